# SPDX-License-Identifier: Apache-2.0
"""Sizes as people type them, and bandwidths as nccl-tests defines them."""

import pytest

from fastcoll.measure.busbw import VERBS, algbw_gbps, bus_factor, busbw_gbps
from fastcoll.measure.sizes import format_number, format_size, parse_count, parse_size, parse_sizes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8", 8),
        ("2K", 2 * KIB),
        ("2k", 2 * KIB),
        ("256M", 256 * MIB),
        ("1G", GIB),
        ("4KiB", 4 * KIB),
        ("4 KB", 4 * KIB),
        ("12B", 12),
    ],
)
def test_a_size(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "K", "-8", "1.5M", "8X", "8:16"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "sizes_bytes"),
    [
        ("8:128:4", [8, 32, 128]),
        ("8:100:4", [8, 32, 100]),
        ("4M:128M:4", [4 * MIB, 16 * MIB, 64 * MIB, 128 * MIB]),
        ("8:64", [8, 16, 32, 64]),
        ("8:8:2", [8]),
        ("1M", [MIB]),
        ("1M,8,2K,8", [8, 2 * KIB, MIB]),
    ],
)
def test_a_range_holds_its_end_and_a_list_is_sorted(text: str, sizes_bytes: list[int]) -> None:
    assert parse_sizes(text) == sizes_bytes


@pytest.mark.parametrize("text", ["8:4:2", "8:64:1", "0:64:2", "8:64:2:2", "8:x:2", "8,,16", "a"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (8, "8 B"), (2048, "2 KiB"), (2050, "2050 B"), (256 * MIB, "256 MiB")],
)
def test_a_size_reads_back(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text
    assert parse_size(text) == size_bytes


def test_a_count_is_decimal() -> None:
    assert [parse_count(text) for text in ("1500", "100K", "25M", "1.5B")] == [
        1500,
        100_000,
        25_000_000,
        1_500_000_000,
    ]
    with pytest.raises(ValueError, match="not a count"):
        parse_count("25MB")


@pytest.mark.parametrize(
    ("verb", "world_size", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("reduce_scatter", 4, 0.75),
        ("all_gather", 4, 0.75),
        ("broadcast", 4, 1.0),
        ("reduce", 4, 1.0),
        ("sendrecv", 4, 1.0),
        ("all_to_all", 4, 0.75),
        ("gather", 4, 0.75),
        ("scatter", 4, 0.75),
        ("barrier", 4, 0.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(verb: str, world_size: int, factor: float) -> None:
    assert bus_factor(verb, world_size) == pytest.approx(factor)


def test_bandwidth_is_in_gigabytes_a_second() -> None:
    assert algbw_gbps(1_000_000, 1000.0) == pytest.approx(1.0)
    assert busbw_gbps("all_reduce", 1_000_000, 1000.0, 4) == pytest.approx(1.5)
    assert algbw_gbps(8, 0.0) == 0.0


def test_every_verb_has_a_factor_and_nothing_else_has() -> None:
    assert all(bus_factor(verb, 2) >= 0 for verb in VERBS)
    with pytest.raises(ValueError, match="unknown verb"):
        bus_factor("all_to_none", 2)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (11.64, "11.6"), (999.7, "1000"), (1034.4, "1034")],
)
def test_a_number_has_no_exponent(value: float, text: str) -> None:
    assert format_number(value) == text
    assert format_number(10_300.4, 4) == "10300"
