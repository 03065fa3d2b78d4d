# SPDX-License-Identifier: Apache-2.0
"""The simulator: shared links, the times of a run, and one rank in place of all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll_model.builders import algorithms_of, build
from fastcoll_model.errors import ModelError
from fastcoll_model.fabric import OneSwitch
from fastcoll_model.regular import shifts_of, simulate_regular
from fastcoll_model.schedule import VERBS, Signal
from fastcoll_model.sharing import fair_rates
from fastcoll_model.simulator import simulate
from tests.model.mutations import programs, with_programs

pytestmark = pytest.mark.proof("python/fastcoll_model")

ALL = [(verb, algorithm) for verb in VERBS for algorithm in algorithms_of(verb)]


def test_two_flows_share_a_link_and_the_third_takes_the_rest() -> None:
    capacity = {"a": 10.0, "b": 100.0}
    usages = [{"a": 1.0}, {"a": 1.0, "b": 1.0}, {"b": 1.0}]
    assert fair_rates(usages, capacity.__getitem__) == [5.0, 5.0, 95.0]


def test_a_weight_counts_as_so_many_flows() -> None:
    assert fair_rates([{"a": 4.0}], {"a": 10.0}.__getitem__) == [2.5]
    assert fair_rates([], {}.__getitem__) == []


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=8),
    st.lists(st.floats(0.5, 50), min_size=6, max_size=6),
)
def test_shares_are_feasible_and_nobody_can_get_more(links, capacity) -> None:
    rates = fair_rates([dict.fromkeys(used, 1.0) for used in links], capacity.__getitem__)
    load = [sum(r for r, used in zip(rates, links, strict=True) if i in used) for i in range(6)]
    assert all(x <= c * (1 + 1e-9) for x, c in zip(load, capacity, strict=True))
    for rate, used in zip(rates, links, strict=True):
        # Some link of mine is full, and no flow on it is faster than mine.
        assert any(
            load[i] >= capacity[i] * (1 - 1e-9)
            and all(
                other <= rate * (1 + 1e-9)
                for other, theirs in zip(rates, links, strict=True)
                if i in theirs
            )
            for i in used
        )


@pytest.mark.parametrize(("verb", "algorithm"), ALL)
def test_every_byte_crosses_a_port_up_and_a_port_down(verb: str, algorithm: str) -> None:
    if algorithm == "multimem":
        return  # one byte up can be many down: that is the point of it
    n, size = 6, 6000.0
    timing = simulate(build(verb, algorithm, n), OneSwitch(n, 1.0, 0.01), size)
    ups = sum(b for (_, way), b in timing.link_bytes.items() if way == "up")
    downs = sum(b for (_, way), b in timing.link_bytes.items() if way == "down")
    assert ups == pytest.approx(downs)
    # No link can carry its bytes in less time.
    assert timing.time_us >= max(timing.link_bytes.values()) * 0.01
    assert timing.time_us > 1.0


def test_multimem_moves_s_and_s_over_n_each_way() -> None:
    n, size = 8, 8e6
    timing = simulate(build("all_reduce", "multimem", n), OneSwitch(n, 1.0, 0.001), size)
    assert set(map(round, timing.link_bytes.values())) == {round(size + size / n)}


def test_segments_bring_multimem_to_its_bandwidth() -> None:
    """Let a load and a store of the switch overlap by segments: S + S/n, not 2 S."""
    n, size, beta = 8, 8e6, 0.001
    times = [
        simulate(build("all_reduce", "multimem", n, num_segments=m), OneSwitch(n, 0.0, beta), size)
        for m in (1, 16)
    ]
    assert times[0].time_us == pytest.approx(2 * size * beta)
    assert times[1].time_us < 1.25 * size * beta


def test_two_trees_beat_one_for_large_messages() -> None:
    """Check Sanders, Speck and Traff 2009: both directions of every port are used."""
    n, size, fabric = 16, 64e6, OneSwitch(16, 1.0, 0.001)
    tree = simulate(build("broadcast", "tree", n), fabric, size).time_us
    both = simulate(build("broadcast", "double_binary_tree", n, num_segments=64), fabric, size)
    # The lower bound is S beta; a parent that serves one child after the other leaves gaps.
    assert both.time_us < 1.6 * size * 0.001
    assert tree == pytest.approx(4 * (1 + size * 0.001))


@pytest.mark.parametrize(("verb", "algorithm"), ALL)
def test_one_rank_in_place_of_all_gives_the_same_time(verb: str, algorithm: str) -> None:
    regular = 0
    for n in (1, 2, 3, 4, 6, 8, 12, 16):
        schedule = build(verb, algorithm, n, local_size=1, num_segments=2)
        shifts = shifts_of(schedule, 1)
        if shifts is None:
            continue
        fabric = OneSwitch(n, 2.0, 1 / 500, 1 / 3000)
        exact = simulate(schedule, fabric, 1e5).time_us
        assert simulate_regular(schedule, fabric, 1e5, shifts).time_us == pytest.approx(exact)
        regular += 1
    rootless = verb in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    chains = ("chain", "socket_chain")
    irregular = algorithm in (*chains, "tree", "double_binary_tree") or not rootless
    assert (regular == 0) == irregular


def test_a_trace_tells_every_step_that_took_time() -> None:
    schedule = build("all_reduce", "ring", 3)
    timing = simulate(schedule, OneSwitch(3, 1.0, 0.01, 0.001), 300, trace=True)
    moving = [e for e in timing.events if e.rank == 0 and "reduce" in str(e.step)]
    assert [(e.start_us, e.end_us) for e in moving] == [(1.0, 2.1), (3.1, pytest.approx(4.2))]
    assert max(e.end_us for e in timing.events) == pytest.approx(timing.time_us)
    assert simulate(schedule, OneSwitch(3, 1.0, 0.01, 0.001), 300).events == []


def test_what_cannot_run_is_refused() -> None:
    schedule = build("all_reduce", "ring", 4)
    with pytest.raises(ModelError, match="4 ranks don't fit on a topology of 3"):
        simulate(schedule, OneSwitch(3, 1.0, 0.01), 100)
    deaf = programs(schedule)
    deaf[2, 0] = [step for step in deaf[2, 0] if not isinstance(step, Signal)]
    with pytest.raises(ModelError, match="waits for a signal of rank 2"):
        simulate(with_programs(schedule, deaf), OneSwitch(4, 1.0, 0.01), 100)


@pytest.mark.long
def test_rings_of_256_ranks_step_by_step() -> None:
    n, size = 256, 1e9
    fabric = OneSwitch(n, 1.0, 1 / 50e3)
    schedule = build("all_gather", "hierarchical_ring", n, local_size=8)  # rings of 32
    exact = simulate(schedule, fabric, size).time_us
    assert exact == pytest.approx(32 * 1.0 + (n - 1) / n * size / 50e3)
