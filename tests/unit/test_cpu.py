# SPDX-License-Identifier: Apache-2.0
"""The facts of the machine's CPUs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastcoll.machine import cpu

TWO_CPUS = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 106
model name\t: A CPU

processor\t: 1
vendor_id\t: GenuineIntel
model name\t: Another CPU
"""


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(cpu, "_CPUINFO", path)
    cpu._cpuinfo.cache_clear()
    yield path
    cpu._cpuinfo.cache_clear()


def test_the_first_cpu_is_read_and_once(cpuinfo: Path) -> None:
    """Each group asks, and a server's kernel takes milliseconds for all its CPUs."""
    cpuinfo.write_text(TWO_CPUS)
    assert cpu.cpu_model() == "A CPU (family 6 model 106)"
    cpuinfo.unlink()
    assert cpu.vendor() == "GenuineIntel"


def test_a_machine_that_tells_nothing_has_no_vendor(cpuinfo: Path) -> None:
    assert not cpuinfo.exists()
    assert cpu.vendor() == ""
    assert cpu.cpu_model()
