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

from vllm.platforms.cpu import CpuPlatform

LIMIT_S = 600
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

if own := os.environ.get(COMMUNICATOR):
    CpuPlatform.get_device_communicator_cls = classmethod(lambda _cls: own)


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
    """Prompts that the engine gets at once, and how many tokens it gives to each.

    Repeats are those of each library, if several take turns.
    """

    size: int
    prompt_tokens: int
    new_tokens: int
    repeats: int = 1


@dataclass(frozen=True)
class Engine:
    """The choices that a program makes for an engine.

    Attributes:
        plugins: VLLM_PLUGINS: "fastcoll", or "" for vLLM's own communicator.
        libraries: The generations take turns between them: see `vllm_turns.py`.
        options: Further arguments of `vllm.LLM`.
        fuse: Whether sums are fused with the norms behind them.
    """

    plugins: str
    libraries: tuple[str, ...] = ()
    model: Model = Model()
    options: dict[str, Any] = field(default_factory=dict)
    fuse: bool = False


@dataclass(frozen=True)
class Generation:
    """One generation: its library, the chosen tokens of each prompt, and its duration."""

    library: str
    tokens: list[list[int]]
    took_s: float


@dataclass(frozen=True)
class Output:
    """The generations of each batch; and all that was printed."""

    batches: list[list[Generation]]
    printed: str

    @property
    def tokens(self) -> list[list[list[list[int]]]]:
        return [[one.tokens for one in batch] for batch in self.batches]


def run(folder: Path, engine: Engine, batches: Sequence[Batch]) -> Output:
    """Start an engine on a model in `folder`, and let it generate."""
    (folder / "config.json").write_text(json.dumps(engine.model.config()))
    environment = os.environ | {
        "VLLM_PLUGINS": engine.plugins,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        COMMUNICATOR: "vllm_turns.ByTurns" if engine.libraries else "",
        "FASTCOLL_FUSE": "1" if engine.fuse else "",
    }
    asked = json.dumps(
        {
            "options": engine.options,
            "libraries": engine.libraries,
            "batches": [asdict(one) for one in batches],
        }
    )
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
    batches = json.loads(lines[0].removeprefix("GENERATED "))
    return Output([[Generation(**one) for one in batch] for batch in batches], printed)


def generate(engine: Any, batch: Batch, libraries: Sequence[str]) -> list[Generation]:
    """Let an engine choose the tokens of a batch, as often as the batch says."""
    from vllm import SamplingParams

    taken = SamplingParams(
        temperature=0, max_tokens=batch.new_tokens, ignore_eos=True, detokenize=False
    )
    found = []
    for repeat in range(batch.repeats):
        # Of each repeat other ones: the engine keeps what it has computed for a prompt.
        ids = [
            [(7 * i + j + 131 * repeat) % 1000 + 3 for j in range(batch.prompt_tokens)]
            for i in range(batch.size)
        ]
        prompts = [{"prompt_token_ids": one} for one in ids]
        first = repeat % max(len(libraries), 1)
        for library in (*libraries[first:], *libraries[:first]) or ("",):
            if library:
                engine.collective_rpc("use_library", args=(library,))
            start_s = time.perf_counter()
            done = engine.generate(prompts, taken, use_tqdm=False)
            took_s = time.perf_counter() - start_s
            tokens = [list(one.outputs[0].token_ids) for one in done]
            found.append(Generation(library, tokens, took_s))
    return found


def main() -> None:
    from vllm import LLM

    model, asked = sys.argv[1], json.loads(sys.argv[2])
    batches, libraries = [Batch(**one) for one in asked["batches"]], asked["libraries"]
    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=max(one.prompt_tokens + one.new_tokens for one in batches),
        max_num_seqs=max(one.size for one in batches),
        enable_prefix_caching=False,
        worker_extension_cls="vllm_turns.WorkerByTurns" if libraries else "",
        seed=0,
        **asked["options"],
    )
    done = [[asdict(one) for one in generate(engine, each, libraries)] for each in batches]
    print("GENERATED", json.dumps(done))


if __name__ == "__main__":
    main()
