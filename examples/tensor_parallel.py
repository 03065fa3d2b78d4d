# SPDX-License-Identifier: Apache-2.0
"""A tensor-parallel MLP: the first matrix cut by columns, the second by rows.

Run it:  torchrun --nproc-per-node 2 examples/tensor_parallel.py

relu(x A) B = sum over the ranks of relu(x A_r) B_r: the cut goes through the hidden layer, where
relu works number by number. One all_reduce forward, one backward, nothing between the matrices.
"""

import torch

import fastcoll

BATCH, WIDTH, HIDDEN = 8, 32, 96


class Enter(torch.autograd.Function):
    """Passes the input on; backward it sums the gradients of the ranks' parts for that input."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grad_outputs: torch.Tensor) -> torch.Tensor:
        del ctx
        gradient = grad_outputs[0].clone()
        fastcoll.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    """Forward the sum of the ranks' parts; backward nothing."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        del ctx
        x = x.clone()
        fastcoll.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, *grad_outputs: torch.Tensor) -> torch.Tensor:
        del ctx
        return grad_outputs[0]


def main() -> None:
    torch.manual_seed(0)
    x, a, b = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((BATCH, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )
    y = torch.relu(x @ a) @ b  # one process
    y.square().sum().backward()

    with fastcoll.init() as group:
        n, rank = group.world_size, group.rank
        mine = x.detach().clone().requires_grad_()
        a_mine = a.detach().tensor_split(n, dim=1)[rank].clone().requires_grad_()
        b_mine = b.detach().tensor_split(n, dim=0)[rank].clone().requires_grad_()
        result = Leave.apply(torch.relu(Enter.apply(mine) @ a_mine) @ b_mine)
        result.square().sum().backward()

        torch.testing.assert_close(result, y)
        torch.testing.assert_close(mine.grad, x.grad)
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a_mine.grad, a.grad.tensor_split(n, dim=1)[rank])
        torch.testing.assert_close(b_mine.grad, b.grad.tensor_split(n, dim=0)[rank])
        if rank == 0:
            print(f"weights of the layer: {a.numel() + b.numel()}")
            print(f"on this rank:         {a_mine.numel() + b_mine.numel()}")
            print("outputs and all gradients are those of one process")
            print(f"Look at: 2 calls of {result.nbytes} bytes, and no weight or gradient travels.")


if __name__ == "__main__":
    main()
