# SPDX-License-Identifier: Apache-2.0
"""One run of `fastcoll demo`: the phases, their checks, and the document it ends in.

Decides the checks of a demo that worked. Knows nothing of tables, options or pictures.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

from fastcoll.measure.demo_rank import ALONE, FASTCOLL, GLOO, DemoConfig
from fastcoll.measure.pool import NotMeasured, Pool, available_cpus
from fastcoll.measure.protocol import Reply
from fastcoll.measure.results import provenance
from fastcoll.measure.training import TrainingConfig, num_gradients

PHASES = (FASTCOLL, GLOO, ALONE)
# float32 sums in another order differ in the last bits, which the steps then carry on.
LOSS_TOLERANCE = 1e-3
Json = dict[str, Any]
OnStep = Callable[[str, int, float], None]


def make_config(
    folder: Path, world_size: int, num_params: int, num_steps: int, symmetric: bool
) -> DemoConfig:
    """Return the demo's settings: a batch of about 128 for any number of ranks."""
    large = num_params > 1_000_000
    training = TrainingConfig(
        num_params=num_params,
        num_steps=num_steps,
        world_size=world_size,
        batch_size=world_size * ceil(128 / world_size),
        learning_rate=0.01 if large else 0.05,
    )
    return DemoConfig(
        training=training,
        socket_path=str(folder / "demo.sock"),
        store_path=str(folder / "demo.store"),
        num_threads=max(1, len(available_cpus()) // world_size),
        symmetric=symmetric,
    )


def _run_phase(pool: Pool, phase: str, on_step: OnStep) -> list[Reply]:
    """Run one phase on all ranks (or on rank 0 alone, the others waiting) and return the ends."""
    lines = pool.lines[:1] if phase == ALONE else pool.lines
    for line in lines:
        line.send(phase)
    ends: list[Reply] = []
    for rank in range(len(lines)):
        reply = pool.reply_of(rank)
        while "step" in reply:
            on_step(phase, reply["step"], reply["loss"])
            reply = pool.reply_of(rank)
        if "error" in reply:
            raise NotMeasured(f"rank {rank}: {reply['error']}")
        ends.append(reply)
    return ends


def _slowest(ends: Sequence[Reply], key: str) -> list[float]:
    return [round(max(step), 3) for step in zip(*(end[key] for end in ends), strict=True)]


def phase_record(phase: str, ends: Sequence[Reply]) -> Json:
    """Sum up one phase over its ranks: mean losses, slowest times."""
    losses = [statistics.fmean(step) for step in zip(*(end["losses"] for end in ends), strict=True)]
    record: Json = {
        "name": phase,
        "losses": [float(f"{loss:.7g}") for loss in losses],
        "accuracy": ends[0]["accuracy"],
        "fingerprints": [end["fingerprint"] for end in ends],
        "compute_median_us": statistics.median(_slowest(ends, "compute")),
    }
    if phase != ALONE:
        communication = _slowest(ends, "communication")
        record |= {
            "communication_us": communication,
            "communication_median_us": statistics.median(communication),
            "communication_best_us": min(communication),
            "waiting_median_us": statistics.median(_slowest(ends, "waiting")),
        }
    return record


def make_checks(phases: Sequence[Json]) -> list[Json]:
    """Return the checks: equal bits on all ranks, the losses of one process, it learned."""
    alone = next(phase for phase in phases if phase["name"] == ALONE)
    checks = []
    for phase in phases:
        if phase is alone:
            continue
        name, prints = phase["name"], phase["fingerprints"]
        what = f"{name}: parameters have the same bits on all {len(prints)} ranks"
        checks.append(_check(what, len(set(prints)) == 1, prints[0][:12]))
        pairs = zip(phase["losses"], alone["losses"], strict=True)
        furthest = max(abs(loss - reference) for loss, reference in pairs)
        what = f"{name}: losses match one process within {LOSS_TOLERANCE:g}"
        checks.append(_check(what, furthest <= LOSS_TOLERANCE, f"{furthest:.1e}"))
    first, last = alone["losses"][0], phases[0]["losses"][-1]
    what = "the network learned: the loss fell to less than half"
    return [*checks, _check(what, last < first / 2, f"{first:.3f} -> {last:.3f}")]


def _check(what: str, passed: bool, found: str) -> Json:
    return {"what": what, "passed": passed, "found": found}


def run_demo(config: DemoConfig, on_step: OnStep) -> Json:
    """Train in all phases and return the result document.

    Raises:
        NotMeasured: a rank failed; the text says how.
    """
    origin = provenance()
    training = config.training
    ranks = range(training.world_size)
    # Gloo looks for the address of the host's name, which a container may not know.
    start = ["env", "GLOO_SOCKET_IFNAME=lo", sys.executable, "-m", "fastcoll.measure.demo_rank"]
    commands = [[*start, config.to_json(), str(rank)] for rank in ranks]
    with Pool("demo", training.world_size, config.socket_path, commands) as pool:
        ends = {phase: _run_phase(pool, phase, on_step) for phase in PHASES}
    phases = [phase_record(phase, ends[phase]) for phase in PHASES]
    ours, gloo = phases[0], phases[1]
    return {
        "kind": "demo",
        **origin,
        "settings": {
            **asdict(training),
            "num_params": num_gradients(training),
            "gradient_bytes": 4 * num_gradients(training),
            "symmetric": config.symmetric,
            "num_threads": config.num_threads,
        },
        "communication_ratio": gloo["communication_median_us"] / ours["communication_median_us"],
        "same_bits_as_gloo": ours["fingerprints"][0] == gloo["fingerprints"][0],
        "checks": make_checks(phases),
        "phases": phases,
    }
