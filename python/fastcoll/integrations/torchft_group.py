# SPDX-License-Identifier: Apache-2.0
"""A process group of torchft on fastcoll, made anew for each quorum.

Decides nothing but the name: `process_group` makes the groups. Needs torchft, so nothing else
imports this.

    from fastcoll.integrations.torchft_group import ProcessGroupFastcoll

    manager = torchft.Manager(pg=ProcessGroupFastcoll(timeout=timedelta(seconds=30)), ...)
"""

from torch.distributed import ProcessGroup, Store

from fastcoll.integrations.torch_backend import process_group

TESTED = "0.2.0"
try:
    from torchft.process_group import ProcessGroupWrapper
except ImportError as error:
    raise ImportError(
        f"torchft.process_group has no ProcessGroupWrapper here: install torchft {TESTED}, with "
        "which this was tested"
    ) from error


class ProcessGroupFastcoll(ProcessGroupWrapper):  # type: ignore[misc]
    """In place of torchft's ProcessGroupGloo; `timeout` limits the making and each call."""

    def _create_pg(self, store: Store, rank: int, world_size: int) -> ProcessGroup:
        name = f"torchft quorum {self._quorum_id}"
        return process_group(store, rank, world_size, self._timeout, name=name)

    def getBackendName(self) -> str:  # noqa: N802
        return "torchft-fastcoll"
