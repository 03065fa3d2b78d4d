# SPDX-License-Identifier: Apache-2.0
"""A pipeline: each rank is a stage of the network, micro-batches follow each other through it.

Run it:  torchrun --nproc-per-node 2 examples/pipeline.py

The schedule is GPipe's: all micro-batches forward, then all backward. Activations go right,
their gradients come back left.
"""

import torch
from torch import nn

import fastcoll

WIDTH, MICRO_BATCHES, ROWS = 32, 6, 4


def make_stages(n: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(n)]


def micro_batches() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(MICRO_BATCHES, ROWS, WIDTH, generator=generator, dtype=torch.float64)


def run_stage(stage: nn.Module, rank: int, n: int) -> float:
    """Run one step of training on this rank's stage; return the loss on the last one."""
    inputs, outputs, sending, loss = [], [], [], 0.0
    for batch in micro_batches():
        x = batch if rank == 0 else torch.empty_like(batch)
        if rank > 0:
            fastcoll.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank < n - 1:
            sending.append(fastcoll.isend(y.detach(), rank + 1))  # and on with the next
        inputs.append(x)
        outputs.append(y)
    for x, y in zip(inputs, outputs, strict=True):
        if rank < n - 1:
            gradient = torch.empty_like(y)
            fastcoll.recv(gradient, rank + 1)
            y.backward(gradient)
        else:
            part = y.square().mean() / MICRO_BATCHES
            part.backward()
            loss += part.item()
        if x.grad is not None:  # not on the first stage
            sending.append(fastcoll.isend(x.grad, rank - 1))
    for work in sending:
        work.wait()
    return loss


def main() -> None:
    with fastcoll.init() as group:
        rank, n = group.rank, group.world_size
        stage = make_stages(n)[rank]  # a real one makes its own stage only
        loss = run_stage(stage, rank, n)

        whole = nn.Sequential(*make_stages(n))
        alone = whole(micro_batches().flatten(0, 1)).square().mean()
        alone.backward()
        for ours, theirs in zip(stage.parameters(), whole[rank].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        if rank == n - 1:
            torch.testing.assert_close(loss, alone.item())
            idle = (n - 1) / (MICRO_BATCHES + n - 1)
            print(f"{n} stages, {MICRO_BATCHES} micro-batches: loss {loss:.4f}, as of one process")
            print(f"Look at: stages idle for (p - 1) / (m + p - 1) = {idle:.0%} of the time, the")
            print("bubble; more micro-batches make it smaller, and keep more activations alive.")


if __name__ == "__main__":
    main()
