# SPDX-License-Identifier: Apache-2.0
"""`fastcoll bench VERB`: fastcoll beside other libraries, in one run.

Decides options and tables. How anything is measured is fastcoll.measure's matter.
"""

import subprocess
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeAlias

import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from fastcoll import env
from fastcoll.bootstrap.launcher import connect_store
from fastcoll.choose import algorithms
from fastcoll.cli.console import (
    STDOUT,
    ExitCode,
    JsonFile,
    Plot,
    Wide,
    end_with,
    fit,
    make_console,
    make_table,
    quiet_progress,
    write_json,
)
from fastcoll.cli.points import Sizes, parse_sizes_option
from fastcoll.launchers import Launch
from fastcoll.measure import mpi
from fastcoll.measure.busbw import VERBS
from fastcoll.measure.library import IN_GRAPH
from fastcoll.measure.plot import plot_bench
from fastcoll.measure.pool import NotMeasured
from fastcoll.measure.results import to_text
from fastcoll.measure.session import (
    GPU_FAMILIES,
    GPU_PEERS,
    OWN_GRAPH,
    PEERS,
    BenchSettings,
    make_pool,
    run_bench,
)
from fastcoll.measure.sizes import format_number, format_size
from fastcoll.measure.timer import Budget
from fastcoll.types import SCHEDULE_PREFIX, DType, Op
from fastcoll_model.errors import did_you_mean

Json = dict[str, Any]
_MEETING_LIMIT_S = 60.0


@dataclass(frozen=True)
class Output:
    """Where a result goes beside the tables, and whether these have all columns."""

    json_path: Path | None
    plot: Path | None
    wide: bool


class Level(StrEnum):
    """Where the calls are made from."""

    python = "python"
    c = "c"


class Device(StrEnum):
    """Where tensors lie."""

    cpu = "cpu"
    cuda = "cuda"


_Peers: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help=f"Peers: any of {', '.join(PEERS)}; on GPUs of {', '.join(GPU_FAMILIES)}, or of "
        f"their ways {', '.join(GPU_PEERS)}. With commas between them."
    ),
]
_DeviceOption: TypeAlias = Annotated[
    Device, typer.Option(help="Where the tensors lie: rank r on GPU r modulo their number.")
]
_Graph: TypeAlias = Annotated[
    bool, typer.Option(help="On GPUs: measure every library in a captured graph, too.")
]
_Symmetric: TypeAlias = Annotated[
    bool, typer.Option("--symmetric", help="fastcoll's tensors come from fastcoll.empty().")
]
_AsyncOp: TypeAlias = Annotated[
    bool, typer.Option("--async-op", help="Start every call asynchronously, and wait for it.")
]
_LevelOption: TypeAlias = Annotated[
    Level, typer.Option(help="Called from Python, or in compiled loops (C against C).")
]
_Pin: TypeAlias = Annotated[
    bool,
    typer.Option(
        help="Keep ranks on a core each, but not those of Gloo and oneCCL, which have threads."
    ),
]
_MpiDir: TypeAlias = Annotated[
    Path | None, typer.Option(help="Folder with openmpi, mpich, intelmpi, oneccl.")
]

# The columns of nccl-tests, with the keys of their numbers; then those that go first where there
# is no room.
_KEYS = {
    "time_us": "time_us",
    "best": "best_us",
    "min": "min_rank_us",
    "max": "max_rank_us",
    "skew": "skew_us",
    "algbw_gbps": "algbw_gbps",
    "busbw_gbps": "busbw_gbps",
}
_COLUMNS = ("size", "count", "type", "op", *_KEYS, "#wrong")
_SPARE = ("op", "type", "skew", "min", "max", "algbw_gbps", "best", "count", "busbw_gbps", "#wrong")


def _peers(vs: str | None, device: Device, graph: bool) -> tuple[str, ...]:
    """Return the libraries to measure beside; a family's name means each of its ways, on GPUs.

    There each of them comes a second time, in a captured graph, if `graph`.
    """
    families = GPU_FAMILIES if device is Device.cuda else {}
    known = tuple(dict.fromkeys((*families, *GPU_PEERS))) if families else PEERS
    usual = ",".join(families) or "gloo"
    peers: list[str] = []
    for text in (usual if vs is None else vs).split(","):
        if name := text.strip():
            if not families and name in (*GPU_FAMILIES, *GPU_PEERS):
                text = f"{name!r} is measured on GPUs: it needs --device cuda"
                raise typer.BadParameter(text, param_hint="--vs")
            name = _choice(name, known, "--vs")
            peers += families.get(name, (name,))
    if device is Device.cuda and graph:
        peers = [OWN_GRAPH, *(each for name in peers for each in (name, name + IN_GRAPH))]
    return tuple(dict.fromkeys(peers))


def _choice(text: str, choices: tuple[str, ...], option: str) -> str:
    if text.lower() not in choices:
        raise typer.BadParameter(
            f"{text!r} is not one of {', '.join(choices)}{did_you_mean(text, choices)}",
            param_hint=option,
        )
    return text.lower()


def _algorithm(name: str) -> str:
    """Return an algorithm's name; whether it suits the call its ranks know."""
    names = ("auto", *(one.name for one in algorithms.ALL))
    if name in names or name.startswith(SCHEDULE_PREFIX):
        return name
    raise typer.BadParameter(
        f"{name!r} is not one of {', '.join(names)} or {SCHEDULE_PREFIX}NAME"
        f"{did_you_mean(name, names)}",
        param_hint="--algorithm",
    )


def _check_way(device: Device, level: Level, async_op: bool) -> None:
    if device is Device.cuda and level is Level.c:
        raise typer.BadParameter("there is no compiled loop on GPUs", param_hint="--level")
    if async_op and (device is Device.cuda or level is Level.c):
        text = "asynchronous calls are measured on CPUs, from Python"
        raise typer.BadParameter(text, param_hint="--async-op")


def bench(
    verb: Annotated[str, typer.Argument(help=f"What to measure: {', '.join(VERBS)}.")],
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Processes.")] = 2,
    sizes: Sizes = "8:256M:4",
    dtype: Annotated[str, typer.Option(help="Element type, as torch calls it.")] = "float32",
    op: Annotated[str, typer.Option(help="Reduction: sum, avg, product, min, max, ...")] = "sum",
    vs: _Peers = None,
    device: _DeviceOption = Device.cpu,
    graph: _Graph = True,
    symmetric: _Symmetric = False,
    async_op: _AsyncOp = False,
    algorithm: Annotated[str, typer.Option(help="fastcoll's algorithm.")] = "auto",
    numerics: Annotated[str | None, typer.Option(help="same_bits or fast.")] = None,
    level: _LevelOption = Level.python,
    pin: _Pin = True,
    rounds: Annotated[int, typer.Option(min=1, help="Turns each library takes per size.")] = 4,
    window_us: Annotated[
        float, typer.Option(min=1, max=1e7, help="Length of one timing window.")
    ] = 3000.0,
    mpi_dir: _MpiDir = None,
    json_path: JsonFile = None,
    plot: Plot = None,
    wide: Wide = False,
) -> None:
    """Time a verb with fastcoll and with other libraries, taking turns in one run.

    Every result is checked against an exact reference before anything is timed. Starts its own
    ranks, or, under torchrun, one on each of its processes.
    """
    _check_way(device, level, async_op)
    launch = env.launch()
    settings = BenchSettings(
        verb=_choice(verb, tuple(VERBS), "VERB"),
        dtype=_choice(dtype, tuple(DType.__members__), "--dtype"),
        op=_choice(op, tuple(name.lower() for name in Op.__members__), "--op"),
        world_size=launch.world_size if launch else ranks,
        sizes_bytes=parse_sizes_option(sizes),
        peers=_peers(vs, device, graph),
        device=device.value,
        level=level.value,
        symmetric=symmetric,
        async_op=async_op,
        algorithm=_algorithm(algorithm),
        numerics=numerics and _choice(numerics, ("same_bits", "fast"), "--numerics"),
        pin=pin,
        mpi_dir=mpi_dir or mpi.default_mpi_dir(),
        budget=Budget(window_us=window_us, num_rounds=rounds),
    )
    output = Output(json_path, plot, wide)
    with tempfile.TemporaryDirectory(prefix="fc") as folder:
        if launch is None:
            _measure(settings, Path(folder), list(range(ranks)), output)
            return
        shared = agree_on_folder(folder, launch)
        if launch.rank == 0:
            _measure(settings, shared, [0], output)
        else:
            _run_ranks_of_libraries(settings, shared, launch.rank)


def agree_on_folder(folder: str, launch: Launch) -> Path:
    """Return rank 0's folder on every process of a launcher; all must be on one machine."""
    store = connect_store(launch, _MEETING_LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.world_size)
    told: list[Any] = [folder]
    dist.broadcast_object_list(told, src=0)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, Path(told[0]).is_dir())
    dist.destroy_process_group()
    if not all(found):
        text = "one machine is measured; the launcher's processes are on several"
        end_with(ExitCode.USAGE, text)
    return Path(told[0])


def _run_ranks_of_libraries(settings: BenchSettings, folder: Path, rank: int) -> None:
    """Start this torchrun process's rank of each library and wait for their end."""
    started = []
    for library in ("fastcoll", *settings.peers):
        if library in mpi.FLAVOURS:
            continue
        try:
            pool = make_pool(settings, library, folder, [rank])
        except NotMeasured:
            continue
        started += [subprocess.Popen(command) for command in pool.commands]
    for process in started:
        process.wait()


def _measure(settings: BenchSettings, folder: Path, own_ranks: list[int], output: Output) -> None:
    num_libraries = 1 + len(settings.peers)
    num_turns = num_libraries * (1 + len(settings.sizes_bytes) * (1 + settings.budget.num_rounds))
    with quiet_progress("starting", num_turns) as show:

        def on_turn(library: str, size_bytes: int) -> None:
            text = f"{library}, {format_size(size_bytes)}" if size_bytes else f"start {library}"
            show(description=text, advance=1)

        try:
            document = run_bench(settings, folder, own_ranks, on_turn)
        except NotMeasured as error:
            end_with(ExitCode.FAILED, f"fastcoll cannot be measured: {error}")
    console = make_console(output.wide, is_silent=output.json_path == STDOUT)
    print_document(document, console)
    write_json(document, output.json_path, to_text)
    if output.plot is not None:
        plot_bench(document, output.plot)
        console.print(f"picture: {output.plot}", markup=False)
    if any(row["cells"][0]["status"] != "measured" for row in document["rows"]):
        raise typer.Exit(ExitCode.FAILED)


def _ratio(ratios: Json, library: str) -> str:
    if library not in ratios:
        return "-"
    return (
        f"{format_number(ratios[library]['median'])}x ({format_number(ratios[library]['best'])}x)"
    )


def print_document(document: Json, console: Console) -> None:
    """Print fastcoll's table in nccl-tests' columns, the peers' times, and missing results."""
    settings, rows = document["settings"], document["rows"]
    measured = [lib["name"] for lib in document["libraries"] if lib["status"] == "measured"]
    peers = measured[1:]
    machine = document["machine"]
    console.print(
        f"[bold]{settings['verb']}[/bold], {settings['world_size']} ranks on "
        f"{machine['num_usable_cpus']} cores of {machine['cpu_model']}; {settings['level']} level"
        f"{', symmetric tensors' if settings['symmetric'] else ''}"
        f"{', asynchronous calls' if settings['async_op'] else ''}; times in us: median over "
        "windows of the slowest rank; ratios: of medians (of best windows)"
    )
    table, left_out = fit(partial(_own_table, rows, peers), _SPARE, console)
    console.print(table)
    if peers:
        console.print(_peer_table(rows, measured))
    for text in [*filter(None, [left_out]), *_remarks(document)]:
        console.print(text)


def _own_table(rows: list[Json], peers: list[str], without: Collection[str]) -> Table:
    names = [name for name in _COLUMNS if name not in without]
    table = make_table("fastcoll", names, names)
    for peer in peers:
        table.add_column(f"{peer} /\nfastcoll", justify="right", style="green", overflow="fold")
    for row in rows:
        cell = row["cells"][0]
        shown = {"size": format_size(row["size_bytes"]), "count": str(row["count"])}
        shown |= {"type": row["type"], "op": row["op"], "time_us": "not measured"}
        if cell["status"] == "measured":
            shown |= {name: format_number(cell[key]) for name, key in _KEYS.items()}
            shown["#wrong"] = "-" if cell["num_wrong"] is None else str(cell["num_wrong"])
        ratios = [_ratio(row["ratios"], peer) for peer in peers]
        table.add_row(*(shown.get(name, "") for name in names), *ratios)
    return table


def _peer_table(rows: list[Json], names: list[str]) -> Table:
    columns = ("size", *names)
    table = make_table("all libraries: median us (best us)", columns, columns)
    for row in rows:
        cells = []
        for cell in row["cells"]:
            if cell["status"] == "measured":
                cells.append(f"{format_number(cell['time_us'])} ({format_number(cell['best_us'])})")
            else:
                cells.append("not measured")
        table.add_row(format_size(row["size_bytes"]), *cells)
    return table


def _remarks(document: Json) -> list[str]:
    """Return the remarks below the tables: reasons, the one-way flag, the load."""
    remarks = [
        f"{library['name']}: not measured: {library['reason']}"
        for library in document["libraries"]
        if library["status"] != "measured"
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in document["rows"]:
        for cell in row["cells"]:
            if cell["status"] != "measured":
                key = (cell["library"], cell["reason"])
                reasons.setdefault(key, []).append(format_size(row["size_bytes"]))
    for (name, reason), where in reasons.items():
        remarks.append(f"{name}: not measured at {', '.join(where)}: {reason}")
    flags, first = document["one_way_flag_us"], document["rows"][0]["cells"][0]
    if flags:
        flag_us = median(flags)
        text = f"one one-way flag between ranks 0 and 1: {flag_us:.3f} us (median)"
        if document["rows"][0]["size_bytes"] <= 8 and first["status"] == "measured":
            whose = "core call" if document["settings"]["level"] == "c" else "call from Python"
            text += f"; the smallest {whose} takes {first['time_us'] / flag_us:.2f} flags"
        remarks.append(text)
    else:
        remarks.append("one-way flag: not measured")
    staging_mib = document["settings"]["region_bytes"] / 2**20
    remarks.append(f"fastcoll's shared memory: {staging_mib:.2f} MiB per rank")
    remarks.append(f"load average at the start: {document['load_average']}")
    return remarks
