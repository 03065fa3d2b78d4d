# SPDX-License-Identifier: Apache-2.0
"""Sizes and numbers as people type and read them. Knows nothing of verbs, dtypes or libraries."""

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def parse_size(text: str) -> int:
    """Return the bytes meant by `text`: "8", "2K", "256M", "1G", also "2KiB" and "2KB".

    Raises:
        ValueError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 8, 2K, 256M or 1G")
    return int(match[1]) * _UNITS[match[2]]


def parse_sizes(text: str) -> list[int]:
    """Return the sizes meant by "FIRST:LAST:FACTOR", "FIRST:LAST" (factor 2) or "A,B,C", ascending.

    The last one belongs to a range whether or not the factor hits it.

    Raises:
        ValueError: a part is not a size, the range runs backwards, or the factor is below 2.
    """
    if ":" not in text:
        return sorted({parse_size(part) for part in text.split(",")})
    parts = text.split(":")
    if len(parts) > 3:
        raise ValueError(f"{text!r} is not a range; write FIRST:LAST:FACTOR, such as 8:256M:4")
    begin_bytes, end_bytes = parse_size(parts[0]), parse_size(parts[1])
    factor = 2
    if len(parts) == 3:
        factor = int(parts[2]) if parts[2].isdecimal() else 0
    if not 0 < begin_bytes <= end_bytes or factor < 2:
        raise ValueError(f"{text!r}: the range must grow, from above 0, by a factor of 2 or more")
    sizes = []
    size_bytes = begin_bytes
    while size_bytes < end_bytes:
        sizes.append(size_bytes)
        size_bytes *= factor
    return [*sizes, end_bytes]


def format_size(size_bytes: int) -> str:
    """Return `size_bytes` in the largest unit that divides it: "512 B", "2 KiB", "256 MiB"."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes and size_bytes % (1 << shift) == 0:
            return f"{size_bytes >> shift} {unit}"
    return f"{size_bytes} B"


def format_number(value: float, digits: int = 3) -> str:
    """Return a number with so many digits that count, without an exponent if it is large."""
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text else text


def parse_count(text: str) -> int:
    """Return the count meant by `text`: "1500", "85K", "25M", "1.5B" (powers of 1000).

    Raises:
        ValueError: the text is not a count.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMB]?)", text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is not a count; write 1500, 85K or 25M")
    return round(float(match[1]) * _COUNT_UNITS[match[2]])
