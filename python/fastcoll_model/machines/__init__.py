# SPDX-License-Identifier: Apache-2.0
"""What the machine looks like."""
