# SPDX-License-Identifier: Apache-2.0
"""The verbs of fastcoll.jax: results in every kind of program, order, mistakes."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jax.start import COMPILE_S, start_jax
from tests.support.harness import Attempt, Pools, Rank, Setup, attempt

Bits = np.ndarray[Any, Any]


def own(rank: int, world_size: int) -> Bits:
    """Return a rank's parts for all ranks."""
    return np.arange(world_size * 6.0).reshape(world_size, 2, 3) * (rank + 1) + rank


def expected(verb: str, rank: int, world_size: int) -> Bits:
    """Return the result of a verb whose root is rank 1, on one rank."""
    all_parts = np.stack([own(peer, world_size) for peer in range(world_size)])
    mine = all_parts[:, 0]
    rank_before = (rank - 1) % world_size
    results = {
        "all_reduce": mine.sum(0),
        "all_reduce MAX": mine.max(0),
        "reduce_scatter": all_parts.sum(0)[rank],
        "all_gather": mine,
        "all_to_all": all_parts[:, rank],
        "broadcast": mine[1],
        "reduce": mine.sum(0) if rank == 1 else mine[rank],
        "gather": mine if rank == 1 else mine[rank],
        "scatter": all_parts[1, rank],
        "sendrecv": mine[rank_before],
        "send": mine[0],
    }
    return results[verb]


VERBS = ["all_reduce", "all_reduce MAX", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]
VERBS += ["reduce", "gather", "scatter", "sendrecv", "send"]


def verb_of(name: str, rank: int, world_size: int) -> Callable[[Any], Any]:
    """Return the call of a verb, as a function of this rank's parts."""
    import fastcoll
    from fastcoll import jax as fj

    def chain(parts: Any) -> Any:
        x = parts[0] if rank == 0 else fj.recv(parts[0], rank - 1, tag=5)
        if rank + 1 < world_size:
            fj.send(x, rank + 1, tag=5)
        return x

    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    calls: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda parts: fj.all_reduce(parts[0]),
        "all_reduce MAX": lambda parts: fj.all_reduce(parts[0], fastcoll.ReduceOp.MAX),
        "reduce_scatter": fj.reduce_scatter,
        "all_gather": lambda parts: fj.all_gather(parts[0]),
        "all_to_all": fj.all_to_all,
        "broadcast": lambda parts: fj.broadcast(parts[0], 1),
        "reduce": lambda parts: fj.reduce(parts[0], 1),
        "gather": lambda parts: fj.gather(parts[0], 1),
        "scatter": lambda parts: fj.scatter(parts if rank == 1 else parts[0], 1),
        "sendrecv": lambda parts: fj.sendrecv(parts[0], parts[0], after, before),
        "send": chain,
    }
    return calls[name]


def run_verbs(rank: Rank) -> list[str]:
    """Return the verbs and programs with a wrong result."""
    jax, fj = start_jax(rank)
    verbs = {name: verb_of(name, rank.rank, rank.world_size) for name in VERBS}

    def each(parts: Any) -> dict[str, Any]:
        return {name: verb(parts) for name, verb in verbs.items()}

    def in_loops(parts: Any) -> dict[str, Any]:
        def step(carry: Any, one: Any) -> Any:
            return carry, each(one)

        def turn(i: int, results: Any) -> Any:
            del results, i
            one = jax.lax.scan(step, 0, parts[None])[1]
            return jax.lax.cond(parts.sum() > -1, lambda: one, lambda: jax.tree.map(abs, one))

        zeros = jax.tree.map(
            lambda one: jax.numpy.zeros((1, *one.shape)), jax.eval_shape(each, parts)
        )
        return jax.tree.map(lambda one: one[0], jax.lax.fori_loop(0, 2, turn, zeros))

    programs = {
        "by itself": each,
        "by itself, known": each,
        "fastcoll.jax.jit": fj.jit(each),
        "jax.jit": jax.jit(each),
        "by itself, after programs": each,
        "in a scan, a loop and beside a branch": fj.jit(in_loops),
    }
    parts = jax.numpy.asarray(own(rank.rank, rank.world_size))
    wrong = []
    for kind, program in programs.items():
        for name, result in program(parts).items():
            found, right = np.asarray(result), expected(name, rank.rank, rank.world_size)
            if found.shape != right.shape or not (found == right).all():
                wrong.append(f"{name}, {kind}: {found.tolist()}, not {right.tolist()}")
        fj.barrier()
    fj.jit(fj.barrier)()
    return wrong


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_every_verb_in_every_program(own_pools: Pools, world_size: int) -> None:
    assert own_pools(world_size).run(run_verbs, deadline_s=COMPILE_S) == [[]] * world_size


@pytest.mark.long
def test_every_verb_over_nodes(clusters: Pools) -> None:
    assert clusters("aab").run(run_verbs, deadline_s=COMPILE_S) == [[]] * 3


def compare_with_numpy(rank: Rank) -> list[str]:
    """Return the dtypes and operations with other bits than calls on NumPy arrays."""
    jax, fj = start_jax(rank)
    from fastcoll.types import REDUCE_OPS, DType, supported_ops

    wrong = []
    numbers = (np.arange(5) * (rank.rank + 1)) % 3
    arrays = {dtype: numbers.astype(jax.numpy.dtype(dtype.name)) for dtype in DType}
    pairs = [(dtype, op) for dtype in DType for op in supported_ops(dtype)]

    def each(given: list[Any]) -> list[Any]:
        one = dict(zip(DType, given, strict=True))
        return [fj.all_reduce(one[dtype], REDUCE_OPS[op]) for dtype, op in pairs]

    given = [jax.numpy.asarray(one) for one in arrays.values()]
    right = [arrays[dtype].copy() for dtype, _ in pairs]
    for array, (_, op) in zip(right, pairs, strict=True):
        rank.comm.all_reduce(array, REDUCE_OPS[op])
    for program in (fj.jit(each), each):
        for pair, one, bits in zip(pairs, program(given), right, strict=True):
            if one.dtype != bits.dtype or np.asarray(one).tobytes() != bits.tobytes():
                wrong.append(f"{pair}: {one}, not {bits}")
    return wrong


@pytest.mark.long
def test_every_dtype_and_operation_has_the_bits_of_numpy(own_pools: Pools) -> None:
    assert own_pools(2).run(compare_with_numpy, deadline_s=COMPILE_S) == [[], []]


def call_without_python(rank: Rank) -> list[int]:
    """Return the number of known calls that went through Python, and of these with a new one."""
    jax, fj = start_jax(rank)
    from fastcoll.integrations import jax_calls
    from fastcoll.native import _C

    seen: list[int] = []

    def note(facts: Any, given: Any, got: Any) -> None:
        seen.append(facts[1])
        jax_calls.run_in_python(facts, given, got)

    parts = jax.numpy.asarray(own(rank.rank, rank.world_size))
    verbs = [verb_of(name, rank.rank, rank.world_size) for name in VERBS]
    program = fj.jit(lambda parts: [verb(parts) for verb in verbs])
    jax.block_until_ready(program(parts))
    _C.set_jax_fallback(note)
    try:
        jax.block_until_ready(program(parts))
        known = len(seen)
        fj.all_reduce(jax.numpy.ones((7, 7, 7, 7, 7)))  # unknown, so that the test can see one
    finally:
        _C.set_jax_fallback(jax_calls.run_in_python)
    return [known, len(seen)]


def test_a_known_call_needs_no_python(own_pools: Pools) -> None:
    assert own_pools(2).run(call_without_python, deadline_s=COMPILE_S) == [[0, 1]] * 2


def heavy(x: Any, times: int) -> Any:
    """Return 0, later."""
    import jax.numpy as jnp

    for _ in range(times):
        x = jnp.sin(x) @ jnp.cos(x).T / x.shape[0]
    return x.sum() * 0


NUM_CALLS = 12


def keep_order_within(rank: Rank) -> list[str]:
    """Return wrong results of calls in a program that do not depend on each other."""
    jax, fj = start_jax(rank)

    def many(x: Any) -> list[Any]:
        # Without their tokens, rank 0 would come to its last call first, rank 1 to its first.
        lags = [heavy(x + i, i if rank.rank else NUM_CALLS - i) for i in range(NUM_CALLS)]
        return [
            fj.all_reduce(jax.numpy.full((64, 64), 1.0 + i) + lag) for i, lag in enumerate(lags)
        ]

    x = jax.numpy.asarray(np.random.default_rng(1).random((128, 128)))
    programs = fj.jit(many), jax.jit(many)
    found = [[float(one[0, 0]) for one in program(x)] for program in programs for _ in range(5)]
    return [f"{one}" for one in found if one != [2.0 + 2 * i for i in range(NUM_CALLS)]]


def keep_order_between(rank: Rank) -> list[str]:
    """Return wrong results of programs that start without a wait; the first takes rank 0 long."""
    jax, fj = start_jax(rank)
    wrong = []

    def slow(x: Any) -> Any:
        return fj.all_reduce(jax.numpy.ones(4) + x)

    def quick(x: Any) -> Any:
        return fj.all_reduce(x)

    x = jax.numpy.asarray(np.random.default_rng(1).random((128, 128)))
    late = jax.jit(lambda y: heavy(y, 0 if rank.rank else 60))  # what the first one waits for
    five, seven = jax.numpy.full(4, 5.0), jax.numpy.full(4, 7.0)
    kinds = {"fastcoll": fj.jit, "jax": jax.jit}
    for first, second in (("fastcoll", "fastcoll"), ("jax", "fastcoll"), ("fastcoll", "jax")):
        one, two = kinds[first](slow), kinds[second](quick)
        for _ in range(3):
            results = [one(late(x)), two(five), fj.all_reduce(seven)]
            found = [float(one[0]) for one in results]
            if found != [2, 10, 14]:
                wrong.append(f"{first} before {second}: {found}")
    return wrong


@pytest.mark.long
@pytest.mark.parametrize("program", [keep_order_within, keep_order_between])
def test_calls_keep_the_order_of_the_program(own_pools: Pools, program: Any) -> None:
    assert own_pools(2).run(program, deadline_s=COMPILE_S) == [[], []]


def use_options_of_jit(rank: Rank) -> list[Any]:
    jax, fj = start_jax(rank)

    def scale(tree: dict[str, Any], times: int, *, power: int = 1) -> dict[str, Any]:
        return {name: fj.all_reduce(x) * times**power for name, x in tree.items()}

    program = fj.jit(scale, static_argnums=1, static_argnames="power", donate_argnums=0)
    ones = lambda: {"a": jax.numpy.ones(2), "b": jax.numpy.ones((3, 1))}  # noqa: E731
    found = [float(x[0].sum()) for x in program(ones(), 3, power=2).values()]
    nested = fj.jit(lambda x: fj.jit(fj.all_reduce)(x) + 1)
    found.append(float(nested(jax.numpy.ones(1))[0]))
    found.append(float(jax.grad(lambda x: fj.jit(fj.all_reduce)(x).sum())(jax.numpy.ones(2))[0]))
    printed = fj.jit(lambda x: (jax.debug.print("{}", x, ordered=True), fj.all_reduce(x))[1])
    found.append(float(printed(jax.numpy.ones(2))[0]))
    found.append(float(printed(jax.numpy.ones(2))[0]))
    jax.effects_barrier()
    return found


def test_jit_has_the_options_of_jax(own_pools: Pools) -> None:
    assert (
        own_pools(2).run(use_options_of_jit, deadline_s=COMPILE_S)
        == [[18.0, 18.0, 3.0, 1.0, 2.0, 2.0]] * 2
    )


def pass_to_other_verbs(rank: Rank) -> list[Any]:
    """Give JAX's arrays to the verbs for tensors and NumPy arrays."""
    jax, _ = start_jax(rank)
    import torch

    comm, found = rank.comm, []
    for dtype in ("float64", "bfloat16"):
        mine = jax.numpy.arange(4, dtype=dtype) + rank.rank
        late = jax.jit(lambda x: x + heavy(jax.numpy.ones((256, 256)), 30).astype(x.dtype))(mine)
        sums = torch.empty(4, dtype=getattr(torch, dtype))
        comm.all_reduce(late, out=sums)
        found.append(sums.tolist())
        part = torch.empty(2, dtype=getattr(torch, dtype))
        comm.reduce_scatter_tensor(part, mine)
        found.append(part.tolist())
        comm.broadcast(mine if rank.rank == 0 else sums, 0)
        found.append(sums.tolist()[1:] if rank.rank else [1.0, 2.0, 3.0])
        found.append(attempt(comm.all_reduce, mine))
    return found


def test_other_verbs_read_arrays_of_jax(own_pools: Pools) -> None:
    for rank, found in enumerate(own_pools(2).run(pass_to_other_verbs, deadline_s=COMPILE_S)):
        for sums, part, given, refused in (found[:4], found[4:]):
            assert (sums, part) == ([1, 3, 5, 7], [1, 3] if rank == 0 else [5, 7])
            assert given == [1, 2, 3]
            assert refused.kind == "UsageError"
            assert "tensor, of type ArrayImpl, can't be written" in refused.text


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def count_faults(rank: Rank, num_bytes: int) -> int:
    """Return the fewest page faults of a call among several: memory may be fragmented."""
    jax, fj = start_jax(rank)
    x, counts = jax.numpy.ones(num_bytes // 4), []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        jax.block_until_ready(fj.all_reduce(x))
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts)


@pytest.mark.long
@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="no huge pages here"
)
def test_a_large_result_is_not_faulted_in_by_small_pages(own_pools: Pools) -> None:
    num_bytes = 64 << 20  # more than malloc keeps
    for faults in own_pools(2).run(count_faults, num_bytes, deadline_s=COMPILE_S):
        assert faults < num_bytes // resource.getpagesize() // 4


def make_mistakes(rank: Rank) -> list[Attempt]:
    jax, fj = start_jax(rank)
    np_, comm = jax.numpy, rank.comm
    mesh = jax.make_mesh((2,), ("x",))
    halves = jax.NamedSharding(mesh, jax.P("x"))
    found = [
        attempt(fj.all_reduce, np_.ones(3), "nonsense"),
        attempt(fj.all_reduce, np_.ones(3, np_.int4)),
        attempt(jax.jit(fj.reduce_scatter), np_.ones((5, 2))),
        attempt(fj.broadcast, np_.ones(3), 9),
        attempt(fj.send, np_.ones(3), 0, tag=-1),
        attempt(fj.all_reduce, jax.device_put(np_.ones(4), halves)),
        attempt(fj.all_reduce, np_.ones(3), group="world"),
    ]
    comm.barrier()  # the group is in order
    return found


def test_mistakes_are_found_before_anything_is_sent(fresh_pool: Callable[..., Any]) -> None:
    two_devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    for mistakes in fresh_pool(2, Setup(env=two_devices)).run(make_mistakes, deadline_s=COMPILE_S):
        found = [(one.kind, one.text) for one in mistakes]
        words = [
            ("UsageError", "op"),
            ("UnsupportedError", "int4"),
            ("UsageError", "its first dimension must be 2"),
            ("UsageError", "src=9 is not a rank"),
            ("UsageError", "tag=-1"),
            ("UnsupportedError", "2 devices"),
            ("UsageError", "group must be"),
        ]
        for (kind, text), (right, word) in zip(found, words, strict=True):
            assert kind == right, text
            assert word in text
