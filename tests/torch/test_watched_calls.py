# SPDX-License-Identifier: Apache-2.0
"""Modes and classes of torch see a group's calls as they see Gloo's, on both backends and on nodes.

They see one operator a call, none of its phases, and may keep the call from being made.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fastcoll.integrations import torch_backend
from tests.support.backends import COMPILE_S, TorchGroup, on_backend
from tests.support.harness import Attempt, Pool, Rank, Setup, attempt
from tests.support.verb_calls import NOT_OF_GLOO, VERB_CALLS

Pools = Callable[[int], Pool]
Program = Callable[[Rank], Any]
# Gloo makes a batch of other operators of the first two, and a wrong sum of the third.
OTHERWISE_ON_GLOO = (
    *NOT_OF_GLOO,
    "reduce_scatter_tensor_coalesced",
    "all_gather_into_tensor_coalesced",
    "all_reduce, strided",
)
# Gloo does not give its operator what it was given.
OF_GLOO_ALONE = ("aten.split.Tensor", "aten.copy_.default")
# On Gloo they have no kernel for meta tensors, or no tensor.
NOT_OF_META = ("all_reduce_coalesced", "batch_isend_irecv", "barrier")
NAMES = [
    name for name, call in VERB_CALLS.items() if call.in_torch and name not in OTHERWISE_ON_GLOO
]


class Watching(TorchDispatchMode):
    """Notes the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A tensor that only its class can read."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(lambda one: getattr(one, "inner", one), args), **(kwargs or {}))


def each_verb(rank: Rank) -> dict[str, Any]:
    """Of each verb, the first call and the second: what was seen, and what was written."""
    group, found = TorchGroup(rank.rank, rank.world_size), {}
    for name in NAMES:
        for is_known in (False, True):
            given, got = VERB_CALLS[name].tensors(rank.world_size)
            with Watching() as mode:
                VERB_CALLS[name].make(group, given, got)
            seen = [one for one in mode.seen if one not in OF_GLOO_ALONE]
            sums = [got.sum().item()] if VERB_CALLS[name].writes(rank.rank) else []
            found[f"{name}, {is_known}"] = seen, sums
    return found


def counted(rank: Rank) -> dict[str, int]:
    tensor = torch.ones(3)
    with CommDebugMode() as mode:
        for _ in range(2):
            dist.all_reduce(tensor)
            dist.all_gather_into_tensor(torch.empty(3 * rank.world_size), tensor)
            dist.all_reduce(tensor, async_op=True).wait()  # type: ignore[union-attr]
    return {str(name): number for name, number in mode.get_comm_counts().items()}


def kept_back(rank: Rank) -> Any:
    """Under FakeTensorMode no call is made: rank 1 makes none at all."""
    group, shapes = TorchGroup(rank.rank, rank.world_size), []
    for name in NAMES if rank.rank == 0 else ():
        if name != "all_reduce_coalesced":  # which has no fake, as on Gloo
            with FakeTensorMode():
                given, got = VERB_CALLS[name].tensors(rank.world_size)
                VERB_CALLS[name].make(group, given, got)
            shapes.append((name, tuple(got.shape)))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return shapes, tensor.tolist()


def of_a_class(rank: Rank) -> Any:
    tensor = Wrapped(torch.full((3,), rank.rank + 1.0))
    dist.all_reduce(tensor)
    first = tensor.inner.tolist()
    dist.all_reduce(tensor, async_op=True).wait()  # type: ignore[union-attr]
    parts = [Wrapped(torch.zeros(3)) for _ in range(rank.world_size)]
    dist.all_gather(parts, Wrapped(torch.full((3,), rank.rank * 1.0)))
    return first, tensor.inner.tolist(), [one.inner.tolist() for one in parts]


def of_meta(rank: Rank) -> Any:
    """No call of tensors without elements is made: rank 1 makes none at all."""
    group, works = TorchGroup(rank.rank, rank.world_size), []
    for name in NAMES if rank.rank == 0 else ():
        if name in NOT_OF_META:
            continue
        given, got = (one.to("meta") for one in VERB_CALLS[name].tensors(rank.world_size))
        works.append((name, VERB_CALLS[name].make(group, given, got) is None))
        if VERB_CALLS[name].is_async:
            work = VERB_CALLS[name].make(group, given, got, async_op=True)
            works.append((name, work is None or work.wait()))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return works, tensor.tolist()


def simulated(rank: Rank) -> Any:
    """Under LocalTensorMode one process has the tensors of all ranks: rank 1 makes no call."""
    world, found = rank.world_size, []
    for group in (None, dist.new_group(list(range(world)))):
        for _ in range(2 if rank.rank == 0 else 0):
            with LocalTensorMode(world) as mode:
                summed = mode.rank_map(lambda one: torch.full((world,), one + 1.0))
                gathered, shard = torch.zeros(world * world), torch.zeros(1)
                dist.all_gather_into_tensor(gathered, summed, group=group)
                dist.all_reduce(summed, group=group)
                dist.reduce_scatter_tensor(shard, summed, group=group)
                dist.broadcast(summed, 1, group=group)
                for tensor in (gathered, summed, shard):
                    found.append([tensor._local_tensors[one].tolist() for one in range(world)])
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return found, tensor.tolist()


def numbers(rank: Rank) -> list[int]:
    """The sequence number after each of some calls."""
    group: Any = dist.group.WORLD
    seen = [group._get_sequence_number_for_group()]
    for call in (dist.barrier, lambda: dist.all_reduce(torch.ones(2)), dist.barrier):
        call()
        seen.append(group._get_sequence_number_for_group())
    if hasattr(dist.ProcessGroup, "_set_sequence_number_for_group"):  # up to torch 2.13
        group._set_sequence_number_for_group()
    return seen


def differences(found: list[Any], wanted: list[Any]) -> list[Any]:
    """Return what differs, by rank; of the verbs by name."""
    if not isinstance(found[0], dict):
        return [pair for pair in zip(found, wanted, strict=True) if pair[0] != pair[1]]
    assert found[0].keys() == wanted[0].keys()
    rows = zip(found, wanted, strict=True)
    return [(name, a[name], b[name]) for a, b in rows for name in a if a[name] != b[name]]


PROGRAMS: list[Program] = [each_verb, counted, kept_back, of_a_class, of_meta, simulated, numbers]


@pytest.fixture(scope="module")
def of_gloo(bare_pools: Pools) -> Callable[[Program], Any]:
    found: dict[str, Any] = {}

    def run(program: Program) -> Any:
        if program.__name__ not in found:
            found[program.__name__] = bare_pools(2).run(on_backend, "gloo", program)
        return found[program.__name__]

    return run


@pytest.mark.parametrize("program", PROGRAMS)
def test_calls_are_seen_as_gloos(
    backend_pools: Pools, of_gloo: Callable[[Program], Any], program: Program
) -> None:
    found = backend_pools(2).run(on_backend, "fastcoll", program)
    assert not differences(found, of_gloo(program))


@pytest.fixture(scope="module")
def two_nodes() -> Any:
    pool = Pool(2, Setup(init=False, nodes="ab"))
    yield pool
    pool.close()


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_calls_over_nodes_are_seen_as_gloos(
    two_nodes: Pool, of_gloo: Callable[[Program], Any], program: Program
) -> None:
    assert not differences(two_nodes.run(on_backend, "fastcoll", program), of_gloo(program))


def lists_of_meta(rank: Rank) -> tuple[list[Attempt], list[float]]:
    """Torch's operators of these calls look into no list of lists, so the calls are made."""
    lists = [torch.ones(3, device="meta") for _ in range(rank.world_size)]
    tensor = torch.ones(3)
    tries = [
        attempt(dist.all_gather, lists, tensor),
        attempt(dist.reduce_scatter, tensor, lists),
    ]
    dist.all_reduce(tensor)
    return tries, tensor.tolist()


def test_lists_of_meta_tensors_are_refused(backend_pools: Pools) -> None:
    for tries, total in backend_pools(2).run(on_backend, "fastcoll", lists_of_meta):
        assert [one.kind for one in tries] == ["UnsupportedError"] * 2
        assert all("is a meta tensor" in one.text for one in tries)
        assert total == [2.0] * 3, "the group can still be used"


def negated(rank: Rank) -> list[list[float]]:
    """Sums of lazily negated tensors, with and without a mode; the ranks of a node have a group."""
    parts = [dist.new_group([one]) for one in range(rank.world_size)]
    dist.all_reduce(torch.ones(1), group=parts[rank.rank])
    sums = []
    for mode in (contextlib.nullcontext(), Watching()):
        given = torch.full((3,), complex(1, rank.rank + 1)).conj().imag
        with mode:
            dist.all_reduce(given)
        sums.append(given.tolist())
    return sums


def test_negated_tensors_are_seen(backend_pools: Pools) -> None:
    assert backend_pools(2).run(on_backend, "fastcoll", negated) == [[[-3.0] * 3] * 2] * 2


@pytest.mark.native
@pytest.mark.timeout(2 * COMPILE_S)
def test_negated_tensors_are_seen_over_nodes(fresh_pool: Callable[..., Pool]) -> None:
    """The group over nodes is one of Python, and those within nodes are compiled."""
    setup = Setup(init=False, nodes="ab", env={"FASTCOLL_TORCH_BACKEND": "compiled"})
    found = fresh_pool(2, setup).run(on_backend, "fastcoll", negated, deadline_s=COMPILE_S)
    assert found == [[[-3.0] * 3] * 2] * 2


def calls_of(rank: Rank, numel: int, step: int) -> dict[str, Callable[[], object]]:
    """Return a group's calls on every `step`-th element of tensors; strided ones are copied."""

    def tensor(size: int = numel) -> torch.Tensor:
        return torch.ones(size * step)[::step]

    comm, world = rank.comm, rank.world_size
    one, got, whole = tensor(), tensor(), tensor(world * numel)
    parts, others = ([tensor() for _ in range(world)] for _ in range(2))
    at_root = parts if rank.rank == 0 else None
    scaled: Any = dist._make_nccl_premul_sum(2.0)
    return {
        "all_reduce": lambda: comm.all_reduce(one),
        "scaled": lambda: comm.all_reduce(one, scaled),
        "queued": lambda: comm.all_reduce(one, async_op=True).wait(),
        "list": lambda: comm.all_reduce_coalesced([one, got]),
        "reduce": lambda: comm.reduce(one, 1),
        "broadcast": lambda: comm.broadcast(one, 1),
        "all_gather": lambda: comm.all_gather(parts, one),
        "all_gather_single": lambda: comm.all_gather_into_tensor(whole, one),
        "reduce_scatter": lambda: comm.reduce_scatter(one, parts),
        "reduce_scatter_single": lambda: comm.reduce_scatter_tensor(one, whole),
        "all_to_all": lambda: comm.all_to_all(others, parts),
        "gather": lambda: comm.gather(one, at_root, 0),
        "scatter": lambda: comm.scatter(one, at_root, 0),
        "sends": lambda: VERB_CALLS["isend, irecv"].make(comm, one, got),
        "send": lambda: VERB_CALLS["send, recv"].make(comm, one, got),
        "objects": lambda: comm.all_gather_object([None] * world, numel),
        "barrier": lambda: comm.barrier(),
    }


def own_calls(rank: Rank) -> dict[str, list[str]]:
    """Return the operators that a mode sees of functions of fastcoll, which are none.

    Each call is made twice: the second one is known.
    """
    found = {}
    for numel, step in ((300_000, 1), (3, 2), (300_000, 2)):
        for name, call in calls_of(rank, numel, step).items():
            with Watching() as mode:
                call()
                call()
            found[f"{name}, {numel}, {step}"] = mode.seen
    with Watching() as mode, rank.comm.new_group() as group:
        group.barrier()
    found["new_group"] = mode.seen
    return {name: seen for name, seen in found.items() if seen}


@pytest.mark.parametrize("nodes", ["aa", pytest.param("aab", marks=pytest.mark.long)])
def test_own_calls_are_not_seen(pools: Pools, clusters: Callable[[str], Pool], nodes: str) -> None:
    pool = clusters(nodes) if "b" in nodes else pools(len(nodes))
    assert pool.run(own_calls) == [{}] * len(nodes)


def traced(rank: Rank) -> tuple[list[str], list[float]]:
    """Trace functions that make calls, known ones and others, and return the errors."""

    def one(given: torch.Tensor) -> torch.Tensor:
        result = given * 2
        dist.all_reduce(result)
        return result

    def parts(given: torch.Tensor) -> torch.Tensor:
        outputs = [torch.empty(3) for _ in range(rank.world_size)]
        dist.all_gather(outputs, given)
        return outputs[0]

    one(torch.ones(3))
    found = [attempt(torch.jit.trace, function, torch.ones(3)).kind for function in (one, parts)]
    after: list[float] = one(torch.ones(3)).tolist()
    return found, after


@pytest.mark.parametrize("nodes", ["aa", pytest.param("ab", marks=pytest.mark.long)])
def test_a_trace_by_jit_refuses_calls(backend_pools: Pools, two_nodes: Pool, nodes: str) -> None:
    """As Gloo's; what was traced left out the calls of groups in Python, without a word."""
    pool = two_nodes if nodes == "ab" else backend_pools(len(nodes))
    expected = (["RuntimeError"] * 2, [2.0 * len(nodes)] * 3)
    assert pool.run(on_backend, "fastcoll", traced) == [expected] * len(nodes)


def test_a_torch_that_sets_no_sequence_number_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, gone = "_get_sequence_number_for_group", "_set_sequence_number_for_group"
    torchs = getattr(dist.ProcessGroup, kept)
    monkeypatch.setattr(dist.ProcessGroup, kept, torchs)  # as it was, behind this test
    monkeypatch.delattr(dist.ProcessGroup, gone, raising=False)
    torch_backend._count_calls()
    assert getattr(dist.ProcessGroup, kept) is not torchs
    assert not hasattr(dist.ProcessGroup, gone)
