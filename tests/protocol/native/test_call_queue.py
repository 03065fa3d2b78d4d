# SPDX-License-Identifier: Apache-2.0
"""The queue of asynchronous calls under ThreadSanitizer, and with bugs planted into its source."""

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
LIMIT_S = 240

# Planted bugs: the text that each replaces, the text in its place, and the message that tells.
PLANTED = {
    "over before idle": (
        r"\n(  queued_\.fetch_sub\(kHere, std::memory_order_release\);\n)(  call->over\(\);\n)",
        r"\n\2\1",
        "not idle",
    ),
    "empty before over": (
        r"\n  call->over\(\);\n  std::unique_lock lock\(mutex_\);\n(  if \(--num_open_ .*\n)",
        r"\n  std::unique_lock lock(mutex_);\n\1  lock.unlock();\n"
        "  call->over();\n  lock.lock();\n",
        "not everybody told|data race",
    ),
    "ahead of one that rests": (
        r"if \(resting_\) calls_\.push_front\(std::move\(resting_\)\);\n(  calls_.push_back.*)",
        r"\1\n  if (resting_) calls_.push_back(std::move(resting_));",
        "another order",
    ),
    "begun behind another": (
        r"if \(num_open_ == 0\) switch",
        "switch",
        "behind another",
    ),
    "rests for ever": (r"\) {\n  go_on\(\);\n", ") {\n", "not empty after"),
    "by a thread meanwhile": (r"  is_taken_ = true;\n", "", "another order|data race"),
    "ahead of Python": (r"if \(seen % kHere != 0\) return false;", "", "ahead of Python's"),
    "a thread for each call": (  # two at a time may also end in the wrong order first
        r"has_thread_ \|\| is_taken_",
        "is_taken_",
        "two calls|another order|data race",
    ),
    "unlocked": (
        r"lock\(mutex_\);\n  if \(!begin",
        "lock(*std::make_unique<std::mutex>().release());\n  if (!begin",
        "race",
    ),
    "ready, but not over": (r"  end\(done\);\n", "", "was not carried out|is not over"),
    "ready, and again": (
        r"= std::exchange\(resting_, nullptr\);\n  lock",
        "= resting_;\n  lock",
        "twice",
    ),
    "asked, and again": (
        r"std::move\(call\), is_done\);\n  }\n}",
        "std::move(call), false);\n  }\n}",
        "twice",
    ),
    "nobody goes on after a moment": (r"else {\n    go_on\(\);\n", "else {\n", "rests"),
    "yields to strangers": (
        r"  if \(company.is_there\(time_us\)\) {",
        "  if (false) {",
        "was left to a thread",
    ),
    "strangers not noted": (
        r"if \(rests\) company\.note_pause",
        "if (false) company.note_pause",
        "not noted",
    ),
    "own thread a stranger": (r"if \(rests\) company", "company", "counts as lost"),
    "waits beside strangers for ever": (
        r"return now_us\(\) >= end_us_;",
        "return false;",
        "beside strangers lasts",
    ),
    "a thread for each callback": (r"if \(callbacks_behind\)", "if (false)", "woke up"),
    "a callback behind the next call": (r"    start\(callbacks\);.*\n", "", "not empty after"),
    "callbacks dropped": (
        r"  for \(const auto& callback : callbacks\) callback\(\);\n",
        "",
        "does not run",
    ),
    "a callback behind itself": (
        r"    callbacks_behind = nullptr;\n",
        "",
        "does not run",
    ),
    "no moment for a thread": (
        r"return under_way_ == call \|\| ",
        "return ",
        "is waited for|goes on",
    ),
    "put away when another is begun": (
        r"std::unique_lock lock = is_done \? end\(call\) : std::unique_lock\(mutex_\);",
        "if (is_done) end(call);\n  for (int i = 0; i < 50; ++i) sched_yield();\n"
        "  std::unique_lock lock(mutex_);",
        "two calls run at once",
    ),
    "gone with its group": (r"self = shared_from_this\(\)", "self = this", "ThreadSanitizer"),
}


COMMAND = ["g++", "-std=c++20", "-pthread", "-O1", "-g1", "-fsanitize=thread", "-Wall"]
COMMAND += [f"-I{ROOT / 'csrc'}"]
BESIDE = (
    "csrc/group/threads.cpp",
    "csrc/cpu/wait.cpp",
    "tests/protocol/native/test_call_queue.cpp",
)


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Compile the sources without a bug, once for all programs."""
    need("g++", "setarch")
    folder = tmp_path_factory.mktemp("call_queue")
    return compile_all(COMMAND, [ROOT / name for name in BESIDE], folder, LIMIT_S)


@pytest.mark.proof(*CPP)
@pytest.mark.native
@pytest.mark.parametrize("planted", ["", *PLANTED])
def test_call_queue(planted: str, beside: list[Path], tmp_path: Path) -> None:
    pattern, text, caught_by = PLANTED.get(planted, ("", "", ""))
    source = copy_planted(ROOT / "csrc/group/call_queue.cpp", tmp_path, pattern, text)
    program = tmp_path / "program"
    build(COMMAND, [source], program, LIMIT_S, beside)
    done = run([*UNDER_THREAD_SANITIZER, program], LIMIT_S)
    assert_caught(done, caught_by)
    assert planted or "all well" in done.stdout
