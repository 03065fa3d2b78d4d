# SPDX-License-Identifier: Apache-2.0
"""fastcoll: collective communication between the processes of one machine.

Call `init()` (or start with torchrun), then `all_reduce(tensor)` and its fellows in place of
torch.distributed's.

These functions have no gradients; those in `fastcoll.integrations.ops` do. A tensor that a call
writes counts as changed in place from the start of the call. A backward pass that needs its former
values raises RuntimeError. Leaves that require gradients are written outside of `torch.no_grad()`
too, as by torch.distributed. Autograd does not see writes to `tensor.data`, to NumPy arrays on a
tensor's memory, nor to tensors of inference mode. It does not see torch's own such writes either.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastcoll.api.lifecycle import (
    destroy,
    destroy_process_group,
    get_rank,
    get_world_size,
    init,
    init_process_group,
    is_initialized,
    new_group,
    shrink,
)
from fastcoll.api.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    monitored_barrier,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from fastcoll.api.reductions import prepare
from fastcoll.api.tensors import empty, from_tensor, zeros
from fastcoll.api.verbs import (
    all_gather,
    all_gather_into_tensor,
    all_gather_into_tensor_coalesced,
    all_gather_single,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    batch_isend_irecv,
    broadcast,
    gather,
    gather_into_tensor,
    gather_single,
    irecv,
    isend,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
    scatter,
    send,
)
from fastcoll.bootstrap.identity import library_version
from fastcoll.calls.batches import P2POp
from fastcoll.calls.epilogues import TritonEpilogue
from fastcoll.calls.group import BaseGroup as Group
from fastcoll.calls.rows import RMSNorm
from fastcoll.calls.work import Work
from fastcoll.errors import (
    AbortedError,
    CollectiveTimeout,
    DesyncError,
    DriverError,
    FastcollError,
    PeerLostError,
    UnsupportedError,
    UsageError,
)
from fastcoll.group.communicator import Communicator
from fastcoll.integrations import compile as torch_compile
from fastcoll.integrations import torch_backend
from fastcoll.integrations.compile import fuse_compiled
from fastcoll.integrations.ddp import CompressedGradients, compressed_ddp_hook, ddp_hook
from fastcoll.integrations.stand_in import stand_in_for_gloo
from fastcoll.integrations.torch_backend import make_default
from fastcoll.types import ReduceOp

if TYPE_CHECKING:
    from fastcoll.nodes.group import HierarchicalCommunicator
    from fastcoll.ranks.functions import launch

__version__ = library_version()

# Names whose modules few programs need, imported at first use: `import fastcoll` takes 30 ms less.
_LATER = {"HierarchicalCommunicator": "fastcoll.nodes.group", "launch": "fastcoll.ranks.functions"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(_LATER[name]), name)
    return globals()[name]


torch_backend.register()
torch_compile.register()

__all__ = [
    "AbortedError",
    "CollectiveTimeout",
    "Communicator",
    "CompressedGradients",
    "DesyncError",
    "DriverError",
    "FastcollError",
    "Group",
    "HierarchicalCommunicator",
    "P2POp",
    "PeerLostError",
    "RMSNorm",
    "ReduceOp",
    "TritonEpilogue",
    "UnsupportedError",
    "UsageError",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "compressed_ddp_hook",
    "ddp_hook",
    "destroy",
    "destroy_process_group",
    "empty",
    "from_tensor",
    "fuse_compiled",
    "gather",
    "gather_into_tensor",
    "gather_object",
    "gather_single",
    "get_rank",
    "get_world_size",
    "init",
    "init_process_group",
    "irecv",
    "is_initialized",
    "isend",
    "launch",
    "make_default",
    "monitored_barrier",
    "new_group",
    "prepare",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "shrink",
    "stand_in_for_gloo",
    "zeros",
]
