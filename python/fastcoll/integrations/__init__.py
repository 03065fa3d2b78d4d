# SPDX-License-Identifier: Apache-2.0
"""fastcoll under torch's interfaces and JAX's.

`torch_backend` makes groups for torch.distributed; `torch_group` is the process group in Python
and `c10d_backend.cpp` the one in C++. `stand_in` lets them serve groups of Gloo. `ops` has
operators with gradients; `compile`, `traced` and `lowered` are for torch.compile. `ddp` and `fsdp`
have hooks and communication objects. The modules named `jax_` make the operations of
`fastcoll.jax`; they import JAX, and nothing else imports them.
"""
