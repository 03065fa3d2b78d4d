# SPDX-License-Identifier: Apache-2.0
"""Machines and clusters: described in files, shipped, or found on this machine."""
