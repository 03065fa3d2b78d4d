# SPDX-License-Identifier: Apache-2.0
"""fastcoll under other programs' interfaces: torch.distributed."""
