# SPDX-License-Identifier: Apache-2.0
"""One rank of `fastcoll.launch`: takes the work from a file, and replies by a pipe.

Run as a module, with the two descriptors. Decides nothing.
"""

import os
import pickle
import sys
import traceback

import cloudpickle

from fastcoll.ranks.functions import pack_error, send_reply


def main(work_fd: int, reply_fd: int) -> bool:
    """Run the function; whether it returned."""
    with open(f"/proc/self/fd/{work_fd}", "rb") as file:  # a position of its own
        sys.path[:], folder, work = pickle.load(file)
    os.chdir(folder)
    with os.fdopen(reply_fd, "wb") as pipe:
        try:
            function, args = cloudpickle.loads(work)
            reply = cloudpickle.dumps((None, function(*args)))
        except Exception as error:
            send_reply(pipe, pack_error(error, traceback.format_exc()))
            return False
        send_reply(pipe, reply)
    return True


if __name__ == "__main__":
    sys.exit(0 if main(*map(int, sys.argv[1:])) else 1)
