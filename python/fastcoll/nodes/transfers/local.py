# SPDX-License-Identifier: Apache-2.0
"""Sends and receives within a node, of a group over several nodes.

Decides the facts that the whole group is told: the peers of its waits, and its errors, with the
group's numbers of the ranks. Must not know of other nodes' transfers.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from fastcoll.calls.transfer_work import (
    LONG_S,
    OnGpus,
    StridedTransferWork,
    Transfers,
    TransferWork,
    post,
)
from fastcoll.calls.transfers import ANY, Transfer
from fastcoll.calls.work import limit_of_wait
from fastcoll.errors import CollectiveTimeout, FastcollError, UsageError
from fastcoll.nodes.transfers.channels import Ends
from fastcoll.nodes.verdict.wait_chain import CYCLE

_Timeout = float | timedelta | None


class _LocalTransfer(TransferWork):
    """The common base of the transfers within a node."""

    __slots__ = ()
    _transfer: Transfer
    _transfers: "LocalTransfers"

    def wait(self, timeout: _Timeout = None) -> bool:
        return self._transfers.waited(self, self._transfer, super().wait, timeout)

    def source_rank(self) -> int:
        """Return the group rank of the sender of a complete receive."""
        return self._transfers.ranks[super().source_rank()]


class LocalWork(_LocalTransfer):
    """A transfer within a node."""

    __slots__ = ("_transfer", "_transfers")


class StridedLocalWork(_LocalTransfer, StridedTransferWork):
    """A transfer within a node of a strided tensor."""

    __slots__ = ("_transfer", "_transfers")


class LocalTransfers(Transfers):
    """The transfers of one node's ranks; `ranks` are their numbers in the whole group."""

    def __init__(self, node_group: Any, on_gpus: OnGpus, ranks: Sequence[int], ends: Ends) -> None:
        super().__init__(node_group, on_gpus)
        self.ranks = ranks
        self._ends = ends
        self._watch = ends.watch
        self._waits = ends.waits

    def post(self, transfer: Transfer) -> TransferWork:
        try:
            work = post(self._group, transfer, LocalWork, StridedLocalWork)
        except FastcollError as error:
            raise self._verdict(error) from error
        except BaseException as error:
            self._give_up(transfer, error)
            raise
        assert isinstance(work, _LocalTransfer)
        work._transfer, work._transfers = transfer, self
        return work

    def waited(
        self,
        work: TransferWork,
        transfer: Transfer,
        wait: Callable[[_Timeout], bool],
        timeout: _Timeout,
    ) -> bool:
        """Wait for one of them; if that takes long, tell the group, and listen to it."""
        try:
            if limit_of_wait(timeout) or transfer.peer == ANY or work._wait_for(LONG_S):
                return wait(timeout)
            with self._waits.announced(self.ranks[transfer.peer], transfer.sends):
                while not work._wait_for(LONG_S):
                    if verdict := self._watch.verdict_to_raise():
                        raise self._watch.fail(verdict)
                return wait(None)
        except FastcollError as error:
            raise self._verdict(error) from error
        except BaseException as error:
            self._give_up(transfer, error)
            raise

    def _give_up(self, transfer: Transfer, error: BaseException) -> None:
        peer = ANY if transfer.peer == ANY else self.ranks[transfer.peer]
        self._ends.give_up(self._ends.name(transfer.sends, peer, transfer.tag), error)

    def _verdict(self, error: FastcollError) -> FastcollError:
        """Return the whole group's error for an error of the node, which ends the group."""
        try:
            self._group.check()
        except UsageError:  # it is closed
            return error
        except FastcollError as broken:
            found = self._watch.of_node(broken, "transfer")
            # The node tells of a cycle in it; a chain may go on in other nodes.
            is_cycle = CYCLE in str(found)
            if isinstance(found, CollectiveTimeout) and len(found.ranks) == 1 and not is_cycle:
                told, rank = self._waits.follow(found.ranks[0])
                found = CollectiveTimeout(f"{found}{told}", [rank])
            return self._watch.fail(found)
        return error
