# SPDX-License-Identifier: Apache-2.0
"""The store that a launcher's environment names.

Decides how long a rank waits for it and which rank an error names. torch decides whether torchrun's
agent or rank 0 serves the store. Must not know the messages in the store.
"""

from datetime import timedelta

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fastcoll.bootstrap.blocking_calls import ask
from fastcoll.errors import CollectiveTimeout
from fastcoll.launchers import Launch


def connect_store(launch: Launch, limit_s: float) -> Store:
    """Return the launcher's store, which other ranks may not have come to yet.

    Raises:
        CollectiveTimeout: It did not answer within the limit, or refused; where rank 0 serves it,
            `ranks` holds 0 on the others.
    """

    def connect() -> Store:
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
        by_rank_0 = not launch.agent_serves and launch.rank != 0
        server = ", which rank 0 serves," if by_rank_0 else ""
        advice = ""
        if launch.job:
            advice = "; its port follows from the job's name: set MASTER_PORT if it is taken"
        raise CollectiveTimeout(
            f"init (rank {launch.rank} of {launch.world_size}): the store at {at}{server} failed "
            f"within {limit_s:g} s: {error}{advice}",
            [0] if by_rank_0 else [],
        ) from error
