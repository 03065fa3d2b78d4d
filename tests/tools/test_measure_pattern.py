# SPDX-License-Identifier: Apache-2.0
"""The benchmark's data and its check: right results pass, wrong ones are counted."""

from dataclasses import replace

import pytest
import torch

from fastcoll.measure.pattern import PERIOD, Cell, count_wrong, fill_input, make_cell

WORLD_SIZE = 3
NUMEL = PERIOD + 1000  # more than a period, and no multiple of it


def inputs_of(cell: Cell) -> list[torch.Tensor]:
    inputs = [torch.empty(cell.input_numel, dtype=cell.torch_dtype) for _ in range(cell.world_size)]
    for rank, tensor in enumerate(inputs):
        fill_input(tensor, cell, rank)
    return inputs


def result_of(cell: Cell, rank: int) -> torch.Tensor:
    """Return the expected result of `rank`, by the plainest means."""
    inputs = inputs_of(cell)
    mine = slice(rank * cell.numel, (rank + 1) * cell.numel)
    if cell.verb in ("all_gather", "gather"):
        return torch.cat(inputs)
    if cell.verb == "all_to_all":
        return torch.cat([tensor[mine] for tensor in inputs])
    if cell.verb == "scatter":
        return inputs[cell.root][mine].clone()
    if cell.verb == "broadcast":
        return inputs[cell.root]
    total = sum(tensor.to(torch.float64) for tensor in inputs)
    assert isinstance(total, torch.Tensor)
    total = total.to(cell.torch_dtype)
    if cell.verb == "reduce_scatter":
        return total[mine].clone()
    return total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "float64"])
@pytest.mark.parametrize(
    "verb",
    [
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "all_to_all",
    ],
)
def test_a_right_result_passes_and_a_wrong_element_is_found(verb: str, dtype: str) -> None:
    cell = Cell(verb, dtype, "sum", NUMEL, WORLD_SIZE, root=1)
    for rank in range(WORLD_SIZE):
        output = result_of(cell, rank)
        assert count_wrong(output, cell, rank) == 0
        output[-1] = 9
        output[NUMEL // 2] = 9
        gets = verb not in ("reduce", "gather") or rank == cell.root
        assert count_wrong(output, cell, rank) in ((1, 2) if gets else (0,))


def test_elements_in_the_wrong_place_are_found() -> None:
    cell = Cell("all_reduce", "float32", "sum", 1 << 17, WORLD_SIZE)
    output = result_of(cell, 0)
    for segment in (1 << 10, 1 << 14, 1 << 16):
        assert count_wrong(output.roll(segment), cell, 0) > output.numel() // 2


def test_ranks_that_get_each_others_chunk_are_found() -> None:
    cell = Cell("reduce_scatter", "float32", "sum", 1 << 12, WORLD_SIZE)
    assert count_wrong(result_of(cell, 1), cell, 0) > cell.numel // 2


@pytest.mark.parametrize("op", ["avg", "product", "min", "max"])
def test_other_reductions(op: str) -> None:
    cell = Cell("all_reduce", "float64", op, 1000, WORLD_SIZE)
    stacked = torch.stack(inputs_of(cell))
    result = {
        "avg": stacked.sum(0) / WORLD_SIZE,
        "product": stacked.prod(0),
        "min": stacked.amin(0),
        "max": stacked.amax(0),
    }[op]
    assert count_wrong(result, cell, 0) == 0
    assert count_wrong(result + 1, cell, 0) == 1000


def test_sums_over_the_largest_world_stay_exact() -> None:
    cell = Cell("all_reduce", "bfloat16", "sum", PERIOD, 64)
    assert int(sum(tensor.to(torch.int64) for tensor in inputs_of(cell)).max()) <= 256  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("verb", "size_bytes", "numel", "actual_bytes"),
    [
        ("all_reduce", 8, 2, 8),
        ("all_reduce", 2, 1, 4),
        ("reduce_scatter", 1200, 100, 1200),
        ("all_gather", 8, 1, 12),
        ("broadcast", 1 << 20, 1 << 18, 1 << 20),
        ("barrier", 1 << 20, 0, 0),
    ],
)
def test_a_cell_counts_the_larger_side(
    verb: str, size_bytes: int, numel: int, actual_bytes: int
) -> None:
    cell = make_cell(verb, "float32", "sum", size_bytes, WORLD_SIZE)
    assert (cell.numel, cell.size_bytes) == (numel, actual_bytes)


@pytest.mark.parametrize(
    ("verb", "bytes_by_rank"),
    [
        ("broadcast", (0, 16384, 0)),
        ("scatter", (0, 16380, 0)),
        ("reduce", (16384, 0, 16384)),
        ("gather", (5460, 5460, 5460)),
        ("sendrecv", (16384, 16384, 16384)),
        ("all_to_all", (16380, 16380, 16380)),
        ("all_reduce", (0, 0, 0)),
    ],
)
def test_who_gives_writes_its_input_anew(verb: str, bytes_by_rank: tuple[int, ...]) -> None:
    cell = replace(make_cell(verb, "float32", "sum", 16384, WORLD_SIZE), root=1)
    assert tuple(map(cell.rewritten_bytes, range(WORLD_SIZE))) == bytes_by_rank
    assert cell.is_rewritten == any(bytes_by_rank)
    small = make_cell(verb, "float32", "sum", 4096, WORLD_SIZE)
    assert not small.is_rewritten
    assert small.rewritten_bytes(0) == 0
