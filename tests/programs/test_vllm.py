# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU engine on fastcoll, unchanged: the tokens are those of vLLM's own shared memory.

Runs where vLLM is installed (vllm.txt); its packages are too many for each run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import on_backend
from tests.support.harness import Rank

pytest.importorskip("vllm", reason="vLLM is not installed: tests/programs/vllm.txt")
pytestmark = pytest.mark.slow

LIMIT_S = 600
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, options = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(model=model, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16",
                 max_model_len=256, seed=0, max_num_seqs=8, **options)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 + 3 for j in range(16)]} for i in range(3)]
    taken = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    done = engine.generate(prompts, taken, use_tqdm=False)
    print("TOKENS", json.dumps([list(one.outputs[0].token_ids) for one in done]))
"""


def tokens_and_log(folder: Path, plugins: str, **options: object) -> tuple[object, str]:
    """Run the engine; return the tokens that it chose, and what it printed."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {
        "VLLM_PLUGINS": plugins,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(program), str(model), json.dumps(options)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    [line] = [one for one in done.stdout.splitlines() if one.startswith("TOKENS ")]
    return json.loads(line.removeprefix("TOKENS ")), printed


# On CPUs vLLM 0.32 itself needs a compiled model for pipelines: an assertion of its own fails else.
@pytest.mark.parametrize(
    ("parallel", "eager"),
    [
        ("tensor_parallel_size", True),
        ("tensor_parallel_size", False),
        ("pipeline_parallel_size", False),
    ],
)
def test_the_engine_chooses_the_same_tokens(tmp_path: Path, parallel: str, eager: bool) -> None:
    options = {parallel: 2, "enforce_eager": eager}
    ours, log = tokens_and_log(tmp_path, "fastcoll", **options)
    assert "communicates through fastcoll" in log
    theirs, log = tokens_and_log(tmp_path, "", **options)
    assert "communicates through fastcoll" not in log
    assert ours == theirs


def communicate(rank: Rank) -> list[Any]:
    from fastcoll.integrations.vllm_communicator import FastcollCommunicator

    comm = FastcollCommunicator(
        dist.group.WORLD, torch.device("cpu"), dist.group.WORLD, unique_name="tp:0"
    )
    mine = torch.arange(6.0).reshape(2, 3) + 10 * rank.rank
    results: list[Any] = [comm.all_reduce(mine.clone())]
    results += [comm.all_gather(mine, dim) for dim in (0, 1, -1)]
    results += [comm.gather(mine, 1, dim) for dim in (0, -1)]
    sent = {"hidden": mine, "none": torch.empty(0, 4), "step": 7, "bits": mine.to(torch.bfloat16)}
    if rank.rank == 0:
        comm.send_tensor_dict(sent, 1)
    elif rank.rank == 1:
        results.append(comm.recv_tensor_dict(0))
    return results


def test_the_calls_of_the_communicator(bare_pools: Any) -> None:
    parts = [torch.arange(6.0).reshape(2, 3) + 10 * rank for rank in range(3)]
    rows = bare_pools(3).run(on_backend, "gloo", communicate)
    for rank, (total, *gathered) in enumerate(rows):
        assert torch.equal(total, sum(parts))
        for dim, whole in zip((0, 1, -1), gathered[:3], strict=True):
            assert torch.equal(whole, torch.cat(parts, dim))
        for dim, whole in zip((0, -1), gathered[3:5], strict=True):
            assert whole is None if rank != 1 else torch.equal(whole, torch.cat(parts, dim))
    received = rows[1][-1]
    assert list(received) == ["hidden", "none", "step", "bits"]
    assert torch.equal(received["hidden"], parts[0])
    assert torch.equal(received["bits"], parts[0].to(torch.bfloat16))
    assert (received["none"].shape, received["step"]) == ((0, 4), 7)
