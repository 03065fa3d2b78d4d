# SPDX-License-Identifier: Apache-2.0
"""vLLM's plugin: tensor and pipeline parallelism on CPUs through fastcoll.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its
processes. Decides whether this vLLM is one that the plugin knows. VLLM_PLUGINS, vLLM's own setting,
names the plugins that it loads. Must not import vLLM's communicators before that.
"""

import importlib.metadata

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


def _version() -> str:
    """Return the version of the installed distribution: vLLM's CPU wheels have another name."""
    names = importlib.metadata.packages_distributions().get("vllm", ["vllm"])
    return importlib.metadata.version(names[0])
