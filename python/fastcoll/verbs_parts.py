# SPDX-License-Identifier: Apache-2.0
"""The verbs that have no C function of their own, as methods of a group.

Decides how torch.distributed's arguments become calls. Must not know how a call is carried out.
"""

from collections.abc import Iterable, Sequence

import torch

from fastcoll.calls import Call
from fastcoll.errors import UsageError
from fastcoll.memory.array import Array
from fastcoll.parts import PartsCall
from fastcoll.types import ReduceOp, Verb
from fastcoll.verbs import VerbMethods
from fastcoll.work import Work


class PartsMethods(VerbMethods):
    """Verbs with a root, and verbs with a part for each rank."""

    def issue(self, call: Call | PartsCall) -> Work | None:
        """Check, plan and start a call."""
        raise NotImplementedError

    def issue_all(self, calls: Iterable[Call | PartsCall], async_op: bool) -> Work | None:
        """Check and plan several calls, then start them as one."""
        raise NotImplementedError

    def gather_words(self, words: list[int]) -> list[list[int]]:
        """Gather integers from all ranks."""
        raise NotImplementedError

    def reduce(
        self,
        tensor: Array,
        dst: int,
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        *,
        out: Array | None = None,
        algorithm: str = "auto",
        numerics: str | None = None,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.reduce`; `dst` is a rank of this group."""
        return self.issue(
            Call(
                verb=Verb.reduce,
                input=tensor,
                output=tensor if out is None else out,
                op=op,
                root=dst,
                async_op=async_op,
                algorithm=algorithm,
                numerics=numerics,
                timeout_s=timeout_s,
            )
        )

    def all_gather(
        self,
        tensor_list: Sequence[Array],
        tensor: Array,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.all_gather`."""
        return self.issue(
            PartsCall(
                verb=Verb.all_gather,
                input=tensor,
                output=tensor_list,
                async_op=async_op,
                timeout_s=timeout_s,
            )
        )

    def reduce_scatter(
        self,
        output: Array,
        input_list: Sequence[Array],
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        *,
        algorithm: str = "auto",
        numerics: str | None = None,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.reduce_scatter`."""
        sizes = {tuple(part.shape) for part in input_list if hasattr(part, "shape")}
        if len(sizes) < 2 or len(input_list) != self.world_size:
            return self.issue(
                PartsCall(
                    verb=Verb.reduce_scatter,
                    input=input_list,
                    output=output,
                    op=op,
                    async_op=async_op,
                    algorithm=algorithm,
                    numerics=numerics,
                    timeout_s=timeout_s,
                )
            )
        # Parts of unequal size: a reduce for each rank.
        calls = (
            Call(
                verb=Verb.reduce,
                input=part,
                output=output,
                op=op,
                root=root,
                algorithm=algorithm,
                numerics=numerics,
                timeout_s=timeout_s,
            )
            for root, part in enumerate(input_list)
        )
        return self.issue_all(calls, async_op)

    def gather(
        self,
        tensor: Array,
        gather_list: Sequence[Array] | None = None,
        dst: int = 0,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.gather`; `dst` is a rank of this group."""
        return self.issue(
            PartsCall(
                verb=Verb.gather,
                input=tensor,
                output=gather_list,
                root=dst,
                async_op=async_op,
                timeout_s=timeout_s,
            )
        )

    def scatter(
        self,
        tensor: Array,
        scatter_list: Sequence[Array] | None = None,
        src: int = 0,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.scatter`; `src` is a rank of this group."""
        return self.issue(
            PartsCall(
                verb=Verb.scatter,
                input=scatter_list,
                output=tensor,
                root=src,
                async_op=async_op,
                timeout_s=timeout_s,
            )
        )

    def all_to_all_single(
        self,
        output: Array | None,
        input: Array,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | tuple[torch.Tensor, list[int]] | None:
        """See `fastcoll.all_to_all_single`."""
        result = None
        if output is None:
            result = self._output_for(input, input_split_sizes, output_split_sizes, async_op)
            output, output_split_sizes = result
        work = self.issue(
            PartsCall(
                verb=Verb.all_to_all,
                input=input,
                output=output,
                input_splits=input_split_sizes,
                output_splits=output_split_sizes,
                async_op=async_op,
                timeout_s=timeout_s,
            )
        )
        return result or work

    def _output_for(
        self,
        input: Array,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        async_op: bool,
    ) -> tuple[torch.Tensor, list[int]]:
        """Ask the others how much they give; return an output of that size, and its splits."""
        if input_splits is None or output_splits is not None or async_op:
            raise UsageError(
                "all_to_all_single without an output needs input_split_sizes on every rank, no "
                "output_split_sizes and no async_op"
            )
        if not isinstance(input, torch.Tensor) or input.dim() == 0:
            raise UsageError(
                "all_to_all_single without an output needs a tensor with rows as input"
            )
        if len(input_splits) != self.world_size or sum(input_splits) != len(input):
            raise UsageError(
                f"input_split_sizes {list(input_splits)} must be {self.world_size} numbers that "
                f"add up to the {len(input)} rows of input"
            )
        splits = [row[self.rank] for row in self.gather_words(list(input_splits))]
        return input.new_empty((sum(splits), *input.shape[1:])), splits

    def all_to_all(
        self,
        output_tensor_list: Sequence[Array],
        input_tensor_list: Sequence[Array],
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.all_to_all`."""
        return self.issue(
            PartsCall(
                verb=Verb.all_to_all,
                input=input_tensor_list,
                output=output_tensor_list,
                async_op=async_op,
                timeout_s=timeout_s,
            )
        )
