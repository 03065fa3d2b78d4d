# SPDX-License-Identifier: Apache-2.0
"""Gradients and batches of fastcoll.jax's verbs, beside all ranks' parts in one process.

The result of all_reduce, all_gather and broadcast is one value, which all ranks have. The loss is
then a function of that one, and else the sum of the ranks' losses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.jax.start import COMPILE_S, start_jax
from tests.jax.test_jax_verbs import VERBS, own, verb_of
from tests.support.harness import Attempt, Pools, Rank, attempt

Array = np.ndarray[Any, Any]
ALIKE = ("all_reduce", "all_reduce AVG", "all_gather", "broadcast")


def carried_out(verb: str, given: Sequence[Array]) -> list[Array]:
    """Return the results of all ranks."""
    world_size, whole = len(given), np.stack(given)
    ranks = range(world_size)
    results = {
        "all_reduce": lambda: [whole.sum(0)] * world_size,
        "all_reduce AVG": lambda: [whole.mean(0)] * world_size,
        "all_gather": lambda: [whole] * world_size,
        "broadcast": lambda: [whole[1]] * world_size,
        "reduce_scatter": lambda: list(whole.sum(0)),
        "reduce_scatter AVG": lambda: list(whole.mean(0)),
        "all_to_all": lambda: [whole[:, rank] for rank in ranks],
        "sendrecv": lambda: [whole[rank - 1] for rank in ranks],
        "vary": lambda: list(whole),
    }
    return results[verb]()


def linear_verbs(rank: int, world_size: int) -> dict[str, Callable[[Any], Any]]:
    import fastcoll
    from fastcoll import jax as fj

    avg, after, before = fastcoll.ReduceOp.AVG, (rank + 1) % world_size, (rank - 1) % world_size
    return {
        "all_reduce": fj.all_reduce,
        "all_reduce AVG": lambda x: fj.all_reduce(x, avg),
        "all_gather": fj.all_gather,
        "broadcast": lambda x: fj.broadcast(x, 1),
        "reduce_scatter": fj.reduce_scatter,
        "reduce_scatter AVG": lambda x: fj.reduce_scatter(x, avg),
        "all_to_all": fj.all_to_all,
        "sendrecv": lambda x: fj.sendrecv(x, x, after, before),
    }


def input_of(rank: int, world_size: int) -> Array:
    return np.random.default_rng(rank).random((world_size, 2))


def loss_of(result: Any, weight: float) -> Any:
    return (weight * result * result * (1 + np.arange(2))).sum()


def total_loss(verb: str, given: Sequence[Array]) -> float:
    results = carried_out(verb, given)
    if verb in ALIKE:
        return float(loss_of(results[0], 1))
    return float(sum(loss_of(one, 1 + rank) for rank, one in enumerate(results)))


def slopes(verb: str, rank: int, world_size: int) -> Array:
    """Return the derivative of the loss by a rank's input, by differences: the loss is a square."""
    found = np.zeros_like(input_of(rank, world_size))
    for place in np.ndindex(found.shape):
        sides = []
        for step in (0.5, -0.5):
            given = [input_of(peer, world_size) for peer in range(world_size)]
            given[rank][place] += step
            sides.append(total_loss(verb, given))
        found[place] = sides[0] - sides[1]
    return found


def differentiate(rank: Rank) -> list[str]:
    """Return the derivatives that are wrong."""
    jax, fj = start_jax(rank)
    me, size = rank.rank, rank.world_size
    verbs, x = linear_verbs(me, size), jax.numpy.asarray(input_of(me, size))
    wrong = []

    def gradient(verb: str, x: Any) -> Any:
        weight = 1.0 if verb in ALIKE else 1.0 + me
        return jax.grad(lambda y: loss_of(verbs[verb](y), weight))(x)

    def transposed_twice(verb: str, x: Any) -> Any:
        transpose = jax.linear_transpose(verbs[verb], x)
        result = jax.eval_shape(verbs[verb], x)
        return jax.linear_transpose(lambda y: transpose(y)[0], result)(x)[0]

    def all_of(x: Any) -> dict[str, list[Any]]:
        return {
            name: [
                gradient(name, x),
                jax.jvp(verb, (x,), (2 * x,))[1],
                transposed_twice(name, x),
            ]
            for name, verb in verbs.items()
        }

    for kind, program in {"by itself": all_of, "jit": fj.jit(all_of)}.items():
        for name, found in program(x).items():
            result = carried_out(name, [input_of(peer, size) for peer in range(size)])[me]
            rights = [slopes(name, me, size), 2 * result, result]
            for what, one, right in zip(("grad", "jvp", "twice"), found, rights, strict=True):
                if not np.allclose(one, right):
                    wrong.append(f"{name}, {what}, {kind}: {one}, not {right}")

    # A value that all ranks have alike, used by each with a weight of its own.
    used = jax.grad(lambda y: loss_of(fj.vary(y), 1.0 + me))(jax.numpy.ones((1, 2)))
    if not np.allclose(used, [[2 * sum(1 + r for r in range(size)) * (1 + i) for i in range(2)]]):
        wrong.append(f"vary: {used}")
    second = jax.hessian(lambda y: (fj.all_reduce(y) ** 3).sum())(jax.numpy.ones(1))
    if not np.allclose(second, 6 * size * size):
        wrong.append(f"hessian: {second}")
    return wrong


@pytest.mark.long
def test_the_gradient_of_each_verb(own_pools: Pools) -> None:
    assert own_pools(2).run(differentiate, deadline_s=COMPILE_S) == [[], []]
    assert own_pools(3).run(differentiate, deadline_s=COMPILE_S) == [[], [], []]


def ask_for_no_gradient(rank: Rank) -> list[Attempt]:
    import fastcoll

    jax, fj = start_jax(rank)
    x, largest = jax.numpy.ones((2, 2)), fastcoll.ReduceOp.MAX
    functions = [
        lambda y: fj.all_reduce(y, largest),
        lambda y: fj.reduce(y, 0),
        lambda y: fj.gather(y, 0),
        lambda y: fj.scatter(y, 0),
        lambda y: fj.recv(y, 0),
    ]
    found = [attempt(jax.grad(lambda y, f=f: f(y).sum()), x) for f in functions]
    rank.comm.barrier()
    return found


def test_the_other_verbs_say_that_they_have_no_gradient(own_pools: Pools) -> None:
    for found in own_pools(2).run(ask_for_no_gradient, deadline_s=COMPILE_S):
        assert [one.kind for one in found] == ["UnsupportedError"] * 5
        assert "SUM and AVG" in found[0].text
        assert all("has no gradient" in one.text for one in found[1:])


def run_batches(rank: Rank) -> list[str]:
    """Return the verbs whose batch is wrong, or is more than one call."""
    jax, fj = start_jax(rank)
    me, size = rank.rank, rank.world_size
    verbs = {name: verb_of(name, me, size) for name in VERBS}
    examples = jax.numpy.stack([own(me, size) + 100 * one for one in range(3)])
    moved = jax.numpy.moveaxis(examples, 0, 2)
    wrong = []

    def one_by_one(examples: Any) -> dict[str, list[Any]]:
        return {name: [verb(one) for one in examples] for name, verb in verbs.items()}

    def at_once(examples: Any, moved: Any) -> dict[str, list[Any]]:
        return {
            name: [
                jax.vmap(verb)(examples),
                jax.vmap(verb, in_axes=2)(moved),
                jax.vmap(jax.vmap(verb))(examples[None])[0],
            ]
            for name, verb in verbs.items()
        }

    right = fj.jit(one_by_one)(examples)
    for name, batches in fj.jit(at_once)(examples, moved).items():
        for batch in batches:
            if not (np.asarray(batch) == np.stack(right[name])).all():
                wrong.append(f"{name}: {batch}, not {right[name]}")
        num_calls = str(jax.make_jaxpr(jax.vmap(verbs[name]))(examples)).count("fastcoll_call")
        num_calls_of_one = str(jax.make_jaxpr(verbs[name])(examples[0])).count("fastcoll_call")
        if num_calls != num_calls_of_one:
            wrong.append(f"{name}: {num_calls} calls for a batch")
    return wrong


def test_a_batch_is_one_call(own_pools: Pools) -> None:
    assert own_pools(2).run(run_batches, deadline_s=COMPILE_S) == [[], []]
