# SPDX-License-Identifier: Apache-2.0
"""The algorithms: one module each, named like its file in csrc/cpu.

Every module has `name`, `admits(request)` (None, or the reason why not), `estimate_us(request)`
and `plan(request)`; they are pure functions of the request. This file lists them.
"""

from fastcoll.choose.algorithms import (
    chain,
    copy_engine,
    direct,
    multimem,
    nccl,
    one_shot,
    ring,
    single_copy,
    two_shot,
)

ALL = (one_shot, two_shot, ring, chain, direct, single_copy, multimem, nccl, copy_engine)

__all__ = [
    "ALL",
    "chain",
    "copy_engine",
    "direct",
    "multimem",
    "nccl",
    "one_shot",
    "ring",
    "single_copy",
    "two_shot",
]
