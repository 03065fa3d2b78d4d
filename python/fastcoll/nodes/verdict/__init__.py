# SPDX-License-Identifier: Apache-2.0
"""How a wait between nodes ends, and which rank its error names."""
