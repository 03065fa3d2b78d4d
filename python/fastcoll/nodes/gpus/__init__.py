# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors of a group over several nodes."""
