# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: tokens travel to the rank that has their expert, and back.

Run it:  torchrun --nproc-per-node 2 examples/experts.py

Only the senders know how many tokens go to each rank. all_to_all_single without an output tells the
receivers within the same call. No exchange of counts comes before it.
"""

import torch

import fastcoll

TOKENS, WIDTH, EXPERTS_PER_RANK = 40, 16, 2


def main() -> None:
    with fastcoll.init() as group:
        rank, n = group.rank, group.world_size
        torch.manual_seed(0)  # a process alone would have all of this
        every_token = torch.randn(n, TOKENS, WIDTH)
        experts = torch.randn(n * EXPERTS_PER_RANK, WIDTH, WIDTH)
        gate = torch.randn(WIDTH, n * EXPERTS_PER_RANK)

        tokens = every_token[rank]
        chosen = (tokens @ gate).argmax(1)

        # There: tokens in the order of their experts, so those for one rank lie together.
        order = chosen.argsort(stable=True)
        counts = (chosen // EXPERTS_PER_RANK).bincount(minlength=n).tolist()
        arrived, arrived_counts = fastcoll.all_to_all_single(
            None, tokens[order], input_split_sizes=counts
        )
        whose = torch.empty(len(arrived), dtype=torch.int64)
        fastcoll.all_to_all_single(whose, chosen[order], arrived_counts, counts)

        # Here: every expert works on all its tokens at once.
        worked = torch.empty_like(arrived)
        for expert in range(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK):
            worked[whose == expert] = arrived[whose == expert] @ experts[expert]

        # Back: the same call with the counts the other way round.
        returned = torch.empty_like(tokens)
        fastcoll.all_to_all_single(returned, worked, counts, arrived_counts)
        outputs = torch.empty_like(tokens)
        outputs[order] = returned

        alone = torch.einsum("tw,twv->tv", tokens, experts[chosen])
        torch.testing.assert_close(outputs, alone)
        table: list[list[int]] = [[]] * n
        fastcoll.all_gather_object(table, counts)
        if rank == 0:
            print("tokens from | to", *(f"rank {to:2}" for to in range(n)), sep="  ")
            for sender, row in enumerate(table):
                print(f"rank {sender:2}          ", *(f"{count:7}" for count in row), sep="  ")
            loads = [sum(column) for column in zip(*table, strict=True)]
            print(f"fullest rank: {max(loads)} tokens, {sum(loads) / n:g} if all were alike")
            print("Look at: rows differ, no rank knew the others' counts, and the fullest rank is")
            print("what everybody waits for: hence the balancing losses of such models.")


if __name__ == "__main__":
    main()
