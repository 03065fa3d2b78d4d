# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group find each other and get to each other's memory."""
