# SPDX-License-Identifier: Apache-2.0
"""Faults as data: the deed of the odd ranks of a group, and the error that it is on all others.

Decides which calls wait for a rank, and the deeds of odd ranks meanwhile. Must not know where a
fault happens (fault_places.py).
"""

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests.support.backends import TorchGroup
from tests.support.calls import BARRIER, ROOTED, Call
from tests.support.harness import Attempt, Rank, attempt
from tests.support.perform import make_plain

LIMIT_S = 1.5  # where a fault ends at the limit
LONG_S = 30.0  # where no wait may last to the limit
REASON = "the loss is \x1b[31mNaN"

# ---- calls that wait for a missing rank ---------------------------------------------------------

Wait = (
    Call | Callable[[Any, int], object]
)  # the function is given the group and the rank that is missing

ALL_REDUCE = Call("all_reduce", "float32", 3)
WAITS: dict[str, Wait] = {
    "all_reduce": ALL_REDUCE,
    "large all_reduce": Call("all_reduce", "float32", 500_000),
    "one_shot": Call("all_reduce", "float32", 50_000, algorithm="one_shot"),
    "two_shot": Call("all_reduce", "float32", 5, algorithm="two_shot"),
    "chain": Call("all_reduce", "float32", 50_000, algorithm="chain"),
    "ring": Call("all_reduce", "int32", 50_000, algorithm="ring"),
    "reduce": Call("reduce", "float32", 5, algorithm="two_shot"),  # all ranks wait
    "reduce_scatter": Call("reduce_scatter", "float32", 4),
    "all_gather": Call("all_gather", "float32", 4),
    "broadcast": Call("broadcast", "float32", 3),
    "scatter": Call("scatter", "float32", 3),
    "all_to_all": Call("all_to_all", "float32", 4),
    "barrier": BARRIER,
    "asynchronous": ALL_REDUCE,
    "send": lambda group, missing: transfer(group, missing, group.rank == missing),
    "recv": lambda group, missing: transfer(group, missing, group.rank != missing),
}
OF_FASTCOLL: dict[str, Wait] = {
    "counted all_to_all": lambda group, _: group.all_to_all(
        [torch.ones(4) for _ in range(group.world_size)], [torch.ones(4)] * group.world_size
    ),
    "uneven all_gather": lambda group, _: group.all_gather(
        [torch.ones(rank) for rank in range(group.world_size)], torch.ones(group.rank)
    ),
    "empty": lambda group, _: group.empty((4,)),
    "new_group": lambda group, _: group.new_group(),
}
TRANSFERS = ("send", "recv")
# Those that ranks make again and again while one of them dies in the middle.
BUSY = ("all_reduce", "large all_reduce", "one_shot", "two_shot", "chain", "ring", "symmetric")
# A signal is heard by one call after another, so few of them meet it.
HEARD = ("all_reduce", "large all_reduce", "chain", "barrier", "recv", "empty")


def transfer(group: Any, missing: int, receives: bool) -> None:
    """Send messages to the missing rank or from it, and receive them there."""
    others = [rank for rank in range(group.world_size) if rank != missing]
    for peer in others if group.rank == missing else [missing]:
        tensor = torch.ones(1 << 20)  # so much that a sender waits
        (group.recv if receives else group.send)(tensor, peer)


def make_wait(group: Any, name: str, missing: int) -> None:
    """Make a call that needs the missing rank."""
    wait = (WAITS | OF_FASTCOLL)[name]
    if not isinstance(wait, Call):
        wait(group, missing)
        return
    if wait.verb in ROOTED and wait.verb != "reduce":
        wait = dataclasses.replace(wait, root=missing)
    work = make_plain(group, wait, name == "asynchronous")
    if name == "asynchronous":
        work.wait()


# ---- deeds of an odd rank ------------------------------------------------------------------------


Rows = dict[str, list[Attempt]]  # of each kind of call: itself and those that follow


@dataclasses.dataclass
class Scene:
    """One rank among its groups.

    Attributes:
        groups: A group for each kind of call.
        missing: A rank for which the others wait.
        key: The beginning of this scene's events.
    """

    rank: Rank
    groups: dict[str, Any]
    missing: int
    key: str

    def tell(self, event: str) -> None:
        """Let everybody know that this rank has come so far."""
        self.rank.tell(f"{self.key}: rank {self.rank.rank} {event}")

    def wait_for(self, ranks: Collection[int], event: str) -> None:
        """Wait until some ranks have come so far."""
        for rank in ranks:
            self.rank.wait_for(f"{self.key}: rank {rank} {event}")

    def make(self, name: str) -> list[Attempt]:
        """Make a call of a kind, then the next ones."""
        group = self.groups[name]
        first = attempt(make_wait, group, name, self.missing)
        return [first, *make_late(group)]

    def make_again(self, name: str) -> list[Attempt]:
        """Make calls of a kind until one fails, then the next ones."""
        group, memory = self.groups[name], list[torch.Tensor]()

        def make() -> None:
            if name != "symmetric":
                make_wait(group, name, self.missing)
                return
            if not memory:
                memory.append(group.empty(700_000).fill_(0))
            group.all_reduce(memory[0])

        while not (first := attempt(make)).kind:
            pass
        return [first, *make_late(group)]

    def make_all(self, make: Callable[["Scene", str], list[Attempt]]) -> Rows:
        """Make the calls of all kinds at the same time."""
        with ThreadPoolExecutor(len(self.groups)) as pool:
            rows = {name: pool.submit(make, self, name) for name in self.groups}
        return {name: row.result() for name, row in rows.items()}


def make_late(group: Any) -> list[Attempt]:
    """Make calls on a group that broke: transfers with a neighbour and all others, a collective."""
    peers = [rank for rank in range(group.world_size) if rank != group.rank]
    peers.sort(key=lambda peer: peer != group.rank ^ 1)  # one of its node first
    calls = [(call, peer) for peer in peers for call in (group.recv, group.send)]
    return [*(attempt(call, torch.ones(1), peer) for call, peer in calls), attempt(group.barrier)]


def communicator_of(group: Any) -> Any:
    """Return the group of fastcoll's that carries out a group's calls."""
    return group.communicator() if isinstance(group, TorchGroup) else group


def be_killed(scene: Scene) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_early(scene: Scene) -> None:
    os._exit(7)


def raise_inside(scene: Scene) -> Rows:
    """Leave the groups by an exception of the program's."""
    with contextlib.suppress(ZeroDivisionError), contextlib.ExitStack() as stack:
        for group in scene.groups.values():
            stack.callback(group.close)
        1 / 0  # noqa: B018
    return {}


def be_stopped(scene: Scene) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def be_late(scene: Scene) -> None:
    pass


def abort(scene: Scene) -> Rows:
    """Abort the groups from another thread while this rank waits, too."""
    groups = [communicator_of(group) for group in scene.groups.values()]

    def act() -> None:
        for group in groups:
            group.abort(REASON)

    threading.Timer(0.3, act).start()
    return scene.make_all(Scene.make)


def be_killed_in_the_middle(scene: Scene) -> Rows:
    threading.Timer(0.3, be_killed, (scene,)).start()
    return scene.make_all(Scene.make_again)


class OutOfTime(Exception):
    """A program's own handler raises it."""


def raise_out_of_time(*_: object) -> None:
    raise OutOfTime


def be_interrupted(scene: Scene) -> Rows:
    """Hear a Ctrl-C in each call in turn."""

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    return {name: _interrupted(scene, name, interrupt) for name in scene.groups}


def hear_a_handler(scene: Scene) -> Rows:
    """Hear a signal whose handler raises in each call in turn.

    Another thread takes the signal. So it ends no system call of the thread that waits, which has
    to look by itself whether a handler is to run.
    """
    signal.signal(signal.SIGUSR2, raise_out_of_time)

    def take_signal() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)

    return {name: _interrupted(scene, name, take_signal) for name in scene.groups}


def _interrupted(scene: Scene, name: str, interrupt: Callable[[], None]) -> list[Attempt]:
    group = scene.groups[name]

    def wait() -> None:
        # Started and ended in the attempt, which takes the error however late this thread runs.
        timer = threading.Timer(0.3, interrupt)
        timer.start()
        try:
            make_wait(group, name, scene.missing)
        finally:
            timer.cancel()
            timer.join()

    return [attempt(wait), *make_late(group)]


# ---- the catalogue -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fault:
    """The deed of the odd ranks while the others wait, and its consequences.

    Attributes:
        strike: The deed. It returns the odd rank's own calls; None: the rank is to make them.
        kind: The error of every call that waits, and of the next one.
        words: Parts of its text, `{rank}` being the first odd rank.
        own_kind: The error of an odd rank's own calls; "" if it can make none.
        limit_s: The limit of the groups. An error that is no timeout comes earlier.
        exit_code: The exit code of the odd processes; None if they live.
        members: The members of the group after `shrink`: "all" or "others".
        is_stopped: An odd process stands still until the others have failed.
        needs_absent: One more rank stays away, as the odd ones wait in the calls, too.
        names: The kinds of call that meet the fault; none: all that wait.
        make: The way in which the others make a call of a kind.
    """

    strike: Callable[[Scene], Rows | None]
    kind: str
    words: tuple[str, ...] = ()
    own_kind: str = ""
    limit_s: float = LONG_S
    exit_code: int | None = None
    members: str = "others"
    is_stopped: bool = False
    needs_absent: bool = False
    names: tuple[str, ...] = ()
    make: Callable[[Scene, str], list[Attempt]] = Scene.make

    @property
    def is_deadly(self) -> bool:
        """Whether its ranks can't be used afterwards."""
        return self.exit_code is not None


LOST, LATE = "PeerLostError", "CollectiveTimeout"
FAULTS = {
    "killed": Fault(be_killed, LOST, ("rank",), exit_code=-signal.SIGKILL),
    "killed in the middle": Fault(
        be_killed_in_the_middle,
        LOST,
        exit_code=-signal.SIGKILL,
        names=BUSY,
        make=Scene.make_again,
    ),
    "exits": Fault(exit_early, LOST, exit_code=7),
    "raises": Fault(raise_inside, LOST, ("left the group",)),
    "stopped": Fault(be_stopped, LATE, ("waited",), LATE, LIMIT_S, members="all", is_stopped=True),
    "late": Fault(be_late, LATE, ("waited",), LATE, LIMIT_S, members="all"),
    "aborts": Fault(
        abort,
        "AbortedError",
        (r"the loss is \x1b[31mNaN",),
        "AbortedError",
        members="all",
        needs_absent=True,
    ),
    "Ctrl-C": Fault(
        be_interrupted,
        LOST,
        ("rank {rank} ", "nterrupt"),
        "KeyboardInterrupt",
        members="all",
        needs_absent=True,
        names=HEARD,
    ),
    "a handler raises": Fault(
        hear_a_handler,
        LOST,
        ("rank {rank} ", "OutOfTime"),
        "OutOfTime",
        members="all",
        needs_absent=True,
        names=HEARD,
    ),
}
