# SPDX-License-Identifier: Apache-2.0
"""Programs that end while calls and callbacks are still on their way."""

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.backends import BACKENDS, COMPILE_S
from tests.support.launched import free_port
from tests.support.programs import Said, run_in_pairs, run_python

KINDS = ["native", *BACKENDS]
NODES = ("one node", "two nodes")

# The last callback ends after the program's last line, while `Slow` keeps the interpreter ending.
# Nothing it holds can be let go of then. Undrained it does not end before the interpreter is gone.
# A rank makes its half of the other's last call once `slow` waits for it. A call that is over
# sooner would run `slow` in this thread.
PROGRAM = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
import fastcoll
from fastcoll_autoload.ends import at_the_end
from fastcoll.integrations import c10d_build

rank, file, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("fastcoll", init_method=f"file://{file}", rank=rank, world_size=2)
is_compiled = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__ == "FastcollBackend"
assert is_compiled == (sys.argv[4] == "compiled"), c10d_build.reason()
if how == "undrained":
    at_the_end.remove(c10d_build.load().finish)

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
for owner in range(2):
    ready = Path(f"{file}-{owner}")
    while rank != owner and not ready.exists():
        time.sleep(0.01)
    work = dist.all_reduce(tensors[owner], async_op=True)
    if rank == owner:
        last = work
        last.get_future().then(slow)
        ready.touch()
if how == "destroyed":
    dist.destroy_process_group()
elif how == "undrained":
    last.wait()
"""


# A call without a plan is queued in Python. Its peer ends, or comes late, or makes none.
PENDING = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import fastcoll

rank, file, how, kind, peer = int(sys.argv[1]), *sys.argv[2:6]
if kind == "native":
    store = dist.FileStore(file, 2)
    fastcoll.init(store=store, rank=rank, world_size=2).set_timeout(5)
    calls = fastcoll
else:
    os.environ["FASTCOLL_TORCH_BACKEND"] = kind
    dist.init_process_group("fastcoll", init_method=f"file://{file}", rank=rank, world_size=2)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))
    calls = dist
calls.barrier()
if rank == 1:
    time.sleep(1)
    if peer == "comes late":
        for numel in (400_000, 500):
            calls.all_reduce(torch.ones(numel))
    if peer == "waits":
        time.sleep(8)
    os._exit(7)
works = [calls.all_reduce(torch.ones(numel), async_op=True) for numel in (400_000, 500)]
works[0].get_future().then(lambda future: print("called back", flush=True))
works[1].get_future()
print("leaving", flush=True)
if how == "raises":
    raise ValueError("mine")
sys.exit(5)
"""


# A daemon is in a call while the interpreter ends, and its call ends meanwhile. `Slow` keeps the
# interpreter ending. "closed": the groups are closed at exit, which waits for the call.
DAEMON = """
import os, sys, threading, time
import torch, torch.distributed as dist
import fastcoll
from fastcoll_autoload.ends import at_the_end
from fastcoll.api import lifecycle

rank, file, kind, name, how = int(sys.argv[1]), *sys.argv[2:6]
if kind == "native":
    fastcoll.init(store=dist.FileStore(file, 2), rank=rank, world_size=2)
    calls = fastcoll
else:
    os.environ["FASTCOLL_TORCH_BACKEND"] = kind
    dist.init_process_group("fastcoll", init_method=f"file://{file}", rank=rank, world_size=2)
    calls = dist
large, small = torch.ones(400_000), torch.ones(3)
for tensor in (large, small):
    calls.all_reduce(tensor)
if rank == 1:
    time.sleep(2)
    os._exit(7)
if how == "open":
    at_the_end.remove(lifecycle.close_all)
known = {
    "large": lambda: calls.all_reduce(large),
    "small": lambda: calls.all_reduce(small),
    "first": lambda: calls.broadcast(small, 1),
    "queued": lambda: calls.all_reduce(large, async_op=True).wait(),
    "recv": lambda: calls.recv(large, 1),
}
threading.excepthook = lambda args: None
threading.Thread(target=known[name], daemon=True).start()
time.sleep(0.5)

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(4)

late = Slow()
sys.exit(5)
"""


# torch looks for a store longer than fastcoll's limit, and the interpreter ends meanwhile.
ALONE = """
import sys, time
import fastcoll

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(5)

late = Slow()
try:
    fastcoll.init(timeout_s=2)
except fastcoll.CollectiveTimeout as error:
    print(error.ranks)
sys.exit(5)
"""


# Rank 0 leaves while a transfer is under way that nothing waits for. Rank 1 sees its process end.
TRANSFER = """
import os, select, sys, threading, time
import torch, torch.distributed as dist
import fastcoll

rank, file, kind, nodes, name = int(sys.argv[1]), *sys.argv[2:6]
if nodes == "two nodes":
    os.environ["FASTCOLL_NODE_ID"] = f"node {rank}"
if kind == "native":
    store = dist.FileStore(file, 2)
    fastcoll.init(store=store, rank=rank, world_size=2, timeout_s=300)
    calls = fastcoll
else:
    os.environ["FASTCOLL_TORCH_BACKEND"] = kind
    dist.init_process_group("fastcoll", init_method=f"file://{file}", rank=rank, world_size=2)
    calls = dist
pid = torch.tensor([os.getpid()])
calls.broadcast(pid, 0)
peer = os.pidfd_open(int(pid))
numbers = torch.arange(2_000_000.0)
calls.barrier()
if rank == 0:
    if name == "recv":
        threading.Thread(target=calls.recv, args=(numbers, 1), daemon=True).start()
        time.sleep(0.5)
    else:
        work = getattr(calls, name.split()[0])(numbers, 1)
        if name.endswith("future"):  # a thread waits for the transfer
            work.get_future()
    sys.exit(5)
if name == "isend":
    time.sleep(1)
    received = torch.zeros_like(numbers)
    calls.recv(received, 0)
    print(torch.equal(received, numbers))
print(select.select([peer], [], [], 60) == ([peer], [], []))
os._exit(0)
"""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FASTCOLL_TORCH_BACKEND", request.param)
    return str(request.param)


def run_ways(
    folder: Path, program: str, ways: Iterable[tuple[str, ...]]
) -> dict[tuple[str, ...], list[Said]]:
    """Run a program that begins with the import of fastcoll, on two ranks in each way."""
    return run_in_pairs(folder, program, ways, limit_s=COMPILE_S, first="import fastcoll")


@pytest.mark.slow
def test_what_is_in_flight_is_over_before_the_interpreter(tmp_path: Path, backend: str) -> None:
    ways = [(how, backend) for how in ("destroyed", "left")]
    for way, rows in run_ways(tmp_path, PROGRAM, ways).items():
        for code, out, err in rows:
            assert (code, out) == (0, "called back with 4.0\n"), (way, err)


@pytest.mark.native
@pytest.mark.timeout(2 * COMPILE_S)
def test_without_draining_the_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTCOLL_TORCH_BACKEND", "compiled")
    how = "undrained", "compiled"
    for code, out, err in run_ways(tmp_path, PROGRAM, [how])[how]:
        assert code in (-signal.SIGABRT, -signal.SIGSEGV), err
        assert out == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_leaves_with_calls_pending_ends(tmp_path: Path, kind: str) -> None:
    peers = [("exits", "ends"), ("exits", "comes late"), ("exits", "waits"), ("raises", "ends")]
    hows = [(how, kind, peer) for how, peer in peers]
    for (how, *_), [(code, out, err), _] in run_ways(tmp_path, PENDING, hows).items():
        assert code == (1 if how == "raises" else 5), err
        assert out.splitlines()[0] == "leaving"
        assert "called back" in out


# Not the compiled backend: torch's own bindings, which call it, end the process that way.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["native", "python"])
def test_a_daemon_may_be_in_a_call(tmp_path: Path, kind: str) -> None:
    names = ("large", "small", "first", "queued", "recv")
    ways = [(kind, name, how) for name in names for how in ("closed", "open")]
    for case, [(code, _, err), _] in run_ways(tmp_path, DAEMON, ways).items():
        assert code == 5, (case, err)


# A process whose transfers keep it alive would end with rank 1, a minute later, or by its limit,
# which is longer. A send waits some seconds for its receiver.
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_transfer_keeps_no_process_alive(tmp_path: Path, kind: str) -> None:
    said = {
        "irecv": "True\n",
        "recv": "True\n",
        "isend": "True\nTrue\n",
        "isend in vain": "True\n",
        "irecv with a future": "True\n",
        "isend in vain with a future": "True\n",
    }
    if kind == "compiled":  # see test_a_daemon_may_be_in_a_call
        del said["recv"]
    ways = [(kind, nodes, name) for nodes in NODES for name in said]
    for way, [(code, _, err), (_, out, _)] in run_ways(tmp_path, TRANSFER, ways).items():
        assert (code, out) == (5, said[way[-1]]), (way, err)


# Calls that an object makes as its last ones, while the interpreter ends. The object is held by the
# list of modules, by the program's names, or by itself.
LAST = """
import gc, os, sys
import torch, torch.distributed as dist
import fastcoll

rank, file, kind, nodes, holder = int(sys.argv[1]), *sys.argv[2:6]
if nodes == "two nodes":
    os.environ["FASTCOLL_NODE_ID"] = f"node {rank}"
if kind == "native":
    fastcoll.init(store=dist.FileStore(file, 2), rank=rank, world_size=2)
    calls = fastcoll
else:
    os.environ["FASTCOLL_TORCH_BACKEND"] = kind
    dist.init_process_group("fastcoll", init_method=f"file://{file}", rank=rank, world_size=2)
    calls = dist
tensor = torch.ones(2)
for _ in range(3):
    calls.all_reduce(tensor)
calls.all_reduce(tensor, async_op=True).wait()
made = [
    lambda: calls.all_reduce(tensor),  # a known call
    lambda: calls.broadcast(tensor, 1),
    lambda: calls.barrier(),
    lambda: calls.all_reduce(tensor, async_op=True).wait(),
    lambda: calls.send(tensor, 1 - rank),
]

class Last:
    def __del__(self, made=made):
        for make in made:
            try:
                make()
            except Exception as error:  # the test asks for its class
                print(type(error).__name__, flush=True)

last = Last()
if holder == "modules":
    sys.modules["last"] = last
elif holder == "itself":
    last.last = last
    gc.collect()  # now it is old: no short collection takes it before the end
    del last
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_while_the_interpreter_ends(tmp_path: Path, kind: str) -> None:
    holders = ("modules", "names", "itself")
    ways = [(kind, nodes, holder) for nodes in NODES for holder in holders]
    for case, rows in run_ways(tmp_path, LAST, ways).items():
        for code, out, err in rows:
            assert (code, out) == (0, 5 * "UsageError\n"), (case, err)


@pytest.mark.long
def test_a_rank_alone_under_a_launcher() -> None:
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = run_python("-c", ALONE, env={**os.environ, **launched, "MASTER_PORT": str(free_port())})
    assert (done.returncode, done.stdout, done.stderr) == (5, "(0,)\n", "")


# A handler that the program registered before its group was made still has the group.
HANDLER = """
import atexit, os, sys
import torch, torch.distributed as dist

rank, file, kind, nodes, name = int(sys.argv[1]), *sys.argv[2:6]
if nodes == "two nodes":
    os.environ["FASTCOLL_NODE_ID"] = f"node {rank}"

def use_group():
    tensor = torch.ones(3)
    if name == "calls":
        calls.all_reduce(tensor)  # a known call
        calls.broadcast(tensor, 1)
        calls.all_reduce(torch.ones(100_000), async_op=True).wait()
        rows = [None, None]
        calls.all_gather_object(rows, rank)
        calls.monitored_barrier()
        print(tensor.tolist(), rows)
    calls.destroy_process_group()
    print(calls.is_initialized())

atexit.register(use_group)
if kind == "native":
    import fastcoll as calls
    calls.init(store=dist.FileStore(file, 2), rank=rank, world_size=2)
else:
    calls = dist
    os.environ["FASTCOLL_TORCH_BACKEND"] = kind
    dist.init_process_group("fastcoll", init_method=f"file://{file}", rank=rank, world_size=2)
calls.all_reduce(torch.ones(3))
"""


# Their import of fastcoll comes behind that of the handler, so each has one of its own.
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_of_the_exit_has_its_group(tmp_path: Path, kind: str) -> None:
    said = {"calls": "[2.0, 2.0, 2.0] [0, 1]\nFalse\n", "destroy": "False\n"}
    ways = [(kind, nodes, name) for nodes in NODES for name in said]
    for case, rows in run_in_pairs(tmp_path, HANDLER, ways, limit_s=COMPILE_S).items():
        for code, out, err in rows:
            assert (code, out) == (0, said[case[-1]]), (case, err)
