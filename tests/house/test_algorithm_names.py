# SPDX-License-Identifier: Apache-2.0
"""The names of algorithms in docstrings and in the tuning schema are those of the registry."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fastcoll.api import VERBS
from fastcoll.choose import algorithms, table
from fastcoll.machine import gpu
from fastcoll.types import DType, Op, Request, Verb

SCHEMA = Path(table.__file__).with_name("tuning.schema.json")
LISTS = 3 << 56  # splits of a list of three tensors
# Declared verb -> verb of the core, for the verbs that take an algorithm.
REDUCING = {
    "all_reduce": Verb.all_reduce,
    "reduce": Verb.reduce,
    "reduce_scatter_tensor": Verb.reduce_scatter,
    "reduce_scatter": Verb.reduce_scatter,
    "all_reduce_coalesced": Verb.all_reduce,
    "reduce_scatter_tensor_coalesced": Verb.reduce_scatter,
}


def names_for(verb: Verb, on_gpu: bool, splits: int = 0) -> set[str]:
    """Return the algorithms that can carry out a large call of a verb, asked for by name."""
    request = Request(verb, DType.float32, Op.SUM, 1 << 26, 0, 2, "auto", "fast", 2, splits)
    request = dataclasses.replace(
        request, single_copy="auto", **({"num_channels": 8, "ranks_per_gpu": 1} if on_gpu else {})
    )
    return {
        one.name
        for one in algorithms.ALL
        if one.admits(dataclasses.replace(request, algorithm=one.name)) is None
    }


def named_in(text: str) -> set[str]:
    """Return the names in a docstring's `algorithm:` entry, but for auto and schedule:NAME."""
    [entry] = re.findall(r"^ +algorithm: (.*?)(?=^ +\w+: |^ *$|\Z)", text, re.DOTALL | re.MULTILINE)
    head = re.split(r"\.\s|; for tensors on GPUs", entry)[0]
    return set(re.findall(r'"(\w+)"', head)) - {"auto"}


def test_every_verb_with_an_algorithm_is_here() -> None:
    takes = {name for name, verb in VERBS.items() if "algorithm" in verb.__annotations__}
    assert takes == set(REDUCING)


@pytest.mark.parametrize("name", REDUCING)
def test_a_docstring_lists_the_algorithms_of_its_verb(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "has_kernel", lambda *_, **__: True)
    splits = LISTS if name.endswith("_coalesced") else 0
    want = names_for(REDUCING[name], on_gpu=False, splits=splits)
    if not splits:  # on GPUs the tensors of a list are reduced one by one
        want |= names_for(REDUCING[name], on_gpu=True)
    assert named_in(VERBS[name].__doc__ or "") == want


def test_the_schema_lists_the_algorithms_of_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "has_kernel", lambda *_, **__: True)
    schema: Any = json.loads(SCHEMA.read_text())
    rows = {
        row: set(schema["$defs"][row]["properties"]["algorithm"]["enum"])
        for row in ("row", "gpu_row")
    }
    on_cpu = {name for verb in Verb for name in names_for(verb, on_gpu=False)}
    on_gpu = {name for verb in Verb for name in names_for(verb, on_gpu=True)}
    assert rows["row"] == on_cpu
    # copy_engine is never measured: it runs only where a call asks for it.
    assert rows["gpu_row"] == (on_gpu - {"copy_engine"}) | {table.NCCL_MOVES}


def test_a_name_that_is_left_out_is_seen() -> None:
    text = """
        algorithm: "auto", "ring" or
            "chain". "x" is in another sentence.
        numerics: "fast"
    """
    assert named_in(text) == {"ring", "chain"}
