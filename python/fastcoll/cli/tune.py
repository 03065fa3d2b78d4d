# SPDX-License-Identifier: Apache-2.0
"""`fastcoll tune`: measure which algorithm is best when on this machine, on its CPUs or its GPUs.

Decides options and output. The measurement is in fastcoll.measure.
"""

import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from fastcoll import env
from fastcoll.choose.algorithms import shared
from fastcoll.cli.bench import Device, agree_on_folder
from fastcoll.cli.console import end_without, make_console, make_table, writable
from fastcoll.cli.points import (
    ALL_VERBS,
    SIZES_HELP,
    Ranks,
    Verbs,
    parse_gpu_worlds,
    parse_sizes_option,
    parse_verbs,
    parse_worlds,
    point_progress,
)
from fastcoll.machine import gpu
from fastcoll.measure.on_gpus import OnGpus
from fastcoll.measure.sizes import format_number, format_size
from fastcoll.measure.tune import TuneSettings, run_gpu_tune, run_tune

# Where algorithms take turns in being the best, by powers of 2.
_SIZES = "64,512,1K,2K,4K,8K,16K,32K,64K,128K,256K,512K,1M,4M,16M"
_GPU_SIZES = "256,4K,16K,64K,256K,1M,4M,16M,64M,256M"
Json = dict[str, Any]


def tune(
    out: Annotated[
        Path, typer.Option(callback=writable, help="The table to write, or to go on with.")
    ] = Path("fastcoll-tuning.json"),
    ranks: Ranks = "",
    sizes: Annotated[
        str, typer.Option(help=f"{SIZES_HELP}; default: {_SIZES}; GPUs: {_GPU_SIZES}.")
    ] = "",
    verbs: Verbs = ALL_VERBS,
    minutes: Annotated[
        float, typer.Option(min=0.05, help="Stop after this long; run again to go on.")
    ] = 4.5,
    device: Annotated[
        Device, typer.Option(help="cuda adds rows of GPUs, or measures them anew.")
    ] = Device.cpu,
) -> None:
    """Measure every verb, algorithm and segment size, fit the cost model, and write both down.

    Every variant's result is checked before it is timed, and the variants take turns. Groups choose
    by the table once FASTCOLL_TUNING names it on all their ranks. Nothing else should run then.

    On GPUs, NCCL is one of the algorithms. A rank is a process on a GPU of its own. Where ranks
    outnumber the GPUs they are threads that share them. Their rows say so, and hold for such groups
    alone. Under torchrun its processes are the ranks.
    """
    if device is Device.cuda:
        _tune_gpus(out, ranks, sizes or _GPU_SIZES, parse_verbs(verbs), 60 * minutes)
        return
    sizes_bytes, limit_s = parse_sizes_option(sizes or _SIZES), 60 * minutes
    settings = TuneSettings(parse_worlds(ranks), sizes_bytes, parse_verbs(verbs), limit_s=limit_s)
    with tempfile.TemporaryDirectory(prefix="fc") as folder:
        _print(_measure(settings, out, partial(run_tune, folder=Path(folder))), out)


def _tune_gpus(out: Path, ranks: str, sizes: str, verbs: tuple[str, ...], limit_s: float) -> None:
    launch, num_gpus = env.launch(), torch.cuda.device_count()
    worlds = (launch.world_size,) if launch else parse_gpu_worlds(ranks, num_gpus)
    settings = TuneSettings(worlds, parse_sizes_option(sizes), verbs, limit_s=limit_s)
    with tempfile.TemporaryDirectory(prefix="fc") as folder:
        place = OnGpus(num_gpus, Path(folder), launch.rank if launch else None)
        if any(place.are_threads(world) for world in worlds):
            env.prepare_gpu_threads()  # before the next line, which starts CUDA
        if problem := gpu.problem() or ("" if num_gpus else "torch sees no CUDA device"):
            end_without(f"GPUs can't be measured: {problem}")
        if launch:
            place.folder = agree_on_folder(folder, launch)
        if launch is None or launch.rank == 0:
            document = _measure(settings, out, partial(run_gpu_tune, place=place))
            _print_gpus(document["gpu"], out)
            return
        for command in place.pool(launch.world_size).commands:  # this rank, until told to end
            subprocess.run(command, check=False)


def _measure(settings: TuneSettings, out: Path, run: Callable[..., Json]) -> Json:
    with point_progress(settings.cells(), "nothing more is measured") as show:
        return run(settings, out, on_point=show, fallback=shared.CPU)


def _print(document: Json, path: Path) -> None:
    _print_part(document, path, [fit_of(document)])


def _print_gpus(part: Json, path: Path) -> None:
    left_out = [f"{name}: not measured: {reason}" for name, reason in part["left_out"].items()]
    _print_part(part, path, [gpus_of(part), *left_out])


def gpus_of(part: Json) -> str:
    """Return the GPUs on which that part of a tuning table was measured, as text."""
    machine = part["machine"]
    return f"{machine['num_gpus']} x {', '.join(machine['names'])}, driver {machine['driver']}"


def _print_part(part: Json, path: Path, remarks: list[str]) -> None:
    console = make_console()
    console.print(fastest_table(part))
    if not part["is_complete"]:
        remarks.append("not complete: run the command again to go on")
    remarks.append(f"table: {path}; groups use it with {env.TUNING.name}={path.name} on every rank")
    for remark in remarks:
        console.print(remark, markup=False)


def fastest_table(document: Json) -> Table:
    """Return which variant a tuning table, or its part of GPUs, has as the fastest, by size."""
    names = ("verb", "ranks", "from", "to", "algorithm", "us")
    numbers = ("ranks", "from", "to", "us")
    table = make_table("fastest, by size of what a rank publishes", names, numbers)
    for run in _winners(document["rows"]):
        table.add_row(*run)
    return table


def fit_of(document: Json) -> str:
    """Return the constants fitted to a tuning table, and how well they fit."""
    costs = document["costs"]
    return (
        f"fitted: flag {costs['flag_us']:g} us, waiting for a CPU {costs['switch_us']:g} us, copy "
        f"{_gbps(costs['copy_us_per_byte'])}, a peer's bytes {_gbps(costs['peer_us_per_byte'])}, "
        f"adding {_gbps(costs['reduce_us_per_byte'])}; the model is off by "
        f"{document['fit']['median_error']:.0%} (median)"
    )


def _gbps(us_per_byte: float) -> str:
    return f"{format_number(1e-3 / us_per_byte)} GB/s" if us_per_byte else "free"


def _winners(rows: list[Json]) -> list[list[str]]:
    """Return one line per run of sizes that one variant wins."""
    best: dict[tuple[str, str, int], Json] = {}
    for row in rows:
        key = (row["verb"], _ranks_of(row), row["size_bytes"])
        if key not in best or row["time_us"] < best[key]["time_us"]:
            best[key] = row
    several = Counter((row["verb"], _ranks_of(row), row["size_bytes"]) for row in rows)
    runs: list[list[Any]] = []
    for key, row in best.items():
        name = row["algorithm"]
        segment_bytes: int = row["segment_bytes"] if "segment_bytes" in row else row["size_bytes"]
        if several[key] > 1 and row["size_bytes"] > segment_bytes:
            name += f", segments of {format_size(segment_bytes)}"
        if runs and runs[-1][:2] == [key[0], key[1]] and runs[-1][4] == name:
            runs[-1][3], runs[-1][6] = key[2], row["time_us"]
        else:
            runs.append([key[0], key[1], key[2], key[2], name, row["time_us"], row["time_us"]])
    return [
        [
            verb,
            ranks,
            format_size(low),
            format_size(high),
            name,
            f"{format_number(first, 4)} to {format_number(last, 4)}",
        ]
        for verb, ranks, low, high, name, first, last in runs
    ]


def _ranks_of(row: Json) -> str:
    """Return how many ranks a row is of; and how they share GPUs, if they do."""
    shares = row.get("ranks_per_gpu", 1)
    text = f", {shares} on a GPU ({row['ranks_are']})" if shares > 1 else ""
    return f"{row['world_size']}{text}"
