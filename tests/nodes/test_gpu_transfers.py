# SPDX-License-Identifier: Apache-2.0
"""Sends and receives of CUDA tensors over several nodes, with the CPU in the GPUs' place.

The work of real streams and copy engines is for tests/gpu/test_node_sends.py.
"""

import dataclasses
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastcoll.nodes.transfers import payloads
from fastcoll.nodes.transfers.payloads import GpuPayload
from fastcoll.nodes.transfers.staged import StagedTransfers
from fastcoll.types import TORCH_DTYPES, DType
from tests.contract.test_gpu_parts import go_through
from tests.contract.test_gpu_parts import messages as batches
from tests.support import oracle
from tests.support.fake_streams import PIECE_BYTES, POISON, slow_node_gpus
from tests.support.gpu import needs_gpu_part
from tests.support.harness import Pool, Rank, Setup, attempt

pytestmark = needs_gpu_part
Clusters = Callable[[str], Pool]
FreshPool = Callable[..., Pool]
MAPS = ("aabb", "aaab", "abab")
SIZES = (0, 1, 17, PIECE_BYTES // 4, 5 * PIECE_BYTES // 2 + 3)


@dataclasses.dataclass(frozen=True)
class Message:
    """A message from one rank to another; `given` and `taken` say in which memory it lies there."""

    source: int
    target: int
    tag: int
    dtype: DType
    numel: int
    given: str
    taken: str
    seed: int

    def content(self) -> torch.Tensor:
        """Its elements; all bits are random."""
        dtype = TORCH_DTYPES[self.dtype]
        generator = torch.Generator().manual_seed(self.seed)
        most = 2 if dtype is torch.bool else 256
        num_bytes = self.numel * dtype.itemsize
        return torch.randint(most, (num_bytes,), generator=generator, dtype=torch.uint8).view(dtype)


def messages(seed: int, world: int, per_pair: int) -> list[Message]:
    """Messages of all pairs, one rank's own ones too, in the order of the sender."""
    rng = random.Random(seed)
    made = []
    for source in range(world):
        for target in range(world):
            for _ in range(per_pair):
                dtype = DType[rng.choice(oracle.DTYPES)]
                # NumPy's arrays are the CPU's here, and it has not all types.
                places = ["dense", "dense", "strided"]
                if dtype.name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
                    places.append("cpu")
                given, taken = rng.choice(places), rng.choice(places)
                numel, tag = rng.choice(SIZES), rng.randrange(2)
                number = rng.getrandbits(40)
                made.append(Message(source, target, tag, dtype, numel, given, taken, number))
    rng.shuffle(made)
    return made


def poisoned(dtype: DType, numel: int) -> torch.Tensor:
    kind = TORCH_DTYPES[dtype]
    poison = 1 if kind is torch.bool else POISON
    return torch.full((numel * kind.itemsize,), poison, dtype=torch.uint8).view(kind)


def laid(memory: torch.Tensor, place: str) -> torch.Tensor:
    return memory[::2] if place == "strided" else memory


def exchange(rank: Rank, seed: int, plant: Callable[[], Any] | None = None) -> list[str]:
    """Send all messages at once, each written by the stream only later; say which came wrong."""
    me, world = rank.rank, rank.world_size
    comm = rank.comm.new_group()
    todo = messages(seed, world, 4)
    problems, works, got = [], [], []
    with slow_node_gpus(comm) as slow:
        if plant is not None:
            plant()
        for one in todo:
            if one.target == me:
                memory = poisoned(one.dtype, 2 * one.numel)
                memory = memory if one.taken == "strided" else memory[: one.numel]
                tensor = laid(memory, one.taken)
                before = tensor.clone()
                seen: list[torch.Tensor] = []
                slow.main.give(lambda tensor=tensor, seen=seen: seen.append(tensor.clone()))
                array: Any = tensor.numpy() if one.taken == "cpu" else tensor
                works.append(comm.irecv(array, one.source, one.tag))
                got.append((one, memory, tensor, before, seen))
            if one.source == me:
                tensor = laid(poisoned(one.dtype, 2 * one.numel), one.given)[: one.numel]
                if one.given == "cpu":
                    array = one.content().numpy()
                else:
                    array = tensor
                    slow.main.give(lambda tensor=tensor, one=one: tensor.copy_(one.content()))
                works.append(comm.isend(array, one.target, one.tag))
        for work in works:
            work.wait()
            assert work.is_success()
        slow.main.run()
        for one, memory, tensor, before, seen in got:
            if not same(tensor, one.content()):
                problems.append(f"wrong bytes: {one}")
            if one.taken != "cpu" and not same(seen[0], before):
                problems.append(f"written before the stream had read it: {one}")
            if one.taken == "strided" and not same(
                memory[1::2], poisoned(one.dtype, 2 * one.numel)[1::2]
            ):
                problems.append(f"written between its elements: {one}")
        places = [(one, one.given) for one in todo if one.source == me]
        places += [(one, one.taken) for one in todo if one.target == me]
        sizes = [
            len(one.content()) * one.content().itemsize for one, place in places if place != "cpu"
        ]
        if slow.pinned != sum(min(size, 2 * PIECE_BYTES) for size in sizes):
            problems.append(f"{slow.pinned} bytes of pinned memory for messages of {sizes}")
        assert comm._gpus is None, "sends need neither NCCL nor kernels"
    comm.close()
    return problems


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they have the same bits."""
    flat = [torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for tensor in (one, other)]
    return torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))


@pytest.mark.parametrize("nodes", MAPS)
def test_everybody_to_everybody(clusters: Clusters, nodes: str) -> None:
    seed = secrets.randbits(32)
    problems = [text for texts in clusters(nodes).run(exchange, seed) for text in texts]
    assert not problems, (seed, problems[:4])


# ---- what the made-up GPU must notice ------------------------------------------------------------


def ignores_the_stream() -> None:
    """A send does not wait for what writes its tensor, nor a receive for what reads it."""
    GpuPayload._await_stream = lambda self, wait: None  # type: ignore[method-assign]


def ignores_the_stream_of_receives() -> None:
    """The same of receives alone: what they get is right."""
    right = GpuPayload._await_stream

    def wait(self: Any, wait: Any) -> None:
        if self.transfer.sends:
            right(self, wait)

    GpuPayload._await_stream = wait  # type: ignore[method-assign]


def ignores_its_copies() -> None:
    """Nobody waits for a copy between the GPU and the CPU."""
    right = GpuPayload._do
    GpuPayload._do = lambda self, task, wait: right(self, task, lambda is_over: None)  # type: ignore[method-assign]


def forgets_the_last_piece() -> None:
    """The rest behind whole pieces does not travel."""
    payloads._num_pieces = lambda num_bytes, piece_bytes: num_bytes // piece_bytes


def has_one_slot() -> None:
    """Two pieces of a message lie in the same memory."""
    right = GpuPayload.piece
    GpuPayload.piece = lambda self, index: right(self, 0)[: right(self, index).numel()]  # type: ignore[method-assign]


def in_order(rank: Rank, plant: Callable[[], None] | None = None) -> list[float]:
    """Rank 0 sends to ranks 1 and 2 from a slow GPU first, then from the CPU's memory."""
    comm = rank.comm.new_group()
    found = []
    with slow_node_gpus(comm) as slow:
        if plant is not None:
            plant()
        if rank.rank == 0:
            slow.main.is_stuck = True
            tensor = torch.zeros(100)
            slow.main.give(lambda: tensor.fill_(1.0))
            works = [
                comm.isend(array, peer)
                for peer in (1, 2)
                for array in (tensor, torch.full((100,), 2.0).numpy(), tensor)
            ]
            time.sleep(0.3)
            slow.main.is_stuck = False
            for work in works:
                work.wait()
        elif rank.rank < 3:
            for _ in range(3):
                out = torch.zeros(100)
                comm.recv(out.numpy(), 0)
                found.append(float(out.mean()))
    rank.comm.barrier()
    comm.close()
    return found


IN_ORDER = [[], [1, 2, 1], [1, 2, 1], []]


def test_messages_of_a_tag_are_in_order(clusters: Clusters) -> None:
    assert clusters("aabb").run(in_order) == IN_ORDER


def overtakes() -> None:
    """A send of the CPU's memory does not wait for one of the GPU's before it."""
    StagedTransfers.takes = lambda self, transfer: transfer.array.device >= 0  # type: ignore[method-assign]


def pins_whole_messages() -> None:
    """All pieces of a message have memory of their own."""
    payloads._NUM_SLOTS = 1000


def cuts_what_comes_whole() -> None:
    """A message of the CPU's memory, which is sent in one piece, is received in several."""
    GpuPayload.cut_as = lambda self, piece_bytes: self  # type: ignore[method-assign]


def leaves_strided_copies() -> None:
    """The data that come for a tensor that lies in pieces stay in its dense copy."""
    GpuPayload.finish = lambda self, wait: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "plant",
    [
        ignores_the_stream,
        ignores_the_stream_of_receives,
        ignores_its_copies,
        forgets_the_last_piece,
        has_one_slot,
        pins_whole_messages,
        cuts_what_comes_whole,
        leaves_strided_copies,
    ],
)
def test_a_planted_mistake_is_seen(fresh_pool: FreshPool, plant: Callable[[], None]) -> None:
    """Negative controls."""
    pool = fresh_pool(4, Setup(nodes="aabb", timeout_s=10))
    outcomes = pool.outcomes(exchange, 1, plant)
    assert any(outcome.value or not outcome.ok for outcome in outcomes), "nobody noticed"


def test_a_send_that_overtakes_is_seen(fresh_pool: FreshPool) -> None:
    """Negative control."""
    pool = fresh_pool(4, Setup(nodes="aabb", timeout_s=10))
    assert [one.value for one in pool.outcomes(in_order, overtakes)] != IN_ORDER


# ---- other calls ---------------------------------------------------------------------------------


def others(rank: Rank) -> None:
    """Blocking calls, batches, where NCCL can't be had; what is refused."""
    from tests.support.fake_nodes import facts

    me, comm = rank.rank, rank.comm.new_group()
    peer = (me + 2) % 4
    with slow_node_gpus(comm, lambda device: facts(device) | {"nccl": ""}) as slow:
        assert attempt(comm.all_reduce, torch.ones(3)).kind == "UnsupportedError"
        for to in (peer, me ^ 1):  # between nodes, within one
            tensor = torch.full((5000,), float(me))
            if me < to:
                comm.send(tensor, to, tag=3)
                assert comm.recv(tensor, to, tag=3) == to
            else:
                out = torch.full((5000,), -1.0)
                assert comm.recv(out, to, tag=3) == to
                assert (out == to).all()
                comm.send(tensor, to, tag=3)
            assert (tensor == (to if me < to else me)).all()
        in_batches = dataclasses.replace(rank, comm=comm)
        assert go_through(in_batches, batches, [(10, "float32"), (1, "uint8")]) == []
        for call in (comm.recv, comm.irecv):
            found = attempt(call, torch.ones(3))
            assert (found.kind, "from any rank" in found.text) == ("UnsupportedError", True)
        # The CPU's memory takes what comes from a GPU, from whomever.
        sends = [comm.isend(torch.full((2000,), me), one, tag=5) for one in (peer, me ^ 1)]
        outs = [torch.full((2000,), -1) for _ in sends]
        sources = [comm.recv(out.numpy(), tag=5) for out in outs]
        assert sorted(sources) == sorted((peer, me ^ 1))
        assert all((out == one).all() for out, one in zip(outs, sources, strict=True))
        for send in sends:
            send.wait()
        slow.fake.is_capturing = True
        for to in (peer, me ^ 1):
            found = attempt(comm.isend, torch.ones(3), to)
            assert (found.kind, "can't be captured" in found.text) == ("UnsupportedError", True)
        comm.isend(torch.ones(3).numpy(), me)
        comm.check()
        comm.recv(torch.ones(3).numpy(), me)
        slow.fake.is_capturing = False
        late = comm.irecv(torch.ones(3), peer, tag=9), comm.irecv(torch.ones(3), me ^ 1, tag=9)
        comm.close()
        # A rank that closes earlier is lost to the others.
        assert all(attempt(work.wait).kind in ("UsageError", "PeerLostError") for work in late)


def test_other_calls(clusters: Clusters) -> None:
    clusters("aabb").run(others)


def others_planted(rank: Rank) -> None:
    captured = payloads.captures
    payloads.captures = type(
        "Blind",
        (),
        {"is_capturing": staticmethod(lambda: False), "ignore_captures": captured.ignore_captures},
    )
    others(rank)


def test_an_unseen_capture_fails_the_test(fresh_pool: FreshPool) -> None:
    """Negative control."""
    pool = fresh_pool(4, Setup(nodes="aabb", timeout_s=5))
    assert any(one.error for one in pool.outcomes(others_planted))
