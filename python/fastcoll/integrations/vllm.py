# SPDX-License-Identifier: Apache-2.0
"""vLLM's plugin: tensor and pipeline parallelism on CPUs through fastcoll.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its
processes. Decides whether this vLLM is one that the plugin knows. VLLM_PLUGINS, vLLM's own setting,
names the plugins that it loads. Must not import vLLM's communicators before that.

A program chooses in its own process whether compiled models fuse (`fuse_compiled`). The workers
compile, so the choice travels with vLLM's settings of the compiler. Its caches then know of it.
"""

import importlib.metadata
from collections.abc import Callable
from typing import Any

from fastcoll.integrations.compile import is_fusing

_TESTED = "0.32"  # the releases whose device communicator was read and run
_COMMUNICATOR = "fastcoll.integrations.vllm_communicator.FastcollCommunicator"


def register() -> None:
    """Let the CPU workers of vLLM use fastcoll; other platforms and other releases stay as are."""
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    version = _version()
    if version != _TESTED and not version.startswith(f"{_TESTED}."):
        init_logger("vllm.fastcoll").warning(
            "vLLM %s keeps its own communicator: fastcoll's plugin was tested with %s",
            version,
            _TESTED,
        )
        return
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.get_device_communicator_cls = classmethod(lambda cls: _COMMUNICATOR)
    update = CpuPlatform.check_and_update_config.__func__
    CpuPlatform.check_and_update_config = classmethod(_adding_pass(update))


def _adding_pass(update: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return vLLM's function that completes its settings, with the pass where it is wanted."""

    def update_and_add(cls: Any, settings: Any) -> None:
        update(cls, settings)
        compilation = settings.compilation_config
        if not is_fusing() or compilation.backend != "inductor":
            return
        from fastcoll.integrations.vllm_fusing import add_to

        add_to(compilation.inductor_compile_config)

    return update_and_add


def _version() -> str:
    """Return the version of the installed distribution: vLLM's CPU wheels have another name."""
    names = importlib.metadata.packages_distributions().get("vllm", ["vllm"])
    return importlib.metadata.version(names[0])
