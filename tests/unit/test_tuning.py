# SPDX-License-Identifier: Apache-2.0
"""The tuning table: what it says, whose it is, and that every rank chooses by the same one."""

import copy
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll import _C
from fastcoll.choose import TuningTable, algorithms, read_table, select, tuning
from fastcoll.choose.costs import Costs
from fastcoll.cli.regret import score, without_choice
from fastcoll.errors import UsageError
from fastcoll.measure import regret
from fastcoll.measure.fit import Point, fit
from fastcoll.measure.pattern import make_cell
from fastcoll.measure.pool import Pool
from fastcoll.measure.regret import is_good, judge, run_regret
from fastcoll.measure.results import validate
from fastcoll.measure.rounds import Outcome
from fastcoll.measure.timer import rounds_interval
from fastcoll.measure.tune import make_document, write_table
from fastcoll.measure.variants import VERBS, Points, Variant, request_of, variants_of
from fastcoll.types import Algorithm, Request, Verb
from tests.gpu_host import gpu_rows
from tests.support.damage import damaged
from tests.unit.test_select import plain_request, requests

COSTS = Costs(0.5, 1 / 40e3, 1 / 10e3, 1 / 30e3, 5.0)


def row(algorithm: str, size_bytes: int, time_us: float, **fields: Any) -> dict[str, Any]:
    return {
        "verb": "all_reduce",
        "world_size": 2,
        "num_cpus": 2,
        "size_bytes": size_bytes,
        "algorithm": algorithm,
        "segment_bytes": 128 << 10,
        "time_us": time_us,
        "low_us": time_us,
        "high_us": time_us,
    } | fields


# chain would never be the model's choice.
ROWS = [
    row("one_shot", 1024, 4.0),
    row("one_shot", 1 << 20, 400.0),
    row("chain", 1024, 8.0),
    row("chain", 1 << 20, 100.0),
    row("chain", 1 << 20, 50.0, segment_bytes=256 << 10),
]


def document(rows: list[dict[str, Any]] = ROWS) -> dict[str, Any]:
    of_cpus = make_document(rows, is_complete=True, fallback=COSTS)
    return of_cpus | {"gpu": gpu_rows.part(gpu_rows.ROWS)}


def request(size_bytes: int, **fields: Any) -> Request:
    return replace(plain_request(Verb.all_reduce, size_bytes // 4), **fields)


def test_the_table_decides_where_it_knows_and_the_model_elsewhere() -> None:
    table = TuningTable(document())
    small = select(request(1024), algorithms.ALL, table)
    assert small.plan.algorithm is Algorithm.one_shot
    assert small.reasons["one_shot"] == "4.00 us (measured)"
    large = select(request(1 << 20), algorithms.ALL, table)
    assert (large.plan.algorithm, large.plan.segment_bytes) == (Algorithm.chain, 256 << 10)
    without = select(request(1 << 20), algorithms.ALL)
    assert without.plan.algorithm is not Algorithm.chain
    for unknown in (
        request(2 << 20),
        request(512),
        request(1 << 20, world_size=3),
        request(1 << 20, num_cpus=1),
    ):
        plan = select(unknown, algorithms.ALL, table).plan
        assert plan == select(unknown, algorithms.ALL, TuningTable(document([]))).plan
    asked = select(request(1 << 20, algorithm="one_shot"), algorithms.ALL, table)
    assert asked.plan.algorithm is Algorithm.one_shot


def test_between_sizes_the_table_is_straight_in_a_log_log_picture() -> None:
    found = TuningTable(document()).measured(request(32 << 10), "one_shot")
    assert found is not None
    assert found.time_us == pytest.approx(40.0)  # 5 of 10 doublings, 1 of 2 decades


def choice(*rows: dict[str, Any]) -> str:
    table = TuningTable(document(list(rows)))
    return select(request(1024), algorithms.ALL, table).plan.algorithm.name


def test_where_the_table_shows_no_difference_the_models_choice_stands() -> None:
    usual = row("one_shot", 1024, 4.0, low_us=3.5, high_us=4.5)
    assert select(request(1024), algorithms.ALL).plan.algorithm is Algorithm.one_shot
    assert choice(usual, row("two_shot", 1024, 3.0, low_us=2.0, high_us=3.5)) == "one_shot"
    assert choice(usual, row("two_shot", 1024, 3.0, low_us=2.0, high_us=3.4)) == "two_shot"
    # Of others than the usual one the fastest.
    chain = row("chain", 1024, 3.0, low_us=2.0, high_us=3.4)
    assert choice(usual, chain, row("two_shot", 1024, 3.1, high_us=3.4)) == "chain"
    reasons = select(
        request(1024),
        algorithms.ALL,
        TuningTable(document([usual, row("two_shot", 1024, 3.0, high_us=3.6)])),
    ).reasons
    assert "no difference to two_shot" in reasons["one_shot"]


def measured_by_chance(rng: Random, times_us: dict[str, float], noise: float) -> str:
    """Return the choice by a table of two algorithms measured in 8 rounds of 4 windows."""
    rows = []
    for name, time_us in times_us.items():
        windows = []
        for _ in range(8):
            state = rng.lognormvariate(0, noise)  # of the machine during a round
            windows += [time_us * state * rng.lognormvariate(0, 0.02) for _ in range(4)]
        low_us, high_us = rounds_interval(windows, 8)
        rows.append(row(name, 1024, median(windows), low_us=low_us, high_us=high_us))
    return choice(*rows)


@pytest.mark.parametrize(
    ("two_shot_us", "noise", "chosen"),
    [
        (10.0, 0.02, "one_shot"),
        (10.0, 0.3, "one_shot"),
        (9.0, 0.02, "two_shot"),
        (5.0, 0.15, "two_shot"),
    ],
)
def test_a_choice_does_not_follow_noise(two_shot_us: float, noise: float, chosen: str) -> None:
    rng = Random(5)
    times_us = {"one_shot": 10.0, "two_shot": two_shot_us}
    found = [measured_by_chance(rng, times_us, noise) for _ in range(100)]
    assert found.count(chosen) >= 97


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel"])
def test_calibration_does_not_favour_a_way_to_copy(vendor: str) -> None:
    """A machine that copies half as fast does both ways half as fast."""
    for verb in (Verb.all_gather, Verb.all_to_all, Verb.broadcast):
        for size_bytes in (512 << 10, 1 << 20, 4 << 20):  # they tie at 256 KiB on Intel's CPUs
            moved = request(size_bytes, verb=verb, single_copy="auto", cpu_vendor=vendor)
            get_us = 1 / {"AuthenticAMD": 30e3, "GenuineIntel": 20e3}[vendor]
            half = Costs(0.16, 2 / 50e3, 2 * get_us, 0.0, 7.5)
            [usual, slower] = [
                algorithms.direct.estimate_us(moved, costs)
                < algorithms.single_copy.estimate_us(moved, costs)
                for costs in (None, half)
            ]
            assert usual == slower, (verb, size_bytes)


@pytest.mark.parametrize(("size_bytes", "is_there"), [(256, True), (2 << 10, False)])
def test_reduce_scatter_has_a_one_shot_where_it_travels_with_its_flags(
    size_bytes: int, is_there: bool
) -> None:
    pool = Pool("fastcoll", 2, "", [])
    cell = make_cell("reduce_scatter", "float32", "sum", size_bytes, 2)
    names = {variant.algorithm for variant in variants_of(pool, cell)}
    assert names == {"two_shot", "ring", "chain"} | ({"one_shot"} if is_there else set())


@st.composite
def tables(draw: st.DrawFn) -> TuningTable:
    drawn = draw(
        st.lists(
            st.builds(
                row,
                st.sampled_from(["one_shot", "two_shot", "ring", "chain", "direct"]),
                st.integers(1, 1 << 40),
                st.floats(1e-3, 1e9),
                verb=st.sampled_from([verb.name for verb in Verb if verb is not Verb.barrier]),
                world_size=st.integers(2, 64),
                num_cpus=st.integers(1, 64),
                segment_bytes=st.sampled_from([64 << 10, 128 << 10, 256 << 10]),
            ),
            max_size=12,
        )
    )
    return TuningTable({**document([]), "rows": drawn})


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(requests(), tables())
def test_whatever_the_table_says_the_plan_is_sound(request: Request, table: TuningTable) -> None:
    plan = select(request, algorithms.ALL, table).plan
    assert plan == select(replace(request), algorithms.ALL, table).plan
    _C.Plan(*plan.args())  # the core accepts it
    chosen = next(one for one in algorithms.ALL if one.name == plan.algorithm.name)
    assert chosen.admits(request) is None


def identity_of(document: dict[str, Any]) -> dict[str, Any]:
    return {part: document[part] for part in ("build", "machine")}


def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_table(document(), path)
    table = read_table(path, tuning.identity())
    assert table.digest == TuningTable(document()).digest
    assert table.num_rows == len(ROWS)
    changed = copy.deepcopy(document())
    changed["rows"][0]["time_us"] += 0.5
    assert TuningTable(changed).digest != table.digest


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("build", "version"), "0.0.1", "stale.*version is '0.0.1' there"),
        (("machine", "cpu_model"), "8086", "foreign.*cpu_model is '8086' there"),
        (("machine", "caches"), None, "foreign.*caches"),
        (("rows", 0, "time_us"), -1, r"\.rows\[0\]\.time_us.*minimum"),
        (("rows", 0, "algorithm"), "magic", r"\.rows\[0\]\.algorithm.*magic"),
        (("rows", 0, "segment_bytes"), 100_000, r"\.rows\[0\]\.segment_bytes"),
        (("rows", 1), ROWS[0], r"\.rows\[1\]: measured twice"),
        (("costs", "flag_us"), "fast", r"\.costs\.flag_us"),
        (("schema",), "fastcoll-tuning-0", r"\.schema"),
        (("gpu", "rows", 1), gpu_rows.ROWS[0], r"\.gpu\.rows\[1\]: measured twice"),
        (("gpu", "rows", 0, "algorithm"), "single_copy", r"\.gpu\.rows\[0\]\.algorithm"),
        (("gpu", "rows", 0, "num_channels"), 65, r"\.gpu\.rows\[0\]\.num_channels"),
        (("gpu", "rows", 0, "ranks_are"), "fibers", r"\.gpu\.rows\[0\]\.ranks_are"),
        (("gpu", "machine", "names"), [], r"\.gpu\.machine\.names"),
        (("gpu", "is_complete"), "yes", r"\.gpu\.is_complete"),
    ],
)
def test_a_table_that_is_not_ours_is_refused_with_the_reason(
    path: tuple[Any, ...], value: Any, text: str, tmp_path: Path
) -> None:
    changed = copy.deepcopy(document())
    place = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    file = tmp_path / "table.json"
    file.write_text(json.dumps(changed))
    with pytest.raises(UsageError, match=f"(?s){text}.*fastcoll tune"):
        read_table(file, identity_of(document()))


@pytest.mark.parametrize("text", ["", "{", "[]", '"table"', '{"rows": NaN}', "[" * 100_000, "\0"])
def test_what_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    with pytest.raises(UsageError, match=r"table\.json: can't be read: No such file"):
        read_table(file, {})
    file.write_text(text)
    with pytest.raises(UsageError, match=r"table\.json"):
        read_table(file, identity_of(document()))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_table_is_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.json"
    file.write_text(json.dumps(damaged(data, document())))
    try:
        table = read_table(file, identity_of(document()))
    except UsageError:
        return
    _C.Plan(*select(request(1 << 18), algorithms.ALL, table).plan.args())
    table.measured(gpu_rows.row_request(), "nccl")


def test_the_fit_finds_planted_constants() -> None:
    points = [
        Point(one, candidate.name, candidate.estimate_us(one, COSTS))
        for size in (64, 4096, 1 << 16, 1 << 20)
        for world in (2, 4)
        for one in (request(size, world_size=world, numerics="fast"),)
        for candidate in (algorithms.one_shot, algorithms.two_shot, algorithms.ring)
    ]
    points += [
        Point(moved, "direct", algorithms.direct.estimate_us(moved, COSTS))
        for size in (4096, 1 << 20)
        for moved in (request(size, verb=Verb.broadcast),)
    ]
    found = fit(points)
    assert found is not None
    for name, value in vars(COSTS).items():
        assert getattr(found.costs, name) == pytest.approx(value, rel=0.01)
    assert found.worst_error < 0.01
    assert fit(points[:3]) is None


def test_ranks_with_different_tables_fall_back_together() -> None:
    mine = tuning.Tuning(TuningTable(document()), "mine")
    none = tuning.Tuning(None, "no table")
    digests = [mine.digest, mine.digest, ""]
    assert tuning.agree(mine, [mine.digest] * 3) is mine
    assert tuning.agree(none, [""] * 3) is none
    for one in (mine, none):
        agreed = tuning.agree(one, digests)
        assert agreed.table is None
        assert agreed.is_refusal
        assert f"ranks [0, 1]: {mine.digest}; ranks [2]: none" in agreed.reason


def times(**by_algorithm: tuple[float, float, float]) -> dict[str, dict[str, Any]]:
    return {
        name: {"time_us": middle, "low_us": low, "high_us": high}
        for name, (low, middle, high) in by_algorithm.items()
    }


def test_a_choice_is_good_if_it_is_near_the_best_or_tied_with_it() -> None:
    cell = make_cell("all_reduce", "float32", "sum", 1 << 10, 2)
    slow = (50.0, 50.0, 50.0)
    one_shot = (10.0, 10.0, 10.0)

    def judged(two_shot: tuple[float, float, float]) -> dict[str, Any]:
        found = times(one_shot=one_shot, two_shot=two_shot, chain=slow, ring=(1.0, 1.0, 1.0))
        return judge(request_of(cell, "same_bits"), cell, found, None)

    assert judged((9.5, 9.5, 9.5))["chosen"] == "one_shot"
    assert is_good(judged((9.5, 9.5, 9.5)))  # near
    assert is_good(judged((4.0, 5.0, 10.5)))  # a tie
    beaten = judged((4.0, 5.0, 6.0))
    assert not is_good(beaten)
    assert (beaten["best"], beaten["regret"]) == ("two_shot", 1.0)
    assert "ring" not in beaten["times"]  # not admitted, however fast


SECONDS = {"two_shot": 4.0, "ring": 2.0, "direct": 5.0, "single_copy": 1.0}  # the others: 9.0


@pytest.mark.parametrize("may_read", [True, False])
def test_regret_judges_every_verb_that_has_a_choice(
    may_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ranks that take what SECONDS says: which rows there are, and that the file is sound."""

    def measured(variants: list[Variant], *_: object) -> list[Outcome]:
        outcomes = []
        for variant in variants:
            may = may_read or variant.algorithm != "single_copy"
            refused = None if may else "UnsupportedError: may not read"
            windows = [] if refused else [[SECONDS.get(variant.algorithm, 9.0)] * 2] * 3
            outcomes.append(Outcome(variant.name, reason=refused, windows_us=windows))
        return outcomes

    monkeypatch.setattr(regret, "own_pool", lambda *_: nullcontext())
    monkeypatch.setattr(regret, "measure_cell", measured)
    settings = Points((2,), (64, 1 << 20))
    document = run_regret(settings, tmp_path, lambda *_: None)
    validate(document)
    rows = {
        (row["verb"], row["numerics"]): row for row in document["rows"] if row["size_bytes"] > 64
    }
    reductions = {(v, n) for v in VERBS[:3] for n in ("same_bits", "fast")}
    moves = {(verb, "same_bits") for verb in VERBS[3:]}
    assert set(rows) == reductions | (moves if may_read else set())
    assert rows["all_reduce", "same_bits"]["best"] == "two_shot"
    assert rows["all_reduce", "fast"]["best"] == "ring"
    assert all(rows[move]["best"] == "single_copy" for move in moves & set(rows))
    without = {(p["verb"], p["size_bytes"]) for p in document["no_choice"]}
    assert without == {(v, s) for v, _ in moves for s in (64, 1 << 20)[: 2 - may_read]}
    reason = document["no_choice"][-1]["refused"]["single_copy"]
    assert ("staged" if may_read else "can't read") in reason
    [line] = without_choice(document)
    ends = "64 B" if may_read else "64 B to 1 MiB"
    assert line == f"no choice: {', '.join(VERBS[3:])} of {ends}: direct alone can carry it out"
    assert f"of {len(document['rows'])} choices" in score(document)
    for path, wrong in (("rows", []), ("no_choice", [{"only": "direct"}])):
        with pytest.raises(jsonschema.ValidationError):
            validate(document | {path: wrong})
