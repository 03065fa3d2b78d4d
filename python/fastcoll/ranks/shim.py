# SPDX-License-Identifier: Apache-2.0
"""Becomes a rank's program, after it tied this process to its parent and to its CPUs.

Run as a file: PARENT CPUS COMMAND..., with the CPUs between commas, or "-". Imports no torch, as it
runs before each rank. A parent that is killed can't end its ranks, so the kernel does.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: str, cpus: str, *command: str) -> None:
    """Replace this process by the command."""
    if cpus != "-":
        with contextlib.suppress(OSError):  # a sandbox may refuse it, and nothing depends on it
            os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # gone before the line above
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
