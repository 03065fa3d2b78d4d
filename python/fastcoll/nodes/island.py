# SPDX-License-Identifier: Apache-2.0
"""The group of one node's ranks, as the groups over several nodes see it."""

from collections.abc import Sequence
from typing import Protocol

import torch

from fastcoll.calls.parts import PartsCall
from fastcoll.calls.tensors import Call
from fastcoll.calls.work import Work


class Island(Protocol):
    """A group of the ranks of one node; `fastcoll.group.communicator.Communicator` is one."""

    def issue(self, call: Call | PartsCall) -> Work | None:
        """Check, plan and start a call."""

    def empty(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """Make a symmetric tensor. Collective."""

    def gather_words(self, words: list[int]) -> list[list[int]]:
        """Gather integers from all its ranks. Collective."""

    def shrink(self, *, timeout_s: float | None = None) -> "Island":
        """Make a new one of the ranks that are left; close this one. Collective over those."""

    def set_timeout(self, timeout_s: float) -> None:
        """Set the limit of calls that give none, in seconds."""

    def check(self) -> None:
        """Raise what broke it."""

    def peer_is_gone(self, peer: int) -> bool:
        """Return whether the process of one of its ranks ended or left."""

    def abort(self, reason: str | None = None) -> None:
        """Break it from any thread."""

    def close(self) -> None:
        """Leave it."""
