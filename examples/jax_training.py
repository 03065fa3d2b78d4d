# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training in JAX: one compiled step, which averages all gradients in one call.

Run it:  torchrun --nproc-per-node 2 examples/jax_training.py

Every rank computes the gradients of its share of a batch. `fastcoll.jax.jit` compiles the step with
the all_reduce inside it. The loss and the gradients travel as one vector: one call, not one each.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import fastcoll
import fastcoll.jax

WIDTH, BATCH, STEPS, RATE = 48, 64, 30, 0.05

Parameters = list[jax.Array]  # of each layer, one more row for the bias


def make_parameters() -> Parameters:
    """Return the same start on every rank; else broadcast rank 0's parameters."""
    shapes = [(WIDTH + 1, WIDTH), (WIDTH + 1, WIDTH), (WIDTH + 1, 1)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape) / WIDTH**0.5 for key, shape in pairs]


def inputs_of(step: int, n: int) -> jax.Array:
    """Return the inputs of a step: a share of the batch for each of n ranks."""
    return jax.random.normal(jax.random.key(step + 1), (n, BATCH, WIDTH))


def loss_of(parameters: Parameters, inputs: jax.Array) -> jax.Array:
    outputs = inputs
    for number, layer in enumerate(parameters):
        outputs = (outputs if number == 0 else jnp.tanh(outputs)) @ layer[:-1] + layer[-1]
    return jnp.mean((outputs[:, 0] - jnp.sin(inputs).sum(1)) ** 2)


@fastcoll.jax.jit
def train(parameters: Parameters, inputs: jax.Array) -> tuple[Parameters, jax.Array]:
    """Make one step of all ranks; return the new parameters and the loss of the whole batch."""
    vector, unravel = ravel_pytree(jax.value_and_grad(loss_of)(parameters, inputs))
    vector = fastcoll.jax.all_reduce(vector, fastcoll.ReduceOp.AVG)
    loss, gradients = unravel(vector)
    return [p - RATE * g for p, g in zip(parameters, gradients, strict=True)], loss


def train_alone(parameters: Parameters, inputs: jax.Array) -> tuple[Parameters, jax.Array]:
    """Make one step of a process that has the whole batch."""
    loss, gradients = jax.value_and_grad(loss_of)(parameters, inputs)
    return [p - RATE * g for p, g in zip(parameters, gradients, strict=True)], loss


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    with fastcoll.init() as group:
        rank, n = group.rank, group.world_size
        parameters, losses = make_parameters(), []
        for step in range(STEPS):
            parameters, loss = train(parameters, inputs_of(step, n)[rank])
            losses.append(float(loss))

        alone, train_one = make_parameters(), jax.jit(train_alone)
        for step in range(STEPS):
            alone, loss = train_one(alone, inputs_of(step, n).reshape(-1, WIDTH))
            np.testing.assert_allclose(losses[step], loss, rtol=1e-9)
        for ours, theirs in zip(parameters, alone, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
        if rank == 0:
            numel = sum(layer.size for layer in parameters)
            print(f"{len(parameters)} gradients, {numel} numbers: one all_reduce in each step")
            print(f"loss {losses[0]:.3f} at the start, {losses[-1]:.3f} after {STEPS} steps")
            print("Look at: the parameters are those of one process that has the whole batch. The")
            print("shares are equal, so the mean of their gradients is the gradient of the batch.")


if __name__ == "__main__":
    main()
