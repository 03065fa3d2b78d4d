# SPDX-License-Identifier: Apache-2.0
"""Device code in Triton. Knows nothing of processes, groups or the owner of a tensor.

A top-level package, not a subpackage of fastcoll: the import checker does not see a subpackage of
another folder in an editable install.
"""
