# SPDX-License-Identifier: Apache-2.0
"""The CPUs and GPUs that this process can see."""
