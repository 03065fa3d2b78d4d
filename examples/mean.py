# SPDX-License-Identifier: Apache-2.0
"""The mean of numbers that lie on several ranks, in unequal shares.

Run it:  torchrun --nproc-per-node 2 examples/mean.py
"""

import torch

import fastcoll


def share_of(rank: int) -> torch.Tensor:
    """Return the numbers of a rank: rank 1 has twice as many as rank 0, and larger ones."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(1000 * (rank + 1), generator=generator, dtype=torch.float64) + rank


def main() -> None:
    with fastcoll.init() as group:
        mine = share_of(group.rank)

        # Right: sum and count travel together, one call; divide afterwards.
        total = torch.stack([mine.sum(), torch.tensor(float(len(mine)), dtype=torch.float64)])
        fastcoll.all_reduce(total)
        mean = total[0] / total[1]

        # Wrong, and no error tells: the mean of the means weighs every rank the same.
        mean_of_means = mine.mean()
        fastcoll.all_reduce(mean_of_means, fastcoll.ReduceOp.AVG)

        alone = torch.cat([share_of(rank) for rank in range(group.world_size)]).mean()
        torch.testing.assert_close(mean, alone)
        if group.rank == 0:
            print(f"sum and count reduced   {mean:.6f}")
            print(f"one process, all data   {alone:.6f}")
            print(f"mean of the means       {mean_of_means:.6f}   <- wrong: unequal shares")
            print("Look at: reduce what adds up, divide afterwards; AVG is for equal shares.")


if __name__ == "__main__":
    main()
