# SPDX-License-Identifier: Apache-2.0
"""Groups of torch.distributed that a program asks for as "gloo", carried out by fastcoll.

Decides which of these groups fastcoll serves, together with all ranks of the group, and which
remain torch's own: Gloo, made as if fastcoll were not there. Must not know the verbs.

All versions of torch make groups by one function, which fastcoll_autoload wraps. Its argument
`backend` is rewritten here. From torch 2.14 on one could register "gloo" before torch does. But a
backend's maker is not told of a group's other backends, and a group in Python replaces them.

Gloo keeps CUDA tensors, ranks on several machines, and groups that can be reconfigured. A Gloo that
torch or fastcoll makes for itself is not touched.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import fastcoll_autoload
from fastcoll import env
from fastcoll.api.making import connect, member
from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.exchange import Facts, StoreExchange
from fastcoll.bootstrap.identity import map_nodes, meet
from fastcoll.calls.settings import resolve
from fastcoll.errors import FastcollError
from fastcoll.integrations import torch_backend
from fastcoll.integrations.torch_base import GLOO, NAME, NUMERICS_ON_GPUS, BaseProcessGroup
from fastcoll.text import say

_c10d: Any = dist.distributed_c10d


class _State:
    """Whether the program asked for it, and the reasons that were given for torch's own Gloo."""

    asked = False
    told: set[str] = set()  # noqa: RUF012


class _GlooServesError(Exception):
    """Torch's own Gloo is to serve a group; all its ranks raise it."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason, details)
        self.reason, self.details = reason, details


def stand_in_for_gloo() -> None:
    """Let groups that are asked for as "gloo" be fastcoll's from here on, as FASTCOLL_AS_GLOO=1.

    All ranks have to call it, before they make their groups. A group whose ranks do not all share
    one machine remains torch's own, and a line of the log says so once. `get_backend` goes on
    answering "gloo". It can't be taken back.
    """
    _State.asked = True
    fastcoll_autoload.watch_groups(_c10d, also_gloo=True)


def make_group(torchs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a group as torch asks for it, by torch's own function `torchs`.

    Raises:
        UsageError: FASTCOLL_AS_GLOO is neither 0 nor 1.
    """
    asked = inspect.signature(torchs).bind(*args, **kwargs)
    asked.apply_defaults()
    devices = _devices_of_gloo(asked.arguments) if env.AS_GLOO.get() or _State.asked else []
    if not devices:
        return torchs(*args, **kwargs)
    rank, name = asked.arguments["group_rank"], asked.arguments["group_name"]
    try:
        devices = _prepare(asked.arguments, devices)
    except _GlooServesError as why:
        _log_reason(why, rank)
        return torchs(*args, **kwargs)
    backend = asked.arguments["backend"]
    asked.arguments["backend"] = _rewritten(backend, devices)
    try:
        group, store = torchs(*asked.args, **asked.kwargs)
    except BaseException:
        if (prepared := torch_backend.prepared.pop(name, None)) is not None:
            prepared.comm.close()
        raise
    _name_main_backend(group, devices, backend)
    _c10d._world.pg_map[group] = (backend, store)
    _c10d._world.pg_backend_config[group] = str(_c10d.BackendConfig(backend))
    return group, store


def _devices_of_gloo(asked: dict[str, Any]) -> list[str]:
    """Return the devices that are to be Gloo's in a new group, if fastcoll may serve them."""
    me, ranks = asked["group_rank"], asked["global_ranks_in_group"]
    if me is None or (ranks and dist.get_rank() not in ranks):
        return []  # not a member
    if asked["timeout"] is None:
        return []  # which torch refuses
    if asked.get("enable_reconfigure") or _uses_torchcomms():
        return []
    if asked["pg_tag"] and _c10d._find_pg_by_ranks_and_tag(asked["pg_tag"], ranks):
        return []  # there is such a group already
    backends = _backends_of(asked["backend"])
    devices = [device for device, name in backends.items() if name == GLOO]
    return devices if "cpu" in devices and {*devices} <= {"cpu", "cuda"} else []


def _backends_of(backend: str) -> dict[str, str]:
    return dict(_c10d.BackendConfig(backend).get_device_backend_map())


def _uses_torchcomms() -> bool:
    ask = getattr(_c10d, "_use_torchcomms_enabled", None)
    return ask is not None and bool(ask())


# ---- what all ranks of a group agree on ----------------------------------------------------------


class _OneMachine(StoreExchange):
    """An exchange after which every rank goes on, or every rank leaves the group to Gloo."""

    def gather(self, facts: Facts, deadline: Deadline) -> list[Facts]:
        rows = super().gather(facts, deadline)
        try:
            nodes = map_nodes(meet(rows))
        except FastcollError as error:  # of another version or user; every rank raises it
            raise _GlooServesError("they can't be one group of fastcoll", str(error)) from None
        if len({*nodes.ids}) > 1:
            raise _GlooServesError("their ranks are on several machines", nodes.describe())
        return rows


def _prepare(asked: dict[str, Any], devices: Sequence[str]) -> list[str]:
    """Connect the ranks of a group; return the devices that fastcoll is to serve. Collective.

    Raises:
        _GlooServesError: fastcoll is to serve none.
    """
    backends = _backends_of(asked["backend"])
    kinds = map(_c10d.Backend.backend_type_map.get, backends.values())
    if dist.ProcessGroup.BackendType.CUSTOM in kinds:
        others = sorted({*backends.values()} - {GLOO})
        raise _GlooServesError(
            "a group has one backend that is no part of torch", ", ".join(others)
        )
    name, timeout_s = asked["group_name"], asked["timeout"].total_seconds()
    exchange = _OneMachine(asked["store"], asked["group_rank"], asked["group_size"], name)
    settings = resolve(timeout_s, None, default_on_gpus=NUMERICS_ON_GPUS)
    comm = member(connect(exchange, name, settings))
    compiled = torch_backend.find_compiled(comm, timeout_s)
    try:
        has_gpu = "cuda" in devices and torch.cuda.device_count() > 0
        rows = comm.gather_words([int(has_gpu)])
        ours = ["cpu"] if any(row[0] for row in rows) else list(devices)
        if len(ours) < len(backends) and compiled is None:
            raise _GlooServesError(
                "a group that serves GPUs, too, needs fastcoll's compiled backend",
                "`fastcoll build` compiles it once",
            )
    except BaseException:
        comm.close()
        raise
    torch_backend.prepared[name] = torch_backend.Prepared(comm, compiled, GLOO)
    return ours


def _log_reason(why: _GlooServesError, rank: int) -> None:
    """Say, once for each reason, that torch's own Gloo serves. All ranks know that it was said."""
    if why.reason not in _State.told and rank == 0:
        details = f" ({why.details})" if why.details else ""
        say(f'groups asked for as "{GLOO}" are torch\'s own Gloo: {why.reason}{details}')
    _State.told.add(why.reason)


# ---- how torch knows the group -------------------------------------------------------------------


def _rewritten(backend: str, devices: Sequence[str]) -> str:
    """Return a group's backends with fastcoll for some devices."""
    backends = _backends_of(backend) | dict.fromkeys(devices, NAME)
    return ",".join(f"{device}:{name}" for device, name in backends.items())


def _name_main_backend(group: Any, ours: Sequence[str], backend: str) -> None:
    """Tell torch which of a group's backends is asked about the group itself.

    Up to 2.13 torch names none where several are given. It must not hear that ours is Gloo's kind:
    DDP's logger would take it for the C++ object of Gloo.
    """
    backends = _backends_of(backend)
    if isinstance(group, BaseProcessGroup) or {*backends.values()} != {GLOO}:
        return
    kinds = dist.ProcessGroup.BackendType
    group._set_default_backend(kinds.CUSTOM if len(ours) == len(backends) else kinds.GLOO)
