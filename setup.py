# SPDX-License-Identifier: Apache-2.0
"""Builds the extensions, and the README for a package index. All else stands in pyproject.toml.

`fastcoll._C` is the CPU side and always built. `fastcoll._cuda` is the GPU side, built where nvcc
is: FASTCOLL_CUDA=auto (the default), 0 (never) or 1 (an error if it can't be). Two extensions, so
that nothing of CUDA can break, slow down or enlarge what runs on CPUs.
"""

import logging
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

ROOT = Path(__file__).parent


def files(*patterns: str) -> list[str]:
    return sorted(
        str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)
    )


HEADERS = ("csrc/**/*.h", "csrc/**/*.inc", "kernels/**/*.h", "python/**/*.h")
CPU_SOURCES = files(
    "csrc/python/*.cpp", "csrc/group/*.cpp", "csrc/cpu/*.cpp", "csrc/memory/memfd.cpp"
)
CUDA_SOURCES = files(
    "csrc/cuda/*.cu",
    "csrc/cuda/*.cpp",
    "csrc/memory/cuda_*.cpp",
    "csrc/python/cuda/*.cpp",
    "csrc/python/errors.cpp",
)

# No -march: the instruction set is chosen at run time. The flag -ffp-contract=off keeps the
# rounding of all instruction sets equal: a fused multiply-add rounds once. The flag
# -fno-tree-slp-vectorize is for small calls, which mostly hand words on. Without it two words
# that were just stored are loaded as one, and that load waits until both are in the cache.
COMPILE_FLAGS = [
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fno-tree-slp-vectorize",
    "-fvisibility=hidden",
    "-g0",
    "-Wall",
    "-Wextra",
]
# -fmad=false for the same reason.
NVCC_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fmad=false",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra",
]
# Machine code for these, and PTX of the last for what comes after.
GPU_ARCHS = (os.environ.get("FASTCOLL_CUDA_ARCHS", "").strip() or "80,90,100").split(",")


class Toolkit:
    """The CUDA toolkit that nvcc belongs to."""

    def __init__(self, nvcc: str, home: Path) -> None:
        self.nvcc = nvcc
        folders = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
        self.library_dirs = [str(home / name) for name in folders if (home / name).is_dir()]
        includes = ("include", "targets/x86_64-linux/include", "targets/sbsa-linux/include")
        self.include_dirs = [str(home / name) for name in includes if (home / name).is_dir()]
        listed = self._ask("--list-gpu-arch")
        archs = [arch for arch in GPU_ARCHS if f"compute_{arch}" in listed.split()]
        if not archs:
            raise RuntimeError(f"{nvcc} compiles for none of sm_{', sm_'.join(GPU_ARCHS)}")
        self.targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        self.targets += [f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"]

    def _ask(self, *options: str) -> str:
        done = subprocess.run(
            [self.nvcc, *options], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self.nvcc} {' '.join(options)} failed: {done.stderr.strip()}")
        return done.stdout


class NoToolkit(Exception):
    """There is no nvcc; the text says what to do."""


def find_toolkit() -> Toolkit:
    """Return the toolkit of CUDA_HOME, else of the nvcc on PATH.

    Raises:
        NoToolkit: There is none.
        RuntimeError: It does not work.
    """
    home = os.environ.get("CUDA_HOME", "").strip()
    nvcc = Path(home, "bin", "nvcc") if home else None
    if nvcc is not None and nvcc.is_file():
        return Toolkit(str(nvcc), Path(home))
    on_path = shutil.which("nvcc")
    if on_path is None:
        where = f"CUDA_HOME={home} has no bin/nvcc, nor is it on PATH" if home else "no nvcc found"
        raise NoToolkit(f"{where}: install the CUDA toolkit and put nvcc on PATH, or set CUDA_HOME")
    # It may be a wrapper script: the toolkit is where nvcc itself says.
    done = subprocess.run(
        [on_path, "--dryrun", "-x", "cu", os.devnull],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    top = re.search(r"^#\$ TOP=(.*)$", done.stderr, re.M)
    if top is None:
        raise RuntimeError(f"{on_path} does not work: {done.stderr.strip() or done.stdout.strip()}")
    return Toolkit(on_path, Path(top[1]).resolve())


CPU = Extension(
    "fastcoll._C",
    sources=CPU_SOURCES,
    depends=["setup.py", *files(*HEADERS)],
    include_dirs=["csrc", "kernels", "python", pybind11.get_include()],
    libraries=["dl"],  # a part of libc from glibc 2.34 on
    extra_compile_args=COMPILE_FLAGS,
    language="c++",
)
CUDA = Extension(
    "fastcoll._cuda",
    sources=CUDA_SOURCES,
    depends=["setup.py", *files(*HEADERS, "kernels/**/*.cuh", "csrc/**/*.cuh")],
    include_dirs=CPU.include_dirs.copy(),
    libraries=["cudart_static", "rt", "dl", "pthread"],
    extra_compile_args=COMPILE_FLAGS,
    language="c++",
)


class BuildExt(build_ext):
    """Compiles the source files of an extension on all cores, those of CUDA with nvcc."""

    def run(self) -> None:
        wanted = os.environ.get("FASTCOLL_CUDA", "").strip() or "auto"
        if wanted not in ("auto", "0", "1"):
            raise SystemExit(f"FASTCOLL_CUDA={wanted}: must be auto, 0 or 1")
        # Unless it was asked for, a toolkit that fails costs the GPU side, not the install.
        self.needs_cuda = wanted == "1"
        self.toolkit = None
        try:
            self.toolkit = None if wanted == "0" else find_toolkit()
        except NoToolkit as reason:
            if wanted == "1":
                raise SystemExit(f"FASTCOLL_CUDA=1: {reason}") from None
            self.announce(f"fastcoll: no GPU support: {reason}", logging.INFO)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            if wanted == "1":
                raise SystemExit(f"FASTCOLL_CUDA=1: {error}") from None
            self.warn(f"no GPU support: {error}")
        if self.toolkit is None:
            self.extensions.remove(CUDA)
        else:
            CUDA.include_dirs += self.toolkit.include_dirs
            CUDA.library_dirs += self.toolkit.library_dirs
        super().run()
        if CUDA not in self.extensions:  # an earlier build's would not fit
            Path(self.get_ext_fullpath(CUDA.name)).unlink(missing_ok=True)

    def build_extensions(self) -> None:
        compile_serially = self.compiler.compile
        compile_host = self.compiler._compile
        self.compiler.src_extensions.append(".cu")

        def compile_files(sources, **options):
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                jobs = [pool.submit(compile_serially, [source], **options) for source in sources]
                return [path for job in jobs for path in job.result()]

        def compile_one(obj, src, ext, cc_args, extra_postargs, pp_opts):
            if ext != ".cu":
                compile_host(obj, src, ext, cc_args, extra_postargs, pp_opts)
                return
            flags = [*NVCC_FLAGS, *self.toolkit.targets, *pp_opts]
            command = [self.toolkit.nvcc, *flags, "-c", src, "-o", obj]
            if subprocess.run(command, check=False).returncode != 0:
                raise CompileError(f"{self.toolkit.nvcc} could not compile {src}")

        self.compiler.compile = compile_files
        self.compiler._compile = compile_one
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            if ext is not CUDA or self.needs_cuda:
                raise
            self.warn(f"no GPU support: {error}")
            Path(self.get_ext_fullpath(CUDA.name)).unlink(missing_ok=True)
            self.extensions = [other for other in self.extensions if other is not CUDA]


def package_page(readme: str) -> str:
    """Return the README for a page that has none of the files beside it: no relative links."""
    text = re.sub(r"!\[[^\]]*\]\((?!http)[^)]*\)\n*", "", readme)
    text = re.sub(r"\[([^\]]+)\]\(\1\)", r"`\1`", text)
    text = re.sub(r"\[([^\]]+)\]\((?!http)([^)#]+)[^)]*\)", r"\1 (`\2`)", text)
    return f"{text}\nThe files that this page names are in the source archive.\n"


if __name__ == "__main__":
    setup(
        ext_modules=[CPU, CUDA],
        cmdclass={"build_ext": BuildExt},
        long_description=package_page((ROOT / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
