# SPDX-License-Identifier: Apache-2.0
"""How concurrent transfers share links: max-min fairness, as a fluid."""

from collections.abc import Callable, Mapping, Sequence

from fastcoll_model.fabric import Link

_SAME = 1e-12  # relative: shares that differ by rounding only


def fair_rates(
    usages: Sequence[Mapping[Link, float]], bytes_per_us: Callable[[Link], float]
) -> list[float]:
    """Return each transfer's rate: none can get more without taking from one that has no more.

    Progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2).

    Args:
        usages: For each transfer, the bandwidth it takes of each link, per unit of its rate.
        bytes_per_us: Capacity of a link.
    """
    rates = [0.0] * len(usages)
    users: dict[Link, list[int]] = {}
    for i, usage in enumerate(usages):
        for link in usage:
            users.setdefault(link, []).append(i)
    left = {link: bytes_per_us(link) for link in users}
    wanted = {link: sum(usages[i][link] for i in who) for link, who in users.items()}
    open_ones = set(range(len(usages)))
    while open_ones:
        share = min(left[link] / wanted[link] for link in users)
        # All links that are full at this rate: where ranks do alike, that is one round for all.
        full = [link for link in users if left[link] <= share * wanted[link] * (1 + _SAME)]
        for i in {i for link in full for i in users[link]} & open_ones:
            rates[i] = share
            open_ones.discard(i)
            for link, weight in usages[i].items():
                left[link] = max(0.0, left[link] - share * weight)
                wanted[link] -= weight
        users = {
            link: still
            for link, who in users.items()
            if (still := [i for i in who if i in open_ones])
        }
    return rates
