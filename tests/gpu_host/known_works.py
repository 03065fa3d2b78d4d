# SPDX-License-Identifier: Apache-2.0
"""Known asynchronous calls and transfers of ranks on a CUDA made of the CPU.

`python -m tests.gpu_host.known_works NAME [EXTENSION]` runs a function of this file.
"""

import contextlib
import ctypes
from typing import Any
from unittest import mock

from tests.support.fake_cuda import FakeCuda
from tests.support.fake_ranks import Stream, all_known, raises, run_program, two_ranks

SIDE = Stream().cuda_stream


def beside(cuda: FakeCuda) -> None:
    """An asynchronous call follows the current stream, which follows it once it is waited for."""
    import torch

    with two_ranks(cuda) as me:
        comm, tensor = me.comm, torch.ones(9)
        comm.all_reduce(tensor)
        me.gpu.use(5)
        cuda.done_in_streams()
        version = tensor._version
        with all_known():
            work = comm.all_reduce(tensor, async_op=True)
            assert work.is_completed()
        me.gpu.use(6)
        with all_known():
            assert work.wait()
            assert work.wait(0)
        assert tensor._version == version + 1
        assert me.gpu.kept_for == [Stream()]
        rows = cuda.done_in_streams()
        before, last, end = rows[0][2], rows[2][2], rows[5][2]
        assert len({before, last, end}) == 3
        assert rows == [
            ("record", 5, before),
            ("wait", SIDE, before),
            ("wait", SIDE, last),  # the first call was in another stream
            ("launch", SIDE, 0),
            ("record", SIDE, last),
            ("record", SIDE, end),
            ("wait", 6, end),
            ("wait", 6, end),
        ]
        assert [id(one) for one in work.result()] == [id(tensor)]
        assert (work.is_success(), work.exception(), work.num_bytes()) == (True, None, 36)
        assert repr(work) == "<fastcoll.Work call, done>"


def late(cuda: FakeCuda) -> None:
    """Each handle has an event of its own, which another one takes at its end."""
    import torch

    import fastcoll

    with two_ranks(cuda) as me:
        comm, tensor = me.comm, torch.ones(9)

        def begin() -> tuple[Any, int]:
            work = comm.all_reduce(tensor, async_op=True)
            return work, cuda.done_in_streams()[-1][2]

        comm.all_reduce(tensor)
        (work, end), (other, its_end) = begin(), begin()
        assert end != its_end
        cuda.be_late(True)
        assert not work.is_completed()
        assert work.exception() is None
        with raises(fastcoll.CollectiveTimeout, "not complete after 0.01 s"):
            work.wait(0.01)
        cuda.be_late(False)
        assert work.wait(1.0)
        del work, other
        works = [begin() for _ in range(3)]
        ends = {at for _, at in works}
        assert len(ends) == 3
        assert ends > {end, its_end}, "dropped events are taken again"


def captured(cuda: FakeCuda) -> None:
    """In a capture nothing runs, so no call is over and no program waits; streams do."""
    import torch

    with two_ranks(cuda) as me:
        comm, tensor = me.comm, torch.ones(9)
        comm.all_reduce(tensor)
        cuda.capture_events(True)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            with all_known():
                work = comm.all_reduce(tensor, async_op=True)
            assert not work.is_completed()
            assert work.exception() is None
            end = cuda.done_in_streams()[-1][2]
            assert work.wait(30.0)
            assert cuda.done_in_streams() == [("wait", 0, end)]
        cuda.capture_events(False)
        assert work.is_completed()


def broken(cuda: FakeCuda) -> None:
    """A handle raises the error that broke its group; a call that can't start has none."""
    import torch

    import fastcoll
    from fastcoll.gpu.verdicts import DESYNC

    with two_ranks(cuda) as me:
        comm, tensor = me.comm, torch.ones(9)
        comm.all_reduce(tensor)
        cuda.refuse(True)
        with raises(fastcoll.DriverError, "refused by the fake"):
            comm.all_reduce(tensor, async_op=True)
        cuda.refuse(False)
        with all_known():
            work = comm.all_reduce(tensor, async_op=True)
        words = (ctypes.c_uint32 * 8).from_address(cuda.launched()["host"])
        words[:] = (DESYNC, 0, 1, 0, 72, 7, 8, 0)
        for wait in (work.wait, lambda: work.wait(1)):
            with raises(fastcoll.DesyncError, "rank 1 called something else"):
                wait()
        assert isinstance(work.exception(), fastcoll.DesyncError)


def messages(cuda: FakeCuda) -> None:
    """C++ starts sends and receives, and notes them as Python would."""
    import torch

    import fastcoll
    from tests.support.fallbacks import noting

    with two_ranks(cuda) as me:
        comm, peer, source = me.comm, me.peer, torch.arange(5.0)
        me.gpu.use(5)
        for known, tag in ((False, 3), (True, 4)):
            for one in (comm, peer):
                one.use_gpu(one.device_group.known if known else None)
            cuda.done_in_streams()
            target = torch.zeros(5)
            version = target._version
            with all_known() if known else contextlib.nullcontext():
                comm.send(source, 1, tag=7)
                assert peer.recv(target, 0, tag=7, timeout_s=3) == 0
            assert target._version == version + 1
            assert target.equal(source)
            rows = [row[:2] for row in cuda.done_in_streams() if row[0] == "launch"]
            assert rows == [("launch", 5)] * 2
            target = torch.zeros(5)
            with all_known() if known else contextlib.nullcontext():
                sent, received = comm.isend(source, 1, tag=tag), peer.irecv(target, 0, tag=tag)
                assert received.wait()
                assert sent.wait()
            rows = [row[:2] for row in cuda.done_in_streams()]
            assert rows.count(("launch", SIDE)) == 2
            if known:
                assert [row for row in rows[:3] if row != ("launch", SIDE)] == [
                    ("record", 5),
                    *[("wait", SIDE)] * 2,  # the call before was in another stream
                ]
            assert target.equal(source)
            assert (sent.source_rank(), received.source_rank()) == (1, 0)
            assert [id(one) for one in received.result()] == [id(target)]
            journal = comm.device_group._journal.core
            assert journal.started() == f"send(float32, numel=5, tag={tag}) to rank 1"
            texts = [text for text, _ in journal.messages(0, True, 1).values()]
            assert texts.count("float32, numel=5, tag=7") == 1 + known
            assert texts.count(f"float32, numel=5, tag={tag}") == 1
        comm.all_reduce(torch.ones(3))
        assert journal.started().startswith("all_reduce("), "the last start is the collective"
        strided = torch.ones(4, 2)[:, 0]
        with noting("send") as found:
            comm.send(strided, 1)
            comm.send(torch.ones(0), 1)
        assert len(found) == 2
        peer.recv(torch.ones(4), 0)
        for call, kind, text in (
            (lambda: comm.send(source, 0), fastcoll.UsageError, "which is this rank"),
            (lambda: comm.send(source, 2), fastcoll.UsageError, "dst"),
            (lambda: comm.send(source, 1, tag=2**32), fastcoll.UsageError, "tag"),
            (lambda: comm.recv(source), fastcoll.UnsupportedError, "from any rank"),
        ):
            with raises(kind, text):
                call()


if __name__ == "__main__":
    run_program(globals())
