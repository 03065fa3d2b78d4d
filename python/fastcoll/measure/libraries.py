# SPDX-License-Identifier: Apache-2.0
"""The measured calls: each library's own call for each verb.

Decides which function of a library stands for a verb, in the form that costs least. Knows nothing
of the process that measures, of windows, or of other libraries.
"""

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import fastcoll
from fastcoll.calls.parts import PartsCall, PartsOperands, check_parts
from fastcoll.calls.tensors import Call, Operands, check
from fastcoll.measure.library import Bound, Library, WorkerConfig
from fastcoll.measure.pattern import Cell, make_cell
from fastcoll.native import _C
from fastcoll.types import REDUCTIONS, DType, Verb

_REDUCTIONS = {verb.name for verb in REDUCTIONS}


class Fastcoll(Library):
    """fastcoll, called directly from Python."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        store = dist.FileStore(config.store_path, config.world_size)
        numerics = config.numerics
        comm = fastcoll.init(
            store=store, rank=self.rank, world_size=self.world_size, numerics=numerics
        )
        assert isinstance(comm, fastcoll.Communicator)  # the ranks are on one node
        self.comm = comm

    def version(self) -> str:
        return fastcoll.__version__

    def barrier(self) -> None:
        fastcoll.barrier()

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self.config.symmetric:
            return fastcoll.empty(numel, dtype=dtype)
        return super().allocate(numel, dtype)

    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        fn, args = _torch_call(fastcoll, cell, self.rank, output, source)
        if self.config.algorithm != "auto" and cell.verb in _REDUCTIONS:
            fn = partial(fn, algorithm=self.config.algorithm)
        return fn, args

    def checked(
        self, cell: Cell, output: torch.Tensor, source: torch.Tensor
    ) -> tuple[Call, Operands] | tuple[PartsCall, PartsOperands]:
        """Return the call of `cell` with its operands, as groups plan and carry it out."""
        verb = Verb[cell.verb]
        if verb in (Verb.gather, Verb.scatter, Verb.all_to_all):
            parts = self._parts_call(cell, output, source)
            return parts, check_parts(parts, self.rank, self.world_size)
        call = Call(
            verb=verb,
            input=source,
            output=output,
            op=_torch_op(cell.op),
            root=cell.root,
            # The barrier before a call (`_before`) takes no algorithm of a reduction.
            algorithm=self.config.algorithm if cell.verb in _REDUCTIONS else "auto",
        )
        return call, check(call, self.rank, self.world_size)

    def _parts_call(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> PartsCall:
        verb, is_root = Verb[cell.verb], self.rank == cell.root
        if verb is Verb.gather:
            parts = list(output.chunk(self.world_size)) if is_root else None
            return PartsCall(verb=verb, input=source, output=parts, root=cell.root)
        if verb is Verb.scatter:
            parts = list(source.chunk(self.world_size)) if is_root else None
            return PartsCall(verb=verb, input=parts, output=output, root=cell.root)
        return PartsCall(verb=verb, input=source, output=output)

    def asynchronous(self, call: Bound) -> Bound:
        return _torch_asynchronous(call)

    def one_way_flag(self, iterations: int) -> float:
        return _C.time_one_way_flag(self.comm, iterations)

    def close(self) -> None:
        fastcoll.destroy()


class FastcollCore(Fastcoll):
    """fastcoll's C++ core in a compiled loop: no Python between the calls."""

    def asynchronous(self, call: Bound) -> Bound:
        raise NotImplementedError("there is no compiled loop of asynchronous calls")

    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        ptrs = source.data_ptr(), output.data_ptr()
        if cell.verb == "sendrecv":
            to, of = _neighbours(self.rank, self.world_size)
            message = int(DType[cell.dtype]), cell.numel
            return _C.time_exchanges, (self.comm, to, of, *message, *ptrs, *self._before(cell))
        plan = self.comm.planner.plan(*self.checked(cell, output, source))
        return _C.time_calls, (self.comm, plan, *ptrs, *self._before(cell))

    def _before(self, cell: Cell) -> tuple[_C.Plan | None, tuple[int, int]]:
        """Return what goes before each call: a barrier, and the bytes that are written anew."""
        if not cell.is_rewritten:
            return None, (0, 0)
        meeting = make_cell("barrier", cell.dtype, cell.op, 0, self.world_size)
        plan = self.comm.planner.plan(*self.checked(meeting, self._output, self._input))
        return plan, (self._input.data_ptr(), cell.rewritten_bytes(self.rank))

    def loop(self, iterations: int) -> float:
        time_loop, args = self._call
        return float(time_loop(*args, iterations))


class FastcollVariants(FastcollCore):
    """The core, one algorithm and segment size after the other on the same tensors."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._cell: Cell | None = None
        self._algorithm, self._segment_bytes = "auto", 0

    def prepare(self, cell: Cell) -> int | None:
        self._cell = cell
        return super().prepare(cell)

    def choose(self, algorithm: str, segment_bytes: int) -> None:
        self._algorithm, self._segment_bytes = algorithm, segment_bytes
        if self._cell is not None:
            self._call = self.bind(self._cell, self._output, self._input)

    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        # In "fast" numerics every algorithm is admitted; it changes nothing else about a plan.
        request = cell.request(
            algorithm=self._algorithm,
            numerics="fast",
            num_cpus=self.world_size,
            single_copy=self.comm.single_copy,
        )
        plan = self.comm.planner.choose(request).plan
        if self._segment_bytes:
            plan = replace(plan, segment_bytes=self._segment_bytes)
        built = _C.Plan(*plan.args())
        ptrs = source.data_ptr(), output.data_ptr()
        return _C.time_calls, (self.comm, built, *ptrs, *self._before(cell))

    def release(self) -> None:
        self._cell = None
        super().release()


class Gloo(Library):
    """torch.distributed over Gloo."""

    backend = "gloo"

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        store = dist.FileStore(config.store_path, config.world_size)
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.world_size
        )

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def barrier(self) -> None:
        dist.barrier()

    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        return _torch_call(dist, cell, self.rank, output, source)

    def asynchronous(self, call: Bound) -> Bound:
        return _torch_asynchronous(call)

    def close(self) -> None:
        dist.destroy_process_group()


class Mpi(Library):
    """Any MPI, through mpi4py; the launcher of the process decides the wheel in use."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        if config.mpi4py_folder is not None:
            sys.path.append(config.mpi4py_folder)
        from mpi4py import MPI

        self.mpi = MPI
        self.comm = MPI.COMM_WORLD
        if (self.comm.rank, self.comm.size) != (self.rank, self.world_size):
            raise RuntimeError(
                f"launched as rank {self.rank} of {self.world_size}, but MPI says rank "
                f"{self.comm.rank} of {self.comm.size}"
            )

    def version(self) -> str:
        text = self.mpi.Get_library_version().splitlines()[0]
        return " ".join(text.split(",")[0].replace("\t", " ").split())

    def barrier(self) -> None:
        self.comm.Barrier()

    def close(self) -> None:
        # mpi4py finalizes at exit.
        pass

    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        if cell.verb == "barrier":
            return self.comm.Barrier, ()
        op = {
            "product": self.mpi.PROD,
            "sum": self.mpi.SUM,
            "min": self.mpi.MIN,
            "max": self.mpi.MAX,
            "band": self.mpi.BAND,
            "bor": self.mpi.BOR,
            "bxor": self.mpi.BXOR,
        }.get(cell.op)
        if op is None:
            raise NotImplementedError(f"MPI has no {cell.op}")
        if cell.dtype.startswith(("bfloat", "float8", "float16")):
            raise NotImplementedError(f"MPI has no {cell.dtype}")
        # A ready-made (memory, type) pair: mpi4py's quickest form, without a query of the array.
        out, src = ([t.numpy(), self._datatype(cell.dtype)] for t in (output, source))
        root, is_root = cell.root, self.rank == cell.root
        match cell.verb:
            case "all_reduce":
                return self.comm.Allreduce, (self.mpi.IN_PLACE, out, op)
            case "reduce":
                sides = (self.mpi.IN_PLACE, out) if is_root else (src, None)
                return self.comm.Reduce, (*sides, op, root)
            case "reduce_scatter":
                return self.comm.Reduce_scatter_block, (src, out, op)
            case "all_gather":
                return self.comm.Allgather, (src, out)
            case "gather":
                return self.comm.Gather, (src, out if is_root else None, root)
            case "scatter":
                return self.comm.Scatter, (src if is_root else None, out, root)
            case "all_to_all":
                return self.comm.Alltoall, (src, out)
            case "sendrecv":
                to, of = _neighbours(self.rank, self.world_size)
                return self.comm.Sendrecv, (src, to, 0, out, of)
            case _:
                return self.comm.Bcast, (out, root)

    def asynchronous(self, call: Bound) -> Bound:
        fn, args = call
        if fn == self.comm.Sendrecv:
            raise NotImplementedError(_OWN_HANDLES)
        start = getattr(self.comm, f"I{fn.__name__.lower()}")
        return (lambda: start(*args).Wait()), ()

    def _datatype(self, dtype: str) -> Any:
        names = {"float32": "FLOAT", "float64": "DOUBLE", "bool": "C_BOOL"}
        names |= {"complex64": "C_FLOAT_COMPLEX", "complex128": "C_DOUBLE_COMPLEX"}
        return getattr(self.mpi, names.get(dtype, dtype.upper() + "_T"))


def _torch_call(
    library: Any, cell: Cell, rank: int, output: torch.Tensor, source: torch.Tensor
) -> Bound:
    """Return the call of `cell` by torch.distributed, or by a library with the same names."""
    op, is_root = _torch_op(cell.op), rank == cell.root
    match cell.verb:
        case "all_reduce":
            return library.all_reduce, (output, op)
        case "reduce":
            return library.reduce, (output, cell.root, op)
        case "reduce_scatter":
            return library.reduce_scatter_tensor, (output, source, op)
        case "all_gather":
            return library.all_gather_into_tensor, (output, source)
        case "gather":
            parts = list(output.chunk(cell.world_size)) if is_root else None
            return library.gather, (source, parts, cell.root)
        case "scatter":
            parts = list(source.chunk(cell.world_size)) if is_root else None
            return library.scatter, (output, parts, cell.root)
        case "all_to_all":
            return library.all_to_all_single, (output, source)
        case "broadcast":
            return library.broadcast, (output, cell.root)
        case "sendrecv":
            return _send_and_recv, (library, source, output, *_neighbours(rank, cell.world_size))
        case _:
            return library.barrier, ()


_OWN_HANDLES = "sends and receives have handles of their own"


def _torch_asynchronous(call: Bound) -> Bound:
    fn, args = call
    if fn is _send_and_recv:
        raise NotImplementedError(_OWN_HANDLES)
    return (lambda: fn(*args, async_op=True).wait()), ()


def _neighbours(rank: int, world_size: int) -> tuple[int, int]:
    return (rank + 1) % world_size, (rank - 1) % world_size


def _send_and_recv(
    library: Any, source: torch.Tensor, output: torch.Tensor, to: int, of: int
) -> None:
    sent = library.isend(source, to)
    library.recv(output, of)
    sent.wait()


def _torch_op(op: str) -> Any:
    return getattr(dist.ReduceOp, op.upper())


LIBRARIES: dict[str, type[Library]] = {
    "fastcoll": Fastcoll,
    "fastcoll_core": FastcollCore,
    "fastcoll_variants": FastcollVariants,
    "gloo": Gloo,
    "mpi": Mpi,
}
