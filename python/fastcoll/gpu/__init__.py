# SPDX-License-Identifier: Apache-2.0
"""The ranks' GPUs: regions, streams, launched kernels, and their errors.

`group` starts a call. `terms`, `regions` and `link` make the memory that kernels share, `heap` and
`streams` that of symmetric tensors. `residency` decides whose thread blocks run, `watch` looks for
lost ranks. `multicast` lets the switch add. `nccl` and `copies` carry calls that kernels don't, and
`sums` adds what copies brought. `verdicts` and `journal` explain errors. Kernels themselves are in
csrc/cuda and kernels/cuda.
"""
