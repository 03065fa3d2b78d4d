# SPDX-License-Identifier: Apache-2.0
"""Shared memory without a name: what a rank makes and hands to its peers as a descriptor.

Decides the names that /proc/<pid>/maps shows. Must not know how descriptors travel.
"""

from fastcoll import _C


def create_region(world_size: int) -> int:
    """Return a descriptor of this rank's new pad, scratch and channels; the caller's to close."""
    return _C.memfd_create("fastcoll-region", _C.mapped_bytes(world_size))


def create_arena(num_bytes: int) -> int:
    """Return a descriptor of a new arena of the symmetric heap; the caller's to close."""
    return _C.memfd_create("fastcoll-arena", num_bytes)
