# SPDX-License-Identifier: Apache-2.0
"""The checked arguments of a call, and the verb that they belong to.

Decides which phases a call takes, by the size of its message; the same on every rank. Must not
know how a phase is carried out.
"""

from collections.abc import Callable, Sequence

import torch

from fastcoll.calls.arrays import ArrayView
from fastcoll.calls.group_calls import AnyCall
from fastcoll.calls.limits import call_limit_s
from fastcoll.calls.parts import PartsOperands, Side
from fastcoll.calls.settings import Settings, checked_numerics
from fastcoll.calls.tensors import Operands
from fastcoll.choose.select import check_name
from fastcoll.errors import DesyncError, UnsupportedError
from fastcoll.nodes import moves, reductions, small
from fastcoll.nodes.arrays import as_bytes, tensor_at
from fastcoll.nodes.coded import CodedReduction
from fastcoll.nodes.lanes import Lanes
from fastcoll.nodes.packets import Header, exchange_packets, meet
from fastcoll.nodes.reductions import Reduction
from fastcoll.types import (
    COUNTED,
    ITEMSIZE,
    REDUCTIONS,
    SCHEDULE_PREFIX,
    DType,
    Numerics,
    Verb,
    Wire,
    accumulator,
    order_matters,
)

GatherWords = Callable[[list[int]], list[list[int]]]
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Arguments:
    """Flat tensors on a call's arguments; in parts, one for each rank, where the verb has such."""

    def __init__(self, operands: Operands | PartsOperands, verb: Verb, world_size: int) -> None:
        self.given: list[torch.Tensor]  # this rank's input
        self.got: list[torch.Tensor]  # where its result goes; `bring_back` takes on a strided one's
        self.feedback = operands.feedback if isinstance(operands, Operands) else None
        device = operands.device
        if isinstance(operands, PartsOperands):
            self._output = operands.output
            source = operands.input and operands.input.dense(fill=True)
            self._target = operands.output and operands.output.dense(fill=False)
            self.given, self.got = _of_side(source, device), _of_side(self._target, device)
            self.bring_back = self._copy_parts_back
            self._keeps: object = source
            return
        flat = self._keeps = operands.flat()
        self.bring_back = flat.finish
        in_parts = verb is Verb.reduce_scatter, verb is Verb.all_gather
        dtype = operands.dtype  # the output's too, unless codes follow the result
        self.given = _cut(flat.input_ptr, operands.input, dtype, world_size if in_parts[0] else 1)
        gets = world_size if in_parts[1] else 1
        self.got = _cut(flat.output_ptr, operands.output, dtype, gets)

    def _copy_parts_back(self) -> None:
        if self._output and self._target:
            self._output.bring_back(self._target)


def _cut(address: int, array: ArrayView | None, dtype: DType, count: int) -> list[torch.Tensor]:
    if array is None:
        return []
    whole = tensor_at(address, dtype, array.numel, array.device)
    numel = array.numel // count
    return [whole[rank * numel :][:numel] for rank in range(count)]


def _of_side(side: Side | None, device: int) -> list[torch.Tensor]:
    if side is None:
        return []
    dtype = side.views[0].dtype
    parts = side.parts() if side.cut else side.parts()[:1]
    return [
        tensor_at(address, dtype, num_bytes // ITEMSIZE[dtype], device)
        for address, num_bytes in parts
    ]


def check_options(call: AnyCall) -> None:
    """Check the options of a call; raise UnsupportedError for an algorithm by name."""
    call_limit_s(call.timeout_s)
    check_name(call.algorithm, call.verb)
    if call.algorithm.startswith(SCHEDULE_PREFIX):
        from fastcoll.choose import schedules  # the model, which few programs need

        schedules.check_name(call.algorithm, call.verb)
    if call.algorithm != "auto":
        raise UnsupportedError(
            f'algorithm="{call.algorithm}": a group over several nodes chooses by itself; '
            'give "auto"'
        )
    if call.numerics is not None:
        checked_numerics(call.numerics)


def wire_of(operands: Operands | PartsOperands) -> Wire:
    """Return the format in which a call's elements cross between nodes."""
    return operands.wire if isinstance(operands, Operands) else Wire.none


def by_carrier(
    call: AnyCall,
    operands: Operands | PartsOperands,
    settings: Settings,
    lanes: Lanes,
    *,
    on_gpus: bool = False,
) -> bool:
    """Return whether the carrier reduces, with roundings of its own."""
    dtype, op = operands.dtype, operands.op
    numerics = call.numerics or settings.numerics_between
    if numerics is None:
        is_fast = on_gpus and settings.numerics_on_gpus == "fast"
        numerics = "fast" if is_fast or accumulator(dtype) is not dtype else "same_bits"
    return (
        numerics == "fast"
        and wire_of(operands) is Wire.none
        and call.verb in REDUCTIONS
        and order_matters(dtype, op)
        and lanes.carrier(0).reduces(dtype, op)
    )


def carry_out(
    lanes: Lanes,
    header: Header,
    arguments: Arguments,
    limit_s: float,
    numerics: Numerics,
    gather_words: GatherWords,
) -> None:
    """Make a call on CPUs.

    Args:
        lanes: This rank's lanes.
        header: The call, equal on all ranks.
        arguments: This rank's arguments.
        limit_s: Limit of the call.
        numerics: The promise of a node's reductions.
        gather_words: Gathers integers from all ranks, within the rest of the limit.
    """
    world_size = len(lanes.node_map.places)
    reduces = header.verb in REDUCTIONS
    is_small = header.is_small(lanes, world_size)
    by_carrier = header.by_carrier and not is_small
    fields = header.dtype, header.op, numerics, by_carrier, world_size
    how = Reduction(*fields)
    if header.wire is not Wire.none:
        how = CodedReduction(*fields, header.wire, arguments.feedback)
    meet(lanes, header, limit_s)
    if is_small and reduces:
        small.reduce(lanes, header, how, arguments.given, arguments.got)
    elif is_small:
        small.move(lanes, header, arguments.given, arguments.got)
    else:
        if lanes.is_leader:
            exchange_packets(lanes, header, _NOTHING)
        lanes.node_broadcast(_NOTHING.new_zeros(1), 0)  # no rank goes on before it has seen them
        run_phases(lanes, header, arguments, how, gather_words)
    arguments.bring_back()


def gather_in_call(lanes: Lanes, words: list[int]) -> list[list[int]]:
    """Gather integers from all ranks in the middle of a call on CPUs, as a part of it.

    A call of its own would queue up behind the one that waits for it.
    """
    shape = (len(lanes.node_map.places), len(words))
    rows = torch.empty(shape, dtype=torch.int64, device="cpu")
    mine = torch.tensor(words, dtype=torch.int64, device="cpu")
    moves.gather(lanes, as_bytes(mine), [as_bytes(row) for row in rows])
    result: list[list[int]] = rows.tolist()
    return result


def run_phases(
    lanes: Lanes, header: Header, arguments: Arguments, how: Reduction, gather_words: GatherWords
) -> None:
    """Carry out the phases in lanes: all of a call but its beginning, on CPUs or on GPUs."""
    if header.verb in REDUCTIONS:
        _reduce(lanes, header, arguments, how)
    else:
        _move(lanes, header, arguments, gather_words)


def _reduce(lanes: Lanes, header: Header, arguments: Arguments, how: Reduction) -> None:
    if header.verb is Verb.reduce_scatter:
        reductions.reduce_scatter(lanes, how, arguments.given, arguments.got[0])
        return
    source = arguments.given[0]
    target = arguments.got[0] if arguments.got else None
    root = header.root if header.verb is Verb.reduce else None
    reductions.reduce(lanes, how, source, target, root)


def _move(lanes: Lanes, header: Header, arguments: Arguments, gather_words: GatherWords) -> None:
    given = [as_bytes(part) for part in arguments.given]
    got = [as_bytes(part) for part in arguments.got]
    if header.verb is Verb.broadcast:
        moves.broadcast(lanes, header.root, (got or given)[0])
    elif header.verb is Verb.gather:
        moves.gather(lanes, given[0], got or None, header.root)
    elif header.verb is Verb.scatter:
        moves.scatter(lanes, header.root, given or None, got[0])
    elif header.verb is Verb.all_gather:
        moves.gather(lanes, given[0], got)
    else:
        _all_to_all(lanes, header, given, got, gather_words)


def _all_to_all(
    lanes: Lanes,
    header: Header,
    given: Sequence[torch.Tensor],
    got: Sequence[torch.Tensor],
    gather_words: GatherWords,
) -> None:
    count = len(given)
    if header.splits != COUNTED:
        moves.all_to_all(lanes, given, got, [[part.numel() for part in given]] * count)
        return
    sizes = [part.numel() for part in given] + [part.numel() for part in got]
    rows = gather_words(sizes)
    size = ITEMSIZE[header.dtype]
    for source, row in enumerate(rows):
        for target in range(count):
            if row[target] != (expected := rows[target][count + source]):
                raise DesyncError(
                    f"{header.describe()}: rank {source} gives {row[target] // size} elements to "
                    f"rank {target}, which expects {expected // size}: input_split_sizes and "
                    "output_split_sizes do not match. Outputs of this call are undefined"
                )
    moves.all_to_all(lanes, given, got, [row[:count] for row in rows])
