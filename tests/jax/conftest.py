# SPDX-License-Identifier: Apache-2.0
"""The tests of this folder need JAX, which `fastcoll[test]` installs."""

import importlib.util
import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # In CI a missing JAX is an error of the tests.
    if importlib.util.find_spec("jax") is None and not os.environ.get("CI"):
        why = pytest.mark.skip(reason="jax is not installed: pip install -c constraints.txt jax")
        for item in items:
            if item.path.parent.name == "jax":
                item.add_marker(why)
