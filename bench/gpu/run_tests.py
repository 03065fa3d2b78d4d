# SPDX-License-Identifier: Apache-2.0
"""Runs tests to their end, also when some of them end the process that runs them.

`python run_tests.py RESULTS LIMIT_S STALL_S ARGUMENTS OF PYTEST...`: outcomes go to RESULTS as they
come. A pytest that crashes, loses the device, or begins and ends nothing for STALL_S seconds, is
ended. A new one is started for the remaining tests. Exit code: 0 all passed or were
skipped, 1 some did not, 124 the time was up, else pytest's own.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from live_results import BEGUN, DEVICE_IS_LOST, read

OUT_OF_TIME, STALLED = 124, 71
_POLL_S = 0.2


def run_once(arguments: list[str], results: Path, end: float, stall_s: float) -> int:
    """Run pytest in a process group of its own and return its exit code, or why it was ended."""
    command = [sys.executable, "-m", "pytest", "-p", "live_results", "--live-results", str(results)]
    process = subprocess.Popen([*command, *arguments], start_new_session=True)
    size, moved = -1, time.monotonic()
    try:
        while (code := process.poll()) is None:
            time.sleep(_POLL_S)
            now = time.monotonic()
            found = results.stat().st_size if results.exists() else 0
            if found != size:
                size, moved = found, now
            if now > end:
                return OUT_OF_TIME
            if now - moved > stall_s:
                print(f"nothing for {stall_s:g} s: ended", flush=True)
                return STALLED
        return code
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(results: Path, limit_s: float, stall_s: float, arguments: list[str]) -> int:
    end = time.monotonic() + limit_s
    results.unlink(missing_ok=True)
    while True:
        known = len(read(results))
        code = run_once(arguments, results, end, stall_s)
        goes_on = code < 0 or code > 128 or code in (STALLED, DEVICE_IS_LOST)
        if not goes_on or len(read(results)) == known:
            break
        print(f"exit code {code}: again, for the tests that are left", flush=True)
    rows = read(results)
    failed = [row["test"] for row in rows if row["result"] in ("failed", BEGUN)]
    if failed and code != OUT_OF_TIME:
        return 1
    # 5: nothing is left to be run, after a crash of the last test.
    return 0 if rows and code == 5 else code


if __name__ == "__main__":
    # The end of this process is to be that of pytest too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(OUT_OF_TIME))
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
