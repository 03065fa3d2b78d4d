# SPDX-License-Identifier: Apache-2.0
"""Collective calls made: by the ranks of a pool, against the oracle's results.

Decides the memory of arguments: guard bytes around it, outputs poisoned before the call. Decides
the checks besides the result: inputs stay unchanged, and no byte outside an output is written. Must
not know how the library runs a call.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.calls.parts import PartsCall
from fastcoll.calls.tensors import Call as CheckedCall
from fastcoll.types import Verb
from scripts import verbs
from tests.support import oracle
from tests.support.backends import TorchGroup
from tests.support.calls import (
    BARRIER,
    MOVES,
    REDUCTIONS,
    ROOTED,
    Call,
    Place,
    difference,
    expected,
    words_in,
)
from tests.support.harness import Pool, Rank

_GUARD_BYTES = 64
_WORD_BYTES = 8  # all bytes of an argument are compared by words
_POISON = 0xA5
_ALL = slice(None)
_ARENA_BYTES = 320 << 20  # address space; pages come when they are touched
PARTED = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
_arenas: "weakref.WeakKeyDictionary[Any, torch.Tensor]" = weakref.WeakKeyDictionary()


Result = tuple[np.ndarray, str]  # the bits of the output; another problem, or ""


def check(
    pool: Pool,
    calls: Iterable[Call],
    batch: int = 200,
    nodes: Sequence[Sequence[int]] | None = None,
    in_group: Callable[..., Any] | None = None,
    perform: Callable[..., list[Result]] | None = None,
) -> int:
    """Run calls on every rank of a pool, compare all outputs; the number of calls.

    The oracle works while the ranks do. `in_group` runs a program in another group than the rank's,
    `perform` makes the calls in another way than `perform_all`.
    """
    program = perform or perform_all
    programs = (in_group, program) if in_group else (program,)
    todo = list(calls)
    for first in range(0, len(todo), batch):
        part = todo[first : first + batch]
        pool.start(*programs, part)
        wants = [expected(call, pool.world_size, nodes) for call in part]
        problems = compare(part, wants, pool.finish())
        assert not problems, f"{len(problems)} wrong results:\n" + "\n".join(problems[:12])
    return len(todo)


def compare(
    calls: Sequence[Call], wants: Sequence[Sequence[np.ndarray]], results: Sequence[list[Result]]
) -> list[str]:
    """Return the problems of the results that the ranks returned."""
    problems = []
    for rank, rows in enumerate(results):
        for call, want, (words, problem) in zip(calls, wants, rows, strict=True):
            found = problem or difference(call, len(results), rank, want[rank], words)
            problems += [found] if found else []
    return problems


def perform_all(rank: Rank, calls: Sequence[Call]) -> list[Result]:
    """Make calls one after another on the rank's default group."""
    results = []
    for number, call in enumerate(calls):
        try:
            results.append(Started(rank.comm, call).result())
        except BaseException as error:
            error.add_note(f"in call {number} of {len(calls)}: {call}")
            raise
    return results


def arena_of(comm: Any) -> torch.Tensor:
    """Return this group's symmetric memory for tests; collective at first use."""
    if comm not in _arenas:
        _arenas[comm] = comm.empty((_ARENA_BYTES,), dtype=torch.uint8)
    return _arenas[comm]


class Memory:
    """An argument's memory: a tensor or array in the middle of poisoned bytes."""

    def __init__(
        self,
        dtype: str,
        numel: int,
        place: Place,
        arena: torch.Tensor | None,
        device: torch.device | None = None,
    ) -> None:
        """Lay `numel` elements at a place; a symmetric place is cut from `arena`.

        On a device lies a copy of all the bytes, guards included: `upload` and `download` move it.
        """
        arena = arena if place.kind == "symmetric" else None
        self._size = oracle.itemsize(dtype)
        self._word = oracle.word_of(dtype)
        torch_dtype = getattr(torch, dtype)
        step = 2 if place.kind == "strided" else 1
        unit = 1 if place.kind in ("private", "numpy") else self._size
        start = _GUARD_BYTES + place.offset * unit
        stop = start + numel * step * self._size
        num_bytes = -(-(stop + _GUARD_BYTES) // _WORD_BYTES) * _WORD_BYTES
        if arena is None:
            self._bytes = np.empty(num_bytes, np.uint8)
        else:
            assert num_bytes <= arena.numel(), "the tests' arena is too small"
            self._bytes = arena.numpy()[:num_bytes]
        self._bytes[:] = _POISON
        self._before, inner, self._after = np.split(self._bytes, [start, stop])
        cells = inner.reshape(numel, step * self._size)
        self._cells, self._gaps = cells[:, : self._size], cells[:, self._size :]
        self._on_device: torch.Tensor | None = None
        whole: Any
        if place.kind == "device":
            self._on_device = torch.from_numpy(self._bytes).to(device, copy=True)
            whole = self._on_device[start:stop].view(torch_dtype)
        elif arena is not None:
            whole = arena[start:stop].view(torch_dtype)
        elif place.kind == "numpy":
            whole = inner.view(np.dtype(dtype))
        elif numel == 0:
            whole = torch.empty(0, dtype=torch_dtype)
        else:
            count = numel * step
            whole = torch.frombuffer(self._bytes, dtype=torch_dtype, count=count, offset=start)
        self.array = whole[::step]

    def words(self, part: slice = _ALL) -> np.ndarray:
        """Return the bits of the elements, in an array of its own."""
        return self._cells[part].flatten().view(self._word)

    def copy(self) -> np.ndarray:
        """Return all bytes, in an array of its own."""
        return self._bytes.copy()

    def equals(self, copy: np.ndarray) -> bool:
        """Return whether all bytes are those of a copy."""
        return np.array_equal(self._bytes.view(np.uint64), copy.view(np.uint64))

    def fill(self, words: np.ndarray, first: int = 0) -> None:
        """Put words in, from an element on."""
        rows = words.view(np.uint8).reshape(-1, self._size)
        self._cells[first : first + len(rows)] = rows

    def upload(self) -> None:
        """Let the device have what the bytes are now."""
        if self._on_device is not None:
            self._on_device.copy_(torch.from_numpy(self._bytes))

    def download(self) -> None:
        """Let the bytes be what the device has now."""
        if self._on_device is not None:
            torch.from_numpy(self._bytes).copy_(self._on_device)

    def put_back(self, part: slice, copy: np.ndarray) -> None:
        """Restore some elements from a copy of all bytes."""
        before = copy[len(self._before) : len(copy) - len(self._after)]
        rows = before.reshape(len(self._cells), self._size + self._gaps.shape[1])
        self._cells[part] = rows[part, : self._size]

    def spoil(self) -> None:
        """Put other bytes everywhere."""
        self._bytes[:] = _POISON ^ 0xFF

    def untouched_around(self) -> bool:
        """Return whether all bytes around the elements still hold the poison."""
        return all((part == _POISON).all() for part in (self._before, self._gaps, self._after))


class Started:
    """A call that was made on this rank, and may still be under way.

    Attributes:
        work: The library's return value: None unless `async_op`.
    """

    def __init__(
        self,
        comm: Any,
        call: Call,
        async_op: bool = False,
        start: Callable[..., Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Lay the arguments out and make the call, or leave that to `start`."""
        self._call, self._rank = call, comm.rank
        rank, world, place = comm.rank, comm.world_size, call.place(comm.rank)
        halves: tuple[torch.Tensor | None, ...] = (None, None)
        if any("symmetric" in some.kinds for some in call.places):
            halves = arena_of(comm).chunk(2)  # collective: also where this rank needs none
        num_in, num_out = call.numels(world)
        in_place = place.in_place and call.verb != "all_to_all"  # where it has no meaning
        shared = in_place or call.verb == "broadcast"
        there = place if shared else place.output or place
        num_out_here = max(num_in, num_out) if shared else num_out
        self._output = Memory(call.dtype, num_out_here, there, halves[0], device)
        self._input = (
            self._output if shared else Memory(call.dtype, num_in, place, halves[1], device)
        )
        # In place, the smaller argument is this rank's chunk of the larger one.
        first = rank * call.numel if shared and num_in != num_out else 0
        if call.gives(rank):
            self._input.fill(words_in(call, rank, world), first if num_in < num_out else 0)
        part = slice(first, first + call.numel)
        ins, outs = self._input.array, self._output.array
        self._outputs = slice(0, num_out)
        if shared and num_in < num_out:
            ins = ins[part]
        elif shared and num_out < num_in:
            outs, self._outputs = outs[part], part
        self._before = self._input.copy(), self._output.copy()
        for memory in (self._input, self._output):
            memory.upload()
        self.work = (start or make)(comm, call, ins, outs, async_op)

    def result(self) -> Result:
        """Wait if it is asynchronous; return the output's bits, and another problem if any."""
        if self.work is not None:
            self.work.wait()
        for memory in (self._input, self._output):
            memory.download()
        call, shared = self._call, self._input is self._output
        words = self._output.words(self._outputs)
        if call.gets(self._rank):
            self._output.put_back(self._outputs, self._before[1])
        problem = ""
        if not shared and not self._input.equals(self._before[0]):
            problem = "changed its input"
        elif not self._output.equals(self._before[1]):
            problem = "wrote outside its output"
        if not call.gets(self._rank):
            words = words[:0]
        for memory in (self._input, self._output):  # it is the program's again, on every rank
            memory.spoil()
        return words, problem and f"{call} on rank {self._rank} {problem}"


def split(array: Any, count: int) -> list[Any]:
    """Return equal parts of an array of one dimension."""
    numel = len(array) // count
    return [array[start : start + numel] for start in range(0, numel * count, numel or 1)] or [
        array
    ] * count


def move_by(comm: Any, call: Call, ins: Any, outs: Any) -> Any:
    """Move data by an algorithm of one's own choice, which the public functions don't offer."""
    verb, how = Verb[call.verb], {"root": call.root, "algorithm": call.algorithm}
    if call.verb == "all_gather":
        return comm.issue(CheckedCall(verb=verb, input=ins, output=outs, **how))
    if call.verb == "broadcast":
        return comm.issue(CheckedCall(verb=verb, input=ins, output=ins, **how))
    if call.verb in ("gather", "scatter"):  # a list on the root, or one tensor
        how["single"] = single = call.numel % 2 == 1
        whole = outs if call.verb == "gather" else ins
        whole = (
            None if comm.rank != call.root else whole if single else split(whole, comm.world_size)
        )
        ins, outs = (ins, whole) if call.verb == "gather" else (whole, outs)
    return comm.issue(PartsCall(verb=verb, input=ins, output=outs, **how))


_declared = cache(verbs.declared)
_parser = threading.Lock()  # Python 3.11 can't parse in several threads at a time


@cache
def forms_of(core: str) -> list[verbs.Verb]:
    """Return the declared verbs of one verb of the core; the one of plain tensors first."""
    with _parser:
        found = [one for one in _declared() if one.core == core and one.kind != "lists"]
    return sorted(found, key=lambda one: one.kind != "tensors")


def make(comm: Any, call: Call, ins: Any, outs: Any, async_op: bool = False) -> Any:
    """Hand a call to the library, or to torch where the group is torch's.

    Sizes take turns with the forms of the verb.
    """
    if call.verb in MOVES and call.algorithm != "auto":
        return move_by(comm, call, ins, outs)
    if isinstance(comm, TorchGroup):
        return make_by_torch(comm, call, ins, outs, async_op)
    forms = forms_of(call.verb)
    verb = forms[call.numel % len(forms)]
    arrays = {verb.output: outs, verb.input: ins}
    if ins is outs:
        arrays.pop("out", None)
    has_parts = {"gather": verb.output, "scatter": verb.input}.get(call.verb)
    if has_parts and comm.rank != call.root:
        arrays[has_parts] = None
    given: dict[str, Any] = {"group": comm}
    for name, array in arrays.items():
        is_list = name in verb.lists() and array is not None
        given[name] = split(array, comm.world_size) if is_list else array
    if call.verb in REDUCTIONS:
        given["op"] = getattr(fastcoll.ReduceOp, call.op)
    if call.verb in ROOTED:
        given["dst" if call.verb in ("gather", "reduce") else "src"] = call.root
    # Defaults are left out: given arguments take a slower way through the library.
    options = {"algorithm": "auto", "numerics": None}
    given |= {
        name: getattr(call, name) for name, usual in options.items() if getattr(call, name) != usual
    }
    given |= {"async_op": True} if async_op else {}
    # By place as far as all before is given.
    by_place = (one.name for one in verb.arguments if not one.by_name_only)
    places = [*itertools.takewhile(given.__contains__, by_place)]
    return getattr(fastcoll, verb.name)(*[given.pop(name) for name in places], **given)


def make_plain(group: Any, call: Call, async_op: bool = False) -> Any:
    """Make a call with ones; BARRIER is a barrier."""
    if call == BARRIER:
        return group.barrier()
    num_in, num_out = call.numels(group.world_size)
    ins = torch.ones(num_in, dtype=getattr(torch, call.dtype))
    in_place = call.verb in ("all_reduce", "reduce", "broadcast")
    return make(group, call, ins, ins if in_place else ins.new_ones(num_out), async_op)


def make_by_torch(comm: TorchGroup, call: Call, ins: Any, outs: Any, async_op: bool) -> Any:
    """Hand a call to torch; calls of an odd size take lists of parts, where there are two forms."""
    root, op, has_parts = call.root, getattr(dist.ReduceOp, call.op), call.verb in PARTED
    parts_in, parts_out = (split(one, comm.world_size) if has_parts else [] for one in (ins, outs))
    at_root = comm.rank == root
    forms: dict[str, list[tuple[Callable[..., Any], tuple[Any, ...]]]] = {
        "all_reduce": [(dist.all_reduce, (ins, op))],
        "reduce": [(dist.reduce, (ins, root, op))],
        "broadcast": [(dist.broadcast, (ins, root))],
        "reduce_scatter": [
            (dist.reduce_scatter_tensor, (outs, ins, op)),
            (dist.reduce_scatter, (outs, parts_in, op)),
        ],
        "all_gather": [
            (dist.all_gather_into_tensor, (outs, ins)),
            (dist.all_gather, (parts_out, ins)),
        ],
        "all_to_all": [
            (dist.all_to_all_single, (outs, ins)),
            (dist.all_to_all, (parts_out, parts_in)),
        ],
        "gather": [(dist.gather, (ins, parts_out if at_root else None, root))],
        "scatter": [(dist.scatter, (outs, parts_in if at_root else None, root))],
    }
    function, arguments = forms[call.verb][-(call.numel % 2)]
    return function(*arguments, group=comm.group, async_op=async_op)
