# SPDX-License-Identifier: Apache-2.0
"""Small trainings by Lightning, Fabric, Accelerate, Trainer, transformers TP, DeepSpeed and TRL.

Each takes the name of torch's backend and returns the losses and a hash of the weights, by which
tests compare backends bit by bit.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS = 3


def folder() -> Path:
    return Path(os.environ["PROGRAM_FOLDER"])


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def samples(num: int = 24) -> torch.utils.data.TensorDataset:
    inputs = torch.randn(num, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def digest(tensors: Any) -> str:
    """A hash of the bits of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def lightning(backend: str) -> Any:
    """Lightning's Trainer with DDP, and metrics that it averages over ranks, of integers too."""
    import lightning as pl
    from lightning.pytorch.strategies import DDPStrategy

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(self.inner(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True, on_epoch=True)
            seen = torch.tensor(index + 5 * self.global_rank)
            self.log("seen", seen, sync_dist=True, reduce_fx="mean", on_epoch=True, on_step=False)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    model = Model()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=1,
        limit_train_batches=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(samples(), batch_size=4))
    assert dist.get_backend() == backend
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    counted = trainer.strategy.reduce(torch.tensor(3 + trainer.global_rank), reduce_op="mean")
    return metrics, int(counted), digest(model.parameters())


def fabric(backend: str) -> Any:
    """Lightning Fabric with FSDP."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    world = int(os.environ["LOCAL_WORLD_SIZE"])
    strategy = DDPStrategy(process_group_backend=backend)
    runner = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    runner.launch()
    assert dist.get_backend() == backend
    model, optimizer = small_model(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = runner.setup(model, optimizer)
    loader = runner.setup_dataloaders(torch.utils.data.DataLoader(samples(), batch_size=4))
    losses = []
    for inputs, wanted in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        runner.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(runner.all_reduce(loss.detach(), reduce_op="mean")))
    gathered = runner.all_gather(torch.tensor(runner.global_rank))
    return losses, gathered.tolist(), digest(model.parameters())


def accelerate(backend: str) -> Any:
    """Accelerate, which takes a group that is there; it knows no name but "gloo" on CPUs."""
    from accelerate import Accelerator

    dist.init_process_group(backend)
    runner = Accelerator(cpu=True)
    assert runner.num_processes == dist.get_world_size() and dist.get_backend() == backend
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(samples(), batch_size=4)
    model, optimizer, loader = runner.prepare(model, optimizer, loader)
    losses = []
    for inputs, wanted in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        runner.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(runner.gather(loss.detach().reshape(1)).tolist())
    total = runner.reduce(torch.tensor(runner.process_index + 1), reduction="sum")
    result = losses, int(total), runner.gather_for_metrics([runner.process_index], True)
    runner.end_training()
    return result, digest(model.parameters())


def trainer(backend: str) -> Any:
    """The Trainer of transformers, through Accelerate."""
    from transformers import Trainer, TrainingArguments

    dist.init_process_group(backend)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.inner(x)
            return {"loss": torch.nn.functional.mse_loss(logits, labels), "logits": logits}

    rows = [{"x": x, "labels": y} for x, y in samples()]
    arguments = TrainingArguments(
        output_dir=str(folder() / "out"),
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=STEPS,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )
    model = Model()
    runner = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    loss = runner.train().training_loss
    assert dist.get_backend() == backend
    return loss, runner.evaluate()["eval_loss"], digest(model.parameters())


def tensor_parallel(backend: str) -> Any:
    """A Llama of transformers, split over the ranks by its own plan."""
    from transformers import LlamaForCausalLM

    dist.init_process_group(backend)
    place = folder() / f"model-{backend}"
    if dist.get_rank() == 0:
        _llama(num_hidden_layers=2, num_key_value_heads=2).save_pretrained(place)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(place, tp_plan="auto")
    assert dist.get_backend() == backend
    tokens = torch.arange(6).reshape(1, 6)
    with torch.no_grad():
        logits = model(tokens).logits
        more = model.generate(tokens, max_new_tokens=STEPS + 1, do_sample=False)
    return digest([logits]), more.tolist()


def deepspeed(backend: str) -> Any:
    """DeepSpeed's ZeRO, stages 1 to 3."""
    import deepspeed as engine

    engine.init_distributed(dist_backend=backend)
    assert dist.get_backend() == backend
    return [_zero(engine, stage) for stage in (1, 2, 3)]


def _zero(engine: Any, stage: int) -> list[float]:
    model = small_model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    runner, _, _, _ = engine.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    data = samples()
    losses = []
    for step in range(STEPS):
        first = 8 * step + 4 * dist.get_rank()
        inputs, wanted = data[first : first + 4]
        loss = torch.nn.functional.mse_loss(runner(inputs), wanted)
        runner.backward(loss)
        runner.step()
        losses.append(float(loss))
    return losses


def grpo(backend: str) -> Any:
    """TRL's GRPO of a Llama with PEFT's LoRA: ranks generate, then share texts and rewards."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    dist.init_process_group(backend)
    arguments = GRPOConfig(
        output_dir=str(folder() / "out"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=STEPS,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )
    runner = GRPOTrainer(
        model=_llama(num_hidden_layers=1, pad_token_id=0),
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(24)]}),
        processing_class=_words(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    runner.train()
    assert dist.get_backend() == backend
    rewards = [row["reward"] for row in runner.state.log_history if "reward" in row]
    return rewards, digest(runner.model.parameters())


def _llama(**facts: int) -> Any:
    """A small Llama, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, **facts))


def _words() -> Any:
    """A tokenizer of 60 words, made without a download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(60))]
    index = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(index, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def torchmetrics(backend: str) -> Any:
    """Metrics over ranks that saw unequal numbers of samples, or none."""
    import torchmetrics as metrics

    dist.init_process_group(backend)
    rank = dist.get_rank()
    source = torch.Generator().manual_seed(rank)
    scores = torch.rand(20 + 3 * rank, 4, generator=source).softmax(1)
    labels = torch.randint(0, 4, (len(scores),), generator=source)
    found = {}
    for name in ("MulticlassAccuracy", "MulticlassAUROC", "MulticlassConfusionMatrix"):
        metric = getattr(metrics.classification, name)(num_classes=4)
        metric.update(scores, labels)
        found[name] = metric.compute().tolist()
    for name in ("CatMetric", "MeanMetric", "MaxMetric"):
        metric = getattr(metrics, name)()
        if rank:
            metric.update(scores[:, 0])
        found[name] = metric.compute().tolist()
    return found
