# SPDX-License-Identifier: Apache-2.0
"""Sends and receives between nodes."""
