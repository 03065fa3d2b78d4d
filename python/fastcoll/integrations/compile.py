# SPDX-License-Identifier: Apache-2.0
"""fastcoll's functions under torch.compile.

`fastcoll.all_reduce` is a C function, which the compiler can't look into. So the compiler must be
given another function to trace (`traced.py`). Decides when: not before the compiler is imported.
Its import takes seconds, and a program that compiles nothing shall not spend them. A compiler that
can't be taught costs the program a line in the log: neither its import nor fastcoll's fails.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from fastcoll import env
from fastcoll.text import say_once

_GENERATOR = "torch._inductor.lowering"
_chosen: list[bool] = []  # by `fuse_compiled`, the last one counts


def register() -> None:
    """Register fastcoll's functions with torch's compiler, and the operators with its generator."""
    advice = "Don't compile functions that call fastcoll"
    _after_import("torch._dynamo", partial(_try, _register_tracing, advice))
    _after_import(_GENERATOR, partial(_try, _register_lowerings, advice))
    if env.FUSE.get():
        _after_import(
            _GENERATOR, partial(_try, partial(_fuse, True), "FASTCOLL_FUSE has no effect")
        )


def fuse_compiled(enabled: bool = True) -> None:
    """Let torch.compile fuse all_reduce, the addition of a residual, and RMSNorm. Not collective.

    Holds for programs that this thread compiles from now on by Inductor, on CPU tensors. The norms
    of torch, Hugging Face's Llama and Gemma are known, with and without a residual. The sum with
    the residual has the bits of the separate steps, and the norm those of `fastcoll.RMSNorm`. All
    ranks may do it, or some: it changes nothing that crosses between them. FASTCOLL_FUSE=1 in the
    environment does the same; FASTCOLL_LOG=plan tells how many were found (docs/use/compile.md).

    Args:
        enabled: Whether to do so.
    """
    _chosen.append(enabled)
    _after_import(_GENERATOR, partial(_fuse, enabled))


def is_fusing() -> bool:
    """Return whether the program wants that, by `fuse_compiled` or by its environment."""
    return _chosen[-1] if _chosen else env.FUSE.get()


def _try(register: Callable[[], None], advice: str) -> None:
    """Call `register`, or say why that failed: it may be a torch that was patched."""
    try:
        register()
    except Exception as error:
        say_once(f"torch.compile can't be told of fastcoll: {error!r}. {advice}")


def _fuse(enabled: bool) -> None:
    from fastcoll.integrations import fusing

    fusing.install(enabled)


def _register_tracing() -> None:
    from fastcoll.integrations import traced

    traced.register()


def _register_lowerings() -> None:
    from fastcoll.integrations import lowered

    lowered.register()


# ---- when a module is there ----------------------------------------------------------------------


def _after_import(name: str, act: Callable[[], None]) -> None:
    """Act now if a module is loaded, else as soon as it has been imported."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Awaiting(name, act))


class _Awaiting(MetaPathFinder):
    """Finds no module; sees one being looked for, and has something done once it is loaded."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _then(spec.loader, self._act)
        return spec


def _then(loader: Loader, act: Callable[[], None]) -> None:
    load = loader.exec_module

    def load_and_act(module: ModuleType) -> None:
        load(module)
        act()

    loader.exec_module = load_and_act  # type: ignore[method-assign]
