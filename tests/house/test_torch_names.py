# SPDX-License-Identifier: Apache-2.0
"""Functions of torch.distributed keep its names, and the names and order of its arguments."""

import inspect

import pytest
import torch.distributed as dist

import fastcoll
from fastcoll.calls.methods import VerbMethods

VERBS = ("all_", "barrier", "batch_", "broadcast", "gather", "irecv", "isend", "monitored", "recv")
VERBS += ("reduce", "scatter", "send")
NOT_OURS = {
    "all_gather_coalesced",  # deprecated there; all_gather_into_tensor_coalesced does it
    "reduce_op",  # deprecated there, and no function
}


def names_of_torch() -> list[str]:
    return [name for name in dir(dist) if name.startswith(VERBS) and name not in NOT_OURS]


@pytest.mark.parametrize("name", names_of_torch())
def test_every_verb_of_torch_is_there(name: str) -> None:
    torchs = list(inspect.signature(getattr(dist, name)).parameters)
    kinds = inspect.signature(getattr(fastcoll, name)).parameters.values()
    ours = [kind.name for kind in kinds if kind.kind is not inspect.Parameter.KEYWORD_ONLY]
    common = min(len(torchs), len(ours))
    assert ours[:common] == torchs[:common]
    assert name in fastcoll.__all__


@pytest.mark.parametrize("name", names_of_torch())
def test_every_argument_of_torch_is_taken(name: str) -> None:
    torchs = {*inspect.signature(getattr(dist, name)).parameters}
    assert torchs <= {*inspect.signature(getattr(fastcoll, name)).parameters}


def test_the_transfers_of_batches_take_what_torchs_do() -> None:
    torchs = list(inspect.signature(dist.P2POp).parameters)
    assert list(inspect.signature(fastcoll.P2POp).parameters) == torchs


@pytest.mark.parametrize(
    ("name", "older"),
    [
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
        ("gather_single", "gather_into_tensor"),
    ],
)
def test_newer_names_mean_the_same(name: str, older: str) -> None:
    for home in (fastcoll, VerbMethods):
        assert getattr(home, name) is getattr(home, older)
