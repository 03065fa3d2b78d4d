# SPDX-License-Identifier: Apache-2.0
"""Every verb on two to four hosts that are network namespaces, over Gloo; what crosses the links.

Maps: two equal hosts, 3 + 1, three uneven ones, and four of one rank each. FASTCOLL_NODE_ID makes
those of test_verbs.py; here the kernel does. test_hosts.py cuts links and kills hosts.
"""

from collections.abc import Iterator

import pytest
from hosts import Hosts

from tests.nodes.everything import check_differences, check_everything
from tests.nodes.host_pool import (
    HostPool,
    OnHosts,
    assert_each_byte_crosses_once,
    pools_on_hosts,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def on_hosts() -> Iterator[OnHosts]:
    def start(hosts: Hosts, nodes: str) -> HostPool:
        return HostPool(hosts, ["abcd".index(node) for node in nodes])

    with pools_on_hosts(start) as get:
        yield get


@pytest.mark.parametrize("nodes", ["aabb", "aaab", "aaabcc", "abcd"])
def test_every_verb(on_hosts: OnHosts, nodes: str) -> None:
    check_everything(on_hosts(nodes), nodes)


@pytest.mark.parametrize("numerics", ["same_bits", "fast"])
@pytest.mark.parametrize("nodes", ["aabb", "abba", "aaab", "aaabcc", "abcabc", "abcd"])
def test_each_byte_crosses_once_a_host(on_hosts: OnHosts, nodes: str, numerics: str) -> None:
    assert_each_byte_crosses_once(on_hosts(nodes), numerics)


def test_hosts_that_differ(on_hosts: OnHosts) -> None:
    check_differences(on_hosts("aabb"))
