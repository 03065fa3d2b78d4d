# SPDX-License-Identifier: Apache-2.0
"""How concurrent transfers share links: max-min fairness, as a fluid."""

from collections.abc import Callable, Mapping, Sequence

from fastcoll.model.fabric import Link


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
    users: dict[Link, set[int]] = {}
    for i, usage in enumerate(usages):
        for link in usage:
            users.setdefault(link, set()).add(i)
    left = {link: bytes_per_us(link) for link in users}
    while users:
        share, tightest = min(
            ((left[link] / sum(usages[i][link] for i in who), link) for link, who in users.items()),
            key=lambda pair: pair[0],
        )
        for i in list(users[tightest]):
            rates[i] = share
            for link, weight in usages[i].items():
                left[link] = max(0.0, left[link] - share * weight)
                users[link].discard(i)
                if not users[link]:
                    del users[link]
    return rates
