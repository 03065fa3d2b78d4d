# SPDX-License-Identifier: Apache-2.0
"""Refuses calls where torch records a program: torch.jit.trace, and make_fx.

They see torch's operators alone, so the program that they make would leave the call out. Decides
whether such a tracer runs in a thread, and how C++ notices it; see csrc/python/torch_tracers.h.
"""

import ctypes

import torch

from fastcoll.errors import UsageError
from fastcoll.native import _C

_INCLUDED = "_ZN3c104impl26raw_local_dispatch_key_setE"  # what a thread adds to torch's default
_KEYS = _JIT, _MODE = [torch._C._dispatch_key_parse(name) for name in ("Tracer", "Python")]
# The functions of fastcoll.integrations.ops that stand for verbs.
_OPERATORS = {
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
}


def show_tracers() -> None:
    """Show C++ how to notice a tracer. A torch that keeps it elsewhere lets calls through."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        included = ctypes.c_uint64.in_dll(library, _INCLUDED)  # of this thread
        keys = 0
        for key in _KEYS:
            bit = torch._C.DispatchKeySet(key).raw_repr()
            before = included.value
            with torch._C._IncludeDispatchKeyGuard(key):
                if included.value != before | bit:
                    return
            keys |= bit
        _tracer()
    except (AttributeError, OSError, RuntimeError, ValueError):
        return
    _C.set_torch_tracers(library._handle, keys, refuse_traced)


def refuse_traced(verb: str) -> None:
    """Refuse a call that a tracer of this thread would not see.

    Raises:
        UsageError: Such a tracer runs. Nothing was sent.
    """
    tracer = _tracer()
    if tracer is None:
        return
    name = _OPERATORS.get(verb)
    advice = (
        f"call fastcoll.integrations.ops.{name}, an operator, which is recorded"
        if name
        else "make the call outside of it (the operators of fastcoll.integrations.ops are recorded)"
    )
    raise UsageError(f"{verb} would be missing in the program that {tracer} records; {advice}")


def _tracer() -> str | None:
    """Return the tracer that records this thread's operators now, and not in one of them."""
    lib = torch._C
    if _runs(_JIT):
        return "torch.jit.trace"
    if _runs(_MODE) and lib._get_dispatch_mode(lib._TorchDispatchModeKey.PROXY) is not None:
        return "make_fx"
    return None


def _runs(key: torch._C.DispatchKey) -> bool:
    lib = torch._C
    return lib._dispatch_tls_is_dispatch_key_included(
        key
    ) and not lib._dispatch_tls_is_dispatch_key_excluded(key)
