# SPDX-License-Identifier: Apache-2.0
"""When a group's GPU side waits for the device, on a runtime made of counters; with planted bugs.

Needs CUDA's headers, and no GPU.
"""

import platform
import re
import shutil
from pathlib import Path

import pytest

from tests.proofs import CPP
from tests.support.programs import build, need, run

ROOT = Path(__file__).parents[3]
LIMIT_S = 120
SOURCE = ROOT / "csrc/cuda/device_group.cpp"
BESIDE = ROOT / "csrc/cuda/launch_order.cpp"

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


@pytest.mark.proof(*CPP)
@pytest.mark.native
@pytest.mark.parametrize("planted", ["", *PLANTED])
def test_device_group(planted: str, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("not run: nvcc is not installed")
    need("setarch")
    source, caught_by = SOURCE.read_text(), ""
    if planted:
        pattern, text, caught_by = PLANTED[planted]
        source, count = re.subn(pattern, text, source)
        assert count == 1, "the source has changed: plant it anew"
    copy, program = tmp_path / "device_group.cpp", tmp_path / "program"
    copy.write_text(source)
    includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'kernels'}"]
    command = ["nvcc", "-std=c++20", "-cudart=none", "-Xcompiler=-fsanitize=thread,-pthread"]
    command += ["-Xcompiler=-O1,-g1,-Wall", *includes]
    build(
        command,
        [copy, BESIDE, ROOT / "tests/protocol/native/test_device_group.cpp"],
        program,
        LIMIT_S,
    )
    # Fixed addresses: under strong address randomisation an older ThreadSanitizer can't start.
    fixed = [shutil.which("setarch") or "setarch", platform.machine(), "-R"]
    done = run([*fixed, "env", "TSAN_OPTIONS=halt_on_error=1", str(program)], LIMIT_S)
    if planted:
        assert done.returncode != 0, f"the planted bug went unseen:\n{done.stdout[-4000:]}"
        assert re.search(caught_by, done.stdout), done.stdout[-4000:]
    else:
        assert done.returncode == 0, done.stdout[-4000:]
        assert "all well" in done.stdout
