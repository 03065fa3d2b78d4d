# SPDX-License-Identifier: Apache-2.0
"""Verbs for Python objects, and the barrier that names missing ranks, as methods of a group.

Objects travel as pickles between the processes of one user, which is checked when a group is made.
With `weights_only` torch saves and loads the objects instead. Decides how they become bytes, and
that small objects take one call: their lengths and bytes travel in packets of one size. Only if one
of them is larger, all ranks make a second call, of the whole objects. Decides, too, that a rank has
at most one copy of a large object: of its own packed objects and of those that it receives. An
object that can't be packed is an error on all ranks: its packet has the reason in its place. Must
not know how a call is carried out.
"""

import io
import pickle
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from fastcoll.calls.group_calls import GroupCalls
from fastcoll.calls.limits import call_limit_s
from fastcoll.calls.tensors import checked_rank
from fastcoll.errors import DesyncError, UsageError
from fastcoll.text import error_in_words

# Such a message travels beside the arrival line of its rank.
_PACKET_BYTES = 1024
# The length of the object, and a word of the verb's own. Below 0: that of the reason, negated.
_WORDS = struct.Struct("=qq")
_ROOM_BYTES = _PACKET_BYTES - _WORDS.size
_UNPACKABLE = -1  # the word of a scatter that does not take place
_EVERYWHERE = -1  # the word of a gather to all ranks, in place of the one
_Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


class _Packed(io.BytesIO):
    """Packed objects, or the error that kept them from being packed."""

    error: Exception | None = None


class _Packet(NamedTuple):
    """A packet that came: its words, and the bytes of its object if they fit in, or its problem."""

    length: int
    word: int
    data: bytes

    @property
    def problem(self) -> str:
        """Why its sender could not pack the objects; "" where it could."""
        return self.data.decode(errors="replace") if self.length < 0 else ""


# Packed objects that came: a small one's bytes, or a file of a large one.
_Came: TypeAlias = bytes | io.BytesIO


class ObjectMethods(GroupCalls):
    """Collectives, sends and receives of anything that can be pickled."""

    # Around a monitored barrier. A group over nodes notes there which ranks have come.
    _attend: Callable[[], AbstractContextManager[None]] = nullcontext

    def gather_bytes(self, data: bytes, limit_s: float | None = None) -> list[bytes]:
        """Gather a string of bytes from every rank; they may differ in length. Collective."""
        came = self._gather_packed(_Packed(data), limit_s)
        return [one if isinstance(one, bytes) else one.getvalue() for one in came]

    def _gather_packed(self, mine: _Packed, limit_s: float | None = None) -> Sequence[_Came]:
        packets = self._gather_packets(mine, _EVERYWHERE, limit_s)
        lengths = [packet.length for packet in packets]
        if max(lengths) <= _ROOM_BYTES:
            return [packet.data for packet in packets]
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

    def _gather_packets(
        self, mine: _Packed, word: int, limit_s: float | None = None
    ) -> list[_Packet]:
        """Gather a packet from every rank; raise where one can't be what this rank waits for."""
        rows = np.empty((self.world_size, _PACKET_BYTES), np.uint8)
        self.all_gather_into_tensor(rows, _packet_of(mine, word), timeout_s=limit_s)
        came = rows.tobytes()
        packets = [_read_packet(came, start) for start in range(0, len(came), _PACKET_BYTES)]
        if any(packet.word != word for packet in packets):
            places = ["all ranks" if one.word == _EVERYWHERE else one.word for one in packets]
            sides = ", ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
            raise DesyncError(
                f"gather_object() needs the same dst on every rank, got {sides}; nothing was "
                "moved and the group can still be used"
            )
        if min(packet.length for packet in packets) < 0:
            problems = enumerate(packet.problem for packet in packets)
            raise _unpackable({rank: text for rank, text in problems if text}) from mine.error
        return packets

    def _hand_over(self, gives: Sequence[io.BytesIO], gets: Sequence[io.BytesIO]) -> None:
        """Give each rank a file, and get one from each; they may be empty, and end up full."""
        self.all_to_all([_array_on(file) for file in gets], [_array_on(file) for file in gives])

    def all_gather_object(
        self, object_list: list[Any], obj: Any, *, weights_only: bool = False
    ) -> None:
        """See `fastcoll.all_gather_object`."""
        _check_length(object_list, "object_list", self.world_size)
        came = list(self._gather_packed(_packed(obj, weights_only)))
        object_list[:] = _all_unpacked(came, weights_only)

    def broadcast_object_list(
        self, object_list: list[Any], src: int = 0, *, weights_only: bool = False
    ) -> None:
        """See `fastcoll.broadcast_object_list`; `src` is a rank of this group."""
        root = checked_rank(src, "src", self.world_size)
        _check_list(object_list)
        gives = self.rank == root
        packed = _packed(object_list, weights_only) if gives else _Packed()
        row = _packet_of(packed) if gives else np.empty(_PACKET_BYTES, np.uint8)
        self.broadcast(row, root)
        packet = _read_packet(row.tobytes())
        if packet.length < 0:
            raise _unpackable({root: packet.problem}) from packed.error
        came: _Came = packet.data
        if packet.length > _ROOM_BYTES:
            came = self.allocated(
                lambda: packed if gives else _file_of(packet.length), packet.length
            )
            self.broadcast(_array_on(came), root)
        if not gives:
            _replace(object_list, came, root, weights_only)
        elif weights_only:  # the others refuse objects that are not allowed; so does this rank
            _unpacked(came, weights_only, root, device="meta")

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
        packets = self._gather_packets(mine, root)
        lengths = [0 if rank == root else one.length for rank, one in enumerate(packets)]
        came: list[_Came] = [packet.data for packet in packets]
        if max(lengths) > _ROOM_BYTES:
            gets = self.allocated(
                lambda: [_file_of(length if self.rank == root else 0) for length in lengths],
                sum(lengths),
            )
            is_given = [rank == root != self.rank for rank in ranks]
            self._hand_over([mine if one else io.BytesIO() for one in is_given], gets)
            came = [*gets]
            del gets
        if object_gather_list is not None and self.rank == root:
            came[root] = mine
            del mine
            object_gather_list[:] = _all_unpacked(came, weights_only)

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
        gives: list[_Packed] = []
        if self.rank == root:
            _check_length(scatter_object_input_list, "scatter_object_input_list", self.world_size)
            gives = [_packed(obj, weights_only) for obj in scatter_object_input_list or ()]
        row = np.empty(_PACKET_BYTES, np.uint8)
        self.scatter(row, _packets_to_scatter(gives) if gives else None, root)
        packet = _read_packet(row.tobytes())
        if packet.word == _UNPACKABLE:
            error = next((file.error for file in gives if file.error), None)
            raise _unpackable({root: packet.problem}) from error
        mine: _Came = gives[root] if gives else packet.data
        if packet.word > 0:  # as many bytes as all objects have, of which one does not fit in
            mine = self._scatter_files(gives, packet, root)
        del gives
        scatter_object_output_list[0] = _unpacked(mine, weights_only, root)

    def _scatter_files(self, gives: list[_Packed], packet: _Packet, root: int) -> io.BytesIO:
        """Hand out the root's files; return this rank's. The list of the root is then empty."""
        mine = self.allocated(
            lambda: gives[root] if gives else _file_of(packet.length), packet.word
        )
        gets = [io.BytesIO() for _ in range(self.world_size)]
        if self.rank == root:
            gives[root] = _Packed()  # the root keeps its own object
        else:
            gets[root] = mine
        # A scatter has equal parts: one long object would make all of them as long.
        self._hand_over(gives or [io.BytesIO()] * self.world_size, gets)
        gives.clear()
        return mine

    def send_object_list(
        self, object_list: list[Any], dst: int, *, weights_only: bool = False
    ) -> None:
        """See `fastcoll.send_object_list`; `dst` is a rank of this group."""
        _check_list(object_list)
        packed = _packed(object_list, weights_only)
        self.send(_packet_of(packed), dst)
        if packed.error is not None:
            text = f"objects can't be packed ({error_in_words(packed.error)}); rank {dst} is told"
            raise UsageError(text) from packed.error
        if (message := _array_on(packed)).size > _ROOM_BYTES:
            self.send(message, dst)

    def recv_object_list(
        self, object_list: list[Any], src: int | None = None, *, weights_only: bool = False
    ) -> int:
        """See `fastcoll.recv_object_list`; `src` and the result are ranks of this group."""
        _check_list(object_list)
        row = np.empty(_PACKET_BYTES, np.uint8)
        peer = self.recv(row, src)
        packet = _read_packet(row.tobytes())
        if packet.length < 0:
            raise UsageError(
                f"rank {peer} can't pack the objects that it was to send ({packet.problem})"
            )
        came: _Came = packet.data
        if packet.length > _ROOM_BYTES:
            came = _file_of(packet.length)
            self.recv(_array_on(came), peer)
        _replace(object_list, came, peer, weights_only)
        return peer

    def monitored_barrier(
        self, timeout: float | timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See `fastcoll.monitored_barrier`."""
        del wait_all_ranks  # an error names all missing ranks in any case
        call_limit_s(timeout)  # a call that is refused is not attended
        # The second one ends only where all have passed the first. Over nodes a late rank still
        # finds there what the others left, though they no longer wait for it.
        with self._attend():
            for _ in range(2):
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
    try:
        if not weights_only:
            return _Packed(pickle.dumps(obj))  # which takes over the bytes, without a copy
        packed = _Packed()
        torch.save(obj, packed)
    except Exception as error:  # an object's own code may raise anything
        packed = _Packed()
        packed.error = error
    return packed


def _packet_of(packed: _Packed, word: int = 0) -> _Bytes:
    """Return the packet of packed objects: they themselves if they fit in, or their problem."""
    packet = bytearray(_PACKET_BYTES)
    if packed.error is None:
        data = packed.getbuffer()
        length = len(data)
    else:
        data = memoryview(error_in_words(packed.error).encode()[:_ROOM_BYTES])
        length = -len(data)
    _WORDS.pack_into(packet, 0, length, word)
    if length <= _ROOM_BYTES:
        packet[_WORDS.size : _WORDS.size + len(data)] = data
    return np.frombuffer(packet, np.uint8)


def _packets_to_scatter(files: list[_Packed]) -> list[_Bytes]:
    """Return the packet for each rank. Its word is 0 if all objects fit in, else their size."""
    if failed := next((file for file in files if file.error), None):
        return [_packet_of(failed, _UNPACKABLE)] * len(files)
    lengths = [file.getbuffer().nbytes for file in files]
    word = sum(lengths) if max(lengths) > _ROOM_BYTES else 0
    return [_packet_of(file, word) for file in files]


def _read_packet(came: bytes, start: int = 0) -> _Packet:
    length, word = _WORDS.unpack_from(came, start)
    start += _WORDS.size
    size = abs(length) if length <= _ROOM_BYTES else 0
    return _Packet(length, word, came[start : start + size])


def _unpackable(problems: dict[int, str]) -> UsageError:
    said = "; ".join(f"rank {rank}: {text}" for rank, text in problems.items())
    return UsageError(
        f"objects can't be packed ({said}); nothing was moved and the group can still be used"
    )


def _all_unpacked(came: list[_Came], weights_only: bool) -> list[Any]:
    """Unpack the objects of each rank; each file is gone before the next one is unpacked."""
    objects: list[Any] = []
    came.reverse()
    while came:
        objects.append(_unpacked(came.pop(), weights_only, len(objects)))
    return objects


def _unpacked(came: _Came, weights_only: bool, sender: int, device: str | None = None) -> Any:
    """Return the objects that came; the tensors of saved ones on another device, if given."""
    data = came if isinstance(came, bytes) else came.getbuffer()
    is_saved = data[:2] == b"PK"  # by torch: a zip archive, which is no pickle
    if is_saved != bool(weights_only):
        raise UsageError(
            f"rank {sender} sent objects with weights_only={is_saved}, but this rank was called "
            f"with weights_only={not is_saved}; it must be the same on all ranks"
        )
    if not weights_only:
        return pickle.loads(data)
    file = io.BytesIO(came) if isinstance(came, bytes) else came
    file.seek(0)
    return torch.load(file, weights_only=True, map_location=device)


def _replace(object_list: list[Any], came: _Came, sender: int, weights_only: bool) -> None:
    objects = _unpacked(came, weights_only, sender)
    if len(objects) != len(object_list):
        raise UsageError(
            f"object_list has {len(object_list)} objects, but rank {sender} sent {len(objects)}"
        )
    object_list[:] = objects


def _check_length(objects: object, name: str, world_size: int) -> None:
    if not isinstance(objects, list) or len(objects) != world_size:
        what = f"{len(objects)} elements" if isinstance(objects, list) else type(objects).__name__
        raise UsageError(f"{name} must be a list of {world_size} elements, one a rank, not {what}")
