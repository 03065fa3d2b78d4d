# SPDX-License-Identifier: Apache-2.0
"""The demo's training and its checks: results that they accept, and faults that each catches."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from fastcoll.measure.demo import make_checks
from fastcoll.measure.training import (
    NUM_TRAIN,
    Training,
    TrainingConfig,
    batch_indices,
    num_gradients,
)

# Looked for, not imported: that takes as long as torch, in every process that collects the tests.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="not run: no scikit-learn")

CONFIG = TrainingConfig(3000, 4, world_size=2, batch_size=64, learning_rate=0.05)


def phase(name: str, **changed: Any) -> dict[str, Any]:
    return {"name": name, "losses": [2.0, 0.5], "fingerprints": ["a" * 64] * 2} | changed


def failed(*phases: dict[str, Any]) -> list[str]:
    return [check["what"] for check in make_checks(phases) if not check["passed"]]


def test_checks_pass_on_a_good_run_and_each_catches_its_failure() -> None:
    good = (phase("fastcoll"), phase("gloo"), phase("one process"))
    assert failed(*good) == []
    apart = phase("fastcoll", fingerprints=["a" * 64, "b" * 64])
    assert "same bits" in failed(apart, *good[1:])[0]
    off = phase("fastcoll", losses=[2.0, 0.52])
    assert "match one process" in failed(off, *good[1:])[0]
    flat = [phase(name, losses=[2.0, 1.9]) for name in ("fastcoll", "gloo", "one process")]
    assert "learned" in failed(*flat)[0]


@pytest.mark.parametrize("num_params", [3000, 100_000, 25_000_000])
def test_the_network_has_about_the_wanted_size(num_params: int) -> None:
    config = TrainingConfig(num_params, 1, 2, 64, 0.1)
    found = num_gradients(config)
    assert abs(found - num_params) < 0.03 * num_params
    if num_params < 1_000_000:
        assert found == sum(p.numel() for p in Training(config).model.parameters())


def test_an_epoch_uses_no_example_twice() -> None:
    steps = NUM_TRAIN // CONFIG.batch_size
    epoch = torch.cat([batch_indices(CONFIG, step) for step in range(steps)])
    assert len(set(epoch.tolist())) == steps * CONFIG.batch_size
    assert not torch.equal(batch_indices(CONFIG, 0), batch_indices(CONFIG, steps))


@pytest.mark.slow
def test_shares_of_the_ranks_average_to_the_whole_batch() -> None:
    shares = []
    for rank in range(2):
        training = Training(CONFIG)
        training.backward(0, rank, 2)
        shares.append(training.gradients.clone())
    whole = Training(CONFIG)
    whole.backward(0, 0, 1)
    torch.testing.assert_close((shares[0] + shares[1]) / 2, whole.gradients)
    assert not torch.equal(shares[0], shares[1])


@pytest.mark.slow
def test_gradients_are_views_of_one_buffer_and_equal_seeds_give_equal_bits() -> None:
    buffer = torch.empty(num_gradients(CONFIG))
    first, second = Training(CONFIG, buffer), Training(CONFIG)
    first.backward(0, 0, 1)
    second.backward(0, 0, 1)
    torch.testing.assert_close(buffer, second.gradients, rtol=0, atol=0)
    assert all(
        p.grad is not None and p.grad.untyped_storage().data_ptr() == buffer.data_ptr()
        for p in first.model.parameters()
    )
    first.optimizer.step()
    assert first.fingerprint() != second.fingerprint()
    second.optimizer.step()
    assert first.fingerprint() == second.fingerprint()
