# SPDX-License-Identifier: Apache-2.0
"""Receives from any rank in a group over several nodes.

Such a receive is posted in the node. It also polls the channel of every rank of another node that
has begun to send with its tag. Senders write on the board that they begin with a carrier. The first
message decides. If it comes from another node, the receive is withdrawn from the node, unless it
has a message there.
"""

import time
from collections.abc import Callable
from functools import partial

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.calls.transfer_work import TransferBetween, TransferWork
from fastcoll.calls.transfers import ANY, Transfer
from fastcoll.errors import CollectiveTimeout, FastcollError
from fastcoll.nodes.transfers.channels import Channel, Ends, InOrder, senders_key
from fastcoll.nodes.transfers.turns import Turns
from fastcoll.nodes.verdict.backoff import FIRST_PAUSE_S, LONGEST_PAUSE_S, LOOK_EVERY_S
from fastcoll.nodes.verdict.lookout import Lookout
from fastcoll.nodes.verdict.watch import ignore_errors

_FIRST_LOOK_S = 1e-3


class AnySource(InOrder):
    """The receives from any rank with one tag."""

    def __init__(
        self, ends: Ends, tag: int, turns: Turns, channel: Callable[[Transfer, int], Channel]
    ) -> None:
        """Make the queue; `channel` returns the channel on which a rank sends."""
        super().__init__(ends)
        self._key = senders_key(ends.seat.rank, tag)
        self._turns = turns
        self._channel = channel
        self._num_told = 0
        self._channels: list[Channel] = []  # the next one to be asked first

    def start(self, receive: Transfer, post: Callable[[], TransferWork]) -> TransferBetween:
        """Queue a receive; `post` makes it one of the node's too."""
        local: list[TransferWork] = []
        on_interrupt = partial(self._ends.give_up, self._name(receive))
        work = TransferBetween(lambda: self._run(receive, local[0]), receive, on_interrupt)
        try:
            with self._turns.starting:
                self._turns.enter(receive)
                local.append(post())
                self._queue.put(work)
        except BaseException as error:
            # There is no thread, or a signal handler raised it: the next receive gets the message.
            if self._queue.take_back(work, error) or work.is_completed():
                self._turns.leave(receive)
                for posted in local:
                    ignore_errors(posted.withdraw)
            raise
        return work

    def _run(self, receive: Transfer, local: TransferWork) -> int:
        deadline = self._ends.deadline(receive)
        try:
            with self._ends.lookout() as lookout:
                channel = self._first(receive, local, deadline, lookout)
            if channel is None:
                return self._from_node(receive, local, deadline)
            channel.carry_out(receive, deadline=deadline)
            return channel.peer
        except Exception as error:
            ignore_errors(local.withdraw)  # nothing is written to the user's memory from here on
            self._fail(self._name(receive), error)
            raise
        finally:
            self._turns.leave(receive)

    def _from_node(self, receive: Transfer, local: TransferWork, deadline: Deadline) -> int:
        try:
            local.wait(max(deadline.left_s(), 0.001))
        except FastcollError as error:
            if local.is_completed():
                raise
            raise self._late(receive, deadline) from error
        return local.source_rank()

    def _first(
        self, receive: Transfer, local: TransferWork, deadline: Deadline, lookout: Lookout
    ) -> Channel | None:
        """Wait for the first message; return its channel, None if it is the node's."""
        pause_s, look_s, next_look = FIRST_PAUSE_S, _FIRST_LOOK_S, 0.0
        others = self._others()
        while True:
            # First: a rank that is gone may have sent a message in this node before.
            are_gone = lookout.are_gone(others)
            if local.is_completed():
                return None
            if are_gone:
                raise lookout.error(self._name(receive), others)
            if (now := time.monotonic()) >= next_look:
                self._check()
                self._find_senders(receive)
                next_look, look_s = now + look_s, min(2 * look_s, LOOK_EVERY_S)
            for channel in self._channels:
                if self._turns.is_next(receive, channel.peer) and channel.is_offered(deadline):
                    if not local.withdraw():
                        return None
                    self._channels.remove(channel)
                    self._channels.append(channel)
                    return channel
            if deadline.passed():
                raise self._late(receive, deadline)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _find_senders(self, receive: Transfer) -> None:
        for text in self._ends.board.appended(self._key, self._num_told):
            self._num_told += 1
            channel = self._channel(receive, int(text))
            if channel.num_begun == 0:
                self._channels.append(channel)
            channel.num_begun += 1

    def _late(self, receive: Transfer, deadline: Deadline) -> FastcollError:
        return self._ends.watch.await_verdict() or CollectiveTimeout(
            f"{self._name(receive)} waited {deadline.limit_s:g} s for a message", self._others()
        )

    def _others(self) -> list[int]:
        seat = self._ends.seat
        return [rank for rank in range(len(seat.node_map.places)) if rank != seat.rank]

    def _name(self, receive: Transfer) -> str:
        return self._ends.name(False, ANY, receive.tag)
