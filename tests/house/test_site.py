# SPDX-License-Identifier: Apache-2.0
"""The site of all pages builds without a warning, and has every public name."""

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import fastcoll
from fastcoll.integrations import ops

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs/site/mkdocs.yml"
API = (ROOT / "docs/api.md").read_text()
GROUPS = (ROOT / "docs/api_groups.md").read_text()
JAX = (ROOT / "docs/use/jax.md").read_text()
# Methods that other parts of fastcoll call on a group, and no user.
INNER = set(
    re.findall(
        r"\w+",
        """
        add_arena add_program add_shared_arena allocated arena_ptr async_begin async_end
        await_native cache_gpu_plan cache_plan check_host counts decide_survivors device_group
        drive_transfers end_unmet_transfers exchange_fds fail
        forget_queue gather_bytes gather_words gpu_report has_open_sends hold_parts idle in_turn
        issue issue_all issue_reduce_scatter issue_steps make on_close output_for parts_held poison
        prepare_call refuse_handler run run_list run_parts set_limit socket_fds start_transfers
        traces transfer try_single_copy tuning use_gpu
        """,
    )
)


def undocumented(api: str, groups: str) -> set[str]:
    """Return the public names that the two pages do not have."""
    on_page = set(re.findall(r"(?:^::: |`)(fastcoll\.[\w.]+)", api, re.M))
    names = {f"fastcoll.{name}" for name in fastcoll.__all__}
    operators = {name for name, one in vars(ops).items() if name[0] != "_" and callable(one)}
    own = {name for name in operators if getattr(ops, name).__module__ == ops.__name__}
    # These serve the compiler.
    inner = {"code_of", "members_of", "name_at_torch", "name_of", "named"}
    names |= {f"fastcoll.integrations.ops.{name}" for name in own - inner}
    kinds = (fastcoll.Communicator, fastcoll.HierarchicalCommunicator)
    methods = {name for kind in kinds for name in dir(kind) if name[0] != "_"} - INNER
    listed = set(re.findall(r"^        - (\w+)$", groups, re.M))
    return (names - on_page) | (methods - listed)


def test_every_public_name_is_documented() -> None:
    assert undocumented(API, GROUPS) == set()
    for name in set(fastcoll.__all__) - {"__version__", "ReduceOp"}:
        assert getattr(fastcoll, name).__doc__, name


def test_every_function_for_jax_is_documented() -> None:
    """Reads the source: JAX need not be installed."""
    source = ast.parse(Path(fastcoll.__file__).with_name("jax.py").read_text())
    [names] = [
        ast.literal_eval(one.value)
        for one in source.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "__all__"
    ]
    assert names == sorted(re.findall(r"^::: fastcoll\.jax\.(\w+)$", JAX, re.M))


def test_a_name_without_a_place_is_found() -> None:
    assert undocumented(API.replace("::: fastcoll.scatter\n", ""), GROUPS) == {"fastcoll.scatter"}
    assert undocumented(API, GROUPS.replace("        - abort\n", "")) == {"abort"}


def build(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site; every warning is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", folder]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if not os.environ.get("CI") and find_spec("mkdocs") is None:
        pytest.skip('not built: pip install "fastcoll[docs]"')
    done = build(CONFIG, tmp_path)
    assert done.returncode == 0, done.stderr
    api, groups = ((tmp_path / name).read_text() for name in ("api.html", "api_groups.html"))
    assert "every rank gets the result" in api
    assert "every rank gets the result" in groups, "methods have the functions' docstrings"
    assert "Args:" not in groups, "docstrings are tables"
    settings = (tmp_path / "settings.html").read_text()
    assert settings.count("<code>FASTCOLL_TIMEOUT_S</code>") == 1
    assert "fastcoll inspect" in (tmp_path / "cli.html").read_text()
    # Nothing is fetched by who reads it.
    fetched = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?https?://[^\"> ]+", api)
    assert [one for one in fetched if "canonical" not in one] == []
