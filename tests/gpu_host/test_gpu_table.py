# SPDX-License-Identifier: Apache-2.0
"""Rows of GPUs in a tuning table: what they decide, which are refused, and whose they are."""

from pathlib import Path
from typing import Any

import pytest

from fastcoll import _C
from fastcoll.choose import TuningTable, algorithms, select, tuning
from fastcoll.choose.algorithms.shared import CPU
from fastcoll.choose.table import validate
from fastcoll.machine import gpu
from fastcoll.measure.tune import make_document
from fastcoll.types import Algorithm, DType, Verb
from tests.gpu_host.gpu_rows import (
    MACHINE,
    ROWS,
    TIMES,
    Json,
    document,
    part,
    row_request,
)
from tests.gpu_host.test_gpu_host import agree_terms, hello
from tests.support.gpu import needs_gpu_part

# ---- the table -----------------------------------------------------------------------------------


@needs_gpu_part
def test_rows_of_gpus_decide_within_what_the_numerics_allow() -> None:
    table = TuningTable(document())

    def chosen(**fields: Any) -> Algorithm:
        return select(row_request(**fields), algorithms.ALL, table).plan.algorithm

    assert chosen() is Algorithm.chain
    assert chosen(numerics="fast") is Algorithm.nccl
    assert chosen(dtype=DType.int32) is Algorithm.nccl, "the order of integers does not matter"
    assert chosen(numerics="fast", no_nccl="none here") is Algorithm.ring
    plan = select(row_request(), algorithms.ALL, table).plan
    assert (plan.segment_bytes, plan.channels) == (0, 32)
    _C.Plan(*plan.args())
    reasons = select(row_request(), algorithms.ALL, table).reasons
    assert reasons["nccl"] == "25.00 us (measured)", "it moves, and a kernel of ours adds"


@needs_gpu_part
@pytest.mark.parametrize(
    "other",
    [
        {"num_channels": 16},
        {"ranks_per_gpu": 2},
        {"world_size": 3},
        {"numel": 1 << 20},
        {"splits": 1},
        {"verb": Verb.reduce_scatter},
    ],
    ids=str,
)
def test_rows_of_gpus_hold_for_such_groups_alone(other: Json) -> None:
    table = TuningTable(document())
    asked = row_request(**other)
    assert select(asked, algorithms.ALL, table) == select(asked, algorithms.ALL)


def test_rows_of_gpus_say_nothing_of_cpus() -> None:
    table = TuningTable(document())
    on_cpus = row_request(num_channels=0, ranks_per_gpu=0)
    assert all(table.measured(on_cpus, name) is None for name in TIMES)
    assert TuningTable(document([])).gpus is None
    assert table.digest != TuningTable(document(ROWS[1:])).digest
    assert TuningTable(document([])).digest == TuningTable(make_document_of_cpus()).digest


def make_document_of_cpus() -> Json:
    return make_document([], is_complete=True, fallback=CPU)


# ---- whose it is ---------------------------------------------------------------------------------


def test_a_table_of_other_gpus_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = tuning.Tuning(TuningTable(document()), "mine")
    monkeypatch.setattr(gpu, "fingerprint", lambda: MACHINE)
    assert tuned.problem_on_gpus() == ""
    for name, value in {"driver": "590.2", "num_gpus": 8, "names": ["Other"], "nccl": "9"}.items():
        monkeypatch.setattr(gpu, "fingerprint", lambda odd={name: value}: MACHINE | odd)
        assert f"{name} is {MACHINE[name]!r} there, {value!r} here" in tuned.problem_on_gpus()
    monkeypatch.setattr(gpu, "fingerprint", lambda: pytest.fail("not asked where it is no use"))
    cpus = tuning.Tuning(TuningTable(make_document_of_cpus()), "mine")
    assert "no rows of GPUs" in cpus.problem_on_gpus()
    assert tuning.Tuning(None, "no table").problem_on_gpus() == "no table"


def test_the_driver_tells_its_version_and_all_gpus_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = gpu.Gpu(0, "Some GPU", "id", 90, 132, True, True)
    monkeypatch.setattr(gpu, "gpus", lambda: [one])
    assert gpu.fingerprint(tmp_path)["num_gpus"] == 1
    assert gpu.fingerprint(tmp_path)["driver"] == f"CUDA {gpu.driver_version()}"
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (x)\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    for pci in ("0000:19:00.0", "0000:3b:00.0"):
        (tmp_path / "gpus" / pci).mkdir(parents=True)
    found = gpu.fingerprint(tmp_path)
    assert (found["driver"], found["num_gpus"], found["names"]) == ("570.86.15", 2, ["Some GPU"])
    validate(document() | {"gpu": part(ROWS, machine=found)})


@needs_gpu_part
def test_all_ranks_use_it_or_none() -> None:
    other = hello("b", no_table="another driver")
    assert agree_terms([hello("a"), other]).no_table == "rank 1: another driver"
    assert agree_terms([hello("a"), hello("b")]).no_table == ""
