# SPDX-License-Identifier: Apache-2.0
"""The names of algorithms in docstrings and in the tuning schema are those of the registry."""

import inspect
import shutil
from pathlib import Path

import algorithm_names
import pytest
import verbs

from fastcoll.api import VERBS
from fastcoll.choose import Candidate, algorithms
from fastcoll.types import Algorithm, Verb

MODULE = "python/fastcoll/api/reductions.py"


def test_the_written_names_are_current() -> None:
    assert algorithm_names.outdated() == []


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (MODULE, '"two_shot", "ring", "chain", on GPUs', '"two_shot", "chain", on GPUs'),
        (MODULE, '"multimem" and most', '"magic" and most'),
        (MODULE, 'on GPUs "nccl", or', 'on GPUs "nccl" or "magic", or'),
        ("python/fastcoll/api/lists.py", '"one_shot" or "two_shot".', '"one_shot" or "ring".'),
        (algorithm_names.SCHEMA, '"direct", "single_copy"', '"direct"'),
        (algorithm_names.SCHEMA, '"multimem", "nccl", "nccl_moves"', '"nccl", "nccl_moves"'),
    ],
)
def test_another_name_makes_them_outdated(path: str, old: str, new: str, tmp_path: Path) -> None:
    for name in algorithm_names.written():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(verbs.ROOT / name, tmp_path / name)
    text = (tmp_path / path).read_text()
    assert old in text
    (tmp_path / path).write_text(text.replace(old, new, 1))
    assert algorithm_names.outdated(tmp_path) == [path]


def test_every_verb_with_an_algorithm_says_which() -> None:
    for verb in verbs.declared():
        text = VERBS[verb.name].__doc__ or ""
        takes = "algorithm" in [one.name for one in verb.arguments]
        assert takes == ("algorithm: " in text)
        assert not takes or algorithm_names.choices(verb) in " ".join(text.split())


def test_the_names_are_those_that_the_registry_admits() -> None:
    """Some by hand, so that a fault in the asking shows."""
    assert algorithm_names.names_for(Verb.reduce) == ["one_shot", "two_shot"]
    assert "single_copy" in algorithm_names.names_for(Verb.broadcast)
    assert "multimem" in algorithm_names.names_for(Verb.all_reduce, on_gpu=True)
    assert "multimem" not in algorithm_names.names_for(Verb.all_reduce)
    assert "ring" in algorithm_names.in_any_order()
    assert "chain" not in algorithm_names.in_any_order()


@pytest.mark.parametrize("algorithm", algorithms.ALL, ids=lambda one: one.name)
def test_every_algorithm_offers_what_the_selection_asks_for(algorithm: Candidate) -> None:
    """As the registry imports modules by name, no type checker sees them."""
    assert Algorithm[algorithm.name] in Algorithm
    for name in ("admits", "estimate_us", "plan"):
        function = getattr(algorithm, name)
        bound = ("self", *getattr(function, "keywords", ()))
        asked, offered = (
            [
                (one.name, one.default, one.annotation)
                for one in inspect.signature(call).parameters.values()
                if one.name not in bound
            ]
            for call in (getattr(Candidate, name), function)
        )
        assert offered[: len(asked)] == asked
        assert all(
            default is not inspect.Parameter.empty for _, default, _ in offered[len(asked) :]
        )
