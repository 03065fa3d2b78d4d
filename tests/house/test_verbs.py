# SPDX-License-Identifier: Apache-2.0
"""The declared verbs, and the text that scripts/verbs.py writes from them."""

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import verbs

import fastcoll
from fastcoll import _C
from fastcoll.api import VERBS
from fastcoll.calls.methods import VerbMethods
from fastcoll.integrations.torch_group import FastcollProcessGroup
from fastcoll.integrations.torch_names import TORCH_CALLS
from fastcoll.integrations.torch_profile import ProfiledProcessGroup

ROOT = Path(__file__).parents[2]


def test_the_written_files_are_current() -> None:
    assert verbs.outdated() == []


STUBS = ("python/fastcoll/calls/methods.pyi", "python/fastcoll/api/verbs.pyi")
FROM_VERBS = ("csrc/python/verbs.inc", *STUBS)
FROM_NAMES = ("python/fastcoll/integrations/c10d_names.h",)


@pytest.mark.parametrize(
    ("module", "old", "new", "outdated"),
    [
        ("api/moves", "    src: int | None = None,", "    source: int | None = None,", None),
        ("api/moves", "    src: int | None = None,", "    src: int | None = 0,", FROM_VERBS),
        ("api/reductions", "@verb\ndef reduce(", "def reduce(", FROM_VERBS),
        ("api/lists", '    algorithm: str = "auto",\n', "", FROM_VERBS),
        ("api/transfers", "tensor: Array,", "tensor: object,", None),
        ("api/moves", "    output: Array | None,", "    output: Array,", STUBS),
        ("api/transfers", ") -> int:", ") -> None:", STUBS),
        ("api/moves", "gather_into_tensor = gather_single", "", FROM_VERBS),
        ("integrations/torch_names", '"gather", "GATHER"', '"gather", "SCATTER"', FROM_NAMES),
    ],
)
def test_a_changed_declaration_makes_them_outdated(
    module: str, old: str, new: str, outdated: tuple[str, ...] | None, tmp_path: Path
) -> None:
    sources = verbs.TORCH_NAMES, *(f"{verbs.API}/{name}.py" for name in verbs.KINDS)
    for path in (*verbs.WRITTEN_FILES, *sources):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    changed = tmp_path / "python/fastcoll" / f"{module}.py"
    text = changed.read_text()
    assert old in text
    changed.write_text(text.replace(old, new, 1))
    if outdated is None:  # C++ would not know what the argument means
        with pytest.raises(ValueError, match="is no array"):
            verbs.outdated(tmp_path)
    else:
        assert verbs.outdated(tmp_path) == [*outdated]


def test_the_text_has_the_verbs_that_are_declared_at_import() -> None:
    assert {verb.name for verb in verbs.declared()} == set(VERBS)


def test_torchs_calls_are_those_of_the_process_group_and_of_the_verbs() -> None:
    for call in TORCH_CALLS:
        for method in (call.method, *call.older):
            assert callable(getattr(FastcollProcessGroup, method))
            assert getattr(ProfiledProcessGroup, method) is not getattr(
                FastcollProcessGroup, method
            )
    blocking = {"send", "recv", "batch_isend_irecv"}
    called = {call.verb for call in TORCH_CALLS} - {""}
    assert called <= set(VERBS) - blocking
    of_torch = {verb for verb in VERBS if hasattr(dist, verb) or verb.endswith("_coalesced")}
    assert of_torch - called == blocking


def parameters_of(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in parameters]


@pytest.mark.parametrize("name", VERBS)
def test_functions_and_methods_show_the_declared_arguments(name: str) -> None:
    arguments = parameters_of(VERBS[name])
    assert getattr(fastcoll, name) is getattr(_C, name)
    assert parameters_of(getattr(fastcoll, name)) == arguments
    self, *others = parameters_of(getattr(VerbMethods, name))
    assert self[0] == "self"
    assert others == [one for one in arguments if one[0] != "group"]
    assert (VERBS[name].__doc__ or "") in (getattr(fastcoll, name).__doc__ or "")
