# SPDX-License-Identifier: Apache-2.0
"""Every verb on two to four hosts that are network namespaces, over Gloo; what crosses the links.

Maps: two equal hosts, 3 + 1, three uneven ones, and four of one rank each. FASTCOLL_NODE_ID makes
those of test_verbs.py; here the kernel does. test_hosts.py cuts links and kills hosts.
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from hosts import Hosts

from tests.contract.test_differences import check_each_field, check_each_form
from tests.nodes.everything import check_everything
from tests.nodes.host_pool import HostPool, assert_each_byte_crosses_once, require_hosts
from tests.support.draw import VERBS
from tests.support.harness import Rank
from tests.support.sites import across, ranks_by_node

pytestmark = pytest.mark.slow
LARGE = 30_000  # elements: beyond a header
OnHosts = Callable[[str], HostPool]


@pytest.fixture(scope="module")
def on_hosts() -> Iterator[OnHosts]:
    """`on_hosts("aab")` are ranks 0 and 1 on a host and rank 2 on another one."""
    with contextlib.ExitStack() as stack:
        pools: dict[str, HostPool] = {}

        def get(nodes: str) -> HostPool:
            if nodes not in pools or not pools[nodes].is_open:
                num_hosts = len(set(nodes))
                require_hosts(num_hosts)
                hosts = stack.enter_context(Hosts(num_hosts=num_hosts))
                pools[nodes] = HostPool(hosts, ["abcd".index(node) for node in nodes])
                stack.callback(pools[nodes].close)
                assert pools[nodes].run(node_map) == [ranks_by_node(nodes)] * len(nodes)
            return pools[nodes]

        yield get


def node_map(rank: Rank) -> list[list[int]]:
    return [list(ranks) for ranks in rank.comm.node_map.nodes]


@pytest.mark.parametrize("nodes", ["aabb", "aaab", "aaabcc", "abcd"])
def test_every_verb(on_hosts: OnHosts, nodes: str) -> None:
    check_everything(on_hosts(nodes), nodes)


@pytest.mark.parametrize("numerics", ["same_bits", "fast"])
@pytest.mark.parametrize("nodes", ["aabb", "abba", "aaab", "aaabcc", "abcabc", "abcd"])
def test_each_byte_crosses_once_a_host(on_hosts: OnHosts, nodes: str, numerics: str) -> None:
    assert_each_byte_crosses_once(on_hosts(nodes), numerics)


def test_hosts_that_differ(on_hosts: OnHosts) -> None:
    site = across("aabb").on(on_hosts("aabb"))
    check_each_form(site, LARGE)
    for verb in VERBS:
        check_each_field(site, verb, LARGE)
