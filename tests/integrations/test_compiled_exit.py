# SPDX-License-Identifier: Apache-2.0
"""Programs that end while calls and callbacks of the compiled backend are still on their way."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from backends import COMPILE_S

pytestmark = [pytest.mark.native, pytest.mark.timeout(2 * COMPILE_S)]

# The last callback ends after the program's last line, while `Slow` keeps the interpreter ending.
# What it holds can't be let go of then. Undrained it does not end before the interpreter is gone.
PROGRAM = """
import atexit, sys, time
import torch, torch.distributed as dist
import fastcoll
from fastcoll.integrations import c10d_build

rank, file, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("fastcoll", init_method=f"file://{file}", rank=rank, world_size=2)
assert c10d_build.reason() == "", c10d_build.reason()
if how == "undrained":
    atexit.unregister(c10d_build.load().finish)

class Slow:
    def __del__(self, sleep=time.sleep, seconds=60 if how == "undrained" else 1):
        sleep(seconds)

def slow(future):
    for _ in range(6000 if how == "undrained" else 100):
        time.sleep(0.01)
    print("called back with", future.value()[0][0].item(), flush=True)

late = Slow()
tensors = [torch.ones(100_000) for _ in range(20)]
dist.all_reduce(tensors[0])
for tensor in tensors[1:]:
    dist.all_reduce(tensor, async_op=True)
last = dist.all_reduce(tensors[0], async_op=True)
last.get_future().then(slow)
if how == "destroyed":
    dist.destroy_process_group()
elif how == "undrained":
    last.wait()
"""


def end(folder: Path, how: str) -> list[tuple[int, str, str]]:
    """Run the program on two ranks; what each returned and said."""
    store = folder / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(store), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=COMPILE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCOLL_TORCH_BACKEND", "compiled")


@pytest.mark.parametrize("how", ["destroyed", "left"])
def test_what_is_in_flight_is_over_before_the_interpreter(tmp_path: Path, how: str) -> None:
    for code, out, err in end(tmp_path, how):
        assert (code, out) == (0, "called back with 4.0\n"), err


def test_without_draining_the_process_is_killed(tmp_path: Path) -> None:
    for code, out, err in end(tmp_path, "undrained"):
        assert code in (-signal.SIGABRT, -signal.SIGSEGV), err
        assert out == ""
