# SPDX-License-Identifier: Apache-2.0
"""The store that a launcher's environment names.

Decides how long a rank waits for it and which rank an error names. torch decides whether torchrun's
agent or rank 0 serves the store. Must not know the messages in the store.
"""

import socket
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fastcoll.bootstrap.blocking_calls import ask
from fastcoll.bootstrap.deadline import Deadline
from fastcoll.errors import CollectiveTimeout
from fastcoll.launchers import Launch

_PAUSE_S = 0.05  # between two looks for the store; a refused connection costs about 20 us


def connect_store(launch: Launch, limit_s: float) -> Store:
    """Return the launcher's store, which other ranks may not have come to yet.

    Raises:
        CollectiveTimeout: It did not answer within the limit, or refused; where rank 0 serves it,
            `ranks` holds 0 on the others.
    """
    is_served_here = launch.rank == 0 and not launch.agent_serves

    def connect() -> Store:
        if not is_served_here:
            _await_server(launch, limit_s)
        # Without a world size torch waits for no rank: the exchange finds the missing ranks.
        url = f"env://?rank={launch.rank}&world_size=-1"
        if launch.job:  # its address is not in the environment
            url = (
                f"tcp://{launch.master_addr}:{launch.master_port}?rank={launch.rank}&world_size=-1"
            )
        store: Store
        store, _, _ = next(rendezvous(url, timeout=timedelta(seconds=limit_s)))
        # Another job may have the port: then the ranks miss each other, and don't mix.
        return PrefixStore(launch.job, store) if launch.job else store

    try:
        return ask(connect, limit_s)
    except (RuntimeError, TimeoutError) as error:
        at = f"{launch.master_addr}:{launch.master_port}"
        by_rank_0 = not launch.agent_serves and not is_served_here
        server = ", which rank 0 serves," if by_rank_0 else ""
        advice = ""
        if launch.job:
            advice = "; its port follows from the job's name: set MASTER_PORT if it is taken"
        raise CollectiveTimeout(
            f"init (rank {launch.rank} of {launch.world_size}): the store at {at}{server} failed "
            f"within {limit_s:g} s: {error}{advice}",
            [0] if by_rank_0 else [],
        ) from error


def _await_server(launch: Launch, limit_s: float) -> None:
    """Wait until something listens at the store's address.

    torch waits for that up to 3 s longer than its limit. By then this limit's error may have ended
    the program. C++ that returns to an interpreter that ends takes the process down.

    Raises:
        TimeoutError: Nothing listens there.
    """
    deadline = Deadline(limit_s)
    while True:
        try:
            address = (launch.master_addr, launch.master_port)
            with socket.create_connection(address, timeout=max(deadline.left_s(), _PAUSE_S)):
                return
        except OSError as error:
            if deadline.passed():
                raise TimeoutError(f"nothing listens there: {error}") from error
        time.sleep(_PAUSE_S)
