# SPDX-License-Identifier: Apache-2.0
"""The functions that a user calls, and the group that a call means."""

from fastcoll.api import lists, moves, reductions, transfers  # noqa: F401  each declares verbs
from fastcoll.api.declared import VERBS as VERBS
from fastcoll.calls.tensor_layout import show_types
from fastcoll.calls.tracers import show_tracers

# Whether C++ knows this torch's tensors; if not, every call takes the Python path.
READS_TENSORS = show_types()
show_tracers()
