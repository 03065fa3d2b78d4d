# SPDX-License-Identifier: Apache-2.0
"""torch's default device is the program's: memory of a call's own lies where its tensors lie."""

import copy

import numpy as np
import torch

import fastcoll
from tests.contract.test_changed_memory import each_verb, verb_call
from tests.support.harness import Pools, Rank, attempt
from tests.support.sites import Site, each_kind
from tests.support.verb_calls import VERB_CALLS

NUMELS = (61, 20_011)  # that no other test has, so that the first call of a kind is under test


def elsewhere(rank: Rank, name: str) -> list[str]:
    """Call while other tensors are made without memory, then as always."""
    verb, wrong = VERB_CALLS[name], []
    for numel in NUMELS:
        tensors = verb.tensors(rank.world_size, numel=numel)
        others = copy.deepcopy(tensors)
        with torch.device("meta"):
            failed = attempt(verb.make, rank.comm, *tensors)
        if failed.kind:
            return [f"{numel}: {failed.text}"]
        verb.make(rank.comm, *others)
        if not all(map(torch.equal, tensors, others)):
            wrong.append(f"{numel}: other values")
    return wrong


@each_verb
@each_kind
def test_a_default_device_is_not_a_calls(site: Site, name: str) -> None:
    verb_call(site, name)
    assert site.run(elsewhere, name) == [[]] * site.world


def arrays_elsewhere(rank: Rank) -> list[float]:
    parts = [np.full(37, rank.rank + part, np.float32) for part in range(rank.world_size)]
    sums = np.empty(37, np.float32)
    with torch.device("meta"):
        fastcoll.reduce_scatter(sums, parts, group=rank.comm)
    return sums.tolist()


def test_arrays_that_lie_apart(pools: Pools) -> None:
    assert pools(2).run(arrays_elsewhere) == [[1.0] * 37, [3.0] * 37]
