# SPDX-License-Identifier: Apache-2.0
"""Exchanges small facts between all ranks, before there is a group.

Decides how the introductions travel: a torch store, a torch process group of any backend, or a
fastcoll group that exists already. As JSON, never as a pickle: a store listens on the network.
Must not know the facts.
"""

import contextlib
import hashlib
import json
import operator
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from fastcoll.bootstrap.blocking_calls import ask
from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.node_map import NodeMap
from fastcoll.bootstrap.os_errors import REFUSALS
from fastcoll.errors import CollectiveTimeout, UsageError

Facts = dict[str, Any]

# Marks in place of the text of a rank that has left: by an error of its own, or at its limit. One
# that has waited as long as the others is not missing.
_GAVE_UP = "gave up"
_TIMED_OUT = "timed out"
_MARKS = {_GAVE_UP, _TIMED_OUT}
_LAST_S = 0.5  # for the store to answer a question at the end of the limit
T = TypeVar("T")


def without_prefixes(store: Store) -> Store:
    """Return the store that others stand for a part of."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


class Exchange(ABC):
    """A way to send facts to all other ranks."""

    rank: int
    world_size: int
    # A store that all ranks can reach; None where all are on one node anyway.
    store: Store | None = None
    node_map: NodeMap | None = None  # of the group that exchanges facts, if it has several nodes

    @property
    def serves_store(self) -> bool:
        """Whether the store ends with this process; torch tells it in its representation alone."""
        return self.store is not None and "server=TCPServer" in repr(without_prefixes(self.store))

    @abstractmethod
    def gather(self, facts: Facts, deadline: Deadline) -> list[Facts]:
        """Give `facts` and return those of all ranks, by rank. Collective."""

    def is_gone(self, peer: int) -> bool:
        """Return whether a rank is known to be gone; False also where that can't be known."""
        del peer  # a store, or a process group of torch's, does not know which ranks live
        return False

    def leave_farewell(self, farewell: bytes, deadline: Deadline) -> None:
        """Keep why this rank gives up for ranks that come late, where there is a place for it."""
        del farewell, deadline

    def farewell_from(self, peer: int, deadline: Deadline) -> bytes:
        """Return the farewell that a rank left since the last `gather`; b"" if there is none."""
        del peer, deadline
        return b""


@dataclass(frozen=True)
class _Look:
    """How far a turn of a StoreExchange is."""

    is_behind: bool  # a rank has entered the next turn
    seen: str  # a digest of the texts of all ranks, as this one last saw them
    texts: list[str] | None  # once every rank saw these


class StoreExchange(Exchange):
    """Through a torch.distributed store that all ranks can reach."""

    def __init__(self, store: Store, rank: int, world_size: int, name: str = "world") -> None:
        """Meet over `store` the ranks that make the group of this name, the same on all ranks."""
        try:
            rank, world_size = operator.index(rank), operator.index(world_size)
        except TypeError:
            raise UsageError(
                f"rank and world_size are integers, not {rank!r} and {world_size!r}"
            ) from None
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is outside a world of {world_size}")
        self.rank = rank
        self.world_size = world_size
        self.store = store
        self._store = PrefixStore(f"fastcoll/{name}/{world_size}", store)
        self._turn = 0  # of the last `gather` that ended well
        self._rival = ""  # about another process that came as this rank, for an error

    def gather(self, facts: Facts, deadline: Deadline) -> list[Facts]:
        # The n-th exchange of one rank on this store meets the n-th of the others, independent of
        # all else. So groups can be made again and again on one store.
        turn = self._ask(partial(self._store.add, f"count/{self.rank}", 1), deadline)
        pause_s = 0.001
        try:
            while (found := self._meet(turn, json.dumps(facts), deadline)) is None:
                # Two processes that claim one rank follow each other until the limit.
                self._rival = self._namesake(turn, deadline) or self._rival
                time.sleep(min(pause_s, deadline.left_s()))
                pause_s = min(2 * pause_s, 0.5)
                turn = self._ask(partial(self._store.add, f"count/{self.rank}", 1), deadline)
            self._turn = turn
            return found
        except BaseException as error:
            mark = _TIMED_OUT if isinstance(error, CollectiveTimeout) else _GAVE_UP

            # The next attempt is to meet the others' first. A mark, and not nothing: the ranks that
            # still wait shall not take this one for missing.
            def leave() -> None:
                self._store.set(f"hello/{turn}/{self.rank}", mark)
                self._store.add(f"entered/{turn}", -1)
                self._store.add(f"count/{self.rank}", -1)

            with contextlib.suppress(RuntimeError):
                self._ask(leave, deadline)
            raise

    # The store may have gone with the rank that kept it; a system that refuses memory or threads
    # refuses a question, too. The error at hand tells more than one of these.

    def leave_farewell(self, farewell: bytes, deadline: Deadline) -> None:
        key = f"farewell/{self._turn}/{self.rank}"
        with contextlib.suppress(CollectiveTimeout, *REFUSALS, RuntimeError):
            self._ask(partial(self._store.set, key, farewell.hex()), deadline)

    def farewell_from(self, peer: int, deadline: Deadline) -> bytes:
        key = f"farewell/{self._turn}/{peer}"
        with contextlib.suppress(CollectiveTimeout, *REFUSALS, RuntimeError, ValueError):
            if self._has([key], deadline):
                return bytes.fromhex(self._texts([key], deadline)[0])
        return b""

    def _meet(self, turn: int, text: str, deadline: Deadline) -> list[Facts] | None:
        """Return what all ranks say in a turn; None if this rank has to go on to the next one.

        A rank may have died behind its text. A launcher then starts all ranks anew on this store,
        and those that had not come before are a turn behind. So a rank trusts the texts only once
        every rank has said that it saw the same ones. It follows the first rank of a later turn.
        """

        def publish() -> _Look:
            self._store.add(f"entered/{turn}", 1)
            self._store.set(f"process/{turn}/{self.rank}", _this_process())
            self._store.set(f"hello/{turn}/{self.rank}", f"{secrets.token_hex(8)} {text}")
            return self._look(turn, "")

        look = self._ask(publish, deadline)
        # Polled, as a store's own wait is not ended by Ctrl-C.
        pause_s = 0.001
        while look.texts is None:
            if look.is_behind:
                return None
            if deadline.left_s() <= 0:
                self._give_up(turn, look.seen, deadline)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
            look = self._ask(partial(self._look, turn, look.seen), deadline)
        return [json.loads(one.partition(" ")[2]) for one in look.texts]

    def _look(self, turn: int, seen: str) -> "_Look":
        """Ask the store how far a turn is, and tell it which texts this rank saw, if others.

        All in one question: each takes a thread.
        """
        # Asked first: who completes this turn enters the next one.
        is_behind = self._store.add(f"entered/{turn + 1}", 0) > 0
        hellos, sights = self._keys("hello", turn), self._keys("seen", turn)
        if not self._store.check(hellos) or _MARKS & {*(texts := self._read(hellos))}:
            return _Look(is_behind, seen, None)
        digest = hashlib.sha256("".join(texts).encode()).hexdigest()
        if digest != seen:
            self._store.set(f"seen/{turn}/{self.rank}", digest)
        all_saw = self._store.check(sights) and set(self._read(sights)) == {digest}
        return _Look(is_behind, digest, texts if all_saw else None)

    def _keys(self, kind: str, turn: int) -> list[str]:
        return [f"{kind}/{turn}/{peer}" for peer in range(self.world_size)]

    def _ask(self, question: Callable[[], T], deadline: Deadline) -> T:
        """Return the store's answer; behind a cut link it gives none."""
        try:
            return ask(question, max(deadline.left_s(), _LAST_S))
        except TimeoutError:
            text = f"did not answer within {deadline.limit_s:g} s. Is the network up?"
            raise CollectiveTimeout(f"init (rank {self.rank}): the store {text}") from None
        except RuntimeError as error:
            raise CollectiveTimeout(
                f"init (rank {self.rank}): the store failed: {error}"
            ) from error

    def _has(self, keys: list[str], deadline: Deadline) -> bool:
        return bool(self._ask(lambda: self._store.check(keys), deadline))

    def _texts(self, keys: list[str], deadline: Deadline) -> list[str]:
        return self._ask(partial(self._read, keys), deadline)

    def _read(self, keys: list[str]) -> list[str]:
        if self._store.has_extended_api():  # type: ignore[attr-defined]
            return [value.decode() for value in self._store.multi_get(keys)]
        return [self._store.get(key).decode() for key in keys]

    def _give_up(self, turn: int, seen: str, deadline: Deadline) -> NoReturn:
        keys = self._keys("hello", turn)
        texts = [self._has([key], deadline) and self._texts([key], deadline)[0] for key in keys]
        # Absent ranks, and those that left. Without any, the limit of another one was shorter.
        ranks = [peer for peer, text in enumerate(texts) if text in (False, _GAVE_UP)]
        ranks = ranks or [peer for peer, text in enumerate(texts) if text == _TIMED_OUT]
        gave_up = ", or gave up" if any(texts[peer] for peer in ranks) else ""
        if not ranks:
            keys = self._keys("seen", turn)
            saw = [self._has([key], deadline) and self._texts([key], deadline) for key in keys]
            ranks = [peer for peer, one in enumerate(saw) if one != [seen]]
        rival = self._namesake(turn, deadline) or self._rival
        raise CollectiveTimeout(
            f"init (rank {self.rank} of {self.world_size}) waited {deadline.limit_s:g} s for "
            f"ranks {ranks}, which did not come to the store{gave_up}{rival}",
            ranks,
        )

    def _namesake(self, count: int, deadline: Deadline) -> str:
        """Return a text about another process that came as this rank: it takes the next turn."""
        for other in (count - 1, count + 1):
            key = f"process/{other}/{self.rank}"
            if not self._has([key], deadline):
                continue
            [process] = self._texts([key], deadline)
            if process != _this_process():
                return (
                    f"; {process} came as rank {self.rank}, before or beside this {_this_process()}"
                )
        return ""


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def exchange_of(group: dist.ProcessGroup) -> Exchange:
    """Return how the ranks of a torch process group of any backend reach each other.

    Over the group's store, whose waits can be given up, rather than by a collective of the group.
    """
    if (store := _usable_store(group)) is None:
        return CollectiveExchange(group)
    return StoreExchange(store, group.rank(), group.size(), group.group_name)


def _usable_store(group: dist.ProcessGroup) -> Store | None:
    """Return the store that a process group was made with; MPI's has a placeholder."""
    try:
        store = found = group.get_group_store()
    except RuntimeError:
        return None
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return None if type(store) is Store else found


class CollectiveExchange(Exchange):
    """Through a collective of a torch process group that has no store, such as one of MPI."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self._group = group

    def gather(self, facts: Facts, deadline: Deadline) -> list[Facts]:
        texts: list[str] = [""] * self.world_size

        def gather() -> None:
            dist.all_gather_object(texts, json.dumps(facts), group=self._group)

        try:
            ask(gather, deadline.left_s())
        except TimeoutError:
            raise CollectiveTimeout(
                f"init (rank {self.rank} of {self.world_size}) waited {deadline.limit_s:g} s for "
                f'an all_gather of the process group "{self._group.group_name}", which has no '
                "store that could tell who is missing. The all_gather goes on: make no other "
                "call of that process group"
            ) from None
        return [json.loads(text) for text in texts]


class GathersBytes(Protocol):
    """The methods of a group that are used while a part of it becomes a group."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def gather_bytes(self, data: bytes, limit_s: float | None = None) -> list[bytes]: ...
    def peer_is_gone(self, peer: int) -> bool: ...


class BytesExchange(Exchange):
    """Through a fastcoll group that exists already, which knows which of its ranks are gone."""

    def __init__(self, group: GathersBytes, store: Store | None = None) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self.store = store
        self._group = group

    def is_gone(self, peer: int) -> bool:
        return self._group.peer_is_gone(peer)

    def gather(self, facts: Facts, deadline: Deadline) -> list[Facts]:
        limit_s = max(deadline.left_s(), _LAST_S)
        rows = self._group.gather_bytes(json.dumps(facts).encode(), limit_s)
        return [json.loads(row) for row in rows]
