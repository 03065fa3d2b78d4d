# SPDX-License-Identifier: Apache-2.0
"""Sockets: the data between them, counted on schedules and on wires, and the chain over them."""

import random
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from fastcoll_model.builders import build, chain_of_sockets
from fastcoll_model.builders.sockets import NAME, Chain, halves, runs_of
from fastcoll_model.checker import check
from fastcoll_model.explain import compare, priced
from fastcoll_model.machines.cluster import Cluster, Port
from fastcoll_model.machines.described import describe
from fastcoll_model.machines.local import Core, Local
from fastcoll_model.machines.machine import Machine, load_machine, machine_of
from fastcoll_model.machines.sockets import made_up, sockets_of
from fastcoll_model.schedule import Copy, Schedule, Signal, Span, Wait
from fastcoll_model.simulator import simulate
from tests.model.crossings import Crossings, crossings

pytestmark = pytest.mark.proof("python/fastcoll_model")

PAGE = Path(__file__).parents[2] / "docs/sockets.md"


def schedule_on(machine: Machine, algorithm: str) -> Schedule:
    if algorithm == NAME:
        return chain_of_sockets(sockets_of(machine))
    return build("all_reduce", algorithm, len(machine.ranks))


def counted(machine: Machine, algorithm: str) -> Crossings:
    return crossings(schedule_on(machine, algorithm), sockets_of(machine))


@cache
def counted_on(k: int, m: int, algorithm: str) -> Crossings:
    return counted(made_up(k, m), algorithm)


def on_wires(machine: Machine, algorithm: str) -> float:
    """Return the messages that the simulator's wires between sockets carry."""
    size = 1e6
    timing = simulate(schedule_on(machine, algorithm), Cluster(machine), size)
    ends = [(link, link.source + link.target) for link in timing.link_bytes if type(link) is Port]
    return sum(timing.link_bytes[link] for link, both in ends if "core" not in both) / size


ALGORITHMS = ("one_shot", "two_shot", "chain", "socket_chain")


@pytest.mark.parametrize("ranks", ["filled", "dealt"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_wires_carry_what_the_steps_say(algorithm: str, ranks: str) -> None:
    """Count twice: the steps of the schedule, and the simulator's bytes on each wire."""
    for shape in ((2, 4), (4, 3)):
        machine = made_up(*shape, ranks)  # type: ignore[arg-type]
        assert on_wires(machine, algorithm) == pytest.approx(counted(machine, algorithm).all_reads)


def test_the_chain_loads_each_wire_once() -> None:
    """Partial sums go from each socket to the next, and the last one's result to all others."""
    found = counted_on(4, 16, "socket_chain")
    there = {(0, 1): 1.0, (1, 2): 1.0, (2, 3): 1.0}
    back = {(3, 0): 1.0, (3, 1): 1.0, (3, 2): 1.0}
    assert found.reads == found.lines == there | back


@pytest.mark.parametrize(("writes", "lines"), [(1, 1), (2, 2)])
def test_a_block_that_is_written_again_crosses_again(writes: int, lines: int) -> None:
    """Rank 1 reads a block of rank 0 twice; the cache has it, unless rank 0 wrote in between."""
    block = [Span(rank, "scratch", 0, 1) for rank in (0, 1)]
    write = Copy(block[0], Span(0, "input", 0, 1))
    rewrite = [write] if writes == 2 else []
    read = Copy(block[1], block[0])
    owner = [write, Signal(1), Wait(1), *rewrite, Signal(1)]
    programs = [owner, [Wait(0), read, Signal(0), Wait(0), read]]
    by_hand = Schedule("all_reduce", "by hand", 2, 1, lambda rank, _: iter(programs[rank]))
    found = crossings(by_hand, [0, 1])
    assert (found.all_reads, found.all_lines) == (2, lines)


def test_nothing_crosses_on_one_socket() -> None:
    assert crossings(build("all_reduce", "two_shot", 4), [0] * 4) == Crossings({}, {})


def handovers(machine: Machine, algorithm: str) -> float:
    """Return how many latencies between sockets follow one another, for a message of no bytes."""
    wires = {
        ends: type(wire)(wire.kind, wire.gbps, float("core" not in "".join(ends)), "")
        for ends, wire in machine.wires.items()
    }
    alike = Machine(machine.name, machine.title, machine.ranks, wires)
    return simulate(schedule_on(machine, algorithm), Cluster(alike), 0).time_us


def test_the_chain_waits_for_one_handover_per_socket() -> None:
    for k, m in ((1, 4), (2, 8), (4, 4)):
        machine = made_up(k, m)
        assert handovers(machine, "socket_chain") == (k if k > 1 else 0)  # k - 1 there, one back
        assert handovers(machine, "two_shot") == (2 if k > 1 else 0)
    # With every neighbour on the other socket each addition is a handover.
    assert handovers(made_up(2, 4, "dealt"), "socket_chain") == 8


@pytest.mark.parametrize("num_segments", [1, 3])
def test_every_placement_has_the_order_of_ranks(num_segments: int) -> None:
    """The bits do not depend on the sockets: uneven ones, dealt out ones, any."""
    draw = random.Random(0)
    for _ in range(40):
        sockets = [draw.randrange(3) for _ in range(draw.randint(1, 11))]
        proof = check(chain_of_sockets(sockets, num_segments))
        assert proof.rank_order, sockets
        assert proof.same_on_all_ranks


def wrong_rows(text: str) -> list[str]:
    """Return the rows of a page that differ from the counts on their schedules."""
    found = []
    for line in re.findall(r"^\| \d x \d+ \|.*$", text, re.M):
        shape, algorithm, *numbers = (cell.strip() for cell in line.strip("|").split("|"))
        k, m = map(int, shape.split(" x "))
        counts = counted_on(k, m, algorithm)
        right = [counts.all_reads, counts.all_lines, handovers(made_up(k, 2), algorithm)]
        found += [] if list(map(float, numbers)) == pytest.approx(right) else [line]
    return found


@pytest.mark.long
def test_the_table_of_the_page_is_true() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d x", line)]
    assert len(rows) == 12
    assert wrong_rows("\n".join(rows)) == []
    assert len(wrong_rows("| 2 x 16 | two_shot | 32 | 18 | 2 |\n")) == 1


def test_runs_are_consecutive_ranks_of_a_socket() -> None:
    assert runs_of([0, 0, 1, 1, 1]) == [range(2), range(2, 5)]
    assert runs_of([0, 1, 0]) == [range(1), range(1, 2), range(2, 3)]
    assert [halves(n) for n in (1, 2, 5)] == [[0], [0, 1], [0, 0, 0, 1, 1]]


def test_the_owner_of_a_block_and_its_blocks_agree() -> None:
    for runs in (runs_of(halves(7)), runs_of([0, 0, 0, 1, 1, 0, 0, 0])):
        for at, run in enumerate(runs):
            chains = [Chain(runs, rank, 24) for rank in run]
            ends = [(one._blocks(one.rank).start, one._blocks(one.rank).stop) for one in chains]
            assert (ends[0][0], ends[-1][1]) == (0, 24)
            assert all(before[1] == after[0] for before, after in pairwise(ends))
            assert all(
                one._owner(at, b) == one.rank
                for one in chains
                for b in range(*ends[one.rank - run.start])
            )


def test_the_chain_is_chosen_where_sockets_and_ranks_agree() -> None:
    """By price, on one socket never. docs/sockets.md has the price where ranks are dealt out."""
    size = 4 << 20
    assert compare("all_reduce", Cluster(made_up(2, 8)), 16, size).best.algorithm == NAME
    on_one = compare("all_reduce", Cluster(load_machine("cpu-2s")), 4, size)
    reasons = {one.algorithm: (one.time_us, one.reason) for one in on_one.candidates}
    assert reasons[NAME] == (None, "there is one socket only")


def test_a_small_message_is_not_worth_four_handovers() -> None:
    machine = Cluster(made_up(4, 4))
    two_shot, chain = (priced("all_reduce", one, machine, 16, 1024) for one in ("two_shot", NAME))
    assert (two_shot.time_us or 0) < (chain.time_us or 0)


def test_sockets_of_a_machine_as_the_kernel_describes_it() -> None:
    """Two NUMA nodes of two caches each: caches of one node are no sockets of their own."""
    cores = tuple(Core(i, (i,), i // 4, i // 4, f"{i // 2}", "") for i in range(8))
    found = Local(cores, {}, (), (), 1 << 30, ())
    assert sockets_of(machine_of(describe(found), "here")) == [0] * 4 + [1] * 4
    assert sockets_of(made_up(4, 2)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sockets_of(made_up(2, 2, "dealt")) == [0, 1, 0, 1]
    assert set(sockets_of(load_machine("hgx-h100"))) == {0}
