# SPDX-License-Identifier: Apache-2.0
"""The constants that stand for groups and reductions in a compiler's graph, which holds no objects.

Decides by which names the operators of `ops.py` know groups, and by which numbers reductions.
Decides, too, how torch's compiler passes a group on to these functions.
"""

import ctypes
import itertools
import weakref

import torch
import torch.distributed as dist

from fastcoll.api.groups import GroupLike, communicator_of, existing_communicator, named_rank
from fastcoll.calls.group import BaseGroup
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.types import BY_NAME, REDUCE_OPS, Op

_DEFAULT = ""  # the default group, whichever it is when the graph runs
# Stands before torch's name of a group, which is looked up when the graph runs.
_OF_TORCH = "torch:"
_groups: weakref.WeakValueDictionary[str, BaseGroup] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_TAKES_OBJECTS = torch.__version__ >= "2.13"  # torch's compiler, for constants


def name_of(group: GroupLike) -> str:
    """Return the name by which the operators know a group; makes the group if it is not yet."""
    # While it traces, the compiler has a stand-in for a process group.
    comm = communicator_of(getattr(group, "real_obj", group))
    if comm is None:
        raise UsageError("this rank is not in the group: it can't make an operator's call there")
    if group is None:
        return _DEFAULT
    for name, known in _groups.items():
        if known is comm:
            return name
    name = f"{comm.name}#{next(_numbers)}"
    _groups[name] = comm
    return name


def name_at_torch(name: object) -> str | None:
    """Return the operators' name of the group that torch knows by a name.

    None where fastcoll is not its backend on CPUs: torch's own calls go elsewhere there.
    """
    return None if _backing(name) is None else f"{_OF_TORCH}{name}"


def _backing(name: object) -> BaseGroup | None:
    """Return the communicator that is the backend on CPUs of torch's group of a name."""
    c10d = dist.distributed_c10d
    try:
        group = c10d._resolve_process_group(name)  # type: ignore[arg-type]
        backends = dist.get_backend_config(group)
    except (LookupError, RuntimeError, TypeError, ValueError):  # no group, or not one of this rank
        return None
    return existing_communicator(group) if "cpu:fastcoll" in backends.split(",") else None


def named(name: str) -> BaseGroup:
    """Return the group of a name.

    Raises:
        UsageError: It is gone.
    """
    comm = communicator_of(None) if name == _DEFAULT else _groups.get(name)
    if comm is None and name.startswith(_OF_TORCH):
        comm = _backing(name.removeprefix(_OF_TORCH))
    if comm is None:
        raise UsageError(f'the group "{name}" of this operator is gone: trace the program again')
    return comm


def code_of(op: object) -> int:
    """Return the number by which the operators know a reduction."""
    if isinstance(op, str) and op in BY_NAME:
        return int(BY_NAME[op])
    for code, known in enumerate(REDUCE_OPS):
        if op == known:
            return code
    raise UnsupportedError(f"{op} is not one of {', '.join(one.name for one in Op)}")


def members_of(group: GroupLike) -> tuple[int, ...]:
    """Return the ranks of a group as its callers number them: globally for torch's groups."""
    group = getattr(group, "real_obj", group)
    comm = communicator_of(group)
    return tuple(named_rank(group, rank) for rank in range(comm.world_size if comm else 0))


def _name_at(address: int) -> str:
    """Return `name_of` the group at an address, which the caller holds and the compiler guards."""
    return name_of(ctypes.cast(address, ctypes.py_object).value)


def _members_at(address: int) -> tuple[int, ...]:
    """Return `members_of` the group at an address."""
    return members_of(ctypes.cast(address, ctypes.py_object).value)


# The compiler puts their results into the graph. They hold as long as its guards do.
CONSTANTS = (code_of, name_of, members_of, _name_at, _members_at)


# ---- the functions that the compiler traces, and that call these ---------------------------------


def traced_code(op: object) -> int:
    """Return `code_of` a reduction."""
    # Before torch 2.13 the compiler takes no ReduceOp, but its name.
    name = getattr(op, "name", None)
    return code_of(op if name is None else name.lower())


def traced_name(group: GroupLike) -> str:
    """Return `name_of` a group; the compiler traces this."""
    return name_of(group) if _is_constant(group) else _name_at(id(group))


def traced_root(src: int, group: GroupLike) -> int:
    """Return the group rank of a root.

    `src` is compared with one member after another. So the compiler sees that the graph holds for
    this root alone, also where it has taken `src` for a number that varies.
    """
    members = _members(group)
    for root, member in enumerate(members):
        if member == src:
            return root
    raise UsageError(f"src={src} is not one of the group's ranks {members}")


def _members(group: GroupLike) -> tuple[int, ...]:
    return members_of(group) if _is_constant(group) else _members_at(id(group))


def _is_constant(group: GroupLike) -> bool:
    """Return whether torch's compiler takes a group for a constant; else it takes its address."""
    return _TAKES_OBJECTS or group is None or isinstance(group, int | dist.ProcessGroup)
