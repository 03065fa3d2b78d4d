# SPDX-License-Identifier: Apache-2.0
"""One run of `fastcoll bench`: which libraries take part, and the document it ends in.

Decides how each library is launched and pinned. Knows nothing of tables, options or pictures.
"""

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastcoll.measure import mpi, oneccl
from fastcoll.measure.engines import ENGINES
from fastcoll.measure.library import IN_GRAPH, WorkerConfig
from fastcoll.measure.pattern import make_cell
from fastcoll.measure.pool import (
    NotMeasured,
    Pool,
    available_cpus,
    mpi_commands,
    own_commands,
    worker_command,
)
from fastcoll.measure.results import provenance, row_record, shorten
from fastcoll.measure.rounds import measure_cell, one_way_flag_us
from fastcoll.measure.timer import Budget
from fastcoll.native import _C

CORE = "core"  # fastcoll itself, from a compiled loop: shows the cost of Python's part of a call
PEERS = ("gloo", CORE, *mpi.FLAVOURS, oneccl.NAME, *ENGINES)
# A second thread of theirs carries the call, and would share the core of the first.
_WITH_THREADS = ("gloo", oneccl.NAME)
# The libraries beside fastcoll on GPUs, and the ways in which each is measured.
GPU_FAMILIES: dict[str, tuple[str, ...]] = {
    "nccl": ("nccl_default", "nccl_nowin", "nccl_window"),
    "symm_mem": ("symm_one_shot", "symm_two_shot", "symm_multimem"),
    "cupy": ("cupy",),
}
GPU_PEERS = tuple(way for family in GPU_FAMILIES.values() for way in family)
OWN_GRAPH = "fastcoll" + IN_GRAPH
_FLAG_ITERATIONS = 10_000
Json = dict[str, Any]


@dataclass(frozen=True)
class BenchSettings:
    """The settings of one run of measurements."""

    verb: str
    dtype: str
    op: str
    world_size: int
    sizes_bytes: tuple[int, ...]
    peers: tuple[str, ...]
    level: str = "python"
    symmetric: bool = False
    async_op: bool = False
    algorithm: str = "auto"
    numerics: str | None = None
    pin: bool = True
    device: str = "cpu"
    mpi_dir: Path = field(default_factory=mpi.default_mpi_dir)
    budget: Budget = field(default_factory=Budget)

    def document(self) -> Json:
        """Return the settings for the result file."""
        told = {key: value for key, value in asdict(self).items() if key != "mpi_dir"}
        return told | {"region_bytes": _C.region_bytes()}


def worker_config(settings: BenchSettings, library: str, folder: Path) -> WorkerConfig:
    """Return the settings of the ranks of `library` ("fastcoll", "gloo" or an MPI).

    Each rank stays on its own core where there are enough. Ranks with a second thread are left to
    the scheduler: it would share the core, which makes Gloo up to 1.5 times slower.
    """
    cpus = available_cpus()
    pinned = settings.pin and library not in _WITH_THREADS and settings.world_size <= len(cpus)
    is_own = library in ("fastcoll", CORE, OWN_GRAPH)
    in_loop = library == CORE or settings.level == "c"
    own_key = "fastcoll_core" if in_loop else "fastcoll"
    if settings.device == "cuda":
        own_key = OWN_GRAPH if library == OWN_GRAPH else "fastcoll_gpu"
    key = own_key if is_own else "mpi" if library in mpi.FLAVOURS else library
    if library == oneccl.NAME and settings.level == "c":
        key = "oneccl_loop"
    return WorkerConfig(
        library=key,
        world_size=settings.world_size,
        socket_path=str(folder / f"{library}.sock"),
        store_path=str(folder / f"{library}.store"),
        cpus=cpus[: settings.world_size] if pinned else None,
        symmetric=settings.symmetric and is_own,
        async_op=settings.async_op,
        algorithm=settings.algorithm if is_own else "auto",
        numerics=settings.numerics if is_own else None,
    )


def make_pool(settings: BenchSettings, library: str, folder: Path, ranks: list[int]) -> Pool:
    """Return the pool of `library`, not started; `ranks` are those that this process starts.

    Raises:
        NotMeasured: the library is not here, or has no loop at this level.
    """
    config = worker_config(settings, library, folder)
    is_on_gpu = library == OWN_GRAPH or library.removesuffix(IN_GRAPH) in GPU_PEERS
    if library != "fastcoll" and (settings.device == "cuda") != is_on_gpu:
        raise NotMeasured(f"it has no call on tensors of the device {settings.device} here")
    if library in ("gloo", *ENGINES) and settings.level == "c":
        raise NotMeasured(f"{library} has no compiled loop here; use --level python")
    if library in mpi.FLAVOURS:
        commands = _mpi_commands(settings, library, config, folder)
    elif library == oneccl.NAME:
        commands = _oneccl_commands(settings, config, folder)
    else:
        commands = own_commands(config, ranks)
    return Pool(library, settings.world_size, config.socket_path, commands)


def _mpi_commands(
    settings: BenchSettings, name: str, config: WorkerConfig, folder: Path
) -> list[list[str]]:
    install = mpi.find_mpi(name, settings.mpi_dir)
    if install is None:
        raise NotMeasured(f"not installed: pip install --prefix {settings.mpi_dir}/{name} ...")
    if settings.level != "c":
        if not mpi.has_mpi4py(install):
            raise NotMeasured("mpi4py is not installed beside it, in the same folder")
        beside = replace(config, mpi4py_folder=str(install.site_packages))
        return mpi_commands(install, beside, None)
    try:
        return mpi_commands(install, config, mpi.build_loop(install, folder))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        raise NotMeasured(str(error)) from None


def _oneccl_commands(
    settings: BenchSettings, config: WorkerConfig, folder: Path
) -> list[list[str]]:
    install = oneccl.find(settings.mpi_dir)
    if install is None:
        place = settings.mpi_dir / oneccl.NAME
        raise NotMeasured(f"not installed: pip install --prefix {place} {oneccl.PACKAGES}")
    try:
        shim = oneccl.build(install, folder)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        raise NotMeasured(str(error)) from None
    config = replace(config, oneccl_shim=str(shim))
    ranks = [worker_command(config, rank) for rank in range(config.world_size)]
    return oneccl.commands(install, ranks, len(available_cpus()))


def run_bench(
    settings: BenchSettings, folder: Path, own_ranks: list[int], on_turn: Callable[[str, int], None]
) -> Json:
    """Measure and return the result document.

    Args:
        folder: An empty folder for sockets; its path must be short.
        own_ranks: Ranks of fastcoll and Gloo that this process starts; torchrun's other processes
            start the others.
        on_turn: Called with a library and a size before each turn.

    Raises:
        NotMeasured: fastcoll itself cannot be started.
    """
    libraries: list[Json] = []
    rows: list[Json] = []
    flags: list[float] = []
    document = {"kind": "bench", **provenance(), "settings": settings.document()}
    names = ("fastcoll", *settings.peers)
    made = {name: _made(settings, name, folder, own_ranks) for name in names}
    with ExitStack() as stack:
        for one in made.values():
            if isinstance(one, Pool):
                stack.callback(one.close)
        pools = []
        for library, pool, reason in _started(made, settings.device == "cuda", on_turn):
            if pool is not None:
                pools.append(pool)
            elif library == "fastcoll":
                raise NotMeasured(reason)
            libraries.append(_library_record(settings, library, pool, reason, folder))

        def add_flag() -> None:
            if (flag_us := one_way_flag_us(pools[0], _FLAG_ITERATIONS)) is not None:
                flags.append(flag_us)

        for size_bytes in (0,) if settings.verb == "barrier" else settings.sizes_bytes:
            cell = make_cell(
                settings.verb, settings.dtype, settings.op, size_bytes, settings.world_size
            )
            turn = partial(_tell, on_turn, cell.size_bytes)
            # Beside the first size, whose time is told in flags.
            flag = None if rows else add_flag
            rows.append(row_record(cell, measure_cell(pools, cell, settings.budget, turn, flag)))
    return {**document, "libraries": libraries, "rows": rows, "one_way_flag_us": flags or None}


def _made(settings: BenchSettings, library: str, folder: Path, own_ranks: list[int]) -> Pool | str:
    """Return a library's pool, or why there is none."""
    try:
        return make_pool(settings, library, folder, own_ranks)
    except NotMeasured as error:
        return str(error)


def _started(
    made: Mapping[str, Pool | str], at_once: bool, on_turn: Callable[[str, int], None]
) -> Iterator[tuple[str, Pool | None, str | None]]:
    """Yield each library once its ranks are up, or with the reason why they are not.

    Args:
        at_once: Let the others come up together once fastcoll has. On GPUs there are many and each
            takes seconds: torchrun's ranks, there at once, would not wait for one after the other.
    """
    for library, pool in made.items():
        on_turn(library, 0)
        if isinstance(pool, str):
            yield library, None, pool
            continue
        try:
            pool.start()
        except NotMeasured as error:
            yield library, None, str(error)
            continue
        yield library, pool, None
        if at_once and library == "fastcoll":
            for other in made.values():
                if isinstance(other, Pool) and other is not pool:
                    other.launch()


def _tell(on_turn: Callable[[str, int], None], size_bytes: int, library: str) -> None:
    on_turn(library, size_bytes)


def _library_record(
    settings: BenchSettings, library: str, pool: Pool | None, reason: str | None, folder: Path
) -> Json:
    """Return one library of a run: its version, and how its ranks were started."""
    cpus = worker_config(settings, library, folder).cpus
    return {
        "name": library,
        "status": "not measured" if reason else "measured",
        "reason": reason,
        "version": pool.version if pool else None,
        "command": [shorten(word) for word in pool.commands[0]] if pool else None,
        "cpus": list(cpus) if cpus else None,
    }
