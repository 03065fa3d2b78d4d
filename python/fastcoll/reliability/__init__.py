# SPDX-License-Identifier: Apache-2.0
"""What bounds a call and what happens when it fails."""
