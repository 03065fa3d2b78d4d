# SPDX-License-Identifier: Apache-2.0
"""Three common mistakes, and how fastcoll answers them.

Run it:  torchrun --nproc-per-node 2 examples/pitfalls.py
"""

import time
from collections.abc import Callable

import torch

import fastcoll

NUM_TENSORS, NUMEL, ROUNDS = 300, 500, 5


def one_call_per_tensor(group: fastcoll.Group) -> None:
    """Reduce hundreds of small gradients, each in a call of its own: slow, not wrong."""
    tensors = [torch.full((NUMEL,), group.rank + number * 0.1) for number in range(NUM_TENSORS)]
    bucket = torch.cat(tensors)

    def each() -> None:
        for tensor in tensors:
            group.all_reduce(tensor)

    def together() -> None:
        group.all_reduce(bucket)

    def shortest_ms(way: Callable[[], None]) -> float:
        spent_s = []
        for _ in range(ROUNDS):
            group.barrier()
            start = time.perf_counter()
            way()
            spent_s.append(time.perf_counter() - start)
        return min(spent_s) * 1e3

    each_ms, together_ms = shortest_ms(each), shortest_ms(together)
    torch.testing.assert_close(bucket, torch.cat(tensors), rtol=0, atol=0)
    if group.rank == 0:
        print(
            f"1. One call for each of many small tensors.\n   {NUM_TENSORS} calls: {each_ms:.2f} ms"
        )
        print(f"   one call of their bucket: {together_ms:.2f} ms, and the same bits")


def mixed_dtypes(group: fastcoll.Group) -> None:
    """Run rank 1 under autocast: its tensor has half the bytes that the others expect."""
    group.all_reduce(torch.ones(4, dtype=torch.float16 if group.rank == 1 else torch.float32))


def skipped(group: fastcoll.Group) -> None:
    """Report a loss on rank 0 alone, in a call that the others do not make."""
    if group.rank == 0:
        group.all_reduce(torch.ones(1))  # inside `if rank == 0`: never do this
    group.barrier()


def missing(group: fastcoll.Group) -> None:
    """Make one more call on all ranks but rank 1: their loops are of unequal length."""
    group.barrier()
    if group.rank != 1:
        group.all_reduce(torch.ones(1), timeout_s=0.3)
    else:
        time.sleep(2)  # busy with something else
        group.barrier()


def show(
    title: str,
    mistake: Callable[[fastcoll.Group], None],
    error: type[fastcoll.FastcollError],
) -> None:
    """Make a mistake in a group of its own, as it breaks the group; every rank must notice."""
    with fastcoll.new_group() as group:
        try:
            mistake(group)
        except error as caught:
            if group.rank == 0:
                print(f"\n{title}\n   {type(caught).__name__}: {caught}")
        else:
            raise RuntimeError(f"rank {group.rank} did not notice: {title}")
    fastcoll.barrier()  # the default group is as it was


def main() -> None:
    with fastcoll.init() as group:
        one_call_per_tensor(group)
        show("2. Rank 1 has another dtype.", mixed_dtypes, fastcoll.DesyncError)
        show("3. Rank 0 makes a call that the others skip.", skipped, fastcoll.DesyncError)
        show("   Rank 1 stays away.", missing, fastcoll.CollectiveTimeout)
        if group.rank == 0:
            print("\nLook at: all ranks got the same error: who called what, or who did not come.")


if __name__ == "__main__":
    main()
