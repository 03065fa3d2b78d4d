# SPDX-License-Identifier: Apache-2.0
"""What ends a wait between nodes, and which rank its error names."""
