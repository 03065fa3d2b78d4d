# SPDX-License-Identifier: Apache-2.0
"""Builds `fastcoll._C`. Everything that is not the extension stands in pyproject.toml."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
# csrc/sim runs the GPU kernels in tests and is no part of the package.
SOURCES = sorted(
    str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.cpp") if path.parent.name != "sim"
)
DEPENDS = [
    "setup.py",
    *sorted(
        str(path.relative_to(ROOT))
        for pattern in ("csrc/**/*.h", "csrc/**/*.inc", "kernels/**/*.h")
        for path in ROOT.glob(pattern)
    ),
]

# No -march: the instruction set is chosen at run time. -ffp-contract=off: a fused multiply-add
# would round differently from one instruction set to the next.
COMPILE_FLAGS = [
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-g0",
    "-Wall",
    "-Wextra",
]


class ParallelBuildExt(build_ext):
    """Compiles the source files of the extension on all cores."""

    def build_extensions(self) -> None:
        compile_serially = self.compiler.compile

        def compile_files(sources, **options):
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                jobs = [pool.submit(compile_serially, [source], **options) for source in sources]
                return [path for job in jobs for path in job.result()]

        self.compiler.compile = compile_files
        super().build_extensions()


setup(
    ext_modules=[
        Extension(
            "fastcoll._C",
            sources=SOURCES,
            depends=DEPENDS,
            include_dirs=["csrc", "kernels", pybind11.get_include()],
            extra_compile_args=COMPILE_FLAGS,
            language="c++",
        )
    ],
    cmdclass={"build_ext": ParallelBuildExt},
)
