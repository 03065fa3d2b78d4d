# SPDX-License-Identifier: Apache-2.0
"""All that the launchers launch compiles for every architecture; its PTX has what it relies on.

Decides what is looked for in the text: what the interpreter can't see. Each check has a planted bug
that it must find. Needs no GPU: a launch ends where the kernel would be loaded.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.triton import mutants

pytestmark = [pytest.mark.proof("kernels"), pytest.mark.long]

ARCHITECTURES = (80, 90, 100)
WORLD = 4
ROWS, COLUMNS = 8, 2048
COLLECTIVES = ("one_shot", "two_shot")


class NoDevice:
    """A driver that knows what to compile for, and no more."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0


class Kernels:
    """The package, or a copy with a planted bug, and a workspace of a rank."""

    def __init__(self, folder: str, package: str, rank: int) -> None:
        self.folder, self.package = folder, package
        table = torch.zeros(WORLD, dtype=torch.int64)
        verdict = torch.zeros(3, dtype=torch.int32)
        self.workspace = self["workspace"].Workspace(table, table, 1 << 20, verdict, rank)

    def __getitem__(self, module: str) -> ModuleType:
        return mutants.load(self.folder, self.package, module)


Launch = Callable[[Kernels], Any]


@pytest.fixture
def stages_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Mapping[str, str]]:
    """`stages_of(launch, architecture)` is what a launch becomes on the way to PTX.

    Nothing is taken from caches.
    """
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    found: list[Mapping[str, str]] = []
    planted: dict[mutants.Bug, str] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> Any:
        code = run(self, *args, **{**options, "warmup": True})
        found.append(code.asm)
        return code

    monkeypatch.setattr(JITFunction, "run", compile_only)

    def compiled(
        launch: Launch, architecture: int, bug: mutants.Bug | None = None, rank: int = 2
    ) -> Mapping[str, str]:
        package = "fastcoll_kernels"
        if bug is not None:
            if bug not in planted:
                name = f"compile_{tmp_path.name}_{len(planted)}"
                planted[bug] = mutants.plant(tmp_path, name, bug)
            package = planted[bug]
        monkeypatch.setattr(triton.runtime.driver, "_active", NoDevice(architecture))
        found.clear()
        launch(Kernels(str(tmp_path), package, rank))
        [stages] = found
        return stages

    return compiled


@pytest.fixture
def ptx_of(stages_of: Callable[..., Mapping[str, str]]) -> Callable[..., str]:
    """`ptx_of(launch, architecture)` is what a launch compiles to."""
    return lambda *args, **options: stages_of(*args, **options)["ptx"]


def faults(ptx: str, collective: bool = True) -> set[str]:
    """Find what the kernels must not have, or lack."""
    found = set()
    reads = re.findall(r"\bld\.global\.[\w.]*(?:acquire|relaxed)[\w.]*", ptx)
    writes = re.findall(r"\b(?:atom|red)\.global\.[\w.]+", ptx)
    if collective and not any("acquire" in word for word in reads):
        found.add("no acquire")
    if collective and not any("release" in word and "exch" in word for word in writes):
        found.add("no release")
    if any("relaxed" in word or "sys" not in word for word in reads + writes):
        found.add("weak atomic")
    # Addresses and signals are read as b64 and b32; all else, from two sources at least, as packs.
    if ptx.count("ld.global.v4.b32") < 2 or re.search(r"\bld\.global\.(?:v2|b16|b8)\b", ptx):
        found.add("narrow load")
    if "st.global.v4.b32" not in ptx or re.search(r"\bst\.global\.(?:v2|b16|b8)\b", ptx):
        found.add("narrow store")
    if re.search(r"\bfma\.", ptx):
        found.add("fma")
    if re.search(r"\bld\.global[\w.]*\.nc\b", ptx):
        found.add("constant load")
    if "st.shared.b64" in ptx and ".f64" not in ptx:  # which sums of fp64 cross by, too
        found.add("addresses go through shared memory")
    return found


def all_reduce(algorithm: str, dtype: torch.dtype = torch.bfloat16, numel: int = 1 << 20) -> Launch:
    tensor = torch.zeros(numel, dtype=dtype)
    return lambda kernels: kernels[algorithm].all_reduce(tensor, kernels.workspace)


def reduce_scatter(
    algorithm: str, dtype: torch.dtype = torch.bfloat16, numel: int = 1 << 18
) -> Launch:
    out, tensor = torch.zeros(numel, dtype=dtype), torch.zeros(WORLD * numel, dtype=dtype)
    return lambda kernels: kernels[algorithm].reduce_scatter(out, tensor, kernels.workspace)


def normalised(kernels: Kernels) -> None:
    out = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    epilogue = kernels["epilogues"].add_rms_norm(out, out.clone(), out[0].clone())
    kernels["one_shot"].all_reduce(out, kernels.workspace, epilogue=epilogue)


def squared(kernels: Kernels) -> None:
    """A user's epilogue with a product and a sum, behind the copy engine's kernel."""
    from tests.triton.users_epilogue import square_plus

    out, rows = torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS, dtype=torch.int64)
    epilogue = kernels["call"].Epilogue(square_plus, (out.clone(), rows))
    kernels["reduce"].reduce([1 << 40] * WORLD, out, epilogue=epilogue)


def sums_from(address: int) -> Launch:
    """The copy engines' additions."""
    out = torch.zeros(1 << 20, dtype=torch.bfloat16)
    return lambda kernels: kernels["reduce"].reduce([address] * WORLD, out)


def squared_behind(kernels: Kernels) -> None:
    """The same on a result that lies in memory."""
    from tests.triton.users_epilogue import square_plus

    out, rows = torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS, dtype=torch.int64)
    epilogue = kernels["call"].Epilogue(square_plus, (out.clone(), rows), by_rows=True)
    kernels["apply"].code_of(out.clone(), out, epilogue)


def normalised_behind(kernels: Kernels) -> None:
    out = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    epilogue = kernels["epilogues"].add_rms_norm(out, out.clone(), out[0].clone())
    kernels["apply"].code_of(out.clone(), out, epilogue)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_behind_a_call_has_what_it_relies_on(
    ptx_of: Callable[..., str], architecture: int
) -> None:
    assert faults(ptx_of(normalised_behind, architecture), collective=False) == set()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sums_have_what_they_rely_on(ptx_of: Callable[..., str], architecture: int) -> None:
    found = [ptx_of(sums_from(address), architecture) for address in (1 << 40, 0x7F00_0000_1230)]
    assert faults(found[0], collective=False) == set()
    assert found[0] == found[1], "addresses are compiled in"


def test_code_is_loaded_when_it_is_asked_for(
    stages_of: Callable[..., Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's own class, of each release: fresh code is on no device until its launcher is."""
    from triton.compiler.compiler import CompiledKernel

    from fastcoll_kernels import apply, call, loading
    from tests.triton.users_epilogue import times

    made: list[Any] = []

    def code(kernels: Kernels) -> None:
        out = torch.zeros(COLUMNS)
        made.append(apply.code_of(out, out, call.Epilogue(times, (2.0,))))

    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda self: setattr(self, "module", 1))
    stages_of(code, 90)
    assert not loading.is_loaded(made[0])
    loading.load(made[0])
    assert loading.is_loaded(made[0])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_shot_has_what_it_relies_on(ptx_of: Callable[..., str], architecture: int) -> None:
    assert faults(ptx_of(all_reduce("one_shot"), architecture)) == set()


@pytest.mark.parametrize("launch", [all_reduce("two_shot"), reduce_scatter("two_shot"), normalised])
def test_the_others_have_what_they_rely_on(ptx_of: Callable[..., str], launch: Launch) -> None:
    assert faults(ptx_of(launch, 90)) == set()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.int32])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_and_dtype(
    ptx_of: Callable[..., str], architecture: int, dtype: torch.dtype
) -> None:
    for algorithm in COLLECTIVES:
        assert faults(ptx_of(all_reduce(algorithm, dtype), architecture)) == set()
    assert faults(ptx_of(reduce_scatter("two_shot", dtype), architecture)) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "numel"), [(1, 1), (0, 17)])
def test_arguments_that_triton_specialises(
    ptx_of: Callable[..., str], rank: int, numel: int
) -> None:
    """Triton compiles the number 1 as a constant, and odd sizes without their alignment."""
    for algorithm in COLLECTIVES:
        text = ptx_of(all_reduce(algorithm, torch.float32, numel), 90, rank=rank)
        assert not faults(text) & {"no acquire", "no release", "weak atomic", "fma"}
    assert ptx_of(reduce_scatter("two_shot", torch.float32, numel), 90, rank=rank)


PLANTED: dict[str, tuple[Launch, mutants.Bug, str]] = {
    "relaxed wait": (
        all_reduce("one_shot"),
        (("signal.py", '(word, 0, sem="acquire"', '(word, 0, sem="relaxed"'),),
        "no acquire",
    ),
    "relaxed arrive": (
        all_reduce("one_shot"),
        (("signal.py", 'mask=mask, sem="release"', 'mask=mask, sem="relaxed"'),),
        "no release",
    ),
    "scope of the device": (
        all_reduce("one_shot"),
        (("signal.py", 'sem="release", scope="sys"', 'sem="release", scope="gpu"'),),
        "weak atomic",
    ),
    "no hint of alignment": (
        all_reduce("one_shot"),
        (("signal.py", "tl.pointer_type(DTYPE)), 16)", "tl.pointer_type(DTYPE)), 1)"),),
        "narrow load",
    ),
    "lanes carried through a loop": (
        all_reduce("one_shot"),
        (("one_shot.py", "at = 0\n", "at = lane\n"), ("one_shot.py", "at + lane,", "at,")),
        "addresses go through shared memory",
    ),
    "fused multiply-add behind a call": (
        squared_behind,
        (("apply.py", '    "enable_fp_fusion",\n', ""),),
        "fma",
    ),
    "fused multiply-add": (
        squared,
        (("call.py", '"enable_fp_fusion": False', '"enable_fp_fusion": True'),),
        "fma",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(ptx_of: Callable[..., str], name: str) -> None:
    launch, bug, fault = PLANTED[name]
    assert fault in faults(ptx_of(launch, 90, bug))
    assert fault not in faults(ptx_of(launch, 90))


# ---- ranks ---------------------------------------------------------------------------------------

# As a number, the rank is compiled in.
RANK_AS_NUMBER: mutants.Bug = (
    ("workspace.py", "self._rank_word, limit_ns", "self.rank, limit_ns"),
    ("signal.py", "return tl.load(group.rank)", "return group.rank"),
)
ONE_BY_ONE: mutants.Bug = (
    (
        "signal.py",
        "    store_release(theirs, epoch, is_peer)\n",
        "    peer = 0\n"
        "    while peer < WORLD:\n"
        "        store_release(words(group, peer) + row + own_rank(group), epoch)\n"
        "        peer += 1\n",
    ),
)
SIDE_BY_SIDE = re.compile(r"tt\.atomic_rmw exch, release, sys, .*tensor<16x!tt\.ptr<i32>")


@pytest.mark.parametrize("bug", [None, RANK_AS_NUMBER], ids=["right", "number"])
def test_one_binary_serves_all_ranks(ptx_of: Callable[..., str], bug: mutants.Bug | None) -> None:
    found = {ptx_of(all_reduce("one_shot"), 90, bug, rank=rank) for rank in range(WORLD)}
    assert (len(found) == 1) == (bug is None)


@pytest.mark.parametrize("bug", [None, ONE_BY_ONE], ids=["right", "one by one"])
def test_peers_are_signalled_side_by_side(
    stages_of: Callable[..., Mapping[str, str]], bug: mutants.Bug | None
) -> None:
    stages = stages_of(all_reduce("one_shot"), 90, bug)
    assert bool(SIDE_BY_SIDE.search(stages["ttir"])) == (bug is None)


# ---- large messages ------------------------------------------------------------------------------

# In 32 bits a message of 2^31 elements has its chunks in another place, and its tiles, whose number
# is rounded up, wrap.
NARROW_START = re.compile(r"arith\.muli %chunk_numel\S*, [^:]*: i32")
NARROW_COUNT = re.compile(r"arith\.addi %(?:chunk_)?numel\S*, [^:]*: i32")
START_BUG = (
    "index = tl.full((), chunk, tl.int64) * chunk_numel + column",
    "index = chunk * chunk_numel + column",
)
COUNT_BUG = ("tl.cdiv(tl.full((), numel, tl.int64), COLUMNS)", "tl.cdiv(numel, COLUMNS)")


def narrow(stages: Mapping[str, str], pattern: re.Pattern[str]) -> list[str]:
    if pattern is NARROW_START:
        assert "%chunk_numel" in stages["ttir"], "the argument has another name"
    return pattern.findall(stages["ttir"])


@pytest.mark.parametrize(
    ("launch", "pattern"),
    [
        (reduce_scatter("two_shot"), NARROW_START),
        (all_reduce("two_shot"), NARROW_START),
        *((all_reduce(name), NARROW_COUNT) for name in COLLECTIVES),
    ],
)
def test_large_messages_are_counted_in_64_bits(
    stages_of: Callable[..., Mapping[str, str]], launch: Launch, pattern: re.Pattern[str]
) -> None:
    assert narrow(stages_of(launch, 90), pattern) == []


@pytest.mark.parametrize(
    ("algorithm", "file", "pattern", "bug"),
    [
        # Of all chunks in a call, and of those that a broken group leaves as NaN.
        ("two_shot", "two_shot.py", NARROW_START, START_BUG),
        ("two_shot", "reduce.py", NARROW_START, START_BUG),
        ("one_shot", "reduce.py", NARROW_COUNT, COUNT_BUG),
        ("two_shot", "reduce.py", NARROW_COUNT, COUNT_BUG),
    ],
)
def test_what_is_counted_in_32_bits_is_seen(
    stages_of: Callable[..., Mapping[str, str]],
    algorithm: str,
    file: str,
    pattern: re.Pattern[str],
    bug: tuple[str, str],
) -> None:
    """Negative controls."""
    assert narrow(stages_of(all_reduce(algorithm), 90, ((file, *bug),)), pattern)
