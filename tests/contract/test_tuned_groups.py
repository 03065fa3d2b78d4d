# SPDX-License-Identifier: Apache-2.0
"""Groups that choose by a tuning table, and groups whose ranks have different ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from fastcoll.choose.algorithms.shared import CPU
from fastcoll.cli import app
from fastcoll.group.communicator import Communicator
from fastcoll.measure.results import validate
from tests.support.harness import Rank


def grouped(rank: Rank, paths: list[str]) -> tuple[str, str, float]:
    """Make a group beside the pool's and say by what it chose an all_reduce of 1 KiB."""
    import os

    os.environ["FASTCOLL_TUNING"] = paths[rank.rank]
    try:
        store = dist.PrefixStore("tuning" + "+".join(paths), rank.store)
        group = Communicator.from_store(store, rank.rank, rank.world_size)
        with group, group.new_group() as part:
            tensor = torch.full((256,), rank.rank + 1.0)
            group.all_reduce(tensor)
            assert part.tuning == group.tuning
            plans = [repr(plan) for plan in group.planner.known()]
            mine = next(text for text in plans if text.startswith("all_reduce("))
            return group.tuning, mine, tensor[0].item()
    finally:
        del os.environ["FASTCOLL_TUNING"]


def test_a_table_is_used_if_all_ranks_have_it(pools: Any, tmp_path: Path) -> None:
    from fastcoll.measure.tune import make_document, write_table

    names = ("verb", "world_size", "num_cpus", "size_bytes", "algorithm", "segment_bytes")
    rows = [
        dict(zip(names, ("all_reduce", 2, cpus, size, algorithm, 65536), strict=True))
        | {"time_us": time_us, "low_us": time_us, "high_us": time_us}
        for cpus in (1, 2)
        for size in (1024, 2048)
        for algorithm, time_us in (("one_shot", 9.0), ("chain", 1.0))
    ]
    path = str(tmp_path / "table.json")
    write_table(make_document(rows, is_complete=True, fallback=CPU), Path(path))
    for tuned, plan, total in pools(2).run(grouped, [path, path]):
        assert tuned.startswith("table ")
        assert "by chain in segments of 65536 bytes" in plan
        assert total == 3.0
    for paths in ([path, ""], ["", path], [path, str(tmp_path / "none.json")]):
        for tuned, plan, total in pools(2).run(grouped, paths):
            assert tuned.startswith("the ranks have different tuning tables: ranks [0]")
            assert "by one_shot" in plan
            assert total == 3.0


@pytest.mark.slow
def test_tune_measures_writes_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    first = ["tune", "--out", str(path), "--ranks", "2", "--verbs", "all_reduce,scatter"]
    result = CliRunner().invoke(app, [*first, "--sizes", "1K,256K"])
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document["is_complete"]
    by_verb = {
        verb: [row for row in document["rows"] if row["verb"] == verb]
        for verb in ("all_reduce", "scatter")
    }
    assert len(by_verb["all_reduce"]) == 4 + 4 * 3
    by_kernel = [row for row in by_verb["scatter"] if row["algorithm"] == "single_copy"]
    assert len(by_kernel) <= 1  # if ranks may read each other's memory here
    assert len(by_verb["scatter"]) == 1 + 3 + len(by_kernel)
    # As an interrupted run would have left it.
    kept = by_verb["all_reduce"]
    path.write_text(json.dumps(document | {"is_complete": False, "rows": kept}))
    result = CliRunner().invoke(app, [*first, "--sizes", "1K,256K"])
    assert result.exit_code == 0, result.output
    again = json.loads(path.read_text())
    assert again["is_complete"]
    assert again["rows"][: len(kept)] == kept
    assert len(again["rows"]) == len(document["rows"])


@pytest.mark.slow
def test_regret_measures_all_points(tmp_path: Path) -> None:
    path = tmp_path / "regret.json"
    options = ["--ranks", "2,3", "--sizes", "64,64K", "--json", str(path)]
    result = CliRunner().invoke(app, ["regret", *options])
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    validate(document)
    moving = [
        row
        for row in document["rows"]
        if row["verb"] not in ("all_reduce", "reduce_scatter", "reduce")
    ]
    assert document["num_points"] == len(document["rows"]) == 2 * 2 * 3 * 2 + len(moving)
    # Of 5 verbs that move data, at 2 sizes in 2 worlds: direct, and what the kernel copies.
    assert len(moving) + len(document["no_choice"]) == 5 * 2 * 2
    assert all({"direct", "single_copy"} == set(row["times"]) for row in moving)
    assert all(point["only"] == "direct" for point in document["no_choice"])
    assert "within 10%" in result.output
    assert "no choice: " in result.output
