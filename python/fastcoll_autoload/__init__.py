# SPDX-License-Identifier: Apache-2.0
"""The door by which torch finds fastcoll in a program that does not import it.

Decides which groups of torch.distributed need fastcoll. Each `import torch` ends with a call of
`autoload`, the wheel's entry point in the group `torch.backends`. So it costs next to nothing,
never raises, and imports fastcoll when a group needs it.

It is a package of its own, as Python imports all of fastcoll before any module of it. It wraps the
one function by which torch makes groups. An entry in torch's table of backends would do for the
name alone. But up to torch 2.13 such an entry costs a group of "cpu:gloo" its default backend, also
in programs that never name fastcoll.
"""

import logging
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from fastcoll_autoload import ends as ends  # registers the end of fastcoll

NAME = "fastcoll"
_GLOO = ("gloo", "undefined")  # torch calls its default "undefined"; on CPUs that is Gloo


def autoload() -> None:
    """Let torch.distributed find fastcoll by name; in place of Gloo, if FASTCOLL_AS_GLOO is set.

    From torch 2.14 on torch itself looks for a backend that is named. The wheel's entry point for
    that is in the group `torch.distributed.backends`.
    """
    try:
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        if c10d is None:  # a torch that was built without it
            return
        if os.environ.get("FASTCOLL_AS_GLOO", "").strip() not in ("", "0"):
            watch_groups(c10d, also_gloo=True)
        elif not hasattr(c10d.Backend, "_ensure_backend_registered"):
            watch_groups(c10d)
    except Exception as error:
        logging.getLogger(NAME).warning(
            "torch %s can't find fastcoll by name: %r. Import fastcoll before "
            "torch.distributed makes a group",
            getattr(sys.modules.get("torch"), "__version__", "?"),
            error,
        )


def watch_groups(c10d: Any, also_gloo: bool = False) -> None:
    """Let fastcoll be asked about each group of torch.distributed that names it.

    Args:
        c10d: torch.distributed.distributed_c10d.
        also_gloo: Ask it about groups of Gloo, too; that can't be taken back.
    """
    if not hasattr(c10d._new_process_group_helper, "fastcoll_names"):
        _wrap_maker(c10d)
    names: set[str] = c10d._new_process_group_helper.fastcoll_names
    names.update(_GLOO if also_gloo else ())


def _wrap_maker(c10d: Any) -> None:
    torchs: Callable[..., Any] = c10d._new_process_group_helper
    names = {NAME}

    @wraps(torchs)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        backend = str(kwargs.get("backend", args[3] if len(args) > 3 else "")).lower()
        if not any(name in backend for name in names):
            return torchs(*args, **kwargs)
        from fastcoll.integrations import stand_in

        return stand_in.make_group(torchs, *args, **kwargs)

    make_group.fastcoll_names = names  # type: ignore[attr-defined]
    c10d._new_process_group_helper = make_group
    if NAME not in c10d.Backend.backend_list:  # for torch.distributed.is_backend_available
        c10d.Backend.backend_list.append(NAME)
        c10d.Backend.backend_capability[NAME] = ["cpu"]
