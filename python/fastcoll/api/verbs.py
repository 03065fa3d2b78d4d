# SPDX-License-Identifier: Apache-2.0
"""The verbs as functions: C functions, of which only an unknown call needs Python.

The stub beside this file has their signatures; scripts/verbs.py writes it from the declarations.
"""

from types import BuiltinFunctionType

from fastcoll.api import lists, moves, reductions, transfers

for _module in (reductions, moves, lists, transfers):
    _found = {k: v for k, v in vars(_module).items() if isinstance(v, BuiltinFunctionType)}
    globals().update(_found)
