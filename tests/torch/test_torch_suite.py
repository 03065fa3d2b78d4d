# SPDX-License-Identifier: Apache-2.0
"""Some of PyTorch's own cases, on both kinds of group.

They pass on Gloo. `torch_suite.py` runs all cases there and here, and compares.
"""

import pytest

from tests.torch import torch_suite

pytestmark = [
    pytest.mark.slow,
    pytest.mark.native,
    pytest.mark.timeout(900),
]

CASES = (
    "test_all_gather",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_group",
    "test_all_gather_into_cat_tensor_cuda",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_full_group_max",
    "test_all_reduce_min",
    "test_all_reduce_product",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_to_all_single_unequal_split",
    "test_barrier_full_group",
    "test_barrier_timeout_full_group",
    "test_barrier_timeout_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_group",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_join_model_equivalence",
    "test_ddp_logging_data_cpu",
    "test_ddp_profiling_torch_profiler",
    "test_ddp_static_graph_nested_types",
    "test_destroy_full_group",
    "test_gather_full_group",
    "test_gather_object_subgroup",
    "test_irecv",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_wait_all_ranks",
    "test_isend",
    "test_reduce_group_sum",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
)
# Two ranks are too few for them: most have a group of ranks 1 and 2.
OF_MORE_RANKS = (
    "test_all_gather_group",
    "test_barrier_timeout_group",
    "test_broadcast_group",
    "test_monitored_barrier_wait_all_ranks",
    "test_reduce_group_sum",
)
# Passes on fastcoll alone; Gloo has no such call, or not with these sizes.
OURS = ("test_all_to_all", "test_all_gather_v_cuda", "test_reduce_scatter_tensor_cuda")
# Not in Gloo's place: it compares the numbers of Gloo's own threads and sockets.
OF_GLOO_ITSELF = ("test_ddp_logging_data_cpu",)
# A method, and a case that must notice if it is wrong.
CORRUPT = (
    "allreduce:test_all_reduce_max",
    "allreduce_coalesced:test_all_reduce_coalesced_sum",
    "all_gather_single:test_all_gather_into_cat_tensor_cuda",
    "all_to_all_single:test_all_to_all_single_equal_split",
    "allgather:test_all_gather",
    "alltoall:test_all_to_all",
    "broadcast:test_broadcast",
    "gather:test_gather",
    "recv:test_send_recv",
    "reduce:test_reduce_sum",
    "reduce_scatter_single:test_reduce_scatter_tensor_cuda",
    "scatter:test_scatter",
)


@pytest.mark.parametrize(
    ("world", "backend", "as_gloo", "nodes"),
    [(2, "python", "0", ""), (4, "compiled", "1", ""), (4, "python", "0", "aabb")],
)
def test_what_passes_on_gloo_passes_here(
    world: int, backend: str, as_gloo: str, nodes: str
) -> None:
    variables = {"FASTCOLL_TORCH_BACKEND": backend, "FASTCOLL_AS_GLOO": as_gloo}
    cases = [name for name in CASES if as_gloo == "0" or name not in OF_GLOO_ITSELF]
    rows = torch_suite.run("fastcoll", world, (*cases, *OURS), env=variables, nodes=nodes)
    skipped = OF_MORE_RANKS if world == 2 else ()
    wanted = {name: "skip" if name in skipped else "pass" for name in rows}
    assert rows.keys() == {*cases, *OURS}
    assert {name: row["outcome"] for name, row in rows.items()} == wanted, [
        row["log"] for name, row in rows.items() if row["outcome"] != wanted[name]
    ]


def test_a_wrong_element_of_any_verb_is_noticed() -> None:
    rows = torch_suite.run("fastcoll", 2, CORRUPT, env={"FASTCOLL_TORCH_BACKEND": "python"})
    assert {name: row["outcome"] for name, row in rows.items()} == dict.fromkeys(CORRUPT, "fail")
