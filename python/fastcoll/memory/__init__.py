# SPDX-License-Identifier: Apache-2.0
"""The memory of a call: users' arrays, shared regions, the symmetric heap."""
