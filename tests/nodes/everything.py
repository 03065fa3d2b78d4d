# SPDX-License-Identifier: Apache-2.0
"""All that ranks on several nodes can do, in one go: for ranks that are dear to start."""

from tests.nodes.test_any_source import from_anybody
from tests.nodes.test_bounds import WIDE, check_bounds
from tests.nodes.test_node_transfers import everybody_to_everybody
from tests.nodes.test_verbs import in_segments, others, uneven
from tests.support.draw import VERBS
from tests.support.harness import Pool
from tests.support.sites import across


def check_everything(pool: Pool, nodes: str) -> None:
    """Every verb, dtype and operation against the oracle; lists, objects, transfers."""
    site = across(nodes).on(pool)
    for verb in VERBS:
        site.check([*site.small_calls(verb), *site.large_calls(verb)])
    site.check(in_segments())
    for dtype in WIDE:  # of numerics="fast"; what becomes of half types differs between carriers
        check_bounds(pool, nodes, dtype)
    for program in (uneven, others, everybody_to_everybody, from_anybody):
        pool.run(program)
