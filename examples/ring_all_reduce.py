# SPDX-License-Identifier: Apache-2.0
"""all_reduce as a ring, from send and recv alone.

Run it:  torchrun --nproc-per-node 2 examples/ring_all_reduce.py

Each rank talks to two neighbours only, so a ring needs 2 (n - 1) steps. All links are busy in every
step, so rings are good for large tensors on networks.
"""

import torch

import fastcoll

NUMEL = 100_001  # not a multiple of the ranks: chunks may differ in size


def pass_on(gives: torch.Tensor, gets: torch.Tensor, rank: int, n: int) -> None:
    """Give a chunk to the right neighbour while one comes from the left."""
    sending = fastcoll.isend(gives, (rank + 1) % n)  # a blocking send would wait in a circle
    fastcoll.recv(gets, (rank - 1) % n)
    sending.wait()


def ring_all_reduce(tensor: torch.Tensor, rank: int, n: int) -> int:
    """Sum a tensor over the ranks, in place; return how many elements this rank sent."""
    chunks, sent = tensor.tensor_split(n), 0
    # reduce_scatter: a chunk goes around and each rank adds its own; rank r ends with chunk r + 1.
    for step in range(n - 1):
        gives, gets = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        arrived = torch.empty_like(gets)
        pass_on(gives, arrived, rank, n)
        gets += arrived
        sent += gives.numel()
    # all_gather: the finished chunks go around once more, and replace the old ones.
    for step in range(n - 1):
        gives, gets = chunks[(rank + 1 - step) % n], chunks[(rank - step) % n]
        pass_on(gives, gets, rank, n)
        sent += gives.numel()
    return sent


def main() -> None:
    with fastcoll.init() as group:
        rank, n = group.rank, group.world_size
        numbers = [torch.arange(NUMEL) * 7 % 1000 + 1000 * one for one in range(n)]
        ours, theirs = numbers[rank].clone(), numbers[rank].clone()
        sent = ring_all_reduce(ours, rank, n)
        fastcoll.all_reduce(theirs)
        alone = torch.stack(numbers).sum(0)
        torch.testing.assert_close(ours, alone, rtol=0, atol=0)
        torch.testing.assert_close(theirs, alone, rtol=0, atol=0)
        if rank == 0:
            print(f"{n} ranks, {NUMEL} elements: 2 (n - 1) = {2 * (n - 1)} steps")
            print(f"sent by rank 0: {sent} elements; 2 (n - 1) / n of the tensor, whatever n is")
            print("Look at: chunk c is summed in the order c, c + 1, ...: with floats every chunk")
            print("has another order. fastcoll.all_reduce always sums in the order of the ranks.")


if __name__ == "__main__":
    main()
