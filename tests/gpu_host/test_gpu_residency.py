# SPDX-License-Identifier: Apache-2.0
"""The thread blocks of many groups on one GPU: whose they are, and that no kernel waits for ever.

The rule and its proof are in fastcoll/gpu/residency.py. Here small machines are explored: each
order in which blocks may start, under that rule, and under broken ones.
"""

import threading
from collections.abc import Iterator
from functools import cache

import pytest

from fastcoll.gpu.residency import Blocks, Residency
from tests.gpu_host.test_gpu_host import agree_terms, hello
from tests.support.gpu import needs_gpu_part

# Blocks that hold one kernel of the largest kind for each multiprocessor, and one block of it.
CAPACITIES = {"A100 (sm_80)": 108, "H100 (sm_90)": 132, "B200 (sm_100)": 148}
GROUPS, WORLD = 64, 8
MOST_BYTES, PAGE_BYTES = 22 << 20, 2 << 20  # of device memory: a region, and what it comes in


# ---- claims --------------------------------------------------------------------------------------


def test_claims_add_up_and_what_does_not_fit_is_refused() -> None:
    residency = Residency()
    one = residency.claim(0, 60, 100)
    assert one is not None
    assert residency.claim(0, 41, 100) is None
    assert residency.blocks(0, 100) == Blocks(100, 40, 25, False)
    assert residency.claim(1, 100, 100) is not None, "another device has its own budget"
    assert residency.claim(0, 40, 100) is not None
    one.release()
    assert residency.blocks(0, 100).free == 60


def test_claims_of_many_threads_never_exceed_the_device() -> None:
    residency = Residency()
    granted: list[bool] = []
    threads = [
        threading.Thread(target=lambda: granted.append(residency.claim(0, 3, 100) is not None))
        for _ in range(50)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(granted) == 33


def test_groups_share_one_set_until_the_last_of_them_is_gone() -> None:
    residency = Residency()
    own = residency.claim(0, 80, 100)
    assert own is not None
    one, other = residency.share(0, 15, 100), residency.share(0, 20, 100)
    assert one is not None
    assert other is not None
    assert (one.begins_sharing, other.begins_sharing) == (True, False)
    assert residency.blocks(0, 100) == Blocks(100, 0, 20, True)
    assert residency.share(0, 21, 100) is None, "more than the set has"
    assert residency.claim(0, 1, 100) is None
    own.release()
    assert residency.blocks(0, 100).shared == 20, "the set stays as it is"
    one.release()
    other.release()
    assert residency.blocks(0, 100) == Blocks(100, 100, 25, False)


# ---- many groups ---------------------------------------------------------------------------------


def make_groups(capacity: int, num_groups: int, **fields: int) -> Iterator[tuple[int, bool]]:
    """Give the channels of each group of ranks on a GPU each, and whether it shares them."""
    residency = Residency()
    for _ in range(num_groups):
        state = residency.blocks(0, capacity)
        facts = {
            "capacity": state.capacity,
            "free_blocks": state.free,
            "shared_blocks": state.shared,
            "is_sharing": state.is_sharing,
        }
        terms = agree_terms([hello(str(rank), **facts, **fields) for rank in range(WORLD)])
        claim = residency.share if terms.shares else residency.claim
        assert claim(0, terms.num_channels, capacity) is not None
        state = residency.blocks(0, capacity)
        assert 0 <= state.free <= capacity
        yield terms.num_channels, terms.shares


@needs_gpu_part
@pytest.mark.parametrize("name", CAPACITIES)
def test_many_groups_find_blocks_and_room_for_sends(name: str) -> None:
    from fastcoll.gpu.batches import pair_channels
    from fastcoll.native import _cuda

    groups = list(make_groups(CAPACITIES[name], GROUPS))
    assert groups[0] == (32, False), "the first ones have blocks of their own"
    assert all(shares for _, shares in groups[10:])
    assert min(channels for channels, _ in groups) >= 8
    for channels, _ in groups:
        assert pair_channels(channels, _cuda.K_PAIR_CHANNELS) == _cuda.K_PAIR_CHANNELS
        pages = -(-_cuda.region_bytes(channels, WORLD) // PAGE_BYTES)
        assert pages * PAGE_BYTES <= MOST_BYTES
    own = sum(channels for channels, shares in groups if not shares)
    shared = max(channels for channels, shares in groups if shares)
    assert own + shared <= CAPACITIES[name]


@needs_gpu_part
def test_a_wish_is_kept_as_far_as_blocks_go() -> None:
    assert list(make_groups(132, 3, most_channels=64)) == [(64, False), (35, False), (33, True)]
    assert list(make_groups(132, 1, most_channels=4)) == [(4, False)]
    assert set(make_groups(4, 9)) == {(2, False), (1, False), (1, True)}


@needs_gpu_part
def test_ranks_of_one_gpu_do_not_share_as_they_run_at_the_same_time() -> None:
    assert not agree_terms([hello(free_blocks=2, shared_blocks=2, capacity=132)] * 2).shares


# ---- the rule, explored --------------------------------------------------------------------------

# A kernel is (group, number of its call); each rank has a device of its own.
Launch = tuple[str, int]


class Device:
    """The kernels that one rank launches, and the blocks that each of them needs."""

    def __init__(self, launches: list[Launch], capacity: int, sharing: str) -> None:
        self.launches, self.capacity, self.sharing = launches, capacity, sharing

    def may_start(
        self, at: int, started: frozenset[tuple[int, int]], ended: frozenset[int]
    ) -> bool:
        """Whether one more block of launch `at` may start: its stream, its order, and room."""
        group, _ = self.launches[at]
        for before in range(at):
            other, _ = self.launches[before]
            same = other == group or (other in self.sharing and group in self.sharing)
            if same and before not in ended:
                return False
        return sum(count for place, count in started if place not in ended) < self.capacity


def finds_a_deadlock(devices: list[Device], needs: dict[str, int]) -> bool:
    """Whether some order of starting blocks leaves kernels that wait for ever.

    A kernel ends on a rank when all of its blocks run, or have run, on every rank.
    """

    def ended(state: tuple[tuple[int, ...], ...]) -> list[frozenset[int]]:
        whole = [
            {
                device.launches[at]
                for at, count in enumerate(counts)
                if count == needs[device.launches[at][0]]
            }
            for device, counts in zip(devices, state, strict=True)
        ]
        everywhere = set.intersection(*whole)
        return [
            frozenset(at for at, launch in enumerate(device.launches) if launch in everywhere)
            for device in devices
        ]

    @cache
    def explore(state: tuple[tuple[int, ...], ...]) -> bool:
        over, moved = ended(state), False
        for rank, (device, counts) in enumerate(zip(devices, state, strict=True)):
            started = frozenset(enumerate(counts))
            for at, count in enumerate(counts):
                if count == needs[device.launches[at][0]] or not device.may_start(
                    at, started, over[rank]
                ):
                    continue
                moved = True
                one = (*counts[:at], count + 1, *counts[at + 1 :])
                if explore((*state[:rank], one, *state[rank + 1 :])):
                    return True
        return not moved and any(
            len(o) < len(d.launches) for o, d in zip(over, devices, strict=True)
        )

    return explore(tuple((0,) * len(device.launches) for device in devices))


# A has two blocks of its own; B and C share two. Capacity: four.
NEEDS = {"A": 2, "B": 2, "C": 2}
CALLS: list[Launch] = [("B", 1), ("A", 1), ("C", 1), ("B", 2)]


def explore(one: list[Launch], other: list[Launch], capacity: int, sharing: str) -> bool:
    return finds_a_deadlock(
        [Device(one, capacity, sharing), Device(other, capacity, sharing)], NEEDS
    )


def test_no_order_of_blocks_leaves_a_kernel_waiting() -> None:
    assert not explore(CALLS, CALLS, 4, "BC")
    # Calls of groups that do not share may be made in any order.
    assert not explore(CALLS, [("B", 1), ("C", 1), ("B", 2), ("A", 1)], 4, "BC")


@pytest.mark.parametrize(
    ("other", "capacity", "sharing"),
    [
        (CALLS, 4, ""),  # kernels that share run beside each other
        ([("C", 1), ("A", 1), ("B", 1), ("B", 2)], 4, "BC"),  # another order on another rank
        (CALLS, 3, "BC"),  # groups of which each has its own do not fit together
    ],
)
def test_each_part_of_the_rule_is_needed(other: list[Launch], capacity: int, sharing: str) -> None:
    assert explore(CALLS, other, capacity, sharing)
