# SPDX-License-Identifier: Apache-2.0
"""The formulas against the simulator; the textbooks' numbers are in docs/worked_examples.md."""

import pytest

from fastcoll_model.builders import build
from fastcoll_model.errors import ModelError
from fastcoll_model.fabric import OneSwitch
from fastcoll_model.formulas import FORMULAS, Constants, estimate_us, hierarchical_all_reduce_us
from fastcoll_model.simulator import simulate

# Latency, transfer and addition all weigh something at one of the sizes.
MACHINE = Constants(alpha_us=3.0, beta_us_per_byte=1 / 1000, gamma_us_per_byte=1 / 7000)
SIZES = (0, 5_000, 3e6)


def simulated_us(verb: str, algorithm: str, n: int, size: float, num_segments: int = 1) -> float:
    schedule = build(verb, algorithm, n, num_segments=num_segments)
    fabric = OneSwitch(n, MACHINE.alpha_us, MACHINE.beta_us_per_byte, MACHINE.gamma_us_per_byte)
    return simulate(schedule, fabric, size).time_us


@pytest.mark.parametrize(("verb", "algorithm"), FORMULAS)
def test_formula_and_simulation_agree(verb: str, algorithm: str) -> None:
    formula = FORMULAS[verb, algorithm]
    for n in (1, 2, 3, 4, 5, 7, 8, 12, 16):
        for num_segments in (1, 4) if algorithm == "chain" else (1,):
            for size in SIZES:
                time_us = simulated_us(verb, algorithm, n, size, num_segments)
                found = estimate_us(verb, algorithm, n, size, MACHINE, num_segments=num_segments)
                exact = n & (n - 1) == 0 or not formula.powers_only
                if exact:
                    assert found == pytest.approx(time_us, rel=1e-9), (n, size)
                else:
                    slack_us = 0.25 * time_us + 3 * MACHINE.alpha_us
                    assert abs(found - time_us) <= slack_us, (n, size, found, time_us)


def test_agreement_would_notice_a_wrong_formula() -> None:
    """Plant one message, one n-th of the bytes, or one addition more: the test fails."""
    n, size = 8, 5_000
    right = estimate_us("all_reduce", "ring", n, size, MACHINE)
    assert right == pytest.approx(simulated_us("all_reduce", "ring", n, size), rel=1e-9)
    per_chunk = size / n
    for extra in (
        MACHINE.alpha_us,
        per_chunk * MACHINE.beta_us_per_byte,
        per_chunk * MACHINE.gamma_us_per_byte,
    ):
        assert right + extra != pytest.approx(right, rel=1e-3)


@pytest.mark.slow
def test_a_1024_rank_run_is_exact() -> None:
    for algorithm in ("tree", "recursive_doubling"):
        found = simulated_us("all_reduce", algorithm, 1024, 1e6)
        assert found == pytest.approx(estimate_us("all_reduce", algorithm, 1024, 1e6, MACHINE))


def test_where_links_are_shared_the_difference_has_a_reason() -> None:
    """Check that Hockney's chain formula charges alpha to the sender of every segment."""
    n, m, size = 6, 10, 1e6
    found = simulated_us("broadcast", "chain", n, size, m)
    hockney = (n - 2 + m) * MACHINE.message_us(size / m)
    assert hockney - found == pytest.approx((m - 1) * MACHINE.alpha_us)


def test_an_algorithm_without_a_formula_says_what_to_use() -> None:
    with pytest.raises(ModelError, match=r"double_binary_tree has no closed formula.*simulator"):
        estimate_us("all_reduce", "double_binary_tree", 4, 1e6, MACHINE)


def test_hierarchical_is_made_of_its_phases() -> None:
    inside, between = Constants(1, 1 / 300e3), Constants(3, 1 / 50e3)
    one_node = hierarchical_all_reduce_us(1, 8, 1e6, inside, between)
    assert one_node == pytest.approx(estimate_us("all_reduce", "two_shot", 8, 1e6, inside))
    alone = hierarchical_all_reduce_us(4, 1, 1e6, inside, between)
    assert alone == pytest.approx(estimate_us("all_reduce", "rabenseifner", 4, 1e6, between))
