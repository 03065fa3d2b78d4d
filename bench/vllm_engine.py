# SPDX-License-Identifier: Apache-2.0
"""One engine of vLLM on CPUs, with a small Llama of random weights, in a process of its own.

Decides the model, the prompts and the environment of an engine. `run` starts one. It prints the
tokens that it chose, and how long each generation took. Its workers import this file, too.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.platforms.cpu import CpuPlatform

LIMIT_S = 600
WITHOUT_SHARED_MEMORY = "VLLM_WITHOUT_SHARED_MEMORY"
COMMUNICATOR = "VLLM_COMMUNICATOR"
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

if os.environ.get(WITHOUT_SHARED_MEMORY):  # then a group stays on torch's Gloo
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _self: False
if own := os.environ.get(COMMUNICATOR):
    CpuPlatform.get_device_communicator_cls = classmethod(lambda _cls: own)


class SilentCommunicator(CpuCommunicator):  # type: ignore[misc]
    """Communicates nothing: the engine has the shapes of a model's tensors, and wrong tokens."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([input_] * self.world_size, dim)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        return self.all_gather(input_, dim) if self.rank_in_group == dst else None


@dataclass(frozen=True)
class Model:
    """The sizes of a Llama."""

    hidden: int = 256
    layers: int = 2

    def config(self) -> dict[str, Any]:
        heads = self.hidden // 32
        return MODEL | {
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
        }


@dataclass(frozen=True)
class Batch:
    """Prompts that the engine gets at once, and how many tokens it gives to each."""

    size: int
    prompt_tokens: int
    new_tokens: int
    repeats: int = 1


@dataclass(frozen=True)
class Engine:
    """The choices that a program makes for an engine.

    Attributes:
        plugins: VLLM_PLUGINS: "fastcoll", or "" for vLLM's own communicator.
        shared_memory: Whether that may use vLLM's own shared memory, else Gloo.
        communicator: "module.Class" of the caller's own; "": vLLM's or the plugin's.
        options: Further arguments of `vllm.LLM`.
        fuse: Whether sums are fused with the norms behind them.
    """

    plugins: str
    shared_memory: bool = True
    communicator: str = ""
    model: Model = Model()
    options: dict[str, Any] = field(default_factory=dict)
    fuse: bool = False


@dataclass(frozen=True)
class Output:
    """Of each batch the chosen tokens and the seconds of each repeat; and all that was printed."""

    tokens: list[list[list[int]]]
    times_s: list[list[float]]
    printed: str


def run(folder: Path, engine: Engine, batches: Sequence[Batch]) -> Output:
    """Start an engine on a model in `folder`, and let it generate."""
    (folder / "config.json").write_text(json.dumps(engine.model.config()))
    environment = os.environ | {
        "VLLM_PLUGINS": engine.plugins,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        WITHOUT_SHARED_MEMORY: "" if engine.shared_memory else "1",
        COMMUNICATOR: engine.communicator,
        "FASTCOLL_FUSE": "1" if engine.fuse else "",
    }
    asked = json.dumps({"options": engine.options, "batches": [asdict(one) for one in batches]})
    done = subprocess.run(
        [sys.executable, __file__, str(folder), asked],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    printed = done.stdout + done.stderr
    lines = [one for one in done.stdout.splitlines() if one.startswith("GENERATED ")]
    if done.returncode != 0 or len(lines) != 1:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {printed[-4000:]}")
    return Output(**json.loads(lines[0].removeprefix("GENERATED ")), printed=printed)


def generate(engine: Any, batch: Batch) -> tuple[list[list[int]], list[float]]:
    """Return the tokens that an engine chooses for a batch, and the seconds of each repeat."""
    from vllm import SamplingParams

    taken = SamplingParams(
        temperature=0, max_tokens=batch.new_tokens, ignore_eos=True, detokenize=False
    )
    times_s = []
    for turn in range(batch.repeats):
        # Of each repeat other ones: the engine keeps what it has computed for a prompt.
        ids = [
            [(7 * i + j + 131 * turn) % 1000 + 3 for j in range(batch.prompt_tokens)]
            for i in range(batch.size)
        ]
        start_s = time.perf_counter()
        done = engine.generate([{"prompt_token_ids": one} for one in ids], taken, use_tqdm=False)
        times_s.append(time.perf_counter() - start_s)
    return [list(one.outputs[0].token_ids) for one in done], times_s


def main() -> None:
    from vllm import LLM

    model, asked = sys.argv[1], json.loads(sys.argv[2])
    batches = [Batch(**one) for one in asked["batches"]]
    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=max(one.prompt_tokens + one.new_tokens for one in batches),
        max_num_seqs=max(one.size for one in batches),
        enable_prefix_caching=False,
        seed=0,
        **asked["options"],
    )
    tokens, times_s = zip(*(generate(engine, batch) for batch in batches), strict=True)
    print("GENERATED", json.dumps({"tokens": tokens, "times_s": times_s}))


if __name__ == "__main__":
    main()
