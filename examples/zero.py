# SPDX-License-Identifier: Apache-2.0
"""A sharded optimizer (ZeRO): every rank keeps Adam's state of its share of the parameters only.

Run it:  torchrun --nproc-per-node 2 examples/zero.py

An all_reduce is a reduce_scatter and an all_gather. The optimizer steps between the two: on the
part of the gradients that this rank got, so it needs state for that part alone.
"""

import torch
from torch import nn

import fastcoll

WIDTH, BATCH, STEPS = 32, 24, 5


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, 1)).double()


class ShardedAdam:
    """Adam over one flat tensor of all parameters, of which a rank updates a share."""

    def __init__(self, model: nn.Module, group: fastcoll.Group) -> None:
        parameters = list(model.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        share_numel = -(-sum(sizes) // group.world_size)  # rounded up: the tail is padding
        self.parameters = torch.zeros(share_numel * group.world_size, dtype=torch.float64)
        self.gradients = torch.zeros_like(self.parameters)
        flats = self.parameters.split([*sizes, len(self.parameters) - sum(sizes)])
        slopes = self.gradients.split([*sizes, len(self.parameters) - sum(sizes)])
        for parameter, flat, slope in zip(parameters, flats, slopes, strict=False):
            flat.copy_(parameter.detach().flatten())
            parameter.data = flat.view_as(parameter)
            parameter.grad = slope.view_as(parameter)
        self.share = nn.Parameter(self.parameters.view(group.world_size, -1)[group.rank].clone())
        self.share.grad = self.gradient = torch.empty_like(self.share)
        self.adam = torch.optim.Adam([self.share], lr=0.01)

    def step(self) -> None:
        fastcoll.reduce_scatter_tensor(self.gradient, self.gradients, fastcoll.ReduceOp.AVG)
        self.adam.step()
        fastcoll.all_gather_into_tensor(self.parameters, self.share.detach())
        self.gradients.zero_()


def loss_of(model: nn.Module, step: int, rank: int, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(n, BATCH, WIDTH, generator=generator, dtype=torch.float64)[rank]
    return nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))


def state_bytes(adam: torch.optim.Adam) -> int:
    return sum(t.nbytes for state in adam.state.values() for t in state.values())


def main() -> None:
    with fastcoll.init() as group:
        rank, n = group.rank, group.world_size
        model = make_model()
        optimizer, loss = ShardedAdam(model, group), torch.zeros(())
        for step in range(STEPS):
            loss = loss_of(model, step, rank, n)
            loss.backward()
            optimizer.step()

        alone = make_model()
        adam = torch.optim.Adam(alone.parameters(), lr=0.01)
        for step in range(STEPS):
            adam.zero_grad()
            torch.stack([loss_of(alone, step, one, n) for one in range(n)]).mean().backward()
            adam.step()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        if rank == 0:
            print(f"Adam's state on one process {state_bytes(adam):7} bytes")
            print(f"Adam's state on each rank   {state_bytes(optimizer.adam):7} bytes")
            print(f"loss after {STEPS} steps: {loss:.4f}; the parameters are those of one process")
            print("Look at: 1/n of the state, and no byte more on the way than an all_reduce.")


if __name__ == "__main__":
    main()
