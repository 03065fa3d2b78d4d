# SPDX-License-Identifier: Apache-2.0
"""Groups over several nodes: shared memory within a node, another library between them.

`group` receives a call, `packets` begin it, `lanes` runs its phases, `small`, `reductions` and
`moves` say which phases a verb has. `carriers` move bytes, `transfers` are sends and receives,
`verdict` ends waits, `gpus` has CUDA tensors, `survivors` shrinks.
"""
