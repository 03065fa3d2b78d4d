# SPDX-License-Identifier: Apache-2.0
"""All that ranks on several nodes can do, in one go: for ranks that are dear to start."""

from tests.contract.test_async import check_handle, handle
from tests.contract.test_coalesced import check_lists
from tests.contract.test_differences import check_each_field, check_each_form
from tests.contract.test_objects import check_every_verb
from tests.contract.test_p2p import check_from_anybody, from_anybody, in_any_order
from tests.contract.test_parts import check_uneven, counted_in_the_queue
from tests.nodes.test_bounds import WIDE, check_bounds
from tests.nodes.test_verbs import in_segments
from tests.support.draw import VERBS
from tests.support.harness import Pool
from tests.support.sites import across

LARGE = 30_000  # elements: beyond a header


def check_everything(pool: Pool, nodes: str) -> None:
    """Every verb, dtype and operation against the oracle; lists, objects, transfers."""
    site = across(nodes).on(pool)
    for verb in VERBS:
        site.check([*site.small_calls(verb), *site.large_calls(verb)])
    site.check(in_segments())
    for dtype in WIDE:  # of numerics="fast"; what becomes of half types differs between carriers
        check_bounds(pool, nodes, dtype)
    for size in (3, 3000):
        check_uneven(site, size)
    for as_list in (False, True):
        site.run(counted_in_the_queue, as_list)
    check_lists(site, 0, (1, 3, 4000), 1)
    check_every_verb(site.run, site.world, weights_only=False)
    check_handle(site.run(handle))
    assert site.run(in_any_order, 1) == [[]] * site.world
    check_from_anybody(site.run(from_anybody)[0])


def check_differences(pool: Pool) -> None:
    """Let ranks on nodes "aabb" make calls that differ."""
    site = across("aabb").on(pool)
    check_each_form(site, LARGE)
    for verb in VERBS:
        check_each_field(site, verb, LARGE, every=False)
