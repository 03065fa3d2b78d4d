# SPDX-License-Identifier: Apache-2.0
"""Compiled programs of JAX that take the order of collectives among their arguments.

A program with an ordered effect has no quick dispatch: JAX finds the token of the former program in
Python, and places it on the devices anew, which takes several hundred us. A program of `jit` here
takes the token as an array, and returns it with its results. It has no effect for JAX, so JAX
dispatches it as any other. It starts once its arguments are there, so the former program is over.

Decides how the token travels. Must not know the verbs.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core  # whether a trace is under way has no public name
from jax._src import dispatch as _dispatch
from jax.extend.core import Primitive
from jax.interpreters import mlir

from fastcoll.integrations.jax_calls import EFFECT, FAILURES

program_p = Primitive("fastcoll_program")
program_p.multiple_results = True


@program_p.def_effectful_abstract_eval  # type: ignore[untyped-decorator]
def _trace_program(token: Any, *arrays: Any, program: Any) -> tuple[list[Any], set[Any]]:
    return [token, *program.out_avals], set(program.effects) - {EFFECT}


def _lower_program(context: Any, token: Any, *operands: Any, program: Any) -> Sequence[Any]:
    # The program starts once all its arguments are there, the former program's token among them.
    # Its own token is there once it is over, as all its results.
    others = context.tokens_in  # of io_callback and the like
    own = mlir.TokenSet.create([EFFECT])
    inner = context.replace(
        avals_in=context.avals_in[1:],
        avals_out=context.avals_out[1:],
        tokens_in=mlir.TokenSet({**dict(others.items()), **dict(own.items())}),
    )
    results = mlir.core_call_lowering(inner, *operands, name="fastcoll", call_jaxpr=program)
    if len(others):
        context.set_tokens_out(inner.tokens_out.subset([effect for effect, _ in others.items()]))
    return [token, *results]


mlir.register_lowering(program_p, _lower_program, platform="cpu")


class _Last(threading.local):
    """The token of this thread's last program of `jit`: an array, which JAX's own ones are not."""

    token: Any = None


_last = _Last()


def _with_token(fun: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fun)
    def run(*args: Any, fastcoll_token: jax.Array, **options: Any) -> tuple[jax.Array, Any]:
        leaves, tree = jax.tree.flatten((args, options))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]

        def call(*arrays: Any) -> Any:
            for place, array in zip(places, arrays, strict=True):
                leaves[place] = array
            inner_args, inner_options = jax.tree.unflatten(tree, leaves)
            return fun(*inner_args, **inner_options)

        arrays = [leaves[place] for place in places]
        program, shapes = jax.make_jaxpr(call, return_shape=True)(*arrays)
        token, *results = program_p.bind(fastcoll_token, *arrays, program=program)
        return token, jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def jit(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a compiled function; see fastcoll.jax.jit."""
    inside = jax.jit(fun, **options)
    outside = jax.jit(_with_token(fun), **options)
    first = np.zeros(0, np.bool_)

    @functools.wraps(fun)
    def run(*args: Any, **options: Any) -> Any:
        if not _core.trace_state_clean():
            return inside(*args, **options)
        tokens = _dispatch.runtime_tokens.current_tokens
        former = tokens.get(EFFECT)
        token = first
        # A program that is over, even if it failed, holds up no other.
        if former is not None and former is _last.token:
            token = first if former._buf.is_ready() else former._buf
        elif former is not None:
            with contextlib.suppress(*FAILURES):
                former.block_until_ready()
        token, result = outside(*args, fastcoll_token=token, **options)
        tokens[EFFECT] = _last.token = _core.Token(token)
        return result

    return run
