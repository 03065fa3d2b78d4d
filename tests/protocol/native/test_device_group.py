# SPDX-License-Identifier: Apache-2.0
"""When a group's GPU side waits for the device, on a runtime made of counters; with planted bugs.

Needs CUDA's headers, and no GPU.
"""

import shutil
from pathlib import Path

import pytest

from tests.proofs import CPP
from tests.support.programs import (
    UNDER_THREAD_SANITIZER,
    assert_caught,
    build,
    compile_all,
    copy_planted,
    need,
    run,
)

ROOT = Path(__file__).parents[3]
LIMIT_S = 120
SOURCE = ROOT / "csrc/cuda/device_group.cpp"
BESIDE = ("csrc/cuda/launch_order.cpp", "tests/protocol/native/test_device_group.cpp")

# Planted bugs: the text that each replaces, the text in its place, and the message that tells.
PLANTED = {
    "lent again": (r"if \(kernels_ended_\) return", "return", "though kernels may run"),
    "lent by close": (
        r"kernels_ended_ = error == cudaSuccess;",
        r"\g<0>\n  return_host_words(host_);",
        "while threads may look at them",
    ),
    "verdict behind a launch": (
        r"  DeviceVerdict& found",
        r"  const std::lock_guard guard(order_->mutex());\n\g<0>",
        "waits for a launch",
    ),
    "giving up behind a launch": (
        r"void DeviceGroup::give_up\(int peer\) \{\n",
        r"\g<0>  const std::lock_guard guard(order_->mutex());\n",
        "waits for a launch",
    ),
    "busy behind a launch": (r", std::try_to_lock\)", ")", "waits for a launch"),
    "giving up by a stream": (
        r"void DeviceGroup::give_up\(int peer\) \{\n",
        r"\g<0>  cudaStreamSynchronize(nullptr);\n",
        "asks CUDA",
    ),
    "measured anywhere": (
        r"call.num_bytes > heap_bytes_ - call.offset_bytes",
        "false",
        "behind the",
    ),
    "blocks shared without an order": (r"options.shares \?", "false ?", "run beside each other"),
    "early behind an event": (r"starts_early_ && !launched.waits", "starts_early_", "event starts"),
    "early against the wish": (r"options.starts_early &&", "", "starts early"),
    "another layout": (r"plan.channels != options_.num_channels", "false", "laid out for"),
    "shape forgotten": (r", options.shape\)", ", {})", "another shape"),
}


COMMAND = ["nvcc", "-std=c++20", "-cudart=none", "-Xcompiler=-fsanitize=thread,-pthread"]
COMMAND += ["-Xcompiler=-O1,-g1,-Wall", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'kernels'}"]


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Compile the sources without a bug, once for all programs."""
    if shutil.which("nvcc") is None:
        pytest.skip("not run: nvcc is not installed")
    need("setarch")
    folder = tmp_path_factory.mktemp("device_group")
    return compile_all(COMMAND, [ROOT / name for name in BESIDE], folder, LIMIT_S)


@pytest.mark.proof(*CPP)
@pytest.mark.native
@pytest.mark.parametrize("planted", ["", *PLANTED])
def test_device_group(planted: str, beside: list[Path], tmp_path: Path) -> None:
    pattern, text, caught_by = PLANTED.get(planted, ("", "", ""))
    program = tmp_path / "program"
    build(COMMAND, [copy_planted(SOURCE, tmp_path, pattern, text)], program, LIMIT_S, beside)
    done = run([*UNDER_THREAD_SANITIZER, program], LIMIT_S)
    assert_caught(done, caught_by)
    assert planted or "all well" in done.stdout
