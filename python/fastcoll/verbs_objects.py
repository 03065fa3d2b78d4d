# SPDX-License-Identifier: Apache-2.0
"""Verbs for Python objects, and the barrier that names who is missing, as methods of a group.

Objects travel as pickles, between the processes of one user, which the group's making checks; or
as torch saves them, for who does not trust what the others load. Decides how objects become
tensors. Must not know how a call is carried out.
"""

import io
import pickle
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from fastcoll.calls import Call, checked_root
from fastcoll.errors import UsageError
from fastcoll.parts import PartsCall
from fastcoll.types import Verb
from fastcoll.verbs_p2p import P2PMethods
from fastcoll.verbs_parts import PartsMethods


class ObjectMethods(PartsMethods, P2PMethods):
    """Collectives, sends and receives of anything that can be pickled."""

    def gather_bytes(self, data: bytes, limit_s: float | None = None) -> list[bytes]:
        """Gather a string of bytes from every rank; they may differ in length. Collective."""
        lengths = [row[0] for row in self.gather_words([len(data)], limit_s)]
        if not any(lengths):
            return [b""] * self.world_size
        rows = [np.empty(length, dtype=np.uint8) for length in lengths]
        mine = np.frombuffer(data, dtype=np.uint8)
        self.issue(PartsCall(verb=Verb.all_gather, input=mine, output=rows, timeout_s=limit_s))
        return [row.tobytes() for row in rows]

    def all_gather_object(
        self, object_list: list[Any], obj: Any, *, weights_only: bool = False
    ) -> None:
        """See `fastcoll.all_gather_object`."""
        _check_length(object_list, "object_list", self.world_size)
        everything = self.gather_bytes(_packed(obj, weights_only))
        object_list[:] = [_unpacked(data, weights_only, r) for r, data in enumerate(everything)]

    def broadcast_object_list(
        self, object_list: list[Any], src: int = 0, *, weights_only: bool = False
    ) -> None:
        """See `fastcoll.broadcast_object_list`; `src` is a rank of this group."""
        root = checked_root(src, "src", self.world_size)
        _check_list(object_list)
        data = _packed(object_list, weights_only) if self.rank == root else b""
        length = np.array([len(data)], np.int64)
        self.issue(Call(verb=Verb.broadcast, input=length, output=length, root=root))
        message = np.frombuffer(data, np.uint8) if data else np.empty(int(length[0]), np.uint8)
        self.issue(Call(verb=Verb.broadcast, input=message, output=message, root=root))
        _replace(object_list, message, root, weights_only)

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int = 0,
        *,
        weights_only: bool = False,
    ) -> None:
        """See `fastcoll.gather_object`; `dst` is a rank of this group."""
        root = checked_root(dst, "dst", self.world_size)
        if self.rank == root:
            _check_length(object_gather_list, "object_gather_list", self.world_size)
        everything = self.gather_bytes(_packed(obj, weights_only))
        if object_gather_list is not None and self.rank == root:
            object_gather_list[:] = [
                _unpacked(data, weights_only, rank) for rank, data in enumerate(everything)
            ]

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int = 0,
        *,
        weights_only: bool = False,
    ) -> None:
        """See `fastcoll.scatter_object_list`; `src` is a rank of this group."""
        root = checked_root(src, "src", self.world_size)
        if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
            raise UsageError("scatter_object_output_list must be a list of at least one element")
        everything = [b""] * self.world_size
        if self.rank == root:
            _check_length(scatter_object_input_list, "scatter_object_input_list", self.world_size)
            everything = [_packed(obj, weights_only) for obj in scatter_object_input_list or ()]
        gives = [len(data) for data in everything]
        lengths = np.array(gives, np.int64)
        self.issue(Call(verb=Verb.broadcast, input=lengths, output=lengths, root=root))
        mine = np.empty(int(lengths[self.rank]), np.uint8)
        # A scatter has equal parts: one long object would make all of them as long.
        self.issue(
            PartsCall(
                verb=Verb.all_to_all,
                input=np.frombuffer(b"".join(everything), np.uint8),
                output=mine,
                input_splits=gives,
                output_splits=[mine.size if rank == root else 0 for rank in range(self.world_size)],
            )
        )
        scatter_object_output_list[0] = _unpacked(mine.tobytes(), weights_only, root)

    def send_object_list(
        self, object_list: list[Any], dst: int, *, weights_only: bool = False
    ) -> None:
        """See `fastcoll.send_object_list`; `dst` is a rank of this group."""
        _check_list(object_list)
        message = np.frombuffer(bytearray(_packed(object_list, weights_only)), np.uint8)
        self.send(np.array([message.size], np.int64), dst)
        self.send(message, dst)

    def recv_object_list(
        self, object_list: list[Any], src: int | None = None, *, weights_only: bool = False
    ) -> int:
        """See `fastcoll.recv_object_list`; `src` and the result are ranks of this group."""
        _check_list(object_list)
        length = np.empty(1, np.int64)
        peer = self.recv(length, src)
        message = np.empty(int(length[0]), np.uint8)
        self.recv(message, peer)
        _replace(object_list, message, peer, weights_only)
        return peer

    def monitored_barrier(
        self, timeout: float | timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See `fastcoll.monitored_barrier`."""
        del wait_all_ranks  # an error names all missing ranks in any case
        self.issue(Call(verb=Verb.barrier, timeout_s=timeout))


def _check_list(objects: object) -> None:
    if not isinstance(objects, list):
        raise UsageError(f"object_list must be a list, not {type(objects).__name__}")


def _packed(obj: Any, weights_only: bool) -> bytes:
    if not weights_only:
        return pickle.dumps(obj)
    packed = io.BytesIO()
    torch.save(obj, packed)
    return packed.getvalue()


def _unpacked(data: bytes, weights_only: bool, sender: int) -> Any:
    is_saved = data.startswith(b"PK")  # by torch: a zip archive, which is no pickle
    if is_saved != bool(weights_only):
        raise UsageError(
            f"rank {sender} sent objects with weights_only={is_saved}, but this rank was called "
            f"with weights_only={not is_saved}; it must be the same on all ranks"
        )
    if not weights_only:
        return pickle.loads(data)
    return torch.load(io.BytesIO(data), weights_only=True)


def _replace(
    object_list: list[Any], message: np.ndarray[Any, Any], sender: int, weights_only: bool
) -> None:
    objects = _unpacked(message.tobytes(), weights_only, sender)
    if len(objects) != len(object_list):
        raise UsageError(
            f"object_list has {len(object_list)} objects, but rank {sender} sent {len(objects)}"
        )
    object_list[:] = objects


def _check_length(objects: object, name: str, world_size: int) -> None:
    if not isinstance(objects, list) or len(objects) != world_size:
        what = f"{len(objects)} elements" if isinstance(objects, list) else type(objects).__name__
        raise UsageError(f"{name} must be a list of {world_size} elements, one a rank, not {what}")
