# SPDX-License-Identifier: Apache-2.0
"""The ranks' GPUs: regions, streams, launched kernels, and their errors."""
