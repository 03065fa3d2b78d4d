# SPDX-License-Identifier: Apache-2.0
"""The code that nvcc makes of the kernels of the simulator: the checks that need no GPU.

No kernel uses a stack, signals are strong and of system scope, region memory is never read as
constant, and nothing became a trap. Copies have several loads under way. Each check also runs on a
planted kernel that it must find.
"""

import functools
import importlib.util
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.proofs import KERNELS
from tests.protocol.sim.sass import blocks_per_sm, copies_of, late_waits, loads_ahead, registers_of
from tests.support.programs import run

ROOT = Path(__file__).parents[3]
ARCHS = (80, 90, 100)
COMPILE_LIMIT_S = 300
FLAGS = ("-std=c++20", "-O3", "-fmad=false", "--expt-relaxed-constexpr")
FLAGS += (f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'kernels'}")

# One type of each size and kind of arithmetic; "" stands for the kernels that only move data.
DTYPES = ("float32", "float64", "float16", "float8_e4m3fn", "boolean", "")
MOVING_KERNELS = 5  # move, move_ll, barrier, send_recv, multimem_move
REDUCING_KERNELS = 6  # one_shot, one_shot_ll, two_shot, ring, chain, add_partials
MULTIMEM_DTYPES = ("float32", "float16")  # they have one more

REDUCING = """
template KernelFn reducing_kernel<Protocol, DType::{0}>(Algorithm, Verb, bool);
template __global__ void add_partials<DType::{0}>(const __grid_constant__ PartialsCall);
"""
MOVING = """
template KernelFn moving_kernel<Protocol>(Verb, bool);
template KernelFn switch_moving_kernel<Protocol>(Verb, bool);
template __global__ void send_recv<Protocol>(const __grid_constant__ PairCall);
"""

# The copies of a kernel: from its input to scratch, and out of it; of results that it passes on.
COPIES = {"move": 2, "send_recv": 2, "one_shot": 1, "two_shot": 2, "multimem": 2}
COPIES |= {"ring": 1, "chain": 1, "multimem_move": 1}
LOADS_AT_ONCE = 4  # kPacksAtOnce

# The kernels of LL packs load their data first: one pack, or one for each of 8 ranks.
LL_KERNELS = {"one_shot_ll", "move_ll"}
LOADS_AHEAD = 1 + 8  # kLlRanksAtOnce

FIRST_EARLY_ARCH = 90  # on which a kernel may start before the one before it is over

# The most registers of a thread, by which one of the largest blocks fits; less for light kernels.
MOST_REGISTERS = 128
MOST_OF_LIGHT = {"barrier": 96, "add_partials": 80}

# Types that the switch can reduce and that are not among those above.
SWITCH_KERNEL = """
template __global__ void multimem<Protocol, DType::{}>(const __grid_constant__ DeviceCall);
"""
SWITCH = "".join(SWITCH_KERNEL.format(dtype) for dtype in ("bfloat16", "int32", "uint64"))

# Of integers that may be summed or compared; of bits any will do.
SWITCH_OPS = ("add.u32", "add.u64", "min.s32", "max.s32", "min.u64", "max.u64")
SWITCH_OPS += ("and.b32", "or.b32", "xor.b64")

HEADERS = '#include "cuda/kernels.cuh"\n#include "cuda/partials.cuh"\n'

# The mistakes that the checks must find, a kernel each.
PLANTED = """
// Loads through `peer` may move in front of the wait.
__global__ void restricted(const std::byte* __restrict__ peer, uint64_t* word, uint32_t* out) {
  while (load_acquire(word) == 0) {}
  *out = load_data<uint32_t>(peer + 4 * thread_idx());
}
// A parameter that is indexed at run time is copied to the stack, without __grid_constant__.
__global__ void stacked(DeviceCall call) {
  call.regions[call.rank] += 1;
  *call.output = call.regions[thread_idx()][0];
}
// A table that only the host has: nvcc says nothing, and the kernel ends in a trap.
__global__ void trapped(const __grid_constant__ DeviceCall call) {
  *call.output = std::byte(dtype_size(call.dtype));
}
// A pack at a time: a load waits for the store before it.
__global__ void one_by_one(std::byte* to, const std::byte* from, uint64_t num_bytes) {
  for_packs(num_bytes, [&](uint64_t at, uint64_t) {
    store_data<Pack>(to + at, load_data<Pack>(from + at));
  });
}
// The program may still be writing the data.
__global__ void unawaited(const __grid_constant__ DeviceCall call) {
  const uint64_t data = load_data<uint64_t>(call.input);
  await_stream();
  store_data(call.output, data);
}
// The data is loaded once the call has begun, for each rank before its store.
__global__ void late(const __grid_constant__ DeviceCall call) {
  Channel<Protocol> channel(call);
  const uint32_t parity = channel.begin_ll();
  for (int rank = 0; rank < call.world_size; ++rank)
    store_relaxed(channel.ll(rank, parity, call.rank),
                  LlPack{load_data<uint64_t>(call.input), channel.slot()});
}
__global__ void fused(float* out) { out[0] = __fmaf_rn(out[1], out[2], out[3]); }
"""
# Checks that look for an access of the right kind find none here.
WEAK = """
__global__ void weak(uint64_t* word) {
  while (load_relaxed(word) == 0) {}
  store_relaxed(word, 2);
}
"""


@dataclass(frozen=True)
class Compiled:
    """One source for one architecture."""

    ptxas: str  # the output of ptxas about registers and stack
    ptx: str
    cubin: Path


Kernels = dict[tuple[str, int], Compiled]  # by type and architecture
SassOf = Callable[[Compiled], str]


def stack_frames(compiled: Compiled) -> list[int]:
    return [int(size) for size in re.findall(r"(\d+) bytes stack frame", compiled.ptxas)]


def traps(compiled: Compiled) -> list[str]:
    return re.findall(r"^\s*trap;", compiled.ptx, re.M)


def constant_loads(compiled: Compiled) -> list[str]:
    return re.findall(r"ld\.global\S*\.nc\S*", compiled.ptx)


def fused(compiled: Compiled) -> list[str]:
    return re.findall(r"\bfma\.\S+", compiled.ptx)


def weak_signals(compiled: Compiled) -> list[str]:
    """Return the accesses of the needed order and scope that a kernel lacks."""
    wanted = ("ld.acquire.sys.global.b128", "st.release.sys.global.b128")
    return [access for access in wanted if access not in compiled.ptx]


def text_of(command: list[str]) -> str:
    done = run(command, COMPILE_LIMIT_S)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def compile_text(folder: Path, text: str, arch: int, header: str = HEADERS) -> Compiled:
    source = folder / f"kernels_{arch}.cu"
    source.write_text(f"{header}namespace fastcoll {{\n{text}\n}}\n")
    command = ["nvcc", *FLAGS, f"-arch=sm_{arch}", "--keep", f"--keep-dir={folder}"]
    cubin = folder / f"kernels_{arch}.out.cubin"
    ptxas = text_of([*command, "-Xptxas", "-v", "-cubin", str(source), "-o", str(cubin)])
    return Compiled(ptxas, (folder / f"kernels_{arch}.ptx").read_text(), cubin)


@pytest.fixture(scope="module")
def nvcc() -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("not run: nvcc is not installed")


@pytest.fixture(scope="module")
def kernels(nvcc: None, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """Compile every type for every architecture."""
    root = tmp_path_factory.mktemp("nvcc")  # here: the factory is not for several threads

    def compile_one(key: tuple[str, int]) -> Compiled:
        dtype, arch = key
        folder = root / f"{dtype}-{arch}"
        folder.mkdir()
        return compile_text(folder, REDUCING.format(dtype) if dtype else MOVING, arch)

    keys = [(dtype, arch) for arch in ARCHS for dtype in DTYPES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(keys, pool.map(compile_one, keys), strict=True))


@pytest.fixture(scope="module")
def planted(nvcc: None, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compile_text(tmp_path_factory.mktemp("planted"), PLANTED, 90)


@pytest.fixture(scope="module")
def weak(nvcc: None, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compile_text(tmp_path_factory.mktemp("weak"), WEAK, 90)


# The output of a compiler depends on nothing else: see test_sim's proofs.
pytestmark = [pytest.mark.proof(*KERNELS), pytest.mark.native, pytest.mark.timeout(900)]


def test_no_kernel_uses_a_stack(kernels: Kernels, planted: Compiled) -> None:
    for (dtype, _), compiled in kernels.items():
        entries = re.findall(r"Compiling entry function", compiled.ptxas)
        expected = (REDUCING_KERNELS if dtype else MOVING_KERNELS) + (dtype in MULTIMEM_DTYPES)
        assert len(entries) == expected
        frames = stack_frames(compiled)
        assert len(frames) >= len(entries)
        assert set(frames) == {0}, compiled.ptxas
    assert max(stack_frames(planted)) > 0


@pytest.mark.parametrize("found_in", [traps, fused, constant_loads])
def test_no_kernel_has(
    kernels: Kernels,
    planted: Compiled,
    found_in: Callable[[Compiled], list[str]],
) -> None:
    assert not any(found_in(compiled) for compiled in kernels.values())
    assert found_in(planted)


def test_no_kernel_has_weak_signals(kernels: Kernels, weak: Compiled) -> None:
    assert not any(weak_signals(compiled) for compiled in kernels.values())
    assert weak_signals(weak)


@pytest.mark.parametrize("arch", [90, 100])
def test_the_switch_is_spoken_to_as_it_understands(
    nvcc: None, weak: Compiled, tmp_path: Path, arch: int
) -> None:
    compiled = compile_text(tmp_path, SWITCH, arch)
    words = [
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2",
        "multimem.st.relaxed.sys.global.v4.f32",
        *(f"multimem.ld_reduce.relaxed.sys.global.{op}" for op in SWITCH_OPS),
        "multimem.st.relaxed.sys.global.u32",
        "multimem.st.relaxed.sys.global.u64",
        "fence.proxy.alias;",  # before data is published, see kernels/README.md
    ]
    assert all(word in compiled.ptx for word in words)
    assert not any(word in weak.ptx for word in words)
    assert set(stack_frames(compiled)) == {0}
    assert not traps(compiled)


def test_what_measures_a_step_keeps_the_same_rules(
    nvcc: None, weak: Compiled, tmp_path: Path
) -> None:
    """Check that signals are as strong as those of collectives, and that packs are packs."""
    compiled = compile_text(tmp_path, "", 90, '#include "cuda/gauge.cuh"\n')
    words = ["ld.acquire.sys.global.u64", "st.release.sys.global.u64"]
    words += ["ld.relaxed.sys.global.b128", "st.relaxed.sys.global.b128"]
    words += ["ld.global.v4.u32", "st.global.v4.u32"]
    assert all(word in compiled.ptx for word in words)
    assert stack_frames(compiled) == [0] * 4
    assert not traps(compiled)
    assert not constant_loads(compiled)
    assert "st.release.sys.global.u64" not in weak.ptx


def cuobjdump() -> str | None:
    """Return cuobjdump of PATH, or the one that Triton brings along."""
    spec = importlib.util.find_spec("triton")
    beside = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    bundled = [place / "backends/nvidia/bin/cuobjdump" for place in beside]
    return shutil.which("cuobjdump") or next((str(path) for path in bundled if path.exists()), None)


@pytest.fixture(scope="module")
def sass_of(nvcc: None) -> SassOf:
    tool = cuobjdump()
    if tool is None:
        pytest.skip("not run: cuobjdump is neither installed nor part of an installed triton")
    return functools.cache(lambda compiled: text_of([tool, "-sass", str(compiled.cubin)]))


def test_copies_have_several_loads_under_way(
    kernels: Kernels, planted: Compiled, sass_of: SassOf
) -> None:
    for (dtype, arch), compiled in kernels.items():
        copies = copies_of(sass_of(compiled))
        for kernel in COPIES.keys() & copies.keys():
            many = [loads for loads in copies[kernel] if loads >= LOADS_AT_ONCE]
            assert len(many) >= COPIES[kernel], (kernel, dtype, arch, copies[kernel])
        assert copies.keys() & COPIES.keys()
    assert set(copies_of(sass_of(planted))["one_by_one"]) == {1}


def test_small_messages_are_loaded_before_their_call_begins(
    kernels: Kernels, planted: Compiled, sass_of: SassOf
) -> None:
    for (dtype, arch), compiled in kernels.items():
        ahead = loads_ahead(sass_of(compiled))
        assert LL_KERNELS & ahead.keys()
        for kernel in LL_KERNELS & ahead.keys():
            assert ahead[kernel] >= LOADS_AHEAD, (kernel, dtype, arch, ahead[kernel])
    assert loads_ahead(sass_of(planted)) == {"late": 0}


def test_kernels_wait_for_their_stream_before_all_else(
    kernels: Kernels, planted: Compiled, sass_of: SassOf
) -> None:
    """Check those that may start early: add_partials is started by no group."""
    for (_, arch), compiled in kernels.items():
        sass = sass_of(compiled)
        if arch < FIRST_EARLY_ARCH:
            assert "ACQBULK" not in sass
        else:
            assert set(late_waits(sass)) <= {"add_partials"}
            assert "PREEXIT" in sass  # they let the next one start
    assert "unawaited" in late_waits(sass_of(planted))


def test_registers_leave_room_for_blocks(kernels: Kernels) -> None:
    for (dtype, arch), compiled in kernels.items():
        registers = registers_of(compiled.ptxas)
        assert len(registers) >= MOVING_KERNELS
        for kernel, count in sorted(registers.items()):
            print(f"sm_{arch} {kernel} {dtype}: {count} registers, {blocks_per_sm(count)} blocks")
            assert count <= MOST_OF_LIGHT.get(kernel, MOST_REGISTERS)


def test_machine_code_keeps_what_the_ptx_says(
    kernels: Kernels, planted: Compiled, sass_of: SassOf
) -> None:
    for (dtype, arch), compiled in kernels.items():
        sass = sass_of(compiled)
        assert ("LDGMC" in sass) == (dtype in MULTIMEM_DTYPES and arch >= 90)
        assert "LDG.E.128.STRONG.SYS" in sass
        assert "STG.E.128.STRONG.SYS" in sass
        assert not re.search(r"LDG\S*\.CONSTANT", sass)
    assert re.search(r"LDG\S*\.CONSTANT", sass_of(planted))
