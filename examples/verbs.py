# SPDX-License-Identifier: Apache-2.0
"""Cheat sheet: the eight verbs, with the numbers of every rank before and after.

Run it:  torchrun --nproc-per-node 2 examples/verbs.py

Rank r holds 1, 2, ... times 10^r, one number for each rank. So the digits of a sum show the part of
each rank, and the digit of a number shows the rank that it was for.
"""

import torch

import fastcoll

VERBS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
)
ROOT = 0


def call(verb: str, mine: torch.Tensor, group: fastcoll.Group) -> torch.Tensor:
    """Make one call; return this rank's numbers afterwards."""
    one, many = torch.zeros_like(mine[:1]), torch.zeros_like(mine)
    is_root = group.rank == ROOT
    match verb:
        case "all_reduce":  # the sum, for all ranks
            fastcoll.all_reduce(mine)
            return mine
        case "reduce":  # the sum, for the root
            fastcoll.reduce(mine, ROOT)
            return mine
        case "reduce_scatter":  # each rank has a part of the sum
            fastcoll.reduce_scatter_tensor(one, mine)
            return one
        case "broadcast":  # the root's numbers, for all ranks
            fastcoll.broadcast(mine, ROOT)
            return mine
        case "all_gather":  # one number of each rank, for all ranks
            fastcoll.all_gather_into_tensor(many, mine[:1])
            return many
        case "gather":  # one number of each rank, for the root
            fastcoll.gather(mine[:1], list(many.split(1)) if is_root else None, ROOT)
            return many if is_root else mine[:1]
        case "scatter":  # each rank has a part of the root's numbers
            fastcoll.scatter(one, list(mine.split(1)) if is_root else None, ROOT)
            return one
        case _:  # all_to_all: each rank has a part of each rank's numbers
            fastcoll.all_to_all_single(many, mine)
            return many


def expected(verb: str, given: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a rank's expected numbers after the call, from those of all: row r is rank r's."""
    is_root = rank == ROOT
    return {
        "all_reduce": given.sum(0),
        "reduce": given.sum(0) if is_root else given[rank],
        "reduce_scatter": given.sum(0)[rank : rank + 1],
        "broadcast": given[ROOT],
        "all_gather": given[:, 0],
        "gather": given[:, 0] if is_root else given[rank, :1],
        "scatter": given[ROOT, rank : rank + 1],
        "all_to_all": given[:, rank],
    }[verb]


def main() -> None:
    with fastcoll.init() as group:
        n = group.world_size
        given = torch.arange(1, n + 1) * 10 ** torch.arange(n).unsqueeze(1)
        before = " ".join(str(number.item()) for number in given[group.rank])
        rows = []
        for verb in VERBS:
            after = call(verb, given[group.rank].clone(), group)
            torch.testing.assert_close(after, expected(verb, given, group.rank), rtol=0, atol=0)
            cells = [""] * n
            shown = " ".join(str(number.item()) for number in after)
            fastcoll.all_gather_object(cells, f"{before} -> {shown}")
            rows.append((verb, *cells))
        if group.rank == ROOT:
            width = max(len(cell) for row in rows for cell in row)
            for verb, *cells in (("", *(f"rank {rank}" for rank in range(n))), *rows):
                print(f"{verb:16}", *(f"{cell:{width}}" for cell in cells), sep="  ")
            print("Look at: all_reduce = reduce_scatter + all_gather; all_to_all is a transpose.")


if __name__ == "__main__":
    main()
