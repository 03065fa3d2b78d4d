# SPDX-License-Identifier: Apache-2.0
"""The verbs as methods of a group: C functions, so that a call with a known plan needs no Python.

The stub beside this file has their signatures; scripts/verbs.py writes it from the declarations.
"""

from fastcoll.native import _C


@_C.add_verbs
class VerbMethods:
    """A group with the verbs as methods. They take the arguments of the functions, less `group`."""
