# SPDX-License-Identifier: Apache-2.0
"""Shared memory without a name: what a rank makes and hands to its peers as a descriptor.

Decides the names that /proc/<pid>/maps shows. Must not know how descriptors travel.
"""

from fastcoll import _C


def create_region() -> int:
    """Return a descriptor of this rank's new pad and scratch; the caller's to close."""
    return _C.memfd_create("fastcoll-region", _C.region_bytes())


def create_arena(num_bytes: int) -> int:
    """Return a descriptor of a new arena of the symmetric heap; the caller's to close."""
    return _C.memfd_create("fastcoll-arena", num_bytes)
