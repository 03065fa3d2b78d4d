# SPDX-License-Identifier: Apache-2.0
"""Softmax over a vocabulary that is cut over the ranks.

Run it:  torchrun --nproc-per-node 2 examples/softmax.py

The last layer of a large language model: no rank ever has all logits of a token. Two numbers per
token travel instead: the largest logit, and the sum of the exponentials.
"""

import torch

import fastcoll

TOKENS, VOCABULARY = 16, 1200


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return softmax over the last dimension of [tokens, this rank's share of the vocabulary]."""
    largest = logits.amax(-1, keepdim=True)
    fastcoll.all_reduce(largest, fastcoll.ReduceOp.MAX)
    powers = (logits - largest).exp()  # at most 1: nothing overflows
    total = powers.sum(-1, keepdim=True)
    fastcoll.all_reduce(total)
    return powers / total


def main() -> None:
    with fastcoll.init() as group:
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(TOKENS, VOCABULARY, generator=generator) * 50  # some beyond exp's range
        mine = whole.tensor_split(group.world_size, dim=-1)[group.rank]
        share = softmax(mine)

        alone = whole.softmax(-1).tensor_split(group.world_size, dim=-1)[group.rank]
        torch.testing.assert_close(share, alone)
        naive = mine.exp().sum(-1)  # without the largest logit
        fastcoll.all_reduce(naive)
        if group.rank == 0:
            print(f"{TOKENS} tokens, {mine.shape[1]} of {VOCABULARY} logits on this rank")
            print(f"largest difference from one process: {(share - alone).abs().max():.1e}")
            print(f"tokens that overflow without the MAX: {int(naive.isinf().sum())} of {TOKENS}")
            gathered, reduced = 4 * TOKENS * VOCABULARY, 2 * 4 * TOKENS
            print(f"Look at: {reduced} bytes were reduced, gathering the logits takes {gathered}.")


if __name__ == "__main__":
    main()
