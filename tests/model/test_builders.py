# SPDX-License-Identifier: Apache-2.0
"""Every builder is proven for every number of ranks; docs/schedules.md has what each moves."""

from collections.abc import Iterable, Iterator

import pytest

from fastcoll_model.builders import algorithms_of, build
from fastcoll_model.builders.hierarchical import BETWEEN
from fastcoll_model.builders.trees import double_parent
from fastcoll_model.checker import Proof, check
from fastcoll_model.errors import ModelError
from fastcoll_model.schedule import ROOTED, VERBS, Copy, Reduce, Schedule, Signal, moved

pytestmark = pytest.mark.proof("python/fastcoll_model")

ALL = [(verb, algorithm) for verb in VERBS for algorithm in algorithms_of(verb)]
SOME_RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12)


def proven(verb: str, algorithm: str, n: int, **options: int | str | None) -> Proof:
    return check(build(verb, algorithm, n, **options))


def roots(verb: str, n: int) -> Iterator[int]:
    yield from sorted({0, n // 2, n - 1}) if verb in ROOTED else (0,)


def prove_all(verb: str, algorithm: str, ranks: Iterable[int]) -> None:
    for n in ranks:
        for root in roots(verb, n):
            assert proven(verb, algorithm, n, root=root).same_on_all_ranks, (n, root)


@pytest.mark.parametrize(("verb", "algorithm"), ALL)
def test_many_numbers_of_ranks_are_proven(verb: str, algorithm: str) -> None:
    prove_all(verb, algorithm, SOME_RANKS)


@pytest.mark.parametrize("verb", VERBS)
def test_a_rank_gets_as_many_blocks_as_belong_there(verb: str) -> None:
    schedule = build(verb, "hierarchical", 6, root=1 if verb in ROOTED else 0)
    for rank in range(6):
        assert schedule.output_blocks(rank) == len(schedule.expected(rank))


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "algorithm"), ALL)
def test_every_number_of_ranks_is_proven(verb: str, algorithm: str) -> None:
    prove_all(verb, algorithm, range(1, 34))


@pytest.mark.parametrize(("verb", "algorithm"), ALL)
def test_segments_are_proven(verb: str, algorithm: str) -> None:
    for n in (1, 2, 3, 6, 8):
        for num_segments in (2, 5):
            proven(verb, algorithm, n, num_segments=num_segments)


@pytest.mark.parametrize(("verb", "algorithm"), [pair for pair in ALL if pair[1] in BETWEEN])
def test_nodes_of_every_shape_are_proven(verb: str, algorithm: str) -> None:
    for num_nodes, local_size in ((1, 6), (6, 1), (2, 3), (3, 2), (5, 4), (4, 5)):
        n = num_nodes * local_size
        for root in roots(verb, n):
            proven(verb, algorithm, n, root=root, local_size=local_size)


def test_the_orders_are_those_on_paper() -> None:
    orders = {a: proven("all_reduce", a, 4).orders[0] for a in algorithms_of("all_reduce")}
    assert orders["two_shot"] == orders["chain"] == orders["socket_chain"] == "0 + 1 + 2 + 3"
    assert orders["ring"] == "1 + 2 + 3 + 0"  # chunk 0 starts behind rank 0
    assert orders["tree"] == "0 + 1 + (2 + 3)"
    assert orders["rabenseifner"] == "0 + 2 + (1 + 3)"
    assert orders["multimem"] == "{0, 1, 2, 3}"


def test_bruck_brings_each_block_once_for_any_number_of_ranks() -> None:
    for n in (3, 7, 12):
        assert proven("all_gather", "bruck", n).blocks_in == [n - 1] * n


def test_a_ring_only_speaks_to_neighbours() -> None:
    n = 9
    for verb in ("all_reduce", "reduce_scatter", "all_gather"):
        schedule = build(verb, "ring", n)
        for rank in range(n):
            for step in schedule.program(rank, 0):
                if isinstance(step, Signal):
                    assert step.rank == (rank + 1) % n
                elif isinstance(step, Copy | Reduce):
                    assert all(src.rank == (rank - 1) % n for src, _ in moved(step))


def crossing_blocks(schedule: Schedule, local_size: int) -> int:
    """Count the blocks that go from one node to another."""
    return sum(
        src.num_blocks
        for rank in range(schedule.world_size)
        for step in schedule.program(rank, 0)
        if isinstance(step, Copy | Reduce)
        for src, dst in moved(step)
        if src.rank // local_size != dst.rank // local_size
    )


def test_hierarchical_spares_the_network() -> None:
    nodes, local = 4, 8
    n = nodes * local
    reducing = build("all_reduce", "hierarchical", n, local_size=local)
    assert crossing_blocks(reducing, local) == 2 * (nodes - 1) * n  # 2 S (m-1)/m per node, m nodes
    exchanging = build("all_to_all", "hierarchical", n, local_size=local)
    assert crossing_blocks(exchanging, local) == n * (n - local)
    broadcasting = build("broadcast", "hierarchical", n, root=5, local_size=local)
    assert crossing_blocks(broadcasting, local) == (nodes - 1) * n


def test_a_rank_with_children_in_one_tree_is_a_leaf_in_the_other() -> None:
    for size in range(2, 130):
        parents = [
            {double_parent(place, size, tree) for place in range(1, size)} - {0} for tree in (0, 1)
        ]
        assert not parents[0] & parents[1]
        for tree in (0, 1):
            children = [double_parent(place, size, tree) for place in range(1, size)]
            assert max(map(children.count, parents[tree]), default=0) <= 2
            assert children.count(0) == 1


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("all_sum", "ring", 4), {}, "all_sum.*all_reduce"),
        (("all_reduce", "bruck", 4), {}, "bruck.*one_shot.*hierarchical"),
        (("all_reduce", "ring", 0), {}, "0 ranks"),
        (("all_reduce", "ring", 4), {"num_segments": 0}, "0 segments"),
        (("broadcast", "tree", 4), {"root": 4}, "root 4"),
        (("all_reduce", "hierarchical", 6), {"local_size": 4}, "local_size"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, options, text) -> None:
    with pytest.raises(ModelError, match=text):
        build(*arguments, **options)
