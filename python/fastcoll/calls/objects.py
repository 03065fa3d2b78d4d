# SPDX-License-Identifier: Apache-2.0
"""Verbs for Python objects, and the barrier that names missing ranks, as methods of a group.

Objects travel as pickles between the processes of one user, which is checked when a group is made.
With `weights_only` torch saves and loads the objects instead. Decides how they become bytes,
and that a rank has at most one copy: of its own packed objects and of those that it receives. An
object that can't be packed is an error on all ranks: its length is then told as -1. Must not know
how a call is carried out.
"""

import io
import pickle
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from fastcoll.calls.group_calls import GroupCalls
from fastcoll.calls.tensors import checked_rank
from fastcoll.errors import DesyncError, UsageError

_MOST_TEXT = 500  # of an error that other ranks are told


class _Packed(io.BytesIO):
    """Packed objects, or the error that kept them from being packed."""

    error: Exception | None = None


class ObjectMethods(GroupCalls):
    """Collectives, sends and receives of anything that can be pickled."""

    def gather_bytes(self, data: bytes, limit_s: float | None = None) -> list[bytes]:
        """Gather a string of bytes from every rank; they may differ in length. Collective."""
        return [file.getvalue() for file in self._gather_files(_Packed(data), limit_s)]

    def _gather_files(self, mine: _Packed, limit_s: float | None = None) -> list[io.BytesIO]:
        lengths = [row[0] for row in self.gather_words([_length_of(mine)], limit_s)]
        self._require_packed(lengths, mine)
        if not any(lengths):
            return [mine] * self.world_size
        files = self.allocated(
            lambda: [
                mine if rank == self.rank else _file_of(length)
                for rank, length in enumerate(lengths)
            ],
            sum(lengths),
        )
        rows = [_array_on(file) for file in files]
        self.all_gather(rows, rows[self.rank], timeout_s=limit_s)
        return files

    def _require_packed(self, lengths: Iterable[int], mine: _Packed) -> None:
        """Raise on all ranks if one of them could not pack its objects. Collective if so."""
        if min(lengths) >= 0:
            return
        texts = self.gather_bytes(_problem_of(mine).encode())
        said = "; ".join(f"rank {rank}: {text.decode()}" for rank, text in enumerate(texts) if text)
        raise UsageError(
            f"objects can't be packed ({said}); nothing was moved and the group can still be used"
        ) from mine.error

    def _hand_over(self, gives: Sequence[io.BytesIO], gets: Sequence[io.BytesIO]) -> None:
        """Give each rank a file, and get one from each; they may be empty, and end up full."""
        self.all_to_all([_array_on(file) for file in gets], [_array_on(file) for file in gives])

    def all_gather_object(
        self, object_list: list[Any], obj: Any, *, weights_only: bool = False
    ) -> None:
        """See `fastcoll.all_gather_object`."""
        _check_length(object_list, "object_list", self.world_size)
        files = self._gather_files(_packed(obj, weights_only))
        object_list[:] = _all_unpacked(files, weights_only)

    def broadcast_object_list(
        self, object_list: list[Any], src: int = 0, *, weights_only: bool = False
    ) -> None:
        """See `fastcoll.broadcast_object_list`; `src` is a rank of this group."""
        root = checked_rank(src, "src", self.world_size)
        _check_list(object_list)
        gives = self.rank == root
        packed = _packed(object_list, weights_only) if gives else _Packed()
        length = np.array([_length_of(packed)], np.int64)
        self.broadcast(length, root)
        num_bytes = int(length[0])
        self._require_packed([num_bytes], packed)
        file = self.allocated(lambda: packed if gives else _file_of(num_bytes), num_bytes)
        message = _array_on(file)
        self.broadcast(message, root)
        if not gives:
            _replace(object_list, file, root, weights_only)
        elif weights_only:  # the others refuse objects that are not allowed; so does this rank
            _unpacked(file, weights_only, root, device="meta")

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int = 0,
        *,
        weights_only: bool = False,
    ) -> None:
        """See `fastcoll.gather_object`; `dst` is a rank of this group."""
        root = checked_rank(dst, "dst", self.world_size)
        if self.rank == root:
            _check_length(object_gather_list, "object_gather_list", self.world_size)
        mine, ranks = _packed(obj, weights_only), range(self.world_size)
        rows = self.gather_words([_length_of(mine), root])
        if any(row[1] != root for row in rows):
            sides = ", ".join(f"rank {rank}: {row[1]}" for rank, row in enumerate(rows))
            raise DesyncError(
                f"gather_object() needs the same dst on every rank, got {sides}; nothing was "
                "moved and the group can still be used"
            )
        self._require_packed([row[0] for row in rows], mine)
        lengths = [0 if rank == root else row[0] for rank, row in enumerate(rows)]
        gets = self.allocated(
            lambda: [_file_of(length if self.rank == root else 0) for length in lengths],
            sum(lengths),
        )
        is_given = [rank == root != self.rank for rank in ranks]
        self._hand_over([mine if one else io.BytesIO() for one in is_given], gets)
        if object_gather_list is not None and self.rank == root:
            gets[root] = mine
            del mine
            object_gather_list[:] = _all_unpacked(gets, weights_only)

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int = 0,
        *,
        weights_only: bool = False,
    ) -> None:
        """See `fastcoll.scatter_object_list`; `src` is a rank of this group."""
        root = checked_rank(src, "src", self.world_size)
        if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
            raise UsageError("scatter_object_output_list must be a list of at least one element")
        gives = [_Packed() for _ in range(self.world_size)]
        if self.rank == root:
            _check_length(scatter_object_input_list, "scatter_object_input_list", self.world_size)
            gives = [_packed(obj, weights_only) for obj in scatter_object_input_list or ()]
        lengths = np.array([_length_of(file) for file in gives], np.int64)
        self.broadcast(lengths, root)
        failed = next((file for file in gives if file.error), gives[root])
        self._require_packed(lengths.tolist(), failed)
        kept, gives[root] = gives[root], _Packed()  # the root keeps its own object
        gets = [io.BytesIO() for _ in range(self.world_size)]
        mine = self.allocated(
            lambda: kept if self.rank == root else _file_of(int(lengths[self.rank])),
            int(lengths.sum()),
        )
        if self.rank != root:
            gets[root] = mine
        # A scatter has equal parts: one long object would make all of them as long.
        self._hand_over(gives, gets)
        del gives
        scatter_object_output_list[0] = _unpacked(mine, weights_only, root)

    def send_object_list(
        self, object_list: list[Any], dst: int, *, weights_only: bool = False
    ) -> None:
        """See `fastcoll.send_object_list`; `dst` is a rank of this group."""
        _check_list(object_list)
        packed = _packed(object_list, weights_only)
        self.send(np.array([_length_of(packed)], np.int64), dst)
        if packed.error is None:
            self.send(_array_on(packed), dst)
            return
        text = np.frombuffer(_problem_of(packed).encode(), np.uint8).copy()
        self.send(np.array([text.size], np.int64), dst)
        self.send(text, dst)
        raise UsageError(
            f"objects can't be packed ({_problem_of(packed)}); rank {dst} is told"
        ) from packed.error

    def recv_object_list(
        self, object_list: list[Any], src: int | None = None, *, weights_only: bool = False
    ) -> int:
        """See `fastcoll.recv_object_list`; `src` and the result are ranks of this group."""
        _check_list(object_list)
        length = np.empty(1, np.int64)
        peer = self.recv(length, src)
        if is_problem := length[0] < 0:
            self.recv(length, peer)
        file = _file_of(int(length[0]))
        self.recv(_array_on(file), peer)
        if is_problem:
            text = file.getvalue().decode()
            raise UsageError(f"rank {peer} can't pack the objects that it was to send ({text})")
        _replace(object_list, file, peer, weights_only)
        return peer

    def monitored_barrier(
        self, timeout: float | timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See `fastcoll.monitored_barrier`."""
        del wait_all_ranks  # an error names all missing ranks in any case
        if isinstance(timeout, timedelta):
            self.barrier(timeout=timeout)
        else:
            self.barrier(timeout_s=timeout)


def _check_list(objects: object) -> None:
    if not isinstance(objects, list):
        raise UsageError(f"object_list must be a list, not {type(objects).__name__}")


def _file_of(num_bytes: int) -> io.BytesIO:
    """Return a file of zeroes, whose memory comes with its first use."""
    return io.BytesIO(bytes(num_bytes))


def _array_on(file: io.BytesIO) -> np.ndarray[Any, Any]:
    """Return the bytes of a file, to be read and written; none is copied."""
    return np.frombuffer(file.getbuffer(), np.uint8)


def _packed(obj: Any, weights_only: bool) -> _Packed:
    packed = _Packed()
    try:
        if weights_only:
            torch.save(obj, packed)
        else:
            pickle.dump(obj, packed)
    except Exception as error:  # an object's own code may raise anything
        packed.error = error
    return packed


def _length_of(packed: _Packed) -> int:
    return -1 if packed.error else packed.getbuffer().nbytes


def _problem_of(packed: _Packed) -> str:
    """Return why objects can't be packed; "" where they can."""
    error = packed.error
    return f"{type(error).__name__}: {error}"[:_MOST_TEXT] if error else ""


def _all_unpacked(files: list[io.BytesIO], weights_only: bool) -> list[Any]:
    """Unpack the objects of each rank; each file is gone before the next one is unpacked."""
    objects: list[Any] = []
    files.reverse()
    while files:
        objects.append(_unpacked(files.pop(), weights_only, len(objects)))
    return objects


def _unpacked(file: io.BytesIO, weights_only: bool, sender: int, device: str | None = None) -> Any:
    """Return the objects in a file; the tensors of a saved one on another device, if given."""
    is_saved = bytes(file.getbuffer()[:2]) == b"PK"  # by torch: a zip archive, which is no pickle
    if is_saved != bool(weights_only):
        raise UsageError(
            f"rank {sender} sent objects with weights_only={is_saved}, but this rank was called "
            f"with weights_only={not is_saved}; it must be the same on all ranks"
        )
    if not weights_only:
        return pickle.loads(file.getbuffer())
    file.seek(0)
    return torch.load(file, weights_only=True, map_location=device)


def _replace(object_list: list[Any], file: io.BytesIO, sender: int, weights_only: bool) -> None:
    objects = _unpacked(file, weights_only, sender)
    if len(objects) != len(object_list):
        raise UsageError(
            f"object_list has {len(object_list)} objects, but rank {sender} sent {len(objects)}"
        )
    object_list[:] = objects


def _check_length(objects: object, name: str, world_size: int) -> None:
    if not isinstance(objects, list) or len(objects) != world_size:
        what = f"{len(objects)} elements" if isinstance(objects, list) else type(objects).__name__
        raise UsageError(f"{name} must be a list of {world_size} elements, one a rank, not {what}")
