# SPDX-License-Identifier: Apache-2.0
"""The communication hooks for DistributedDataParallel.

Decides how a bucket of gradients is averaged, and which of them are coded between nodes. Must not
know how DDP fills its buckets.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch.distributed import GradBucket
from torch.futures import Future

from fastcoll.api.groups import GroupLike, communicator_of, issue
from fastcoll.api.reductions import all_reduce
from fastcoll.calls.tensors import Call, checked_wire
from fastcoll.errors import UsageError
from fastcoll.group.communicator import Communicator
from fastcoll.types import DType, Op, ReduceOp, Verb


def ddp_hook(state: GroupLike, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average DDP's gradients with fastcoll, for any backend of the process group.

    `model.register_comm_hook(group, fastcoll.ddp_hook)` is all that a program changes. The buckets
    are reduced in the background, in the order in which backward fills them, while it goes on.

    The gradients are summed in the order of the ranks and then divided. DDP itself divides first.
    The two have the same bits where the number of ranks is a power of two and no quotient loses
    digits by its smallness. Otherwise they differ by a rounding.

    Args:
        state: The first argument of `register_comm_hook`: a process group or a Communicator of the
            ranks that train together, as DDP's `process_group`. None is the default group. A group
            that is new to fastcoll is made at the first bucket.
        bucket: The gradients; averaged where they are.

    Returns:
        A future of the averaged bucket. If the call raises, backward raises RuntimeError with the
        same text, as DDP makes one of it. The group's next call raises the error itself.
    """
    work = all_reduce(bucket.buffer(), ReduceOp.AVG, state, True)
    assert work is not None, "this rank trains, so it is in the group"
    return work.get_future().then(lambda done: done.value()[0])


def has_few_dimensions(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has fewer than two dimensions, as biases and norms have."""
    return parameter.dim() < 2


class CompressedGradients:
    """The state of `compressed_ddp_hook` for one model.

    Attributes:
        group: The group that trains.
        wire: The format in which gradients cross between nodes.
        feedback: Whether the error of a step's coding is added to the gradients of the next step.
        exact: Whether a parameter's gradient crosses as it is.
    """

    def __init__(
        self,
        group: GroupLike = None,
        wire: Literal["int8", "fp8", "bf16"] = "int8",
        *,
        feedback: bool = True,
        exact: Callable[[torch.Tensor], bool] = has_few_dimensions,
    ) -> None:
        """Choose the gradients that are coded, and how.

        Args:
            group: A process group or a Communicator of the ranks that train together; None is the
                default group.
            wire: As in `fastcoll.all_reduce`. On one node it changes nothing.
            feedback: Keep the errors of the coding, in 4 bytes for each element that is coded. So
                the sum of the given gradients over the steps stays near the true sum. Where a
                gradient is not finite, its error is dropped.
            exact: Called with each parameter; the same answer on every rank and in every step. By
                default those of fewer than two dimensions are exact: few bytes, and much of the
                loss that coding costs.

        Raises:
            UsageError: There is no such format, or `exact` can't be called.
        """
        checked_wire(wire, DType.float32, Op.AVG)
        if not callable(exact):
            raise UsageError(f"exact must be a function of a parameter, not {exact!r}")
        self.group = group
        self.wire = wire
        self.feedback = feedback
        self.exact = exact
        # Bucket -> its parameters and the errors. DDP makes new buckets after the first step.
        self._errors: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def error_of(self, bucket: GradBucket, numel: int) -> torch.Tensor | None:
        """Return the errors that the bucket's last coding left, zeros before its first one.

        None where nothing is coded: without feedback, or on one node.
        """
        if not self.feedback or isinstance(communicator_of(self.group), Communicator):
            return None
        parameters = bucket.parameters()
        known, errors = self._errors.get(bucket.index(), ([], torch.empty(0, device="cpu")))
        if errors.numel() != numel or [*map(id, known)] != [*map(id, parameters)]:
            errors = torch.zeros(numel, dtype=torch.float32, device="cpu")
            self._errors[bucket.index()] = parameters, errors
        return errors


def compressed_ddp_hook(state: CompressedGradients, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average DDP's gradients in fewer bytes between nodes.

    `model.register_comm_hook(fastcoll.CompressedGradients(), fastcoll.compressed_ddp_hook)`. All
    ranks get the same bits, within the bound of docs/numerics.md. A bucket is two messages: its
    coded gradients and its exact ones.

    Args:
        state: A `CompressedGradients` of this model alone.
        bucket: The gradients, of float32, float16 or bfloat16; averaged where they are.

    Returns:
        A future of the averaged bucket; see `ddp_hook` for errors.
    """
    buffer, gradients = bucket.buffer(), bucket.gradients()
    is_exact = [bool(state.exact(parameter)) for parameter in bucket.parameters()]
    started, copies = [], []
    for side, wire in ((False, state.wire), (True, None)):
        some = [one for one, exact in zip(gradients, is_exact, strict=True) if exact is side]
        if not some:
            continue
        message = buffer
        if len(some) < len(gradients):
            message = torch.cat([one.reshape(-1) for one in some])
            copies.append((message, some))
        started.append(_start(state, bucket, message, wire))

    def bring_back(done: Future[list[Future[list[torch.Tensor]]]]) -> torch.Tensor:
        for one in done.value():
            one.value()  # raises its error
        for message, some in copies:
            sizes = [gradient.numel() for gradient in some]
            for gradient, piece in zip(some, torch.split(message, sizes), strict=True):
                gradient.copy_(piece.view(gradient.shape))
        return buffer

    return torch.futures.collect_all(started).then(bring_back)


def _start(
    state: CompressedGradients, bucket: GradBucket, message: torch.Tensor, wire: str | None
) -> Future[list[torch.Tensor]]:
    call = Call(
        verb=Verb.all_reduce,
        input=message,
        output=message,
        op=ReduceOp.AVG,
        async_op=True,
        wire=wire,
        feedback=state.error_of(bucket, message.numel()) if wire else None,
    )
    work = issue(state.group, call)
    assert work is not None, "this rank trains, so it is in the group"
    return work.get_future()
