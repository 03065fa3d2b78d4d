# SPDX-License-Identifier: Apache-2.0
"""Training that outlives a rank: when one is lost the others shrink the group and go on.

Run it:  torchrun --nproc-per-node 3 examples/elastic.py

The last rank leaves half way. torchrun ends all its workers when one of them dies, so here the rank
ends in order. Without torchrun, `--kill` ends it by SIGKILL, and the others do the same as before.
"""

import os
import signal
import sys

import torch
from torch import nn

import fastcoll

WIDTH, BATCH, STEPS, LOST_AT = 16, 32, 40, 20


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same start everywhere
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1)).double()


def gradient_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Return the gradient on one rank's batch of a step, all parameters in one bucket."""
    data = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, WIDTH, generator=data, dtype=torch.float64)
    model.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients])


def update(model: nn.Module, bucket: torch.Tensor) -> None:
    parameters = list(model.parameters())
    parts = bucket.split([parameter.numel() for parameter in parameters])
    with torch.no_grad():
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.sub_(part.view_as(parameter), alpha=0.01)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def agree_on_state(group: fastcoll.Group, model: nn.Module, step: int) -> int:
    """Take rank 0's parameters and step: some may have ended a step that the others lost."""
    for parameter in model.parameters():
        fastcoll.broadcast(parameter.data, 0, group=group)
    number = torch.tensor([step])
    fastcoll.broadcast(number, 0, group=group)
    return int(number)


def train() -> None:
    group = fastcoll.init(timeout_s=10)
    me, n = group.rank, group.world_size
    model, step = make_model(), 0
    while step < STEPS:
        if step == LOST_AT and me == n - 1 > 0:
            if "--kill" in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)
            return
        bucket = gradient_of(model, step, me)
        try:
            fastcoll.all_reduce(bucket, fastcoll.ReduceOp.AVG, group=group)
        except (fastcoll.PeerLostError, fastcoll.CollectiveTimeout) as error:
            # The bucket is undefined now, the parameters are not: they change only below.
            group = fastcoll.shrink(group)
            step = agree_on_state(group, model, step)
            if group.rank == 0:
                print(f"{error}\nLook at: {group.world_size} of {n} ranks go on at step {step}")
            continue
        update(model, bucket)
        step += 1

    alone = make_model()
    for step in range(STEPS):
        ranks = range(n if step < LOST_AT or n == 1 else n - 1)
        update(alone, torch.stack([gradient_of(alone, step, rank) for rank in ranks]).mean(0))
    torch.testing.assert_close(flat(model), flat(alone))


def main() -> None:
    try:
        train()
    finally:
        fastcoll.destroy()


if __name__ == "__main__":
    main()
