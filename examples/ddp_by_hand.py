# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training by hand: buckets of gradients, reduced while backward still runs.

Run it:  torchrun --nproc-per-node 2 examples/ddp_by_hand.py

This is the heart of DistributedDataParallel. Gradients come last layer first; so buckets are filled
in that order, and each starts its all_reduce when its last gradient is there.
"""

from collections.abc import Sequence

import torch
from torch import nn

import fastcoll

WIDTH, DEPTH, BATCH, STEPS, BUCKET_NUMEL = 256, 6, 48, 5, 100_000


class Bucket:
    """Some parameters whose gradients are views of one symmetric tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.gradients = fastcoll.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
        self.num_parameters, self.num_ready = len(parameters), 0
        self.work: fastcoll.Work
        views = self.gradients.split([p.numel() for p in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)  # backward adds into the bucket: no copies
            parameter.register_post_accumulate_grad_hook(self.one_is_ready)

    def one_is_ready(self, _: torch.Tensor) -> None:
        """Called by autograd, in the middle of backward."""
        self.num_ready += 1
        if self.num_ready == self.num_parameters:
            average = fastcoll.ReduceOp.AVG
            self.work = fastcoll.all_reduce(self.gradients, average, async_op=True)
            self.num_ready = 0

    def wait(self) -> None:
        self.work.wait()


def make_buckets(model: nn.Module) -> list[Bucket]:
    """Cut the parameters into buckets, in the order in which backward finishes them."""
    groups: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(list(model.parameters())):
        if groups[-1] and sum(p.numel() for p in groups[-1]) + parameter.numel() > BUCKET_NUMEL:
            groups.append([])
        groups[-1].append(parameter)
    return [Bucket(group) for group in groups]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)  # the same start everywhere; else broadcast rank 0's parameters
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1)).double()


def loss_of(model: nn.Module, step: int, rank: int, n: int) -> torch.Tensor:
    """Return the loss of a rank's share of a batch."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH * n, WIDTH, generator=generator, dtype=torch.float64)
    mine = inputs.view(n, BATCH, WIDTH)[rank]
    return nn.functional.mse_loss(model(mine), mine.sin().sum(1, keepdim=True))


def main() -> None:
    with fastcoll.init() as group:
        rank, n = group.rank, group.world_size
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        buckets = make_buckets(model)
        early, loss = 0, torch.zeros(())
        for step in range(STEPS):
            for bucket in buckets:
                bucket.gradients.zero_()  # instead of zero_grad(), which would drop the views
            loss = loss_of(model, step, rank, n)
            loss.backward()
            early += sum(bucket.work.is_completed() for bucket in buckets)
            for bucket in buckets:
                bucket.wait()
            optimizer.step()

        alone = make_model()
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.stack([loss_of(alone, step, one, n) for one in range(n)]).mean().backward()
            optimizer.step()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        if rank == 0:
            print(f"{len(list(model.parameters()))} gradients in {len(buckets)} buckets")
            print(f"reduced before backward was over: {early} of {len(buckets) * STEPS} buckets")
            print(f"loss after {STEPS} steps: {loss:.4f}; the parameters are those of one process")
            print(
                "Look at: one call per bucket, not per gradient. What is reduced before backward is"
            )
            print("over costs no time of its own, if a core is free to do it.")


if __name__ == "__main__":
    main()
