# SPDX-License-Identifier: Apache-2.0
"""A sharded embedding table: ids travel to the rank that has their rows, the rows come back.

Run it:  torchrun --nproc-per-node 2 examples/embedding.py

The table is too large for one rank; row i lies on rank i mod n. Ids that occur often are asked for
once.
"""

import torch

import fastcoll

ROWS, WIDTH, IDS = 1000, 8, 300


def main() -> None:
    with fastcoll.init() as group:
        rank, n = group.rank, group.world_size
        table = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
        shard = table[rank::n].clone()  # all that this rank keeps
        ids = torch.randint(ROWS, (IDS,), generator=torch.Generator().manual_seed(rank + 1)) ** 2
        ids %= ROWS

        # Questions: each id once, in the order of the ranks that know it.
        wanted, place = ids.unique(return_inverse=True)
        order = (wanted % n).argsort(stable=True)
        counts = (wanted % n).bincount(minlength=n).tolist()
        asked, asked_counts = fastcoll.all_to_all_single(
            None, wanted[order], input_split_sizes=counts
        )

        # Answers: the same way back, a row for an id.
        rows = torch.empty(len(wanted), WIDTH)
        fastcoll.all_to_all_single(rows, shard[asked // n], counts, asked_counts)
        vectors = torch.empty_like(rows)
        vectors[order] = rows
        vectors = vectors[place]

        torch.testing.assert_close(vectors, table[ids], rtol=0, atol=0)
        if rank == 0:
            print(f"{IDS} ids, {len(wanted)} different ones; asked of the ranks: {counts}")
            print(f"this rank holds {len(shard)} of {ROWS} rows and was asked for {len(asked)}")
            print(f"Look at: {rows.nbytes} bytes of rows came; the table has {table.nbytes}.")


if __name__ == "__main__":
    main()
