# SPDX-License-Identifier: Apache-2.0
"""A parameter server: rank 0 keeps the weights, the others compute gradients.

Run it:  torchrun --nproc-per-node 2 examples/parameter_server.py

Each step is a broadcast of the weights and a gather of the gradients.
"""

import torch

import fastcoll

WIDTH, ROWS, STEPS, RATE, SERVER = 50, 64, 40, 0.1, 0


def gradient_of(weights: torch.Tensor, worker: int, step: int) -> torch.Tensor:
    """Return the gradient of a linear regression on a worker's batch."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    inputs = torch.randn(ROWS, WIDTH, generator=generator)
    targets = inputs @ torch.linspace(-1, 1, WIDTH)
    return inputs.T @ (inputs @ weights - targets) / ROWS


def updated(weights: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    return weights - RATE * torch.stack(gradients).mean(0)


def main() -> None:
    with fastcoll.init() as group:
        n, serves = group.world_size, group.rank == SERVER
        workers = range(1, n)
        weights = torch.zeros(WIDTH)
        for step in range(STEPS):
            fastcoll.broadcast(weights, SERVER)
            mine = torch.zeros(WIDTH) if serves else gradient_of(weights, group.rank, step)
            everybodys = [torch.empty(WIDTH) for _ in range(n if serves else 0)]
            fastcoll.gather(mine, everybodys if serves else None, SERVER)
            if serves:
                weights = updated(weights, everybodys[1:])  # the server's own part is empty

        if serves:
            alone = torch.zeros(WIDTH)
            for step in range(STEPS):
                alone = updated(alone, [gradient_of(alone, worker, step) for worker in workers])
            torch.testing.assert_close(weights, alone, rtol=0, atol=0)
            error = (weights - torch.linspace(-1, 1, WIDTH)).abs().max()
            print(f"{len(workers)} workers, {STEPS} steps: largest error of a weight {error:.1e}")
            print("the weights have the bits of one process that does everybody's work")
            print(f"Look at: the server moves {2 * len(workers)} tensors a step, and more with")
            print("every worker; an all_reduce spreads that load, and needs no server.")


if __name__ == "__main__":
    main()
