# SPDX-License-Identifier: Apache-2.0
"""Tensors and arrays without plain elements: each is refused with a way out."""

from typing import Any

import numpy as np
import pytest
import torch

from fastcoll.errors import UnsupportedError
from fastcoll.memory.array import view


@pytest.mark.parametrize(
    ("make", "way_out"),
    [
        (lambda: torch.empty(3, device="meta"), "torch.empty_like"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "int_repr()"),
        (lambda: np.ma.masked_array(np.ones(3), mask=[True, False, False]), "filled(value)"),
    ],
    ids=["meta", "quantized", "masked"],
)
def test_what_has_no_plain_elements_is_refused(make: Any, way_out: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        view(make(), "tensor", gpu=True)
    assert way_out in str(refused.value)
