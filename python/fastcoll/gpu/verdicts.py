# SPDX-License-Identifier: Apache-2.0
"""A failure that a GPU kernel found, as an error that a user can act on.

Decides the texts. Pure; the numbers are those of kernels/cuda/call.h.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fastcoll.calls.limits import GpuLimits
from fastcoll.calls.transfers import Transfer

USAGE, TIMEOUT, DESYNC, PEER_LOST = 1, 3, 4, 5  # ErrorKind in csrc/check.h
# Phase in kernels/cuda/call.h
_COUNT, _PLACE = 4, 5
_PHASES = (
    "did not come to the call before this one",
    "did not arrive",
    "arrived, but did not finish its part",
    "arrived, but did not say that it is through with this rank's tensor",
)


@dataclass(frozen=True)
class Verdict:
    """The words that a kernel left; see DeviceVerdict in kernels/cuda/call.h."""

    kind: int
    raiser: int
    rank: int
    channel: int
    epoch: int
    expected_stamp: int
    seen_stamp: int
    phase: int


def explain(
    verdict: Verdict, where: str, last_call: str, *, peer_is_gone: bool, both: str = ""
) -> tuple[int, str, tuple[int, ...]]:
    """Return the kind, text and guilty ranks of the error.

    Args:
        verdict: The words that the kernel left.
        where: The group and the rank that tells it, as text; all ranks raise the error.
        last_call: The last call that this rank started.
        peer_is_gone: Whether the process of `verdict.rank` ended or left.
        both: The call in which this rank and the other one differ, if that is known.
    """
    peer = verdict.rank
    call = f"GPU call {verdict.epoch} on channel {verdict.channel} {where}"
    rest = f"Last started here: {last_call}. Outputs since then are undefined (NaN where floating)"
    if verdict.kind == USAGE:
        what = (
            f"rank {peer} was in two calls of this group at the same time: a captured graph was "
            "replayed in a stream that does not wait for the other one. Replay it in the stream "
            "of the other calls, let one stream wait for the other, or give it a group of its own"
        )
        return USAGE, f"{call}: {what}. {rest}", (peer,)
    if verdict.kind == DESYNC:
        if verdict.phase == _COUNT:
            what = f"rank {peer} sends another number of elements than rank {verdict.raiser} takes"
        elif verdict.phase == _PLACE:
            what = f"rank {peer} says that its tensor lies outside of its symmetric memory"
        else:
            what = f"rank {peer} called something else than rank {verdict.raiser}"
        if both:
            what += f"; {both}"
        return DESYNC, f"{call}: {what}. {rest}", (peer,)
    if peer_is_gone:
        return PEER_LOST, f"{call} lost rank {peer}: its process ended or left. {rest}", (peer,)
    phase = _PHASES[verdict.phase] if verdict.phase < len(_PHASES) else "did not answer"
    text = (
        f"{call}: rank {verdict.raiser} waited to the limit for rank {peer}, which {phase}. If the "
        f"ranks are only slow, raise timeout_s= or FASTCOLL_GPU_TIMEOUT_S. {rest}"
    )
    return TIMEOUT, text, (peer,)


def format_late(where: str, limits: GpuLimits, late: Mapping[int, str], last_call: str) -> str:
    """Return a line for the log: kernels have waited long for these ranks.

    Args:
        where: The group and the rank that tells it.
        limits: Of the group's waits.
        late: The last call of each late rank, by rank.
        last_call: The last call that this rank started.
    """
    sides = ", ".join(f"rank {rank} (its last call: {call})" for rank, call in late.items())
    return (
        f"a GPU call {where} has waited {limits.report_s:g} s for {sides}. Last started here: "
        f"{last_call}. After {limits.timeout_s:g} s the group breaks: set gpu_timeout_s= of "
        "init(), timeout= of torch's groups, or FASTCOLL_GPU_TIMEOUT_S"
    )


def format_shared_blocks(group: str, device: int, num_channels: int, capacity: int) -> str:
    """Return a line for the log: from this group on, groups share thread blocks."""
    return (
        f'group "{group}" shares {num_channels} of the {capacity} thread blocks of cuda:{device} '
        "with later groups, as earlier ones have the others. Calls of groups that share run one "
        "after the other, and all ranks must make them in the same order"
    )


def nccl_is_late(group: str, last_call: str) -> str:
    """Return the text of an error: a call that NCCL carries does not end."""
    return (
        f'NCCL did not carry a call of group "{group}" within its limit, and was ended; it does '
        f"not say for which rank it waited. Last started here: {last_call}. Outputs are undefined"
    )


def describe_transfer(transfer: Transfer) -> str:
    """Return a send or a receive as text."""
    verb, way = ("send", "to") if transfer.sends else ("recv", "from")
    return f"{verb}({content_of(transfer)}) {way} rank {transfer.peer}"


def content_of(transfer: Transfer) -> str:
    """Return the facts that must be equal on both sides, as text."""
    return f"{transfer.array.dtype.name}, numel={transfer.array.numel}, tag={transfer.tag}"
