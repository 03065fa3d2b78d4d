# SPDX-License-Identifier: Apache-2.0
"""A group of ranks on several nodes: from a user's call to its phases.

Decides the phases of a call. Must not know default groups, nor how a node runs its part.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.distributed import PrefixStore, Store

from fastcoll.bootstrap.exchange import BytesExchange
from fastcoll.bootstrap.node_map import Seat
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.group_calls import AnyCall, AnyOperands, CheckedCall, GpuCall
from fastcoll.calls.lists import ListOperands
from fastcoll.calls.modes import hidden_from_modes
from fastcoll.calls.parts import PartsOperands
from fastcoll.calls.recorder import VerbStats
from fastcoll.calls.settings import Settings
from fastcoll.calls.sites import tracing
from fastcoll.calls.tensors import Operands, checked_rank
from fastcoll.calls.work import CallQueue, Work
from fastcoll.errors import (
    AbortedError,
    CollectiveTimeout,
    DesyncError,
    DriverError,
    FastcollError,
    PeerLostError,
    UsageError,
)
from fastcoll.nodes.arguments import (
    Arguments,
    by_carrier,
    carry_out,
    check_options,
    gather_in_call,
    wire_of,
)
from fastcoll.nodes.carriers import maker_of
from fastcoll.nodes.gpus.group import NodeGpus, Parts
from fastcoll.nodes.lanes import Lanes
from fastcoll.nodes.making import make_lanes
from fastcoll.nodes.packets import Header
from fastcoll.nodes.survivors import agree, report_node
from fastcoll.nodes.symmetric import agreed
from fastcoll.nodes.transfers.channels import Ends
from fastcoll.nodes.transfers.transfers import NodeTransfers
from fastcoll.nodes.verdict.board import Board
from fastcoll.nodes.verdict.doors import Door
from fastcoll.nodes.verdict.lookout import Lookout
from fastcoll.nodes.verdict.wait_chain import Waits
from fastcoll.nodes.verdict.watch import Watch, ignore_errors
from fastcoll.text import error_in_words
from fastcoll.types import ITEMSIZE

_inherited: list[object] = []  # groups that a forked child has closed; gone with the process


class HierarchicalCommunicator(BaseGroup):
    """A group of ranks on several nodes. Made by `fastcoll.init` or `new_group`, like any other.

    Has the verbs of a `Communicator`. A send to another node is over when it is received. Tensors
    on GPUs are sent and received through the host (see `fastcoll.send`). Sums go over the ranks of
    a node, then over the nodes. Between nodes `numerics` is "same_bits" by default, but for SUM and
    PRODUCT of half types. The carrier reduces these, and the error is bounded for up to 8 nodes,
    where nothing overflows or becomes subnormal. With m nodes the bounds are:

    - A sum is within (m + 1) u (|x_0| + |x_1| + ...) of the exact one.
    - A product is within 2 m u |x_0 x_1 ...| of it.
    - Here u is 2^-11 for float16 and 2^-8 for bfloat16.

    With `numerics="fast"`, the default on GPUs in groups of torch.distributed, float32 and float64
    have these bounds over n ranks:

    - A sum is within n u (|x_0| + |x_1| + ...) of the exact one.
    - A product is within n u |x_0 x_1 ...| of it.
    - Here u is 2^-24 for float32 and 2^-53 for float64.

    Messages that fit into a packet, an AVG of half types, MIN and MAX have the same bits anyway.
    MPI has no half types: there these go as bytes, and have the same bits too.
    """

    _transfers: NodeTransfers

    def __init__(
        self, name: str, settings: Settings, seat: Seat, node_group: BaseGroup, store: Store | None
    ) -> None:
        if store is None:
            raise UsageError("a group over several nodes needs a store that all ranks can reach")
        self._seat, self.node_map = seat, seat.node_map
        self._name, self._settings = name, settings
        self._rank = rank = seat.rank
        self._traces = tracing()
        self._node_group = node_group
        self._store = store
        self._sequence = 0
        self._stats: dict[str, VerbStats] = {}
        self._lock = threading.RLock()  # held by a call while it waits
        self._counting, self._closing = threading.RLock(), threading.Lock()
        self._queue = CallQueue(self)
        self._own_store = own = PrefixStore(f"fastcoll/{seat.nonce}", store)
        self._board = board = Board(store, seat.nonce, settings.making_s)
        self._door = door = Door(board, rank)
        self._watch = Watch(name, seat, node_group, board, door)
        self._attend = self._watch.attendance.taken
        make = maker_of(settings.carrier)
        with hidden_from_modes():
            carriers = make_lanes(make, own, seat, node_group, board, settings.making_s)
            self._lanes = Lanes(seat.node_map, rank, node_group, carriers, self._watch)
        lookout = partial(Lookout, seat, board, self._watch, self._lanes.has_lost, door)
        ends = Ends(seat, make, own, board, self._watch, Waits(board, rank), settings, lookout)
        self._transfers = NodeTransfers(ends, node_group)
        self._gpus: NodeGpus | None = None  # until the first call with a tensor there

    @property
    def name(self) -> str:
        """The group's name, the same on all ranks."""
        return self._name

    @property
    def traces(self) -> bool:
        return self._traces

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.node_map.places)

    # ---- calls -----------------------------------------------------------------------------------

    def _checked(self, call: AnyCall) -> Sequence[AnyOperands]:
        self._watch.refuse_child()
        self._refuse_closed(self._closing.locked())
        check_options(call)
        return super()._checked(call)

    def _prepared(self, calls: Sequence[CheckedCall]) -> Callable[[], None]:
        def run() -> None:
            for call, operands in calls:
                self._count(call.verb.name, operands.numel * ITEMSIZE[operands.dtype])
                with self._lock:  # of a list all, or none
                    if isinstance(operands, ListOperands):  # its tensors go one by one
                        for one in operands.tensors:
                            self._run(call, one, operands.splits)
                    else:
                        self._run(call, operands)

        return run

    def _count(self, verb: str, num_bytes: int) -> None:
        with self._counting:
            old = self._stats.get(verb, VerbStats(0, 0, None))
            self._stats[verb] = VerbStats(old.calls + 1, old.num_bytes + num_bytes, None)

    def _issue_on_gpus(self, calls: Sequence[GpuCall], async_op: bool) -> Work | None:
        self.check()
        if self._gpus is None:
            parts = Parts(
                self, self._lanes, self._node_group, self._watch, self._own_store, self._settings
            )
            self._gpus = NodeGpus(parts, calls[0][1].device)
        return self._gpus.issue(calls, async_op)

    def refuse_handler(self) -> None:
        self._watch.refuse_handler()

    def in_turn(self, task: Callable[[int], None]) -> None:
        """Do something that is a call to the other nodes, without waiting for it.

        `task` is given the call's number; it comes behind asynchronous calls that are queued.
        """

        def run() -> None:
            with self._lock:
                self.check_host()
                self._sequence += 1
                task(self._sequence)

        if self._queue.idle():
            run()
        else:
            self._queue.submit(run, [])

    def idle(self) -> bool:
        """Return whether no call is queued; part of the queue's interface."""
        return not self._queue.has_calls()

    def async_begin(self) -> None:
        """Part of the queue's interface: it knows its calls, and nothing is queued elsewhere."""

    async_end = await_native = async_begin

    def _run(self, call: AnyCall, operands: Operands | PartsOperands, of_list: int = 0) -> None:
        self.refuse_handler()
        with self._lock, self._watch.listening():
            self.check_host()
            self._sequence += 1
            what = operands.numel, operands.root, operands.splits
            header = Header(
                self._sequence,
                call.verb,
                operands.dtype,
                operands.op,
                *what,
                by_carrier(call, operands, self._settings, self._lanes),
                wire=wire_of(operands),
                of_list=of_list,
            )
            self._watch.begin(self._sequence, call.verb.name)
            limit_s = self._settings.limit_of(call.timeout_s)
            memory: list[object] = [operands]
            try:
                self._lanes.begin(limit_s)
                memory.append(arguments := Arguments(operands, call.verb, self.world_size))
                carry_out(
                    self._lanes,
                    header,
                    arguments,
                    limit_s,
                    self._settings.numerics_of(call.numerics),
                    partial(gather_in_call, self._lanes),
                )
            except FastcollError as error:
                self._lanes.give_up(memory)
                raise self._watch.fail(error) from error
            except BaseException as error:
                self._lanes.give_up(memory)
                gave_up = f"rank {self.rank} gave up {header.describe()}: {error_in_words(error)}"
                self._watch.fail(PeerLostError(gave_up, [self.rank]))
                raise

    def stats(self) -> dict[str, VerbStats]:
        self._refuse_closed()
        with self._counting:
            return dict(self._stats)

    def check(self) -> None:
        self.check_host()
        if self._gpus is not None:
            self._gpus.check_node_group()

    def check_host(self) -> None:
        """Raise the error that broke the group, as far as the CPU knows it."""
        self._watch.refuse_child()
        self._refuse_closed()
        if self._watch.error is not None:
            raise self._watch.error

    def abort(self, reason: str | None = None) -> None:
        """End the group from any thread, with one verdict for all ranks; see `Communicator.abort`.

        Ranks of other nodes learn of it in their next wait of more than a moment.
        """
        self._refuse_closed()
        text = (
            f'group "{self.name}" was aborted by rank {self.rank} of {self.world_size}: '
            f"{reason or 'no reason given'}"
        )
        self._watch.fail(AbortedError(text, [self.rank]))
        if self._gpus is not None:
            self._gpus.stop()

    def set_limit(self, limit_s: float) -> None:
        self._refuse_closed()
        self._node_group.set_timeout(limit_s)

    def _refuse_closed(self, is_closing: bool = False) -> None:
        if self._closed or is_closing or sys.is_finalizing():  # by then torch makes no tensors
            raise UsageError(f'group "{self.name}" was destroyed')

    # ---- memory and groups -----------------------------------------------------------------------

    def empty(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ) -> torch.Tensor:
        """See `fastcoll.empty`; the tensor is shared by the ranks of this node.

        All ranks hear of a node that has no room, in one small all_gather over all of them.
        """
        self.check_host()
        made: torch.Tensor | None = None
        problem: DesyncError | DriverError | None = None
        try:
            with self._watch.listening():
                made = self._node_group.empty(*size, dtype=dtype, device=device)
            num_bytes = made.nbytes
        except FastcollError as error:
            self._check_node_group(error)
            if not isinstance(error, DesyncError | DriverError):
                raise  # its arguments: no other rank knows of this call
            problem = error
            num_bytes = torch.empty(*size, dtype=dtype, device="meta").nbytes  # type: ignore[arg-type]
        return agreed(made, problem, num_bytes, self.node_map, self.gather_words, self.gather_bytes)

    def _check_node_group(self, error: FastcollError) -> None:
        """Raise the verdict if an error broke this node's part of the group."""
        try:
            self._node_group.check()
        except FastcollError as broken:
            raise self._watch.fail(self._watch.of_node(broken)) from error

    def peer_is_gone(self, peer: int) -> bool:
        """Return whether a rank of this node ended or left; False of those on other nodes."""
        node, local_rank = self.node_map.places[checked_rank(peer, "peer", self.world_size)]
        is_here = node == self.node_map.places[self.rank][0]
        return is_here and self._node_group.peer_is_gone(local_rank)

    def _exchange(self) -> BytesExchange:
        exchange = BytesExchange(self, self._store)
        exchange.node_map = self.node_map
        return exchange

    def shrink(self, *, timeout_s: float | None = None) -> BaseGroup:
        """See `fastcoll.shrink`; this group is closed, also if this raises.

        The ranks of each node agree first, then the nodes over the store, which must have survived.
        A node with a rank that the error named is waited for 5 s at most, unless a rank of it
        comes. Where the survivors are on one node their group is a `Communicator`.
        """
        self._watch.refuse_child()
        self._refuse_closed()
        return super().shrink(timeout_s=timeout_s)

    def _of_survivors(self, limit_s: float) -> BaseGroup:
        report_node(self._board, self.node_map.places[self.rank][0])
        node_group = self._node_group.shrink(timeout_s=limit_s)
        try:
            return self._joined(node_group, limit_s)
        except BaseException:
            node_group.close()
            raise

    def _joined(self, node_group: BaseGroup, limit_s: float) -> BaseGroup:
        """Return the group of all ranks that are left; `node_group` has those of this node."""
        error = self._watch.error
        lost = error.ranks if isinstance(error, CollectiveTimeout | PeerLostError) else ()
        found = agree(self._board, self.node_map, self.rank, node_group, lost, limit_s)
        seat = found.seat(self._seat)
        if seat.node_map.num_nodes == 1:
            return node_group
        group = HierarchicalCommunicator(
            self._name_after_shrink(),
            self._settings.made_within(limit_s),
            seat,
            node_group,
            self._store,
        )
        group._num_shrinks = self._num_shrinks + 1
        return group

    # ---- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._closed:
            return
        if self._watch.is_inherited:
            self._closed = True
            self._lanes.abandon()  # in a child Gloo's end would wait for threads it has not
            _inherited.append(self)
        else:
            self.refuse_handler()
            self._leave()
        if self.on_close is not None:
            self.on_close()

    def _leave(self) -> None:
        self._queue.join()
        if self._gpus is not None:
            self._gpus.close()
        if not self._closing.acquire(blocking=False):
            return  # another thread closes it
        try:
            self._transfers.close()
            if self._watch.error is None:
                with self._lock:  # behind the calls of other threads, as on one node
                    self._closed = True
        except BaseException:  # a signal's, in the wait
            self._closing.release()
            raise
        self._closed, is_broken = True, self._watch.error is not None
        self._lanes.close(is_broken=is_broken, is_in_use=self._watch.is_in_call)
        self._door.close()
        self._watch.close()
        ignore_errors(self._node_group.close)

    def _where(self) -> str:
        return f" on {self.node_map.num_nodes} nodes"
