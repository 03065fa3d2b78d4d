# SPDX-License-Identifier: Apache-2.0
"""How the compiler's pass is turned on and off, what it says, and what the cache knows of it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastcoll.integrations import compile
from tests.support.backends import on_backend
from tests.support.fused import compile_fused, compiler_settings, sum_by_operator
from tests.support.harness import Rank
from tests.support.programs import run_forked, run_python

COLUMNS = 8
LINE = "torch.compile: a norm follows 1 of 2 all_reduces, fused"
# Its code calls torch's operators: a C++ compiler would take seconds.
PROGRAM = """
import os, sys
os.environ.update(FASTCOLL_FUSE=sys.argv[1], FASTCOLL_LOG="plan")
import torch, fastcoll
from fastcoll.integrations import ops

assert "torch._inductor" not in sys.modules and "torch._dynamo" not in sys.modules
fastcoll.init(store=torch.distributed.HashStore(), rank=0, world_size=1)

def run(x):
    return torch.nn.functional.rms_norm(ops.all_reduce(x), (8,)), ops.all_reduce(x) * 2

for log in ("plan", ""):
    os.environ["FASTCOLL_LOG"] = log
    torch.compiler.reset()
    program = torch.compile(run, options={"fallback_by_default": True})
    with torch.no_grad():
        for _ in range(3):
            program(torch.ones(4, 8))
import torch._inductor.config as config
print("PASS", config.post_grad_custom_pre_pass)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_environment_turns_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program says its matches once, however often it runs, and without the log nothing."""
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    said = run_forked(tmp_path, PROGRAM, [("1",), ("0",)], limit_s=300)
    for is_on, (code, out, err) in zip((True, False), said, strict=True):
        assert code == 0, err
        assert err.count(LINE) == err.count("all_reduces") == is_on, err
        assert ("PASS None" in out) != is_on


@pytest.mark.long
def test_another_value_is_refused() -> None:
    done = run_python("-c", "import fastcoll", env={**os.environ, "FASTCOLL_FUSE": "yes"})
    assert "UsageError: FASTCOLL_FUSE='yes': must be 0 or 1" in done.stderr


def test_the_last_word_of_a_program_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "_chosen", [])
    monkeypatch.setattr(compile, "_after_import", lambda name, act: None)
    found = []
    for text in ("", "1", "0"):
        monkeypatch.setenv("FASTCOLL_FUSE", text)
        found.append(compile.is_fusing())
    for enabled in (True, False):
        compile.fuse_compiled(enabled)
        found.append(compile.is_fusing())
    assert found == [False, True, False, True, False]


def turn_on_and_off(rank: Rank) -> list[bool]:
    """Return whether the compiler has the passes that it should have."""
    config = compiler_settings()

    import fastcoll
    from fastcoll.integrations import fusing

    def first(graph: Any) -> None: ...

    def second(graph: Any) -> None: ...

    found = []
    takes_several = hasattr(fusing.custom_graph_pass, "get_custom_graph_passes")  # from 2.13 on
    for there in (None, first, [first, second] if takes_several else second):
        config.post_grad_custom_pre_pass = there
        own = fusing._each(there)
        for enabled, passes in ((True, [*own, fusing.FUSING]), (False, own)):
            for _ in range(2):
                fastcoll.fuse_compiled(enabled)
                found.append(fusing._each(config.post_grad_custom_pre_pass) == passes)
        found.append(config.post_grad_custom_pre_pass == there)
    config.post_grad_custom_pre_pass = None
    return found


@pytest.mark.long
def test_other_passes_stay(bare_pools: Any) -> None:
    assert bare_pools(1).run(turn_on_and_off) == [[True] * 15]


def in_a_torch_of_one_pass(rank: Rank) -> list[Any]:
    """Return the order of passes in a torch whose setting takes only one, and their keys."""
    from fastcoll.integrations import fusing

    order: list[str] = []

    class Noted(fusing.CustomGraphPass):
        def __init__(self, name: str, key: Any) -> None:
            self.name, self.key = name, key

        def __call__(self, graph: Any) -> None:
            order.append(self.name)

        def uuid(self) -> Any:
            return self.key

    class Old:
        """torch._inductor.custom_graph_pass, as it was."""

    kept, fusing.custom_graph_pass = fusing.custom_graph_pass, Old  # type: ignore[assignment]
    try:
        one, other = Noted("one", "a key"), Noted("other", None)
        both = fusing._joined([one, other])
        both(torch.fx.Graph())
        return [
            order,
            fusing._joined([one, one]).uuid(),
            both.uuid(),
            fusing._each(both) == [one, other],
            fusing._joined([one]) is one,
            fusing._joined([]),
        ]
    finally:
        fusing.custom_graph_pass = kept


def test_a_torch_of_one_pass_gets_one(bare_pools: Any) -> None:
    [found] = bare_pools(1).run(in_a_torch_of_one_pass)
    assert found == [["one", "other"], ("a key", "a key"), None, True, True, None]


def keys_of_the_cache(rank: Rank) -> list[Any]:
    """Return the keys before and after a group of torch's, of each backend, and once it is gone."""
    from fastcoll.integrations.fusing import FUSING

    keys = [FUSING.uuid()]
    for backend in ("gloo", "fastcoll"):
        group = dist.new_group(backend=backend)
        keys.append(FUSING.uuid())
        dist.destroy_process_group(group)
        keys.append(FUSING.uuid())
    return [keys[0] == key for key in keys]


def test_the_cache_knows_which_groups_are_fastcolls(backend_pools: Any) -> None:
    found = backend_pools(2).run(on_backend, "fastcoll", keys_of_the_cache)
    assert found == [[True, True, True, False, True]] * 2


def write_behind_the_sum(rank: Rank) -> list[Any]:
    """Compile a program into which an earlier pass puts a write of the residual; return matches."""
    config = compiler_settings()

    def put_write(graph: Any) -> None:
        add = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[0]
        with graph.inserting_before(add):
            written = graph.call_function(torch.ops.aten.mul_.Tensor, (add.args[1], 1.0))
            written.meta.update(add.args[1].meta)

    def count(before: Callable[..., Any] | None) -> int:
        def program(x: torch.Tensor, residual: torch.Tensor) -> Any:
            total = sum_by_operator(x) + residual
            return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True).add(1e-6))

        config.post_grad_custom_pre_pass = before
        with torch.no_grad():
            x = torch.ones(4, COLUMNS)
            return compile_fused(program, x, x.clone(), kernels=False).num_fused

    try:
        return [count(None), count(put_write)]
    finally:
        config.post_grad_custom_pre_pass = None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tensor_that_is_written_in_between_is_not_read_earlier(bare_pools: Any) -> None:
    assert bare_pools(1).run(on_backend, "fastcoll", write_behind_the_sum, deadline_s=250) == [
        [1, 0]
    ]
