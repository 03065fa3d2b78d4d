# SPDX-License-Identifier: Apache-2.0
"""Give the verbs that are methods the docstrings of the functions that declare them.

The methods are C functions, and their stub has signatures alone (`scripts/verbs.py`).
"""

import re
from typing import Any

import griffe

VERBS = "calls.methods.VerbMethods"
GROUP = re.compile(r"^        group: .*\n(?:^            .*\n)*", re.M)


class VerbDocstrings(griffe.Extension):
    """Copies each docstring, less its paragraph on `group`."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Fill in the docstrings of one package."""
        del kwargs
        if pkg.name != "fastcoll":
            return
        for name, method in pkg[VERBS].members.items():
            declared = pkg[name].final_target if pkg[name].is_alias else pkg[name]
            if method.docstring is None and declared.docstring is not None:
                text = GROUP.sub("", declared.docstring.value)
                method.docstring = griffe.Docstring(text, parent=method)
