# SPDX-License-Identifier: Apache-2.0
"""A group's calls: from a user's call to its start.

Decides whether a call runs at once or in the queue, and which calls start together. Some verbs
consist of several calls: decides which. Must not know how a call is carried out.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TypeAlias, TypeVar, cast

import numpy as np
import torch

from fastcoll.calls.arrays import Array, count_writes
from fastcoll.calls.lists import ListCall, ListOperands, check_list
from fastcoll.calls.methods import VerbMethods
from fastcoll.calls.modes import hidden_from_modes
from fastcoll.calls.parts import PartsCall, PartsOperands, check_parts, cut
from fastcoll.calls.sites import at_call_site
from fastcoll.calls.tensors import Call, Operands, check
from fastcoll.calls.transfer_work import AnyTransferWork, Transfers
from fastcoll.calls.transfers import TransferCall
from fastcoll.calls.work import CallQueue, Work
from fastcoll.errors import FastcollError, UsageError
from fastcoll.memory.region import agree
from fastcoll.types import Verb

T = TypeVar("T")
AnyCall: TypeAlias = Call | PartsCall | ListCall
AnyOperands: TypeAlias = Operands | PartsOperands | ListOperands
# A call with its checked arguments, or with a part of them.
CheckedCall: TypeAlias = tuple[AnyCall, AnyOperands]
GpuCall: TypeAlias = tuple[AnyCall, Operands | PartsOperands]
# Smaller memory is allocated without a question to the others.
_ASKED_BYTES = 1 << 20


class GroupCalls(VerbMethods):
    """A group that carries out checked calls."""

    _transfers: Transfers
    _queue: CallQueue

    @property
    def traces(self) -> bool:
        """Whether the site of every call is noted."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The group's name, the same on all ranks."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        raise NotImplementedError

    def transfer(self, call: TransferCall) -> int:
        """Carry out a send or receive that is not on the C++ fast path; return the peer."""
        with hidden_from_modes():
            return self._transfers.run(call)

    def start_transfers(self, calls: Sequence[TransferCall]) -> list[AnyTransferWork]:
        """Start sends and receives that are not on the C++ fast path."""
        with hidden_from_modes():
            return self._transfers.start(calls)

    def issue(self, call: AnyCall) -> Work | None:
        """Check and start a call; every call that is not on the C++ fast path comes here."""
        return self.issue_all((call,), call.async_op)

    def issue_all(self, calls: Iterable[AnyCall], async_op: bool) -> Work | None:
        """Check several calls, then start them as one: all of them, or none at all."""
        checked = [(call, operands) for call in calls for operands in self._checked(call)]
        on_gpus = [
            (call, operands)
            for call, operands in checked
            if not isinstance(operands, ListOperands) and operands.device >= 0
        ]
        if 0 < len(on_gpus) < len(checked):
            raise UsageError("tensors on CPUs and on GPUs in one list: make two calls of them")
        for _, one in on_gpus:
            if isinstance(one, Operands):
                one.make_ready()  # a rank that compiles is late, so before it is waited for
        start = None if on_gpus else self._prepared(checked)
        count_writes(array for _, operands in checked for array in operands.written())
        if start is None:
            with hidden_from_modes():
                return self._issue_on_gpus(on_gpus, async_op)
        if self.traces:
            start = at_call_site(start)
        if not async_op and self._queue.idle():
            with hidden_from_modes():
                start()
            return None
        self.refuse_handler()  # its wait would be for itself
        names = dict.fromkeys(call.verb.name for call, _ in checked)
        what = f'{", ".join(names)} in group "{self.name}"'
        work = self._queue.submit(start, _outputs_of(checked), what)
        if async_op:
            return work
        work.wait()
        return None

    def issue_steps(
        self, steps: Callable[[], None], outputs: list[Array], name: str, async_op: bool
    ) -> Work | None:
        """Start a call that consists of several ones, which `steps` makes one by one."""
        if not async_op:
            steps()
            return None
        self.refuse_handler()
        infers, has_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> None:  # as in this thread
            with torch.inference_mode(infers), torch.set_grad_enabled(has_grad):
                steps()

        return self._queue.submit(run, outputs, f'{name} in group "{self.name}"')

    def prepare_call(self, call: Call) -> None:
        """Compile what follows a reduction, on every rank or on none. Collective.

        Raises:
            UsageError: A rank can't compile it; on all of them.
        """
        problem, operands = "", check(call, self.rank, self.world_size)
        try:
            operands.make_ready()
        except FastcollError as error:
            problem = str(error)
        told = enumerate(self.gather_bytes(problem.encode()))
        if failed := [f"rank {rank}: {text.decode()}" for rank, text in told if text]:
            raise UsageError(f"not every rank is ready for the call: {'; '.join(failed)}")

    def _checked(self, call: AnyCall) -> Sequence[AnyOperands]:
        """Check a call; return its arguments, several of a list."""
        if isinstance(call, Call):
            return [check(call, self.rank, self.world_size)]
        if isinstance(call, PartsCall):
            return [check_parts(call, self.rank, self.world_size)]
        return check_list(call, self.rank, self.world_size)

    def _prepared(self, calls: Sequence[CheckedCall]) -> Callable[[], None]:
        """Return a function that carries out calls on CPUs, one after the other, when called."""
        raise NotImplementedError

    def _issue_on_gpus(self, calls: Sequence[GpuCall], async_op: bool) -> Work | None:
        """Start calls on GPUs as one."""
        raise NotImplementedError

    def refuse_handler(self) -> None:
        """Raise UsageError in a signal handler that has interrupted a call of this group."""

    def gather_words(self, words: list[int], limit_s: float | None = None) -> list[list[int]]:
        """Gather integers from all ranks, within the group's limit or another one. Collective."""
        rows = np.empty((self.world_size, len(words)), dtype=np.int64)
        self.all_gather_into_tensor(rows, np.array(words, np.int64), timeout_s=limit_s)
        result: list[list[int]] = rows.tolist()
        return result

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Gather bytes from all ranks."""
        raise NotImplementedError

    def allocated(self, make: Callable[[], T], num_bytes: int) -> T:
        """Make room for a call's incoming data, on every rank or on none.

        Collective if `num_bytes`, which all ranks know, is large: a rank without memory tells the
        others, before they wait for it.

        Raises:
            DriverError: A rank has no memory for it; on all of them.
        """
        if num_bytes < _ASKED_BYTES:
            return make()
        made: list[T] = []
        problem = ""
        try:
            made.append(make())
        except (MemoryError, RuntimeError) as error:  # of Python, and of torch
            problem = str(error) or "it has not enough memory"
        agree(problem, f"no room for the {num_bytes} bytes that all ranks give", self.gather_bytes)
        return made[0]

    def issue_reduce_scatter(self, call: PartsCall) -> Work | None:
        """Start the reduce_scatter of a list; of unequal parts, as a reduce for each rank."""
        parts = call.input if isinstance(call.input, list | tuple) else ()
        sizes = {tuple(part.shape) for part in parts if hasattr(part, "shape")}
        if len(sizes) < 2 or len(parts) != self.world_size:
            return self.issue(call)
        calls = (
            Call(
                verb=Verb.reduce,
                input=part,
                output=cast(Array, call.output),
                op=call.op,
                root=root,
                algorithm=call.algorithm,
                numerics=call.numerics,
                timeout_s=call.timeout_s,
            )
            for root, part in enumerate(parts)
        )
        return self.issue_all(calls, call.async_op)

    def output_for(
        self,
        input: Array,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        async_op: bool,
        timeout_s: float | None,
    ) -> tuple[torch.Tensor, list[int]]:
        """Gather the sizes of the others' inputs; return an output for them, and its splits.

        Part of all_to_all_single. Collective.
        """
        if input_splits is None or output_splits is not None or async_op:
            raise UsageError(
                "all_to_all_single without an output needs input_split_sizes on every rank, no "
                "output_split_sizes and no async_op"
            )
        if not isinstance(input, torch.Tensor) or input.dim() == 0:
            raise UsageError(
                "all_to_all_single without an output needs a tensor with rows as input"
            )
        cut(input, "input", input_splits, self.world_size)  # before the others hear of the call
        rows = self.gather_words(list(input_splits), timeout_s)
        splits = [row[self.rank] for row in rows]
        shape = (sum(splits), *input.shape[1:])
        num_bytes = sum(map(sum, rows)) * prod(shape[1:]) * input.element_size()
        return self.allocated(lambda: input.new_empty(shape), num_bytes), splits


def _outputs_of(calls: Sequence[CheckedCall]) -> list[Array]:
    """Return the arrays that hold the results, in the order of the user's lists."""
    outputs: list[Array] = []
    before: AnyCall | None = None
    for call, operands in calls:
        if not isinstance(call, ListCall):
            outputs += operands.outputs()
        elif call is not before:  # the first part of a list
            outputs += call.outputs
        before = call
    return outputs
