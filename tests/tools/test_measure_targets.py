# SPDX-License-Identifier: Apache-2.0
"""The goals of bench/targets.py: the worst size decides, and a gap is not a pass."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.programs import load_script


@pytest.fixture(scope="module")
def targets() -> ModuleType:
    return load_script(Path(__file__).parents[2] / "bench" / "targets.py")


def document(ratios: dict[int, dict[str, float]]) -> dict[str, Any]:
    return {
        "rows": [
            {
                "size_bytes": size_bytes,
                "ratios": {peer: {"median": r, "best": r} for peer, r in row.items()},
            }
            for size_bytes, row in ratios.items()
        ]
    }


def test_the_worst_size_in_range_decides(targets: ModuleType) -> None:
    goal = targets.Goal("x", "file", ("gloo",), "8", "128", 4)
    good = document({8: {"gloo": 5.0}, 64: {"gloo": 4.0}, 256: {"gloo": 1.0}})
    assert targets.judge(goal, good).passed
    bad = document({8: {"gloo": 5.0}, 64: {"gloo": 3.9}})
    verdict = targets.judge(goal, bad)
    assert verdict.passed is False
    assert "64 B" in verdict.found


def test_what_memory_alone_would_allow_is_said(targets: ModuleType) -> None:
    goal = targets.Goal("x", "python-symmetric", ("gloo",), "8", "8", 10)
    missed = document({8: {"gloo": 6.0}})
    missed["rows"][0]["cells"] = [
        {"library": "fastcoll", "time_us": 20.0},
        {"library": "gloo", "time_us": 120.0},
    ]
    verdict = targets.judge(goal, missed, {"read_us": {"8": 15.0}})
    assert verdict.passed is False
    assert "only to read the inputs 8x" in verdict.found
    assert "read" not in targets.judge(goal, missed).found
    assert "read" not in targets.judge(goal, missed, {"read_us": {"16": 15.0}}).found


def test_the_fastest_of_several_peers_counts(targets: ModuleType) -> None:
    goal = targets.Goal("x", "file", ("openmpi", "mpich"), "8", "8", 2)
    assert not targets.judge(goal, document({8: {"openmpi": 3.0, "mpich": 1.5}})).passed
    assert targets.judge(goal, document({8: {"openmpi": 3.0}})).passed


def test_each_goal_of_the_calls_on_lists(targets: ModuleType, tmp_path: Path) -> None:
    def passed(gloo: float, one_call: float, reduce_ns: int) -> list[bool | None]:
        calls_ns = {"all_reduce": 100, "barrier": 50, "reduce": reduce_ns}
        lists = {"gloo_over_coalesced": gloo, "coalesced_over_one_call": one_call}
        text = json.dumps({**lists, "calls_ns": calls_ns})
        (tmp_path / "lists.json").write_text(text)
        return [verdict.passed for verdict in targets._list_verdicts(tmp_path)]

    assert [verdict.passed for verdict in targets._list_verdicts(tmp_path)] == [None]
    assert passed(7.0, 1.15, 400) == [True, True, True]
    assert passed(6.9, 1.15, 400) == [False, True, True]
    assert passed(7.0, 1.16, 400) == [True, False, True]
    assert passed(7.0, 1.15, 401) == [True, True, False]


def test_each_goal_of_steps_in_company(targets: ModuleType, tmp_path: Path) -> None:
    def found(
        ratios: list[float], cpu_ms: float = 1.0, absent: int = 0, alone: float = 2.0
    ) -> list[Any]:
        libraries = {
            "fastcoll": {"cpu_ms": cpu_ms, "per_s": 1.0},
            "gloo": {"cpu_ms": 1.0, "per_s": 1.0},
            "compute": {"per_s": alone},
        }
        rows: list[dict[str, Any]] = [
            {"status": "measured", "gloo_over_fastcoll": ratio, "libraries": libraries}
            for ratio in ratios
        ]
        rows += [{"status": "not measured"}] * absent
        (tmp_path / "company.json").write_text(json.dumps({"rows": rows}))
        return list(targets._company_verdicts(tmp_path))

    def passed(*args: Any) -> list[bool | None]:
        return [verdict.passed for verdict in found(*args)]

    assert [verdict.passed for verdict in targets._company_verdicts(tmp_path)] == [None]
    assert passed([1.5, 1.5, 1.5, 1.5, 1.0]) == [True, True, True]
    assert passed([1.5, 1.5, 1.5, 1.5, 0.9]) == [False, True, True]
    assert passed([1.5, 1.5, 1.5, 1.4, 1.0]) == [True, False, True]
    assert passed([2.0], 1.1) == [True, True, False]
    assert found([2.0, 0.9], 1.0, 1)[0].found == "0.90x; 1 of 2 cells (1 not measured) below"
    cells = "33% of 3 cells"
    assert found([1.6, 1.4, 1.0])[1].found == f"{cells}; 1 of 3 where any library could"
    assert found([1.6, 1.4, 1.0], alone=1.4)[1].found == f"{cells}; 1 of 1 where any library could"


def test_each_goal_of_the_calls_through_torch(targets: ModuleType, tmp_path: Path) -> None:
    alone: dict[str, float] = {}

    def passed(call_us: float, small_us: float, large_us: float) -> list[bool | None]:
        rows = {
            "all_reduce, 8 B": (call_us, 150.0),
            "DDP's communication, 100K parameters": (small_us, 500.0),
            "DDP's communication, 25M parameters": (large_us, 3000.0),
        }
        times_us = {
            row: {"compiled": ours, "python": ours, "gloo": gloo}
            for row, (ours, gloo) in rows.items()
        }
        times_us["all_reduce, 8 B"] |= alone
        (tmp_path / "torch.json").write_text(json.dumps({"times_us": times_us}))
        return [verdict.passed for verdict in targets._torch_verdicts(tmp_path)]

    assert [verdict.passed for verdict in targets._torch_verdicts(tmp_path)] == [None]
    assert passed(4.0, 100.0, 1000.0) == [True, True, True] * 2
    assert passed(4.1, 100.0, 1000.0) == [False, True, True] * 2
    assert passed(4.0, 101.0, 1000.0) == [True, False, True] * 2
    assert passed(4.0, 100.0, 1001.0) == [True, True, False] * 2
    alone["fake"] = 3.9
    assert passed(4.1, 100.0, 1000.0) == [False, True, True] * 2
    assert "torch alone 3.9 us" in next(targets._torch_verdicts(tmp_path)).found


def test_what_was_not_measured_is_no_pass(targets: ModuleType) -> None:
    goal = targets.Goal("x", "file", ("gloo",), "8", "128", 4)
    assert targets.judge(goal, None).passed is None
    assert targets.judge(goal, document({})).passed is None
    assert targets.judge(goal, document({8: {"gloo": 9.0}, 64: {}})).passed is None


def test_the_goal_of_pipelining_needs_phases_of_one_length(
    targets: ModuleType, tmp_path: Path
) -> None:
    ratios = {"64": 2.2, str(64 << 10): 1.8, str(64 << 20): 2.0}
    order = {"gloo_over_fastcoll": ratios}
    orders = {"contiguous": order, "interleaved": order}
    (tmp_path / "hierarchical.json").write_text(json.dumps({"orders": orders}))

    def verdict(**found: float | None) -> Any:
        document = {"settings": {"world_size": 16}, "hop_over_intra": 1.1, **found}
        (tmp_path / "pipelining.json").write_text(json.dumps(document))
        return list(targets._node_verdicts(tmp_path))[-1]

    assert verdict(whole_over_sum=0.7).passed
    assert verdict(whole_over_sum=0.71).passed is False
    for unfit in (verdict(whole_over_sum=None), verdict(hidden_of_shorter=1.4)):
        assert unfit.passed is None
        assert "not measured" in unfit.found
