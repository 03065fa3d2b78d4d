# SPDX-License-Identifier: Apache-2.0
"""The algorithms: one module each, named like its file in csrc/cpu.

Every module has `name`, `admits(request)` (None, or the reason why not), `estimate_us(request)`
and `plan(request)`; they are pure functions of the request. `fastcoll.types.Algorithm` lists them.
"""

from importlib import import_module
from typing import cast

from fastcoll.choose.select import Candidate
from fastcoll.types import Algorithm

ALL = tuple(
    cast(Candidate, import_module(f"{__name__}.{algorithm.name}"))
    for algorithm in Algorithm
    if algorithm is not Algorithm.schedule  # the model's, asked for by name: see schedules.py
)
