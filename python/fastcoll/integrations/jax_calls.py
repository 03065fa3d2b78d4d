# SPDX-License-Identifier: Apache-2.0
"""A collective as an operation of JAX: how it is traced, compiled, ordered and run.

Decides the shape of each result and the order of calls. Must not know gradients or vmap, which are
in jax_rules.py.

The order of calls is a matter of correctness: two ranks that run two collectives in different
orders exchange the wrong data. Two computations that JAX dispatches may run at once, and so may two
operations of one computation. A compiled call therefore has an ordered effect. JAX threads a token
through all calls of a program, over branches and loops, and from one program to the next of the
same thread. Tokens that a user hands on could be forgotten. There is one effect for all groups, so
calls on different groups keep their order, too.

An ordered effect costs JAX's quick dispatch, which jax_programs.py brings back. A call outside of
programs waits for those before it, and for its own end.
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

# JAX has no public way to declare an effect, nor to forget the tokens of a thread.
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import effects as _effects
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from fastcoll.calls.group import BaseGroup
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.native import _C
from fastcoll.types import REDUCE_OPS, DType, Op, Verb

TARGET = "fastcoll_call"
# Those of fastcoll.types.Verb, and three more; csrc/python/jax_calls.cpp has the same numbers.
CODES = {verb.name: int(verb) for verb in Verb} | {"send": 9, "recv": 10, "sendrecv": 11}
_NAMES = {code: name for name, code in CODES.items()}
# The result of a call that has none. XLA drops operations whose results have no elements.
_NOTHING = ShapedArray((1,), np.dtype(np.uint8))
# JAX has both for a computation that failed, by the place where its result is used.
FAILURES = (jax.errors.JaxRuntimeError, ValueError)


@dataclass(frozen=True, slots=True)
class Call:
    """A call but for its arrays: a verb, its group and its options."""

    verb: str
    group: int  # the number of the group among those that were used with JAX
    rank: int  # this rank, in that group
    world_size: int
    op: Op = Op.SUM
    root: int = 0
    dest: int = 0
    source: int = 0
    tag: int = 0

    @property
    def facts(self) -> np.ndarray[Any, Any]:
        """The call as the C++ side reads it."""
        code = CODES[self.verb]
        gets = not self.keeps and self.verb not in ("barrier", "send")
        facts = (self.group, code, self.op, self.root, self.dest, self.source, self.tag, gets)
        return np.array(facts, np.int64)

    @property
    def is_root(self) -> bool:
        """Whether this rank gives (broadcast, scatter) or gets (gather, reduce)."""
        return self.rank == self.root

    @property
    def keeps(self) -> bool:
        """Whether the result on this rank is its own array."""
        if self.verb == "broadcast":
            return self.is_root
        return self.verb in ("reduce", "gather") and not self.is_root

    @property
    def gives(self) -> bool:
        """Whether data of this rank's are read; else its first array has only the shape."""
        return not (
            self.verb in ("barrier", "recv")
            or (self.verb in ("broadcast", "scatter") and not self.is_root)
        )

    def result(self, *arrays: ShapedArray) -> ShapedArray:
        """Return the shape and dtype of the result; raise UsageError if an array does not fit."""
        if self.verb in ("barrier", "send"):
            return _NOTHING
        array = arrays[-1]  # of a sendrecv, the one like its result
        shape = array.shape
        if self.verb == "all_gather" or (self.verb == "gather" and self.is_root):
            shape = (self.world_size, *shape)
        cuts = self.verb == "scatter" and self.is_root
        if cuts or self.verb in ("reduce_scatter", "all_to_all"):
            if not shape or shape[0] != self.world_size:
                raise UsageError(
                    f"{self.verb}: an array of shape {shape} has no part for each of "
                    f"{self.world_size} ranks: its first dimension must be {self.world_size}"
                )
            shape = shape if self.verb == "all_to_all" else shape[1:]
        return ShapedArray(shape, array.dtype)


class _Collective(_effects.Effect):  # type: ignore[misc]
    """A call of a group, as an effect: JAX keeps all of them, in the order of the program."""

    def __str__(self) -> str:
        return "fastcoll"


EFFECT = _Collective()
for _allowed in (
    _effects.ordered_effects,
    _effects.lowerable_effects,
    _effects.control_flow_allowed_effects,
    _effects.custom_derivatives_allowed_effects,
    _effects.remat_allowed_effects,
):
    _allowed.add_type(_Collective)


# It has moved between releases of JAX.
_TOKEN = getattr(jax.ffi, "abstract_token", None) or _core.abstract_token

# ---- groups ----

_groups: list[BaseGroup] = []  # by number


@functools.cache
def number_of(group: BaseGroup) -> int:
    """Return the number of a group. From now on the group lives as long as the process.

    A new group is the way out of a failure, which JAX would raise for all later programs of
    `jax.jit`.
    """
    with contextlib.suppress(*FAILURES):
        _await_programs()
    _groups.append(group)
    number: int = _C.add_jax_group(group)
    assert number == len(_groups) - 1
    return number


# ---- compiled ----

call_p = Primitive("fastcoll_call")


@call_p.def_effectful_abstract_eval  # type: ignore[untyped-decorator]
def _trace(*arrays: ShapedArray, call: Call) -> tuple[ShapedArray, set[_Collective]]:
    return call.result(*arrays), {EFFECT}


def _lower(context: Any, *operands: Any, call: Call) -> Sequence[Any]:
    given = 1 if call.gives else 0
    token = context.tokens_in.get(EFFECT)
    outputs = [] if call.keeps else context.avals_out
    rule = jax.ffi.ffi_lowering(TARGET, has_side_effect=True)
    *results, token = rule(
        context.replace(avals_in=(*context.avals_in[:given], _TOKEN), avals_out=(*outputs, _TOKEN)),
        *operands[:given],
        token,
        call=call.facts,
    )
    context.set_tokens_out(mlir.TokenSet({EFFECT: token}))
    return [operands[0]] if call.keeps else results


mlir.register_lowering(call_p, _lower, platform="cpu")

# ---- at once ----


@functools.cache
def _program(call: Call) -> Any:
    """Return the call as a program of its own, without a token."""

    def run(*arrays: jax.Array) -> Any:
        avals = [ShapedArray(one.shape, one.dtype) for one in arrays]
        result = _NOTHING if call.keeps else call.result(*avals)
        invoke = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(result.shape, result.dtype))
        return invoke(*(arrays[:1] if call.gives else ()), call=call.facts)

    return jax.jit(run)


@functools.lru_cache(maxsize=4096)
def _check_place(sharding: jax.sharding.Sharding) -> None:
    """Raise UnsupportedError unless an array lies on one CPU device."""
    devices = sharding.device_set
    if len(devices) != 1 or next(iter(devices)).platform != "cpu":
        raise UnsupportedError(
            f"an array on {len(devices)} devices ({sharding}) is not supported: fastcoll.jax takes "
            "arrays on one CPU device for each process"
        )


def _await_programs() -> None:
    """Wait for the calls of all programs of this thread. A failure is raised once."""
    try:
        jax.effects_barrier()
    except FAILURES:
        _dispatch.runtime_tokens.clear()
        raise


@call_p.def_impl  # type: ignore[untyped-decorator]
def _run(*arrays: jax.Array, call: Call) -> jax.Array:
    for array in arrays:
        _check_place(array.sharding)
    result: jax.Array
    try:
        _await_programs()
        result = _program(call)(*arrays)
        result.block_until_ready()
    except FAILURES as failure:
        error = _C.take_jax_error()
        if error is None or str(error) not in str(failure):
            raise
        raise error from None
    return arrays[0] if call.keeps else result


def issue(call: Call, *arrays: Any) -> Any:
    """Make a call: at once, or as an operation of the program that JAX traces now."""
    if _core.trace_state_clean():
        return _run(*arrays, call=call)
    return call_p.bind(*arrays, call=call)


# ---- in Python ----


def _array_of(operand: tuple[int, memoryview, tuple[int, ...]] | None) -> Any:
    if operand is None:
        return None
    code, memory, shape = operand
    return np.ndarray(shape, jax.numpy.dtype(DType(code).name), buffer=memory)


def run_in_python(facts: Sequence[int], given: Any, got: Any) -> None:
    """Carry out a call that C++ leaves to Python, on memory of XLA's."""
    number, code, op, root, dest, source, tag, _ = facts
    group, verb, reduction = _groups[number], _NAMES[code], REDUCE_OPS[op]
    x, y = _array_of(given), _array_of(got)
    flat_x: Any = None if x is None else x.reshape(-1)
    flat_y: Any = None if y is None else y.reshape(-1)
    if verb == "all_reduce":
        group.all_reduce(x, reduction, out=y)
    elif verb == "reduce_scatter":
        group.reduce_scatter_tensor(flat_y, flat_x, reduction)
    elif verb == "all_gather":
        group.all_gather_into_tensor(flat_y, flat_x)
    elif verb == "all_to_all":
        group.all_to_all_single(flat_y, flat_x)
    elif verb == "broadcast":
        if x is not None and y is not None:
            y[...] = x
        group.broadcast(x if y is None else y, root)
    elif verb == "reduce":
        group.reduce(x, root, reduction, out=y)
    elif verb == "gather":
        group.gather_single(flat_x, flat_y, root)
    elif verb == "scatter":
        group.scatter(y, None if x is None else list(x), root)
    elif verb == "barrier":
        group.barrier()
    else:
        works = [group.isend(x, dest, tag=tag)] if x is not None else []
        works += [group.irecv(y, source, tag=tag)] if verb != "send" else []
        for work in works:
            work.wait()


_C.set_jax_fallback(run_in_python)
jax.ffi.register_ffi_target(TARGET, _C.jax_handler(), platform="cpu")
