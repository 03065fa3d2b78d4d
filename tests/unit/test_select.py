# SPDX-License-Identifier: Apache-2.0
"""The choice of an algorithm: a pure function of what all ranks know to be equal."""

import dataclasses
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll import _C
from fastcoll.choose import algorithms, select
from fastcoll.choose.algorithms.shared import EXCHANGED_INLINE_BYTES, GPU, INLINE_BYTES
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.measure.pattern import make_cell
from fastcoll.types import (
    COUNTED,
    REDUCTIONS,
    Algorithm,
    DType,
    Numerics,
    Op,
    Request,
    Verb,
    order_matters,
    supported_ops,
)

ROOTED = (Verb.broadcast, Verb.gather, Verb.scatter, Verb.reduce)
PASSES_ON = ("ring", "chain")


def plain_request(verb: Verb, numel: int, world_size: int = 2, **fields: Any) -> Request:
    """A call on float32 numbers, of ranks that have a CPU each."""
    plain = Request(
        *(verb, DType.float32, Op.SUM, numel, 0, world_size, "auto", "same_bits", world_size)
    )
    return dataclasses.replace(plain, **fields)


@st.composite
def requests(draw: st.DrawFn, algorithm: str = "auto") -> Request:
    verb = draw(st.sampled_from(Verb))
    dtype = draw(st.sampled_from(DType))
    world = draw(st.integers(1, 64))
    reduces = verb in REDUCTIONS
    return Request(
        verb=verb,
        dtype=dtype,
        op=draw(st.sampled_from(supported_ops(dtype))) if reduces else Op.SUM,
        numel=0 if verb is Verb.barrier else draw(st.integers(0, 1 << 40)),
        root=draw(st.integers(0, world - 1)) if verb in ROOTED else 0,
        world_size=world,
        algorithm=algorithm,
        numerics=draw(st.sampled_from(["same_bits", "fast"])) if reduces else "same_bits",
        num_cpus=draw(st.integers(1, 256)),
        splits=draw(st.sampled_from([0, COUNTED])) if verb is Verb.all_to_all else 0,
        single_copy=draw(st.sampled_from(["never", "auto", "always"])),
        cpu_vendor=draw(st.sampled_from(["GenuineIntel", "AuthenticAMD", ""])),
    )


@settings(max_examples=300, deadline=None)
@given(requests())
def test_every_request_has_one_plan_and_it_is_sound(request: Request) -> None:
    plan = select(request, algorithms.ALL).plan
    assert select(dataclasses.replace(request), algorithms.ALL).plan == plan
    again = _C.Plan(*plan.args())  # the core accepts it
    assert (again.verb, again.dtype, again.op) == (request.verb, request.dtype, request.op)
    assert (again.numel, again.root) == (request.numel, request.root)
    assert again.splits == request.splits
    assert not (again.inline and again.splits == COUNTED)  # the sizes are not known yet
    moves = again.algorithm in (Algorithm.direct, Algorithm.single_copy)
    assert moves == (request.verb not in REDUCTIONS)
    if again.algorithm == Algorithm.single_copy:
        assert request.single_copy != "never"
        assert not again.inline
    if again.inline:
        assert request.staged_bytes <= INLINE_BYTES
    if request.numerics == "same_bits" and request.verb in REDUCTIONS:
        ring = again.algorithm == Algorithm.ring
        assert not (ring and order_matters(request.dtype, request.op))


@settings(max_examples=300, deadline=None)
@given(request=requests(), share=st.floats(0, 1))
def test_what_is_planned_alike_differs_in_its_size_alone(request: Request, share: float) -> None:
    choice = select(request, algorithms.ALL)
    least, most = choice.numels
    assert least <= request.numel <= most <= request.numel * 1.25
    other = dataclasses.replace(request, numel=least + int((most - least) * share))
    others = select(other, algorithms.ALL)
    assert others.plan == dataclasses.replace(choice.plan, numel=other.numel)
    assert others.numels == choice.numels
    name = Algorithm(choice.plan.algorithm).name
    assert next(one for one in algorithms.ALL if one.name == name).admits(other) is None


def test_sizes_are_cut_without_gaps_and_at_powers_of_two() -> None:
    numel, cuts = 0, []
    while numel < 1 << 30:
        least, most = select(plain_request(Verb.all_reduce, numel), algorithms.ALL).numels
        assert least == numel
        cuts.append(most)
        numel = most + 1
    assert {1 << k for k in range(30)} <= {*cuts}
    assert len(cuts) < 130


def test_messages_are_planned_alike_however_they_are_cut() -> None:
    uneven, lists = ([3, 4], [4, 3], [9, 9, 9]), ([3, 4], [1] * 7, [40_000])
    kinds = [
        (Verb.all_gather, [_C.uneven_splits(sizes) for sizes in uneven]),
        (
            Verb.all_reduce,
            [_C.list_splits([(int(DType.float32), n) for n in sizes], 0) for sizes in lists],
        ),
    ]
    for verb, splits in kinds:
        assert len({0, COUNTED, *splits}) == 5
        for single_copy in ("never", "auto", "always"):
            for numel in (7, 1000, 300_000, 30_000_000):
                plans = set()
                for one in splits:
                    asked = plain_request(verb, numel, splits=one, single_copy=single_copy)
                    plan = select(asked, algorithms.ALL).plan
                    assert plan.splits == one
                    plans.add(dataclasses.replace(plan, splits=0))
                assert len(plans) == 1


@settings(max_examples=200, deadline=None)
@given(requests(), st.permutations(algorithms.ALL))
def test_the_order_of_the_candidates_does_not_matter(request: Request, order: list) -> None:
    costs = [one.estimate_us(request) for one in order if one.admits(request) is None]
    chosen = select(request, order).plan
    if len(set(costs)) == len(costs):
        assert chosen == select(request, algorithms.ALL).plan


@settings(max_examples=200, deadline=None)
@given(requests(), st.sampled_from(["one_shot", "two_shot", "ring", "chain"]))
def test_what_is_asked_for_is_taken_or_refused(request: Request, name: str) -> None:
    asked = dataclasses.replace(request, algorithm=name)
    allowed = request.verb in REDUCTIONS and not (request.verb is Verb.reduce and name in PASSES_ON)
    allowed = allowed and not (
        name == "ring"
        and request.numerics == "same_bits"
        and order_matters(request.dtype, request.op)
    )
    if allowed:
        assert Algorithm(select(asked, algorithms.ALL).plan.algorithm).name == name
    else:
        with pytest.raises(UnsupportedError, match=name):
            select(asked, algorithms.ALL)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"magic.*one_shot.*two_shot.*ring.*chain"):
        select(plain_request(Verb.all_reduce, 5, algorithm="magic"), algorithms.ALL)


def test_the_reasons_name_every_candidate() -> None:
    reasons = select(plain_request(Verb.all_reduce, 5), algorithms.ALL).reasons
    assert set(reasons) == {algorithm.name for algorithm in algorithms.ALL}
    assert "chain" in reasons["ring"]
    assert "us" in reasons["one_shot"]


@pytest.mark.parametrize(("world", "alone_to_kib"), [(2, 16 << 10), (4, 8), (8, 0)])
def test_the_root_of_a_large_reduce_of_many_is_helped(world: int, alone_to_kib: int) -> None:
    """As measured with 2 ranks: one_shot, whose other rank stages meanwhile. Many share the sum."""
    for num_kib in (8, 32, 128, 512, 2 << 10, 16 << 10):
        chosen = select(plain_request(Verb.reduce, num_kib << 8, world), algorithms.ALL).plan
        assert chosen.algorithm.name == ("one_shot" if num_kib <= alone_to_kib else "two_shot")


@pytest.mark.parametrize(
    ("verb", "world", "part_bytes", "segment_bytes"),
    [
        (Verb.broadcast, 2, 48 << 10, 128 << 10),
        (Verb.broadcast, 2, 64 << 10, 32 << 10),
        (Verb.gather, 8, 256 << 10, 32 << 10),
        (Verb.gather, 2, (256 << 10) + 4, 128 << 10),
        (Verb.scatter, 1, 128 << 10, 32 << 10),
        (Verb.scatter, 4, 128 << 10, 96 << 10),
        (Verb.scatter, 8, 128 << 10, 128 << 10),
        (Verb.all_gather, 2, 128 << 10, 128 << 10),
        (Verb.reduce, 2, 128 << 10, 32 << 10),  # by one_shot
        (Verb.reduce, 4, 128 << 10, 128 << 10),  # by two_shot
    ],
)
def test_a_part_that_goes_one_way_has_small_segments(
    verb: Verb, world: int, part_bytes: int, segment_bytes: int
) -> None:
    request = plain_request(verb, part_bytes // 4, world)
    assert select(request, algorithms.ALL).plan.segment_bytes == segment_bytes


@pytest.mark.parametrize("verb", [verb for verb in Verb if verb is not Verb.barrier])
def test_a_small_message_travels_with_its_flags(verb: Verb) -> None:
    for numel, is_small in ((2, True), (INLINE_BYTES, False)):
        assert select(plain_request(verb, numel), algorithms.ALL).plan.inline == is_small


def test_ranks_that_share_cpus_take_a_whole_slot_in_each_turn() -> None:
    """Negative control: ranks that have a CPU each."""
    for num_cpus, segment_bytes in ((3, _C.K_SLOT_BYTES), (4, 128 << 10)):
        request = plain_request(Verb.all_reduce, 4 << 20, 4, num_cpus=num_cpus)
        assert select(request, algorithms.ALL).plan.segment_bytes == segment_bytes


def test_two_ranks_that_exchange_on_intel_stage_more_messages() -> None:
    """Negative controls: one that only gives, a third rank, another vendor."""

    def is_inline(
        num_bytes: int, verb: Verb = Verb.all_gather, world: int = 2, vendor: str = "GenuineIntel"
    ) -> bool:
        fields: dict[str, Any] = {"dtype": DType.uint8, "num_cpus": world, "cpu_vendor": vendor}
        return select(plain_request(verb, num_bytes, world, **fields), algorithms.ALL).plan.inline

    assert is_inline(EXCHANGED_INLINE_BYTES)
    assert not is_inline(EXCHANGED_INLINE_BYTES + 1)
    for verb in (Verb.broadcast, Verb.gather, Verb.reduce):
        assert is_inline(INLINE_BYTES, verb)
    assert is_inline(INLINE_BYTES, world=3)
    assert is_inline(INLINE_BYTES, vendor="AuthenticAMD")


def moved_by(verb: Verb, num_bytes: int, vendor: str, world: int = 2, **options: Any) -> str:
    fields = {"dtype": DType.uint8, "num_cpus": 2, "single_copy": "auto", "cpu_vendor": vendor}
    request = plain_request(verb, num_bytes, world, **fields | options)
    return select(request, algorithms.ALL).plan.algorithm.name


def test_single_copies_are_taken_where_they_were_measured_to_be_quicker() -> None:
    """The rows of bench/results in which Open MPI, which copies so, is quicker than staging."""
    for size in (512 << 10, 1 << 20, 4 << 20, 16 << 20):
        assert moved_by(Verb.all_gather, size, "GenuineIntel") == "single_copy"
        assert moved_by(Verb.all_to_all, size, "GenuineIntel") == "single_copy"
        assert moved_by(Verb.broadcast, size, "GenuineIntel") == "direct"
    # Staged parts are fetched past the caches from here on.
    for world in (2, 4):
        assert moved_by(Verb.all_gather, 32 << 20, "GenuineIntel", world) == "direct"
        assert moved_by(Verb.scatter, 32 << 20, "GenuineIntel", world) == "single_copy"
    assert moved_by(Verb.all_to_all, 32 << 20, "GenuineIntel") == "single_copy"
    assert moved_by(Verb.all_gather, 32 << 20, "") == "single_copy"  # no stores past the caches
    assert moved_by(Verb.scatter, 256 << 10, "GenuineIntel") == "direct"
    assert moved_by(Verb.all_gather, 1 << 20, "AuthenticAMD") == "direct"
    assert moved_by(Verb.all_gather, 32 << 20, "AuthenticAMD") == "direct"
    assert moved_by(Verb.all_gather, 4 << 10, "GenuineIntel") == "direct"
    # Where ranks share CPUs a scatter's root stages a segment a turn.
    assert moved_by(Verb.scatter, 256 << 10, "AuthenticAMD", 4) == "single_copy"
    assert moved_by(Verb.scatter, 256 << 10, "AuthenticAMD", 2) == "direct"
    # One copy into scratch serves seven readers, unless it leaves the caches before they read it.
    assert moved_by(Verb.all_gather, 1 << 20, "GenuineIntel", 8, num_cpus=8) == "direct"
    assert moved_by(Verb.all_gather, 1 << 20, "GenuineIntel", 8) == "single_copy"
    assert moved_by(Verb.scatter, 1 << 20, "GenuineIntel", 2) == "single_copy"


# Of bench/results/*/regret.json: two machines of the vendor, or more, were quickest so.
@pytest.mark.parametrize(
    ("vendor", "verb", "world", "size_bytes", "quickest"),
    [
        ("GenuineIntel", "all_gather", 2, 512 << 10, "single_copy"),
        ("AuthenticAMD", "all_gather", 2, 512 << 10, "direct"),
        ("GenuineIntel", "scatter", 2, 512 << 10, "direct"),
        ("GenuineIntel", "broadcast", 4, 2 << 20, "direct"),
        ("AuthenticAMD", "broadcast", 4, 2 << 20, "direct"),
        ("AuthenticAMD", "all_to_all", 4, 512 << 10, "single_copy"),
        ("GenuineIntel", "reduce", 4, 8 << 10, "one_shot"),
        ("GenuineIntel", "reduce", 4, 32 << 10, "two_shot"),
        ("AuthenticAMD", "reduce", 4, 32 << 10, "one_shot"),
        ("AuthenticAMD", "reduce", 4, 16 << 20, "one_shot"),
    ],
)
def test_the_algorithm_is_the_one_that_was_quickest(
    vendor: str, verb: str, world: int, size_bytes: int, quickest: str
) -> None:
    request = make_cell(verb, "float32", "sum", size_bytes, world).request(
        algorithm="auto",
        numerics="same_bits",
        num_cpus=2,
        single_copy="auto",
        cpu_vendor=vendor,
    )
    assert select(request, algorithms.ALL).plan.algorithm.name == quickest


def test_single_copies_can_be_forced_and_forbidden() -> None:
    assert moved_by(Verb.broadcast, 1 << 20, "", single_copy="always") == "single_copy"
    assert moved_by(Verb.all_to_all, 0, "", single_copy="always", splits=COUNTED) == "single_copy"
    assert moved_by(Verb.broadcast, 1 << 10, "", single_copy="always") == "direct"
    assert moved_by(Verb.all_gather, 1 << 20, "GenuineIntel", single_copy="never") == "direct"


@settings(max_examples=200, deadline=None)
@given(requests(), st.integers(0, 1 << 40))
def test_a_larger_message_is_never_expected_to_take_less(request: Request, numel: int) -> None:
    smaller, larger = sorted((request.numel, numel))
    for one in algorithms.ALL:
        sizes = [dataclasses.replace(request, numel=n) for n in (smaller, larger)]
        if all(one.admits(size) is None for size in sizes):
            assert one.estimate_us(sizes[0]) <= one.estimate_us(sizes[1])


@pytest.mark.parametrize("numerics", ["same_bits", "fast"])
@pytest.mark.parametrize("num_cpus", [2, 64])
@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_what_moves_most_bytes_loses_once_and_for_all(
    world: int, num_cpus: int, numerics: Numerics
) -> None:
    """one_shot has the fewest synchronisations and moves the most: it is for small messages."""
    request = partial(plain_request, Verb.all_reduce, numerics=numerics, num_cpus=num_cpus)
    plans = [select(request(1 << k, world), algorithms.ALL).plan for k in range(31)]
    chosen = [plan.algorithm for plan in plans]
    num_small = chosen.count(Algorithm.one_shot)
    assert num_small > 0
    assert num_small < len(chosen) or world == 2  # of two ranks both move as much
    assert chosen[:num_small] == [Algorithm.one_shot] * num_small


def estimated_on_gpus(verb: Verb, ranks: int, ranks_per_gpu: int = 1) -> float:
    request = plain_request(verb, 1 << 20, ranks, num_channels=32, ranks_per_gpu=ranks_per_gpu)
    return algorithms.direct.estimate_us(request)


def test_all_of_a_scatter_leaves_by_the_roots_one_link() -> None:
    scatter, broadcast, gather = (
        estimated_on_gpus(verb, 8) for verb in (Verb.scatter, Verb.broadcast, Verb.gather)
    )
    # As many bytes come by the link of a gather's root; a scatter's root stages all parts, too.
    staged_us = 7 * (4 << 20) * GPU.copy_us_per_byte
    assert scatter == pytest.approx(gather + staged_us)
    assert scatter == pytest.approx(broadcast + staged_us)
    # On one GPU no link takes part: each rank copies its own part.
    alone = estimated_on_gpus(Verb.scatter, 2, 2)
    assert alone < estimated_on_gpus(Verb.scatter, 2)
