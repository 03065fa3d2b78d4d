# SPDX-License-Identifier: Apache-2.0
"""The kernels compile for every architecture without a GPU, and the PTX has what they rely on.

Decides what is looked for in the text: what the interpreter can't see. Each check has a planted bug
that it must find.
"""

import re
from pathlib import Path
from typing import Any

import mutants
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = (80, 90, 100)
WORLD = 4
COLLECTIVE = ("one_shot.all_reduce_kernel", "two_shot.two_shot_kernel", "ring.ring_kernel")


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken from an earlier run's cache, and nothing is left in the user's."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))


def compiled(
    kernel: str,
    architecture: int,
    dtype: torch.dtype = torch.bfloat16,
    folder: str = "",
    package: str = "fastcoll_kernels",
    epilogue: Any = None,
    fusion: bool = False,
) -> str:
    """The PTX of a kernel, specialised as a launch with aligned tensors does it."""
    module, name = kernel.split(".")
    function = getattr(mutants.load(folder, package, module), name)
    group = mutants.load(folder, package, "signal").Group
    call = mutants.load(folder, package, "call")
    checked = call.check(
        dtype, torch.empty(1 << 20, dtype=dtype), "SUM", WORLD, epilogue, call.Launch()
    )
    options = dict(checked.options, SCATTER=False, DTYPE=checked.word_type)
    constants = {key: value for key, value in options.items() if key in function.arg_names}
    types = {
        "group": group("*i64", "*i64", "i64", "*i32", "i32", "i64"),
        "sources": "*i64",
        "source": f"*{checked.word_type}".replace("int", "i"),
        "out": f"*{checked.word_type}".replace("int", "i"),
        "args": tuple(f"*{'fp32' if arg.is_floating_point() else 'i64'}" for arg in checked.args),
        "numel": "i64",
        "chunk_numel": "i64",
        "segment_tiles": "i32",
    }
    signature = {arg: types.get(arg, "constexpr") for arg in function.arg_names}
    aligned = ("source", "out", "numel", "chunk_numel")
    attributes = {
        (position,): [["tt.divisibility", 16]]
        for position, arg in enumerate(function.arg_names)
        if arg in aligned
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    flags = {"num_warps": 8, "enable_fp_fusion": fusion}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=flags).asm[
        "ptx"
    ]


def faults(ptx: str, collective: bool = True) -> set[str]:
    """What the kernels must not have, or lack."""
    found = set()
    atomics = re.findall(
        r"\b(?:atom|red)\.global\.[\w.]+|\bld\.global\.[\w.]*(?:acquire|relaxed)\.[\w.]+", ptx
    )
    if collective and not any(word.startswith("ld") and "acquire" in word for word in atomics):
        found.add("no acquire")
    if collective and not any("exch" in word and "release" in word for word in atomics):
        found.add("no release")
    if any("relaxed" in word or "sys" not in word for word in atomics):
        found.add("weak atomic")
    # Tables of addresses and words are read as b64 and b32; two sources at least as packs.
    if ptx.count("ld.global.v4.b32") < 2 or re.search(r"\bld\.global\.(?:v2|b16|b8)\b", ptx):
        found.add("narrow load")
    if "st.global.v4.b32" not in ptx or re.search(r"\bst\.global\.(?:v2|b16|b8)\b", ptx):
        found.add("narrow store")
    if re.search(r"\bfma\.", ptx):
        found.add("fma")
    if re.search(r"\bld\.global[\w.]*\.nc\b", ptx):
        found.add("constant load")
    if "st.shared.b64" in ptx:
        found.add("addresses go through shared memory")
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_shot_compiles_to_what_it_relies_on(architecture: int) -> None:
    assert faults(compiled(COLLECTIVE[0], architecture)) == set()


@pytest.mark.parametrize("kernel", COLLECTIVE[1:])
def test_the_others_compile_to_what_they_rely_on(kernel: str) -> None:
    assert faults(compiled(kernel, 90)) == set()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.int32])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", COLLECTIVE)
def test_every_kernel_and_dtype(kernel: str, architecture: int, dtype: torch.dtype) -> None:
    assert faults(compiled(kernel, architecture, dtype)) == set()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reduce_with_a_users_epilogue(architecture: int) -> None:
    from users_epilogue import square_plus

    from fastcoll_kernels.call import Epilogue

    epilogue = Epilogue(square_plus, (torch.empty(1), torch.empty(1, dtype=torch.int64)))
    ptx = compiled("reduce.reduce_kernel", architecture, torch.float32, epilogue=epilogue)
    assert "fma" not in faults(ptx, collective=False)
    fused = compiled(
        "reduce.reduce_kernel", architecture, torch.float32, epilogue=epilogue, fusion=True
    )
    assert "fma" in faults(fused, collective=False)


PLANTED: dict[str, tuple[mutants.Bug, str]] = {
    "relaxed_wait": (
        (("signal.py", '(word, 0, sem="acquire"', '(word, 0, sem="relaxed"'),),
        "no acquire",
    ),
    "relaxed_arrive": (
        (("signal.py", 'value, sem="release"', 'value, sem="relaxed"'),),
        "no release",
    ),
    "device_scope": (
        (("signal.py", 'value, sem="release", scope="sys"', 'value, sem="release", scope="gpu"'),),
        "weak atomic",
    ),
    "no_hint": (
        (("signal.py", "tl.pointer_type(DTYPE)), 16)", "tl.pointer_type(DTYPE)), 1)"),),
        "narrow load",
    ),
    "carried_lanes": (
        (
            ("one_shot.py", "at = 0\n", "at = lane\n"),
            ("one_shot.py", "at + lane,", "at,"),
        ),
        "addresses go through shared memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(tmp_path: Path, name: str) -> None:
    bug, fault = PLANTED[name]
    package = mutants.plant(tmp_path, f"compile_{name}", bug)
    assert fault in faults(compiled(COLLECTIVE[0], 90, folder=str(tmp_path), package=package))
