# SPDX-License-Identifier: Apache-2.0
"""Carriers by their names.

Decides which carrier a name means. Must not know how a carrier is used.
"""

from fastcoll.bootstrap.blocking_calls import ask
from fastcoll.errors import CollectiveTimeout, FastcollError, UsageError
from fastcoll.nodes.carriers import mpi as mpi_carrier
from fastcoll.nodes.carriers import torch as torch_carrier
from fastcoll.nodes.carriers.carrier import Carrier, MakeCarrier
from fastcoll.nodes.verdict.store import PollingStore

_GRACE_S = 1.0  # for a carrier to name itself the ranks that it waited for
CARRIERS: dict[str, MakeCarrier] = {
    "gloo": torch_carrier.gloo,
    "mpi": mpi_carrier.mpi,
    "nccl": torch_carrier.gloo,  # which has no business with CPUs; between GPUs it carries anyway
}


def identity(name: str) -> str:
    """Return the facts about a carrier that must be equal on all ranks, in words."""
    return mpi_carrier.describe() if name == "mpi" else name


def maker_of(name: str) -> MakeCarrier:
    """Return the function, collective over a lane, that makes a lane of this carrier.

    Raises:
        UsageError: There is none.
    """
    make = CARRIERS.get(name) or torch_carrier.registered(name)
    if make is None:
        raise UsageError(
            f'there is no carrier "{name}"; there are {", ".join(CARRIERS)} and the backends '
            "registered with torch.distributed. Between GPUs NCCL carries, whatever is named here"
        )
    return make


def make_lane(make: MakeCarrier, store: PollingStore, node: int, num_nodes: int) -> Carrier:
    """Make one lane. Collective over it, the ranks of `store`.

    Raises:
        CollectiveTimeout: A rank of the lane did not come.
        DriverError: This machine has no network device.
    """
    try:
        if make is torch_carrier.gloo:  # first: in Gloo the others would not hear of an error
            ask(lambda: torch_carrier.find_gloo_devices(node), store.deadline.left_s())
        store.meet()
        left_s = store.deadline.left_s()
        # In another thread: a carrier that connects hears no Ctrl-C.
        return ask(lambda: make(store, node, num_nodes, left_s), left_s + _GRACE_S)
    except (RuntimeError, TimeoutError) as error:
        if isinstance(error, FastcollError):
            raise
        raise CollectiveTimeout(
            f"init: the carrier between nodes could not be made on node {node}: {error}"
        ) from error
