# SPDX-License-Identifier: Apache-2.0
"""The calls of torch's process groups: the one table of their names.

The Python group and its events read it; scripts/verbs.py writes c10d_names.h from it for the
compiled backend. Imports nothing, as that script runs without the package.
"""

from typing import NamedTuple


class TorchCall(NamedTuple):
    """One method of torch's process groups."""

    method: str  # its name in the newest torch
    verb: str  # the function of fastcoll that carries it out; "" if there is no single one
    op_type: str  # name in c10d::OpType
    event: str  # name in a profile, behind "fastcoll:"
    older: tuple[str, ...] = ()  # names of the method in older versions of torch
    # Name behind "gloo:", where a group stands in for Gloo; "" if that is `event`.
    as_gloo: str = ""

    def title(self, prefix: str) -> str:
        """Return the name of the event in a profile, behind "fastcoll" or "gloo"."""
        return f"{prefix}:{self.as_gloo if prefix == 'gloo' and self.as_gloo else self.event}"


# COALESCED also stands for the calls for which torch 2.11 has no type.
TORCH_CALLS = (
    TorchCall("allreduce", "all_reduce", "ALLREDUCE", "all_reduce"),
    TorchCall("allreduce_coalesced", "all_reduce_coalesced", "ALLREDUCE_COALESCED", "all_reduce"),
    TorchCall("broadcast", "broadcast", "BROADCAST", "broadcast"),
    TorchCall("reduce", "reduce", "REDUCE", "reduce"),
    TorchCall("allgather", "all_gather", "ALLGATHER", "all_gather"),
    TorchCall("allgather_coalesced", "", "ALLGATHER_COALESCED", "all_gather"),
    TorchCall(
        "all_gather_single",
        "all_gather_into_tensor",
        "_ALLGATHER_BASE",
        "_all_gather_base",
        older=("_allgather_base",),
        as_gloo="all_gather",
    ),
    TorchCall(
        "all_gather_single_coalesced",
        "all_gather_into_tensor_coalesced",
        "COALESCED",
        "all_gather_into_tensor_coalesced",
        older=("allgather_into_tensor_coalesced",),
        as_gloo="all_gather",
    ),
    TorchCall("reduce_scatter", "reduce_scatter", "REDUCE_SCATTER", "reduce_scatter"),
    TorchCall(
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "_REDUCE_SCATTER_BASE",
        "_reduce_scatter_base",
        older=("_reduce_scatter_base",),
        as_gloo="reduce_scatter",
    ),
    TorchCall(
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
        "COALESCED",
        "reduce_scatter_tensor_coalesced",
        older=("reduce_scatter_tensor_coalesced",),
        as_gloo="reduce_scatter",
    ),
    TorchCall("gather", "gather", "GATHER", "gather"),
    TorchCall("gather_single", "gather_single", "GATHER", "gather", older=("gather_into_tensor",)),
    TorchCall("scatter", "scatter", "SCATTER", "scatter"),
    TorchCall("alltoall", "all_to_all", "ALLTOALL", "all_to_all"),
    TorchCall(
        "all_to_all_single",
        "all_to_all_single",
        "ALLTOALL_BASE",
        "all_to_all",
        older=("alltoall_base",),
    ),
    TorchCall("barrier", "barrier", "BARRIER", "barrier"),
    TorchCall("send", "isend", "SEND", "send"),
    TorchCall("recv", "irecv", "RECV", "recv"),
    TorchCall("recv_anysource", "irecv", "RECVANYSOURCE", "recv", as_gloo="recvAnySource"),
    TorchCall("_end_coalescing", "", "COALESCED", "coalesced"),
)
