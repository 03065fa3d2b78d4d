# SPDX-License-Identifier: Apache-2.0
"""`fastcoll doctor`: findings about this machine, and every setting.

Decides which facts are worth a line. Never raises: a probe that fails is a finding.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastcoll.cli.console import STDOUT, ExitCode, JsonFile, end_with, make_console, write_json
from fastcoll.text import printable_lines

_MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "no": "[red]no[/red]"}


@dataclass(frozen=True)
class Finding:
    """One line: `state` is "ok", "note" (works, slower or not used) or "no"."""

    section: str
    name: str
    value: str
    state: str = "ok"
    help: str = ""


Findings = Iterable[Finding]


def _versions() -> Findings:
    from fastcoll.measure.machine import read_commit, read_versions

    names = ("fastcoll", "torch", "numpy", "mpi4py", "scikit-learn", "matplotlib")
    found = read_versions(names)
    for name in ("python", *names):
        value = found.get(name)
        yield Finding("versions", name, value or "not installed", "ok" if value else "note")
    commit = read_commit(Path(__file__).parent)
    if commit:
        yield Finding("versions", "commit", commit.hash[:12] + (" + changes" * commit.dirty))


def _cpu() -> Findings:
    from fastcoll.machine.cpu import affinity
    from fastcoll.measure.machine import read_machine

    machine = read_machine()
    yield Finding("machine", "CPU", machine.cpu_model)
    usable = f"{machine.num_usable_cpus} of {machine.num_cpus}"
    cpus = ",".join(map(str, sorted(affinity())))
    yield Finding("machine", "cores usable", f"{usable} (CPUs {cpus})")
    yield Finding("machine", "NUMA nodes", str(machine.num_numa_nodes))
    yield Finding("machine", "caches", ", ".join(f"{k} {v}" for k, v in machine.caches.items()))
    yield Finding("machine", "memory", f"{machine.memory_gib} GiB")
    virtual = " (virtual machine)" if machine.virtualised else ""
    yield Finding("machine", "kernel", f"{machine.kernel}{virtual}, {machine.libc}")
    yield Finding(
        "machine",
        "transparent huge pages",
        f"{machine.transparent_huge_pages}; shared memory: {machine.shmem_huge_pages}",
    )


def _openmp() -> Findings:
    import torch

    from fastcoll.machine.cpu import affinity

    threads, cpus = torch.get_num_threads(), len(affinity())
    text, state = f"{threads} a rank", "ok"
    if threads > 1:
        most = max(1, cpus // threads)
        text += (
            f", so {most + 1} ranks and more share CPUs. Then set OMP_NUM_THREADS to CPUs / ranks, "
            f"or at least OMP_WAIT_POLICY=passive"
        )
        state = "note"
    yield Finding("machine", "OpenMP threads", text, state)


def _simd() -> Findings:
    from fastcoll.native import _C

    levels = ", ".join(_C.simd_levels())
    yield Finding("fastcoll", "SIMD level", f"{_C.simd_level()} (available: {levels})")
    staging = f"{_C.region_bytes() / 2**20:.2f} MiB per rank and group, whatever the message"
    yield Finding("fastcoll", "shared memory", staging)


def _tuning() -> Findings:
    from fastcoll.choose import tuning

    found = tuning.find()
    state = "no" if found.is_refusal else "ok" if found.table else "note"
    text = f"refused: {found.reason}" if found.is_refusal else found.reason
    yield Finding("fastcoll", "tuning table", text, state)


def _numerics() -> Findings:
    from fastcoll.calls.settings import resolve
    from fastcoll.integrations.torch_base import NUMERICS_ON_GPUS

    settings = resolve(None, None, default_on_gpus=NUMERICS_ON_GPUS)
    text: str = settings.numerics
    if settings.numerics_on_gpus != text:
        text += f"; {settings.numerics_on_gpus} on GPUs in groups of torch.distributed"
    yield Finding("fastcoll", "numerics", text)


def _tensors() -> Findings:
    from fastcoll.api import READS_TENSORS

    text = "read by C++"
    if not READS_TENSORS:
        text = "read by Python alone, which is slow: C++ does not know this torch's layout"
    yield Finding("fastcoll", "tensors", text, "ok" if READS_TENSORS else "note")


def _torch_backend() -> Findings:
    from fastcoll.integrations.c10d_build import report

    text = report()
    yield Finding("fastcoll", "torch backend", text, "note" if text.startswith("in ") else "ok")


def _shm() -> Findings:
    status = os.statvfs("/dev/shm")
    size_bytes = status.f_blocks * status.f_frsize
    text = f"{size_bytes / 2**20:.0f} MiB; fastcoll does not use it"
    yield Finding("processes", "/dev/shm", text)


def _sealed_memory() -> Findings:
    from fastcoll.cli.probes import sealed_memory

    os.close(sealed_memory())
    yield Finding("processes", "memfd, sealed", "works")


def _peer() -> Findings:
    from fastcoll.cli.probes import try_peer

    found = try_peer()
    yield Finding(
        "processes",
        "memory passed to a peer",
        "works" if found.shares_memory else "the peer's writes did not arrive",
        "ok" if found.shares_memory else "no",
    )
    sibling = "works" if found.reads_us else f"refused: {found.reads_error}"
    parent = "works" if found.read_by_us else "refused"
    yield Finding(
        "processes",
        "process_vm_readv",
        f"between ranks: {sibling}; of a child: {parent}",
        "ok" if found.reads_us else "note",
    )
    large = "copied once where that costs less" if found.reads_us else f"staged{_why_staged()}"
    text = f"{large}; on all_gather of 1 MiB between 2 ranks: {_explain_all_gather(found.reads_us)}"
    yield Finding("fastcoll", "large private messages", text, "ok" if found.reads_us else "note")


def _why_staged() -> str:
    """Return the setting to change so that ranks may read each other; Yama is the usual reason."""
    from fastcoll.machine.cpu import read_text

    scope = read_text(Path("/proc/sys/kernel/yama/ptrace_scope")) or "0"
    return f": kernel.yama.ptrace_scope is {scope}, copies between ranks need 0" * (scope != "0")


def _explain_all_gather(may_read: bool) -> str:
    from fastcoll.choose import algorithms, select
    from fastcoll.measure.pattern import make_cell
    from fastcoll.measure.variants import request_of

    cell = make_cell("all_gather", "uint8", "sum", 2 << 20, 2)  # 1 MiB of each rank
    request = request_of(cell, "same_bits", single_copy="auto" if may_read else "never")
    reasons = select(request, algorithms.ALL).reasons
    return f"direct {reasons['direct']}, single_copy {reasons['single_copy']}"


def _membarrier() -> Findings:
    from fastcoll.cli.probes import membarrier

    works = membarrier()
    text = "works" if works else "refused; sleepers use short limits instead"
    yield Finding("processes", "membarrier", text, "ok" if works else "note")


def _pidfd() -> Findings:
    os.close(os.pidfd_open(os.getpid()))
    yield Finding("processes", "pidfd", "works")


def _gpu_driver() -> str:
    """Return the facts about NVIDIA GPUs that are known without torch."""
    if importlib.util.find_spec("pynvml") is not None:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            return f"no driver (NVML: {error})"
        names = [
            pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(idx))
            for idx in range(pynvml.nvmlDeviceGetCount())
        ]
        return f"{len(names)}: {', '.join(map(str, names))}"
    program = shutil.which("nvidia-smi")
    if program is not None:
        asked = [program, "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
        return " ".join(done.stdout.split("\n")).strip() or f"nvidia-smi: {done.stderr.strip()}"
    devices = [path.name for path in Path("/dev").glob("nvidia[0-9]*")]
    return f"devices {', '.join(devices)}, no nvidia-smi" if devices else "none (no /dev/nvidia*)"


def _gpu() -> Findings:
    import torch

    yield Finding("GPU", "NVIDIA devices", _gpu_driver())
    built_for = torch.version.cuda or torch.version.hip
    if torch.cuda.is_available():
        text = f"torch sees {torch.cuda.device_count()}"
    elif built_for is None:
        text = "not used: this torch is built without CUDA"
    else:
        text = f"not used: torch is built for {built_for} but finds no device"
    yield Finding("GPU", "torch", text, "ok" if torch.cuda.is_available() else "note")
    from fastcoll.machine.gpu import nccl_name

    nccl = f"NCCL {nccl_name()}" if nccl_name() else "torch has none"
    yield Finding("GPU", "beside our kernels", nccl, "ok" if nccl_name() else "note")
    yield from _gpu_part()


def _gpu_part() -> Findings:
    from fastcoll.choose import tuning
    from fastcoll.cli.probes import try_gpu_ranks
    from fastcoll.machine import gpu

    if problem := gpu.problem():
        yield Finding("GPU", "fastcoll", f"tensors on CPUs only: {problem}", "note")
        return
    gpus = gpu.gpus()
    for one in gpus:
        handles = "descriptors" if one.has_vmm_fds else "no descriptors of its memory"
        without = one.no_multicast
        multicast = f"no multicast: {without}" if without else "multicast"
        text = f"{one.name}, sm_{one.capability}, {one.num_sms} SMs, {handles}, {multicast}"
        yield Finding("GPU", f"cuda:{one.index}", text)
    apart = gpu.pairs_without_access()
    if len(gpus) > 1:
        text = f"not between {apart}" if apart else "between all"
        yield Finding("GPU", "peer access", text, "note" if apart else "ok")
    yield Finding("GPU", "between processes", try_gpu_ranks(len(gpus)))
    no_table = tuning.find().problem_on_gpus()
    text = f"not used here: {no_table}" if no_table else "chooses for GPUs, too"
    yield Finding("GPU", "tuning table", text, "note" if no_table else "ok")


def _mpi() -> Findings:
    from fastcoll.measure.mpi import FLAVOURS, default_mpi_dir, find_mpi

    for name, flavour in FLAVOURS.items():
        install = find_mpi(name, default_mpi_dir())
        text = f"found in {install.prefix}" if install else "not found (only for fastcoll bench)"
        yield Finding("peers", flavour.title, text, "ok" if install else "note")
    import torch.distributed as dist

    yield Finding("peers", "Gloo", "in torch" if dist.is_gloo_available() else "not in this torch")


def _nodes() -> Findings:
    from fastcoll import env
    from fastcoll.bootstrap.identity import machine

    yield Finding("nodes", "this process", env.NODE_ID.get() or machine())
    launch = env.launch()
    if launch is None:
        how = "run doctor as the ranks are run (torchrun ... -m fastcoll doctor) to see the map"
        yield Finding("nodes", "map", how, "note")
        return
    from fastcoll.cli.map import map_ranks

    node_map, apart = map_ranks(launch)
    for node, (ranks, host) in enumerate(zip(node_map.nodes, node_map.hosts, strict=True)):
        yield Finding("nodes", f"node {node}", f"{host}: ranks {', '.join(map(str, ranks))}")
    if apart:
        yield Finding("nodes", "one machine", apart, "note")


def _settings() -> Findings:
    from fastcoll import env

    for variable in env.VARIABLES:
        try:
            value, state = str(variable.get()), "ok"
        except Exception as error:
            value, state = str(error), "no"
        origin = "set" if variable.is_set() else "default"
        text = f"{value or 'empty'} ({origin}; default {variable.default or 'empty'})"
        yield Finding("settings", variable.name, text, state, variable.help)
    for line in env.misspelt():
        yield Finding("settings", line.split()[0], line, "no")


_PROBES: tuple[tuple[str, str, Callable[[], Findings]], ...] = (
    ("versions", "versions", _versions),
    ("machine", "CPU", _cpu),
    ("machine", "OpenMP threads", _openmp),
    ("fastcoll", "SIMD level", _simd),
    ("fastcoll", "tuning table", _tuning),
    ("fastcoll", "numerics", _numerics),
    ("fastcoll", "tensors", _tensors),
    ("fastcoll", "torch backend", _torch_backend),
    ("processes", "memfd, sealed", _sealed_memory),
    ("processes", "memory passed to a peer", _peer),
    ("processes", "membarrier", _membarrier),
    ("processes", "pidfd", _pidfd),
    ("processes", "/dev/shm", _shm),
    ("GPU", "GPU", _gpu),
    ("nodes", "map", _nodes),
    ("peers", "MPI", _mpi),
    ("settings", "settings", _settings),
)


def examine() -> Iterator[Finding]:
    """Yield all findings; a probe that fails yields why."""
    for section, name, probe in _PROBES:
        try:
            yield from probe()
        except Exception as error:
            yield Finding(section, name, f"{type(error).__name__}: {error}", "no")


def doctor(json_path: JsonFile = None) -> None:
    """Show the findings about this machine, and every FASTCOLL_ variable.

    Ends with code 1 if anything is wrong. That is a part that does not work, a setting that does
    not parse or has no reader, or a refused tuning table.
    """
    findings = list(examine())
    entries = [asdict(finding) for finding in findings]
    write_json({"platform": platform.platform(), "findings": entries}, json_path)
    _print(findings, make_console(is_silent=json_path == STDOUT))
    if wrong := [finding.name for finding in findings if finding.state == "no"]:
        end_with(ExitCode.FAILED, f"not right: {', '.join(wrong)}")


def _print(findings: list[Finding], console: Console) -> None:
    table = Table(title=f"fastcoll doctor, {platform.platform()}", title_justify="left")
    table.add_column("")
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("state")
    section = ""
    for finding in findings:
        if finding.section != section:
            table.add_section()
        text = escape(printable_lines(finding.value))
        if finding.help:
            text += f"\n[dim]{escape(finding.help)}[/dim]"
        title = finding.section if finding.section != section else ""
        table.add_row(title, finding.name, text, _MARKS[finding.state])
        section = finding.section
    console.print(table)
