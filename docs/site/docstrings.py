# SPDX-License-Identifier: Apache-2.0
"""Show the verbs as they are declared: their stubs have signatures alone, and C the functions.

A verb is a Python function with the decorator `verb` (`fastcoll.api.declared`). Its docstring and
signature serve the public function, and the method of groups, which has no `group`.
"""

import re
from collections.abc import Iterator
from typing import Any

import griffe

MODULES = ("reductions", "moves", "lists", "transfers")
GROUP = re.compile(r"^( +)group: .*(?:\n\1 +.*)*\n?", re.M)


def declared(pkg: griffe.Module) -> Iterator[tuple[str, griffe.Function]]:
    """Yield the name and the declaration of each verb, with its further names."""
    for module in (pkg[f"api.{name}"] for name in MODULES):
        found = {name: one for name, one in module.members.items() if _is_verb(one)}
        yield from found.items()
        for name, one in module.members.items():
            if isinstance(one, griffe.Attribute) and str(one.value) in found:
                yield name, found[str(one.value)]


def _is_verb(member: Any) -> bool:
    decorators = member.decorators if isinstance(member, griffe.Function) else ()
    return any(str(one.value) == "verb" for one in decorators)


def _as_method(name: str, function: griffe.Function) -> griffe.Function:
    parameters = [one for one in function.parameters if one.name != "group"]
    this = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    method = griffe.Function(
        name,
        parameters=griffe.Parameters(this, *parameters),
        returns=function.returns,
        lineno=function.lineno,
        endlineno=function.endlineno,
    )
    if function.docstring is not None:
        text = GROUP.sub("", function.docstring.value)
        method.docstring = griffe.Docstring(text, parent=method, parser="google")
    return method


class VerbDocstrings(griffe.Extension):
    """Puts each declaration in the place of its stubs."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Fill in the verbs of fastcoll."""
        del kwargs
        if pkg.name != "fastcoll":
            return
        functions, methods = pkg["api.verbs"], pkg["calls.methods.VerbMethods"]
        for name, function in declared(pkg):
            functions.members[name] = griffe.Alias(name, function, parent=functions)
            methods.set_member(name, _as_method(name, function))
