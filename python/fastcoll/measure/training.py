# SPDX-License-Identifier: Apache-2.0
"""The demo's job: a small network that learns handwritten digits, alone or with others.

Decides data, network and optimiser, all from one seed, so that every way of training takes the
same steps. How gradients are averaged is the caller's matter.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from math import isqrt

import numpy as np
import torch
from torch import nn
from torch.nn import functional

NUM_TRAIN = 1500
_NUM_PIXELS, _NUM_CLASSES = 64, 10


@dataclass(frozen=True)
class TrainingConfig:
    """One training, the same on every rank."""

    num_params: int  # wanted size of the network; the nearest width is taken
    num_steps: int
    world_size: int
    batch_size: int  # examples per step over all ranks; a multiple of world_size
    learning_rate: float
    seed: int = 1

    @property
    def width(self) -> int:
        """Return the hidden width h: h*h + 76*h + 10 parameters with two hidden layers."""
        return max(4, isqrt(max(0, 38 * 38 + self.num_params - 10)) - 38)


@dataclass(frozen=True)
class Digits:
    """scikit-learn's handwritten digits (8 x 8 pixels, 10 classes), split."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


@cache
def load() -> Digits:
    """Return the digits, shuffled the same way in every process."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = torch.from_numpy(pixels[order].astype(np.float32) / 8.0 - 1.0)
    classes = torch.from_numpy(labels[order].astype(np.int64))
    return Digits(images[:NUM_TRAIN], classes[:NUM_TRAIN], images[NUM_TRAIN:], classes[NUM_TRAIN:])


def batch_indices(config: TrainingConfig, step: int) -> torch.Tensor:
    """Return the examples of one step: each epoch is a new permutation, its rest is dropped."""
    steps_per_epoch = NUM_TRAIN // config.batch_size
    epoch, position = divmod(step, steps_per_epoch)
    rng = np.random.default_rng((config.seed, epoch))
    order = torch.from_numpy(rng.permutation(NUM_TRAIN))
    return order[position * config.batch_size : (position + 1) * config.batch_size]


class Training:
    """A network, its optimiser, and all its gradients in one flat buffer, as DDP keeps them.

    Args:
        gradients: The buffer, or None to allocate one of `config`'s size.
    """

    def __init__(self, config: TrainingConfig, gradients: torch.Tensor | None = None) -> None:
        self.config = config
        torch.manual_seed(config.seed)
        width = config.width
        self.model = nn.Sequential(
            nn.Linear(_NUM_PIXELS, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, _NUM_CLASSES),
        )
        self.gradients = torch.empty(num_gradients(config)) if gradients is None else gradients
        offset = 0
        for parameter in self.model.parameters():
            part = self.gradients[offset : offset + parameter.numel()]
            parameter.grad = part.view_as(parameter)
            offset += parameter.numel()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=config.learning_rate, momentum=0.9
        )

    def backward(self, step: int, rank: int, num_ranks: int) -> float:
        """Compute the gradients of this rank's share of a step's batch; return its mean loss."""
        digits = load()
        share = batch_indices(self.config, step)[rank::num_ranks]
        self.gradients.zero_()
        loss = functional.cross_entropy(
            self.model(digits.train_images[share]), digits.train_labels[share]
        )
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def accuracy(self) -> float:
        """Return the share of unseen digits that the network names correctly."""
        digits = load()
        with torch.no_grad():
            named = self.model(digits.test_images).argmax(dim=1)
        return float((named == digits.test_labels).float().mean())

    def fingerprint(self) -> str:
        """Return a hash of all parameters' bits."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().data)
        return digest.hexdigest()


def num_gradients(config: TrainingConfig) -> int:
    """Return the number of parameters of the network that `config` asks for."""
    return config.width * config.width + 76 * config.width + 10
