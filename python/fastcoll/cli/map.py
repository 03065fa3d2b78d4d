# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a launch share memory, without making a group of them."""

import time

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.exchange import StoreExchange
from fastcoll.bootstrap.identity import Terms, describe_rank, map_nodes, meet, why_apart
from fastcoll.bootstrap.launcher import connect_store
from fastcoll.bootstrap.node_map import NodeMap
from fastcoll.launchers import Launch


def map_ranks(launch: Launch, limit_s: float = 20.0) -> tuple[NodeMap, str]:
    """Return the map of a launch's ranks, and the reason that parts some of one machine.

    Collective.
    """
    deadline = Deadline(limit_s)
    store = connect_store(launch, limit_s)
    exchange = StoreExchange(store, launch.rank, launch.world_size)
    hello = describe_rank(address="", token="", terms=Terms("", ""))
    hellos = meet(exchange.gather(hello.to_dict(), deadline))
    node_map = map_nodes(hellos)
    num_done = store.add("fastcoll/mapped", 1)
    while launch.rank == 0 and num_done < launch.world_size and not deadline.passed():
        time.sleep(0.01)  # the server may be in this process, and the others still read
        num_done = store.add("fastcoll/mapped", 0)
    return node_map, why_apart(hellos)
