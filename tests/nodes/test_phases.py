# SPDX-License-Identifier: Apache-2.0
"""The requests of each verb to nodes and carriers, and their order: pure Python, nothing moves.

Every rank of a map runs by itself, on node groups and carriers that only write down what they are
asked. Then the records must fit together: within a node's group, within a lane, and with the plan.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fastcoll.bootstrap.node_map import NodeMap
from fastcoll.calls.parts import PartsCall, check_parts
from fastcoll.calls.tensors import Call, check
from fastcoll.nodes.arguments import Arguments, carry_out
from fastcoll.nodes.lanes import Lanes, Segment
from fastcoll.nodes.packets import Header
from fastcoll.types import DType, Op, Verb

TWO = NodeMap(((0, 1), (2, 3)), ("a", "b"), ("a", "b"))
UNEVEN = NodeMap(((0, 1, 2), (3,)), ("a", "b"), ("a", "b"))
THREE = NodeMap(((0, 3), (1,), (2,)), ("a", "b", "c"), ("a", "b", "c"))
SMALL, LARGE, SEGMENTS = 8, 40_000, 500_000  # elements: a packet, one segment, three
SEGMENT_BYTES = 800_000


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("fastcoll.nodes.lanes.SEGMENT_BYTES", SEGMENT_BYTES)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@dataclass(frozen=True)
class Entry:
    """A request to `whom`: the node's group, a lane's carrier, or the waits of a carrier."""

    whom: str
    what: str
    given: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()


class Record:
    """The node, the carriers and the watch of one rank."""

    accepts_short = True

    def __init__(self, node_map: NodeMap, rank: int, reduces: bool) -> None:
        self.entries: list[Entry] = []
        self._num_local = len(node_map.nodes[node_map.places[rank][0]])
        self._reduces = reduces

    def issue(self, call: Any) -> None:
        size = sum(part.nbytes for part in _parts(call.input))
        self.entries.append(Entry("node", call.verb.name, (size,)))
        if call.verb is Verb.all_gather:  # heads are compared
            call.output.view(self._num_local, -1)[:] = call.input

    def lane(self, number: int) -> "Lane":
        return Lane(self, f"lane {number}")

    def wait(self, transfers: Iterable[Any], *_: object) -> None:
        self.entries.append(Entry("wait", " ".join(str(one) for one in transfers)))


class Lane:
    """A carrier; its transfers are their names."""

    accepts_short = True

    def __init__(self, record: Record, name: str) -> None:
        self._record = record
        self._name = name

    def reduces(self, dtype: DType, op: Op) -> bool:
        return self._record._reduces

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, expected: Sequence[int], given: Any
    ) -> str:
        for part in output.split(list(expected)):  # heads are compared
            part[: len(input)] = input[: len(part)]
        return self._note("all_to_all", tuple(given), tuple(expected))

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> str:
        return self._note("all_gather", (input.nbytes,), (output.nbytes,))

    def broadcast(self, tensor: torch.Tensor, node: int) -> str:
        return self._note("broadcast", (tensor.nbytes, node))

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> str:
        return self._note("all_reduce", (tensor.nbytes, op))

    def _note(self, what: str, given: tuple[int, ...], expected: tuple[int, ...] = ()) -> str:
        self._record.entries.append(Entry(self._name, what, given, expected))
        return self._name


def _parts(array: Any) -> Sequence[torch.Tensor]:
    if array is None:
        return []
    return [array] if isinstance(array, torch.Tensor) else array


def call_of(verb: Verb, numel: int, rank: int, world: int) -> Any:
    """A call of float32 with the arguments that a rank gives; the root is rank 0."""
    one, each = torch.zeros(numel), [torch.zeros(numel) for _ in range(world)]
    many = torch.zeros(numel * world)
    if verb in (Verb.gather, Verb.scatter):
        mine = each if rank == 0 else None
        input, output = (one, mine) if verb is Verb.gather else (mine, one)
        return PartsCall(verb=verb, input=input, output=output)
    if verb is Verb.all_to_all:
        return PartsCall(verb=verb, input=each, output=[torch.zeros(numel) for _ in each])
    sides = {Verb.reduce_scatter: (many, one), Verb.all_gather: (one, many)}
    input, output = sides.get(verb, (one, one))
    return Call(verb=verb, input=input, output=output)


def run(
    node_map: NodeMap,
    verb: Verb,
    numel: int,
    reduces: bool = False,
    plant: Callable[[int, Lanes], None] = lambda rank, lanes: None,
) -> list[list[Entry]]:
    """Let every rank make a call by itself; return what each asked for."""
    records = []
    world = len(node_map.places)
    for rank, (node, local_rank) in sorted(node_map.places.items()):
        record = Record(node_map, rank, reduces)
        carriers: Any = [record.lane(lane) for lane in node_map.lanes_of(node, local_rank)]
        stand_in: Any = record
        lanes = Lanes(node_map, rank, stand_in, carriers, stand_in)
        plant(rank, lanes)
        call = call_of(verb, numel, rank, world)
        checked = check_parts if isinstance(call, PartsCall) else check
        operands = checked(call, rank, world)
        header = Header(
            1, verb, operands.dtype, operands.op, operands.numel, 0, operands.splits, reduces
        )
        arguments = Arguments(operands, verb, world)
        carry_out(lanes, header, arguments, 1.0, "same_bits", lambda words: [words] * world)
        records.append(record.entries)
    return records


def problems(node_map: NodeMap, records: Sequence[Sequence[Entry]]) -> list[str]:
    """Where ranks would wait for each other for ever, or for bytes that nobody sends."""
    found = []
    for node, ranks in enumerate(node_map.nodes):
        on_node = [[e.what for e in records[r] if e.whom == "node"] for r in ranks]
        if any(one != on_node[0] for one in on_node):
            found.append(f"the ranks of node {node} call their node differently")
    for lane in range(node_map.num_lanes):
        rows = []  # by node: what the rank that serves this lane asks of it
        for ranks in node_map.nodes:
            entries = records[ranks[lane % len(ranks)]]
            rows.append([e for e in entries if e.whom == f"lane {lane}"])
        if len({len(row) for row in rows}) > 1:
            found.append(f"lane {lane} is used {[len(row) for row in rows]} times")
            continue
        for number, step in enumerate(zip(*rows, strict=True)):
            if not _fits(step):
                found.append(f"lane {lane}, step {number}: {step}")
    return found


def _fits(step: Sequence[Entry]) -> bool:
    """Whether the nodes of a lane do one thing."""
    if len({one.what for one in step}) > 1:
        return False
    if step[0].what != "all_to_all":
        return len({(one.given, one.expected) for one in step}) == 1
    return all(
        there.expected[here] == one.given[other] or 0 < one.given[other] <= there.expected[here]
        for here, one in enumerate(step)
        for other, there in enumerate(step)
    )


VERBS = [verb for verb in Verb if verb is not Verb.barrier]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
@pytest.mark.parametrize("node_map", [TWO, UNEVEN, THREE], ids=["2+2", "3+1", "2+1+1"])
def test_ranks_fit_together(node_map: NodeMap, verb: Verb) -> None:
    for numel in (0, 1, LARGE + 1, 3 * LARGE + 1):
        assert problems(node_map, run(node_map, verb, numel)) == []


MEETING = "node all_gather, lane 0 all_to_all, wait lane 0, node broadcast"
# Requests of the first rank, by verb, size, map and who reduces: the plan of ARCHITECTURE.md.
PLANS = [
    (
        (TWO, Verb.all_reduce, SMALL, False),
        "node all_gather, node reduce, lane 0 all_to_all, wait lane 0, node broadcast",
    ),
    (
        (TWO, Verb.all_gather, SMALL, False),
        "node all_gather, node all_gather, lane 0 all_to_all, wait lane 0, node broadcast",
    ),
    (
        (TWO, Verb.all_reduce, LARGE, False),
        f"{MEETING}, node reduce_scatter, lane 0 all_to_all, wait lane 0, node all_gather",
    ),
    (
        (TWO, Verb.all_reduce, LARGE, True),
        f"{MEETING}, node reduce_scatter, lane 0 all_reduce, wait lane 0, node all_gather",
    ),
    (
        (THREE, Verb.all_reduce, LARGE, False),
        f"{MEETING}, node reduce_scatter, lane 0 all_to_all, wait lane 0, "
        "lane 0 all_gather, wait lane 0, node all_gather",
    ),
    (
        (TWO, Verb.reduce, LARGE, False),
        f"{MEETING}, node reduce_scatter, lane 0 all_to_all, wait lane 0, node gather",
    ),
    (
        (THREE, Verb.reduce, LARGE, False),
        f"{MEETING}, node reduce_scatter, lane 0 all_to_all, wait lane 0, "
        "lane 0 all_to_all, wait lane 0, node gather",
    ),
    (
        (TWO, Verb.reduce_scatter, LARGE, False),
        f"{MEETING}, node reduce_scatter, lane 0 all_to_all, wait lane 0",
    ),
    (
        (TWO, Verb.all_gather, LARGE, False),
        f"{MEETING}, lane 0 all_to_all, wait lane 0, node all_gather",
    ),
    (
        (TWO, Verb.broadcast, LARGE, False),
        f"{MEETING}, node broadcast, lane 0 broadcast, wait lane 0",
    ),
    (
        (TWO, Verb.scatter, LARGE, False),
        f"{MEETING}, node scatter, lane 0 all_to_all, wait lane 0",
    ),
    (
        (TWO, Verb.gather, LARGE, False),
        f"{MEETING}, lane 0 all_to_all, wait lane 0, node gather",
    ),
    (
        (TWO, Verb.all_to_all, LARGE, False),
        f"{MEETING}, lane 0 all_to_all, wait lane 0, node all_to_all",
    ),
]


def words(entries: Iterable[Entry]) -> str:
    return ", ".join(f"{one.whom} {one.what}" for one in entries)


@pytest.mark.parametrize(("call", "plan"), PLANS, ids=lambda one: getattr(one, "name", None))
def test_a_call_follows_its_plan(call: tuple[NodeMap, Verb, int, bool], plan: str) -> None:
    assert words(run(*call)[0]) == plan


@pytest.mark.parametrize("node_map", [TWO, THREE], ids=["2+2", "2+1+1"])
def test_only_the_roots_node_gets_the_result(node_map: NodeMap) -> None:
    """The rank of a lane on node 0, the root's, gives no sums and gets those of all others."""
    for rank, entries in enumerate(run(node_map, Verb.reduce, LARGE)):
        of_lanes = [entry for entry in entries if entry.whom.startswith("lane")]
        last = of_lanes[-1]
        gives, gets = sum(last.given), sum(last.expected)
        assert (gets > 0, gives > 0) == (
            (True, False) if rank in node_map.nodes[0] else (False, True)
        )


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
@pytest.mark.parametrize("excess", [0, 4])
def test_short_chunks_go_whole_and_no_others(num_nodes: int, excess: int) -> None:
    """Short by what a node gives to all others: it costs less than a trip."""
    names = tuple("abcd"[:num_nodes])
    node_map = NodeMap(tuple((rank,) for rank in range(num_nodes)), names, names)
    short_bytes = (64 << 10) // (num_nodes - 1) // 4 * 4
    numel = (short_bytes + excess) // 4
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:  # else it would be over with its packets
        patched.setattr("fastcoll.nodes.packets._MOST_BYTES", 0)
        records = run(node_map, Verb.all_reduce, numel)
    for node, entries in enumerate(records):
        assert entries[1].whom == "wait"  # for the heads
        given = sum(sum(entry.given) for entry in entries[2:] if entry.what == "all_to_all")
        is_whole = all(entry.what != "all_gather" for entry in entries[2:])
        assert is_whole == (num_nodes == 2 or excess == 0), entries
        shard = -(-numel // num_nodes)
        mine = min(shard, numel - node * shard)
        assert given == 4 * (numel * (num_nodes - 1) if is_whole else numel - mine)


def test_segments_overlap() -> None:
    """The next segment is on its way before anybody waits for the one before it."""
    entries = words(run(TWO, Verb.all_reduce, SEGMENTS)[0][4:])
    begin, end = "node reduce_scatter, lane 0 all_to_all", "wait lane 0, node all_gather"
    assert entries == ", ".join([begin] * 3 + [end] * 3)


def backwards(rank: int, lanes: Lanes) -> None:
    """Node 1 takes its segments in another order; the last one is short."""
    drive = lanes.drive
    if rank >= 2:
        lanes.drive = lambda segments: drive(reversed(list(segments)))  # type: ignore[method-assign]


def hasty(rank: int, lanes: Lanes) -> None:
    """Nobody waits for a segment's transfers."""

    def drive(segments: Iterable[Segment]) -> None:
        for segment in segments:
            deque(segment, maxlen=0)

    lanes.drive = drive  # type: ignore[method-assign]


def test_a_node_that_goes_backwards_is_seen() -> None:
    """Negative control."""
    assert problems(TWO, run(TWO, Verb.all_reduce, SEGMENTS, plant=backwards))


def test_a_rank_that_leaves_a_hop_out_is_seen() -> None:
    """Negative control."""
    records = run(UNEVEN, Verb.all_gather, LARGE)
    for whom in ("lane 1", "node"):
        entries = records[1]
        [*_, last] = [place for place, entry in enumerate(entries) if entry.whom == whom]
        damaged = [*records[:1], [*entries[:last], *entries[last + 1 :]], *records[2:]]
        assert problems(UNEVEN, damaged), whom


def test_a_rank_that_does_not_wait_is_seen() -> None:
    """Negative control."""
    call, _ = PLANS[2]
    assert words(run(*call)[0]) != words(run(*call, plant=hasty)[0])


def test_a_carrier_that_takes_no_less_gets_whole_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_whole() -> bool:
        sizes = [
            {(one.given[1 - node], one.expected[1 - node]) for one in entries if one.expected}
            for node, entries in enumerate(run(TWO, Verb.all_reduce, 1000)[::2])
        ]
        return all(given == expected for one in sizes for given, expected in one)

    assert not all_whole()
    monkeypatch.setattr(Lane, "accepts_short", False)
    assert all_whole()
    for numel in (0, 1000, LARGE):
        assert problems(TWO, run(TWO, Verb.all_gather, numel)) == []
