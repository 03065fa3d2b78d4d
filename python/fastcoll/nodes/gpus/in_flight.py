# SPDX-License-Identifier: Apache-2.0
"""Calls on GPUs whose transfers between nodes are in flight: a thread watches them.

Streams wait for the transfers; the host of a call never waits. Decides when such a call is over,
late, or different from the call on other nodes, and how it is ended then. Must not know the data.

NCCL compares nothing and waits for ever. So with each call the ranks of a lane send each other its
header, on the CPUs' carrier and beside the data. A thread compares the headers. A different call
ends in a `DesyncError`. A late transfer ends in a `CollectiveTimeout` that names the nodes which do
not wait in it. Both end NCCL and this node's kernels; the board tells the other nodes. In a graph
this covers the capture only: replays send no headers, and their transfers have no limit.
"""

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.errors import FastcollError
from fastcoll.nodes.carriers.carrier import Carrier, Started
from fastcoll.nodes.packets import Packets
from fastcoll.nodes.verdict.watch import Watch, ignore_errors

# Between two looks at the calls. A call that takes longer says so on the board, and looks there.
_LOOK_S = 0.1
_POLL_S = 0.001


class CallInFlight:
    """A call on GPUs from its start until its transfers are over."""

    def __init__(self, verb: str, limit_s: float, began: Any) -> None:
        """Note a call; `began` is an event of its stream, None in a capture: nothing runs then."""
        self.verb = verb
        self.sequence = 0
        self.transfers: list[Started] = []
        self.packets: list[Packets] | None = None  # None: the other nodes were not told yet
        self.is_issued = False
        self.about: Watch | None = None  # speaks of the call, which says that it takes long
        self.deadline: Deadline | None = None
        self._limit_s = limit_s
        self._began = began
        self._lock = threading.Lock()

    def is_agreed(self) -> bool:
        """Return whether the headers of all other nodes have arrived and name the same call.

        Raises:
            DesyncError: One names another call.
            RuntimeError: The carrier failed.
        """
        with self._lock:
            while self.packets and self.packets[-1].transfer.is_completed():
                packets = self.packets.pop()
                packets.transfer.wait()
                packets.contents()
            return self.packets == []

    def is_over(self) -> bool:
        if self.deadline is None and (self._began is None or self._began.query()):
            self.deadline = Deadline(self._limit_s)  # its own: earlier work of the stream is done
        running = [one for one in self.transfers if not one.is_completed()]
        return self.is_agreed() and self.is_issued and not running


class CallsInFlight:
    """The calls of one rank; `Lanes` waits through it."""

    def __init__(
        self,
        watch: Watch,
        carriers: Sequence[Carrier],
        is_capturing: Callable[[], bool],
        enter_thread: Callable[[], None],
    ) -> None:
        """Watch over transfers of some carriers.

        Args:
            watch: Decides the group's verdict.
            carriers: Of this rank's lanes, on its GPU.
            is_capturing: Whether the current stream is.
            enter_thread: The thread's first call, so that it may ask about events.
        """
        self._watch = watch
        self._carriers = carriers
        self._is_capturing = is_capturing
        self._enter_thread = enter_thread
        self._current: CallInFlight | None = None
        self._calls: list[CallInFlight] = []
        # Not all nodes have answered; their packets wait.
        self._in_doubt: deque[CallInFlight] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    # ---- for the call ----------------------------------------------------------------------------

    def begin(self, call: CallInFlight) -> None:
        """Start a call: transfers given to `wait` from here on belong to it.

        Raises:
            FastcollError: An earlier call was another one on other nodes.
        """
        earlier = self._current
        try:
            while self._in_doubt and (earlier := self._in_doubt[0]).is_agreed():
                self._in_doubt.popleft()
        except FastcollError as error:
            raise self.fail(error) from error
        except RuntimeError as error:
            raise self.fail(self._about(earlier).broken(str(error))) from error
        self._current = call
        self._in_doubt.append(call)
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run_watcher, name="fastcoll-in-flight", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    raise FastcollError(f"no thread to watch the transfers: {error}") from error
                self._thread = thread
            self._calls.append(call)
            self._changed.notify()

    def wait(
        self, transfers: Sequence[Started], deadline: Deadline, behind: Iterable[Started] = ()
    ) -> None:
        """Let the current stream wait for transfers."""
        del deadline, behind  # the thread sees to them
        for transfer in transfers:
            try:
                transfer.wait()
            except RuntimeError as error:
                raise self._about(self._current).broken(str(error)) from error
            if self._current is not None and not self._is_capturing():
                self._current.transfers.append(transfer)

    def of_node(self, error: FastcollError) -> FastcollError:
        return self._about(self._current).of_node(error)

    # ---- from outside ----------------------------------------------------------------------------

    def _run_watcher(self) -> None:
        try:
            self._watch_calls()
        except BaseException as error:
            self.fail(FastcollError(f"the thread that watches the transfers ended: {error!r}"))
            raise

    def _watch_calls(self) -> None:
        self._enter_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._is_closed)
                self._changed.wait_for(lambda: self._is_closed, _LOOK_S)
                if self._is_closed:
                    return
            ignore_errors(self.look)

    def look(self) -> None:
        """End late or wrong calls, forget finished ones.

        Raises:
            FastcollError: The group's verdict, if it has one now.
        """
        calls = list(self._calls)
        try:
            if self._watch.error:
                raise self._watch.error
            for call in calls:
                if call.is_over():
                    self._forget(call)
                else:
                    self._examine(call)
        except FastcollError as error:
            self.fail(error)
            raise
        except RuntimeError as error:
            lost = self._about(call).broken(str(error))
            self.fail(lost)
            raise lost from error

    def _forget(self, call: CallInFlight) -> None:
        with self._changed:
            if call in self._calls:  # stopping forgets all calls
                self._calls.remove(call)

    def _about(self, call: CallInFlight | None) -> Watch:
        about = copy.copy(self._watch)
        if call is not None:
            about.begin(call.sequence, call.verb)
        return about

    def _examine(self, call: CallInFlight) -> None:
        """Raise the error that ends a running call."""
        deadline = call.deadline
        if deadline is None or deadline.limit_s - deadline.left_s() < _LOOK_S:
            return
        if call.about is None:  # once: it counts the moment that a later call's verdict leaves
            call.about = self._about(call)
            call.about.arrive()
        about = call.about
        if verdict := about.verdict_to_raise():
            raise verdict
        if deadline.passed():
            raise about.late(deadline)

    def fail(self, error: FastcollError) -> FastcollError:
        """Break the group and end its calls; return the group's verdict. See `Watch.fail`."""
        verdict = self._watch.fail(error)
        self.stop()
        return verdict

    def stop(self) -> None:
        """End the transfers: the group is broken."""
        for carrier in self._carriers:
            carrier.abandon()
        with self._changed:
            self._calls.clear()

    def _is_watched(self) -> bool:
        """Return whether calls run and the thread that sees their limits lives."""
        return bool(self._calls) and self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Wait until running calls end or reach their limit, then leave the lanes."""
        while self._is_watched() and self._watch.error is None and not self._is_closed:
            time.sleep(_POLL_S)
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()  # a look takes as long as the board may take to answer
        for carrier in self._carriers:
            carrier.close()
