# SPDX-License-Identifier: Apache-2.0
"""One rank of `fastcoll.launch`: takes the work from a file, and replies by a pipe.

Run as a file, with the two descriptors. It finds fastcoll by its parent's sys.path, which comes
with the work. Decides nothing.
"""

import mmap
import os
import pickle
import sys
import traceback


def main(work_fd: int, reply_fd: int) -> bool:
    """Run the function; whether it returned."""
    with mmap.mmap(work_fd, 0, access=mmap.ACCESS_READ) as file:  # ranks share its position
        sys.path[:], work = pickle.loads(file)
    import cloudpickle

    from fastcoll.ranks.functions import pack_error, send_reply

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
