# SPDX-License-Identifier: Apache-2.0
"""Groups over several nodes: shared memory within a node, another library between them."""
