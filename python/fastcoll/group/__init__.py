# SPDX-License-Identifier: Apache-2.0
"""The ranks of one node: a group runs a checked call by its plan."""
