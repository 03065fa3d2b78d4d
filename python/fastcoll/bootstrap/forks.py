# SPDX-License-Identifier: Apache-2.0
"""Forked children of a rank: they can use none of the groups that their parent had.

Decides which process groups of torch a child has inherited, and the error that it gets. The stores
and connections of its parent would mix the questions of both. Must not know the groups' verbs.
"""

import os
import weakref

import torch.distributed as dist

from fastcoll.errors import UsageError

_inherited: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()


def refusal(name: str) -> UsageError:
    """Return the error that a child raises; the same text as in csrc/group/process_group.cpp."""
    return UsageError(
        f'group "{name}" belongs to the process from which this one was forked, and this one is no '
        "rank of it. Call fastcoll in the parent, or make a group of this process's own: "
        "fastcoll.destroy(), then fastcoll.init(store=..., rank=..., world_size=...)"
    )


def refuse_inherited(group: dist.ProcessGroup) -> None:
    """Raise UsageError if this process inherited a process group from its parent."""
    if group in _inherited:
        raise refusal(group.group_name)


def _note_groups() -> None:
    _inherited.update(dist.distributed_c10d._world.pg_map)


os.register_at_fork(after_in_child=_note_groups)
