# SPDX-License-Identifier: Apache-2.0
"""Times the verbs of fastcoll.jax beside the collectives of JAX on CPUs, which are Gloo's.

    python bench/jax_calls.py [FILE.json] [--rounds 7]

Two processes of jax.distributed, a device each. JAX's psum and all_gather run under shard_map, in a
compiled program; so do fastcoll's, and by themselves. Each way has its turn in each round, in a
program with one call and in one with a loop of calls. A figure is the median over the rounds, in
microseconds a call: the longer one of the two processes'. The results are compared first. Three
minutes. Nothing else should run meanwhile.
"""

import argparse
import importlib.metadata
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from records import write

import fastcoll
from fastcoll.measure.results import provenance

SIZES = (8, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20)
WINDOW_S = 0.03
LOOP_BYTES = 256 << 20  # of all calls of a loop


def start(rank: int, folder: str, port: int) -> tuple[Any, Any, Any]:
    """Return JAX, fastcoll's verbs for it, and a mesh of both processes."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    import fastcoll.jax

    store = dist.FileStore(f"{folder}/store", 2)
    fastcoll.init(store=store, rank=rank, world_size=2, timeout_s=300)
    return jax, fastcoll.jax, jax.make_mesh((2,), ("ranks",), devices=jax.devices())


def ways_of(verb: str, jax: Any, fj: Any, mesh: Any, num_bytes: int) -> dict[str, Any]:
    """Return the calls of a verb, each with the number of collectives in it."""
    numel, spec = num_bytes // 4, jax.P("ranks")
    mine = jax.numpy.asarray(np.arange(numel, dtype=np.float32) % 7 + jax.process_index())
    zeros = jax.numpy.zeros_like(mine)  # the sums in a loop stay what they are
    whole, whole_zeros = (
        jax.make_array_from_process_local_data(jax.NamedSharding(mesh, spec), np.asarray(one))
        for one in (mine, zeros)
    )
    ours = {"all_reduce": fj.all_reduce, "all_gather": fj.all_gather}[verb]
    loops = max(1, min(1000, LOOP_BYTES // num_bytes))

    def theirs(x: Any) -> Any:
        if verb == "all_reduce":
            return jax.lax.psum(x, "ranks")
        return jax.lax.all_gather(x, "ranks")

    def looped(call: Callable[[Any], Any], varies: bool) -> Callable[[Any], Any]:
        def turn(_: Any, x: Any) -> Any:
            result = call(x)[0] if verb == "all_gather" else call(x)
            return jax.lax.pcast(result, "ranks", to="varying") if varies else result

        return lambda x: jax.lax.fori_loop(0, loops, turn, x)

    def sharded(call: Callable[[Any], Any], out: Any, x: Any) -> Any:
        shards = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=out)
        program = jax.jit(shards)
        return lambda: program(x)

    out = jax.P() if verb == "all_reduce" else spec
    our_program, jaxs_program, our_loop = fj.jit(ours), jax.jit(ours), fj.jit(looped(ours, False))
    jaxs_loop = looped(theirs, verb == "all_reduce")
    calls = {
        "JAX's Gloo, a program": (sharded(theirs, out, whole), 1),
        "fastcoll by itself": (lambda: ours(mine), 1),
        "fastcoll, a program of fastcoll.jax.jit": (lambda: our_program(mine), 1),
        "fastcoll, a program of jax.jit": (lambda: jaxs_program(mine), 1),
        "JAX's Gloo, in a loop": (sharded(jaxs_loop, spec, whole_zeros), loops),
        "fastcoll, in a loop": (lambda: our_loop(zeros), loops),
    }
    gloos = np.asarray(calls["JAX's Gloo, a program"][0]().addressable_data(0)).reshape(-1)
    for name in list(calls)[1:4]:
        assert (np.asarray(calls[name][0]()).reshape(-1) == gloos).all(), name
    return calls


def time_verbs(rank: int, folder: str, port: int, rounds: int) -> None:
    """Write the times of all ways, by verb and size, to a file: rank 0's."""
    torch.set_num_threads(1)
    jax, fj, mesh = start(rank, folder, port)
    found: dict[str, Any] = {}
    for verb in ("all_reduce", "all_gather"):
        for num_bytes in SIZES:
            calls = ways_of(verb, jax, fj, mesh, num_bytes)
            times_us: dict[str, list[float]] = {name: [] for name in calls}
            for name, (call, _) in calls.items():
                jax.block_until_ready(call())
                start_s = time.perf_counter()
                jax.block_until_ready(call())
                took = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
                fastcoll.all_reduce(took, fastcoll.ReduceOp.MAX)
                calls[name] = (*calls[name], max(1, min(2000, int(WINDOW_S / took.item()))))
            for _ in range(rounds):
                for name, (call, loops, repeats) in calls.items():
                    fastcoll.barrier()
                    start_s = time.perf_counter()
                    for _ in range(repeats):
                        jax.block_until_ready(call())
                    took_s = (time.perf_counter() - start_s) / repeats / loops
                    slowest = torch.tensor([took_s], dtype=torch.float64)
                    fastcoll.all_reduce(slowest, fastcoll.ReduceOp.MAX)
                    times_us[name].append(slowest.item() * 1e6)
            row = {name: round(statistics.median(times), 3) for name, times in times_us.items()}
            found.setdefault(verb, {})[str(num_bytes)] = row
            if rank == 0:
                print(verb, num_bytes, row, flush=True)
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(found))
    fastcoll.destroy()
    jax.distributed.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="fc") as folder:
        mp.spawn(time_verbs, (folder, port, options.rounds), nprocs=2)  # type: ignore[no-untyped-call]
        times_us = json.loads(Path(folder, "times.json").read_text())
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    document = {
        "kind": "jax",
        **provenance(),
        "settings": {"world_size": 2, "dtype": "float32", "rounds": options.rounds, **versions},
        "times_us": times_us,
    }
    if options.file:
        write(document, options.file)


if __name__ == "__main__":
    main()
