# SPDX-License-Identifier: Apache-2.0
"""`import fastcoll` loads no module that few programs need."""

import importlib
import json
import sys

import pytest

from fastcoll import native
from tests.support.programs import run_python

# With the module that needs each of them.
LATER = {
    "cloudpickle": "fastcoll.ranks.functions",
    "fastcoll.nodes.group": "fastcoll.nodes.group",
    "fastcoll_model": "fastcoll.choose.schedules",
    "jax": "jax",
    "jsonschema": "fastcoll.documents",
    "rich": "fastcoll.cli.console",
    "typer": "fastcoll.cli",
}


def loaded_after(statement: str) -> set[str]:
    """Return the modules that a new interpreter has after a statement."""
    program = f"{statement}\nimport json, sys; print(json.dumps(list(sys.modules)))"
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.long
def test_import_loads_only_what_each_program_needs() -> None:
    assert set(LATER) & loaded_after("import fastcoll") == set()


@pytest.mark.long
@pytest.mark.parametrize("name", ["fastcoll.nodes.group", "fastcoll_model"])
def test_a_module_that_import_loads_is_found(name: str) -> None:
    assert name in loaded_after(f"import fastcoll; import {LATER[name]}")


def test_names_of_later_modules_are_public() -> None:
    import fastcoll

    assert {"HierarchicalCommunicator", "launch"} <= set(fastcoll.__all__)
    assert fastcoll.HierarchicalCommunicator.__module__ == "fastcoll.nodes.group"
    assert fastcoll.launch.__module__ == "fastcoll.ranks.functions"
    with pytest.raises(AttributeError, match="has no attribute 'all_redcue'"):
        fastcoll.all_redcue  # noqa: B018


@pytest.mark.parametrize("has_gil", [True, False])
def test_only_a_python_that_keeps_the_gil_off_is_refused(
    monkeypatch: pytest.MonkeyPatch, has_gil: bool
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: has_gil, raising=False)
    if has_gil:
        assert importlib.reload(native) is native
        return
    with pytest.raises(ImportError, match="needs the GIL: start Python without PYTHON_GIL=0"):
        importlib.reload(native)
