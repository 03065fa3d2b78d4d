# SPDX-License-Identifier: Apache-2.0
"""Tensors of calls between nodes: those whose memory changes, and those that autograd has saved."""

from collections.abc import Callable

import pytest

from tests.contract.test_changed_memory import negate, swapped, with_other_data
from tests.contract.test_versions import saved
from tests.support.harness import Pool
from tests.support.written import VERBS

Clusters = Callable[[str], Pool]


@pytest.mark.parametrize("name", VERBS)
def test_values_are_read_as_they_mean(clusters: Clusters, name: str) -> None:
    assert clusters("ab").run(with_other_data, name, negate) == [[], []]


@pytest.mark.parametrize("name", VERBS)
def test_tensors_can_be_swapped_afterwards(clusters: Clusters, name: str) -> None:
    assert clusters("ab").run(swapped, name) == [[], []]


@pytest.mark.parametrize("name", VERBS)
def test_autograd_sees_what_is_written(clusters: Clusters, name: str) -> None:
    assert clusters("ab").run(saved, name) == [[], []]
