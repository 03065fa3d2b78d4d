# SPDX-License-Identifier: Apache-2.0
"""Schedules of the model, carried out: every one against the oracle, and planted bugs in some."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fastcoll import _C
from fastcoll_model.builders import algorithms_of
from fastcoll_model.compiled import compiled
from fastcoll_model.errors import ModelError, NotRunnableError
from fastcoll_model.schedule import REDUCTIONS, VERBS
from tests.support import harness
from tests.support.calls import ROOTED, Call, Place
from tests.support.harness import Rank, attempt
from tests.support.perform import check

WORLDS = (2, 3, pytest.param(5, marks=pytest.mark.slow))
# One segment; and for two verbs so many that slots are used again and again.
SIZES = (0, 1, 37, 5000)
MANY_SEGMENTS = 2_800_001
IN_RANK_ORDER = ("one_shot", "two_shot", "chain", "socket_chain")


def names(verb: str) -> list[str]:
    return [name for name in algorithms_of(verb) if name != "multimem"]


def every_schedule(world: int) -> list[Call]:
    calls = []
    for verb in VERBS:
        for number, name in enumerate(names(verb)):
            kinds = [("int32", "SUM", None)]
            if verb in REDUCTIONS:
                kinds += [("float32", "AVG", "fast"), ("uint8", "MAX", None)]
            for dtype, op, numerics in kinds:
                for numel in SIZES:
                    root = number % world if verb in ROOTED else 0
                    place = Place("private", numel % 3, in_place=numel == 5000)
                    algorithm = f"schedule:{name}"
                    calls.append(Call(verb, dtype, numel, op, algorithm, numerics, root, (place,)))
    return calls


@pytest.mark.parametrize("world", WORLDS)
def test_every_schedule_of_every_verb_moves_the_right_bytes(world: int, pools: Any) -> None:
    check(pools(world), every_schedule(world))


def test_segments_are_pipelined_through_slots_that_are_used_again(pools: Any) -> None:
    assert MANY_SEGMENTS // 3 * 4 > _C.K_SLOT_BYTES * _C.K_NUM_SLOTS
    calls = [
        Call(verb, "int32", MANY_SEGMENTS // 3, algorithm=f"schedule:{name}")
        for verb, several in (("all_reduce", names("all_reduce")), ("all_to_all", ["bruck"]))
        for name in several
    ]
    check(pools(3), [call for call in calls for _ in range(2)])


def test_in_rank_order_a_schedule_has_the_same_bits(pools: Any) -> None:
    calls = [
        Call("all_reduce", dtype, 3001, op, f"schedule:{name}", places=(Place(kind),))
        for name in IN_RANK_ORDER
        for dtype, op in (("float32", "SUM"), ("complex64", "AVG"), ("float64", "PRODUCT"))
        if op != "PRODUCT" or dtype == "float64"
        for kind in ("private", "symmetric", "strided")
    ]
    check(pools(3), calls)


def refused(rank: Rank, cases: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    tensor, found = torch.ones(4), []
    for dtype, options in cases:
        done = attempt(rank.comm.all_reduce, tensor.to(getattr(torch, dtype)), **options)
        found.append(f"{done.kind}: {done.text}")
    rank.comm.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 4  # the group is as usable as before
    return found


def test_what_a_schedule_can_not_do_is_refused_by_name(pools: Any) -> None:
    cases = [
        ("float32", {"algorithm": "schedule:ring"}),
        ("bfloat16", {"algorithm": "schedule:chain"}),
        ("float32", {"algorithm": "schedule:multimem", "numerics": "fast"}),
        ("float32", {"algorithm": "schedule:magic", "numerics": "fast"}),
    ]
    texts = [
        "UnsupportedError: schedule:ring does not add in rank order",
        "UnsupportedError: schedule:chain rounds bfloat16 at every addition",
        "UnsupportedError: CPUs have no switch",
        "UsageError: all_reduce has no schedule 'magic'; it has one_shot",
    ]
    for found in pools(3).run(refused, cases):
        for text, want in zip(found, texts, strict=True):
            assert text.startswith(want)


def half_types_add_up(rank: Rank) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        tensor = torch.full((1000,), float(rank.rank + 1)).to(dtype)
        rank.comm.all_reduce(tensor, algorithm="schedule:rabenseifner", numerics="fast")
        assert (tensor.float() == 6).all()


def test_half_types_add_up_where_nothing_is_rounded(pools: Any) -> None:
    pools(3).run(half_types_add_up)


# ---- planted bugs ------------------------------------------------------------------------------


def different(rank: Rank) -> Any:
    name = ("ring", "ring", "tree")[rank.rank]
    tensor = torch.ones(4000, dtype=torch.int32)
    return attempt(rank.comm.all_reduce, tensor, algorithm=f"schedule:{name}")


def test_ranks_with_different_schedules_are_told_so(fresh_pool: Any) -> None:
    for found in fresh_pool(3).run(different):
        assert found.kind == "DesyncError"
        assert "schedule #" in found.text


def tampered(rank: Rank, words: list[int], on: int) -> Any:
    """Run a ring in which one rank has another program; everybody has the ring's digest."""
    plan = compiled("all_reduce", "ring", rank.world_size)
    if rank.rank == on:
        rank.comm.add_program(plan.digest, plan.blocks, words)
    tensor = torch.arange(300, dtype=torch.int32) + rank.rank
    want = [3 * number + 3 for number in range(300)]
    done = attempt(rank.comm.all_reduce, tensor, algorithm="schedule:ring")
    return done.kind, tensor.tolist() == want


def steps_of(words: Sequence[int]) -> list[list[int]]:
    steps, at = [], 0
    while at < len(words):
        size = {0: 6, 1: 5 + 2 * words[at + 4] if words[at] == 1 else 0, 2: 2, 3: 3}[words[at]]
        steps.append(list(words[at : at + size]))
        at += size
    return steps


@pytest.mark.slow
def test_a_wrong_program_gives_a_wrong_result_and_a_missing_signal_an_error(
    fresh_pool: Any,
) -> None:
    steps = steps_of(compiled("all_reduce", "ring", 3).programs[1])
    add = next(step for step in steps if step[0] == 1)
    moved = [[*step[:-1], (step[-1] + 1) % 3] if step is add else step for step in steps]
    silent = [step for step in steps if step[0] != 2]

    def run(steps: list[list[int]]) -> set[Any]:
        pool = fresh_pool(3, harness.Setup(timeout_s=4))
        return set(pool.run(tampered, [word for step in steps for word in step], 1))

    assert run(steps) == {("", True)}
    assert ("", False) in run(moved)
    assert run(silent) == {("CollectiveTimeout", False)}


# ---- the compiler ------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 8, 13])
def test_programs_are_the_same_everywhere_and_different_for_different_schedules(world: int) -> None:
    digests = set()
    for verb in VERBS:
        for name in names(verb):
            found = compiled(verb, name, world)
            compiled.cache_clear()
            assert found == compiled(verb, name, world)
            assert found.digest > 1
            digests.add(found.digest)
            assert len(found.programs) == world
    assert len(digests) == sum(len(names(verb)) for verb in VERBS)
    if world > 1:
        assert compiled("broadcast", "tree", world, 1) != compiled("broadcast", "tree", world, 0)


def test_what_has_no_program_is_refused() -> None:
    with pytest.raises(NotRunnableError, match="switch"):
        compiled("all_reduce", "multimem", 4)
    with pytest.raises(ModelError, match="no schedule"):
        compiled("all_reduce", "bruck", 4)
