# SPDX-License-Identifier: Apache-2.0
"""Device code in Triton. Knows nothing of processes, groups or who owns a tensor."""
