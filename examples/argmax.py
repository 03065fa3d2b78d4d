# SPDX-License-Identifier: Apache-2.0
"""Which rank holds the maximum, and where?

Run it:  torchrun --nproc-per-node 2 examples/argmax.py

MAX alone gives the value, not the rank that holds it. So every rank gathers the best of all ranks
(a few bytes), and all choose the same winner. Then only the winner's row has to travel.
"""

import torch

import fastcoll

ROWS, WIDTH = 1000, 8


def table_of(rank: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))


def main() -> None:
    with fastcoll.init() as group:
        mine = table_of(group.rank)
        scores = mine.sum(1)
        best = scores.max(0)

        everybodys = torch.empty(group.world_size)
        fastcoll.all_gather_into_tensor(everybodys, best.values.reshape(1))
        winner = int(everybodys.argmax())  # the lowest rank of equals, the same everywhere

        row = mine[best.indices].clone()
        fastcoll.broadcast(row, winner)

        whole = torch.cat([table_of(rank) for rank in range(group.world_size)])
        where = int(whole.sum(1).argmax())
        if winner != where // ROWS or not torch.equal(row, whole[where]):
            raise RuntimeError(f"rank {winner} won with {row}, but row {where} is the best")
        if group.rank == 0:
            for rank, score in enumerate(everybodys):
                print(f"best of rank {rank}: {score:.4f}{'   <- wins' if rank == winner else ''}")
            print(f"its row, now everywhere: {[round(number, 2) for number in row.tolist()]}")
            print(f"Look at: {4 * group.world_size} bytes decide, one row travels, no table does.")


if __name__ == "__main__":
    main()
