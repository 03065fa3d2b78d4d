# SPDX-License-Identifier: Apache-2.0
"""Gradients and vmap of the collectives of JAX.

Decides the derivative of each verb. The result of all_reduce, all_gather and broadcast counts as
one value that all ranks have alike, as in mpi4jax. So its cotangent is one value, too, and their
transposes move no data. The transposes of reduce_scatter, all_to_all and sendrecv are collectives.
A verb whose ranks have different parts in it has no gradient. A rank that does not use its result
would leave the transposed call out, and the others would wait for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fastcoll.errors import UnsupportedError
from fastcoll.integrations.jax_calls import Call, call_p
from fastcoll.types import Op

_LINEAR = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "sendrecv")


def _require_linear(call: Call) -> None:
    if call.verb not in _LINEAR:
        raise UnsupportedError(
            f"{call.verb} has no gradient, as its ranks have different parts in it; those that "
            f"have one are {', '.join(_LINEAR)}"
        )
    if call.op not in (Op.SUM, Op.AVG):
        raise UnsupportedError(
            f"{call.verb} has a gradient for SUM and AVG, not for {call.op.name}"
        )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> tuple[Any, Any]:
    _require_linear(call)
    tangent = ad.instantiate_zeros(tangents[0])
    # A second array has only the shape of the result.
    return call_p.bind(*primals, call=call), call_p.bind(tangent, *primals[1:], call=call)


def _transpose(cotangent: Any, *arrays: Any, call: Call) -> list[Any]:
    _require_linear(call)
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(arrays[0].aval)] + [None] * (len(arrays) - 1)
    mean = call.world_size if call.op is Op.AVG else 1
    if call.verb in _LOCAL:
        result = local_p.bind(cotangent, call=replace(call, op=Op.SUM))
    elif call.verb == "reduce_scatter":
        gathers = Call("all_gather", call.group, call.rank, call.world_size)
        # The ranks have different uses of this one.
        result = local_p.bind(
            call_p.bind(cotangent, call=gathers), call=replace(call, verb="all_reduce", op=Op.SUM)
        )
    elif call.verb == "all_to_all":
        result = call_p.bind(cotangent, call=call)
    else:
        like = jnp.zeros(arrays[0].aval.shape, arrays[0].aval.dtype)
        back = replace(call, dest=call.source, source=call.dest)
        result = call_p.bind(cotangent, like, call=back)
    return [result / mean if mean > 1 else result] + [None] * (len(arrays) - 1)


ad.primitive_jvps[call_p] = _jvp
ad.primitive_transposes[call_p] = _transpose

# ---- the transposes that move no data, whose own transposes do ----

local_p = Primitive("fastcoll_local")


_LOCAL: dict[str, Callable[[Any, Call], Any]] = {
    "all_reduce": lambda x, _: x,
    "all_gather": lambda x, call: x[call.rank],
    "broadcast": lambda x, call: x if call.is_root else jnp.zeros_like(x),
}


def _carry_out(x: Any, *, call: Call) -> Any:
    return _LOCAL[call.verb](x, call)


@local_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _trace(x: ShapedArray, *, call: Call) -> ShapedArray:
    return ShapedArray(x.shape[1:] if call.verb == "all_gather" else x.shape, x.dtype)


def _transpose_local(cotangent: Any, x: Any, *, call: Call) -> list[Any]:
    del x
    return [call_p.bind(cotangent, call=call)]


def _batch_local(arrays: Sequence[Any], dims: Sequence[int], *, call: Call) -> tuple[Any, int]:
    [x], [dim] = arrays, dims
    if call.verb != "all_gather":
        return local_p.bind(x, call=call), dim
    return local_p.bind(jnp.moveaxis(x, dim, 1), call=call), 0


local_p.def_impl(_carry_out)
mlir.register_lowering(local_p, mlir.lower_fun(_carry_out, multiple_results=False))
ad.deflinear2(local_p, _transpose_local)
batching.primitive_batchers[local_p] = _batch_local

# ---- vmap: the batch is one message ----


def _batch(arrays: Sequence[Any], dims: Sequence[Any], *, call: Call) -> tuple[Any, Any]:
    if call.verb == "sendrecv":
        size = next(x.shape[dim] for x, dim in zip(arrays, dims, strict=True) if dim is not None)
        both = [_batched(x, dim, size) for x, dim in zip(arrays, dims, strict=True)]
        return call_p.bind(*both, call=call), 0
    [x], [dim] = arrays, dims
    if call.verb in ("reduce_scatter", "all_to_all", "scatter"):
        has_parts = call.verb != "scatter" or call.is_root
        x = jnp.moveaxis(x, dim, 1 if has_parts else 0)
        return call_p.bind(x, call=call), 1 if call.verb == "all_to_all" else 0
    result = call_p.bind(x, call=call)
    if call.verb == "send":
        return result, None
    gathers = call.verb == "all_gather" or (call.verb == "gather" and call.is_root)
    return result, dim + 1 if gathers else dim


def _batched(x: jax.Array, dim: int | None, size: int) -> jax.Array:
    return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


batching.primitive_batchers[call_p] = _batch
