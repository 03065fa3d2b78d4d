#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the names of the algorithms into the docstrings of the verbs and the tuning schema.

Asks the registry, so it runs in an environment with fastcoll, after an algorithm was added.
`--check` writes nothing and fails if a file is not current.
"""

import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import verbs

from fastcoll.choose import algorithms, table
from fastcoll.machine import gpu
from fastcoll.types import DType, Numerics, Op, Request, Verb

SCHEMA = "python/fastcoll/choose/tuning.schema.json"
LISTS = 3 << 56  # splits of a list of three tensors
_ENTRY = re.compile(r"^ {8}algorithm: .*?(?=^ {8}\w+: )", re.DOTALL | re.MULTILINE)


def names_for(
    verb: Verb, *, on_gpu: bool = False, splits: int = 0, numerics: Numerics = "fast"
) -> list[str]:
    """Return the algorithms that can carry out a large call of a verb, asked for by name."""
    request = Request(verb, DType.float32, Op.SUM, 1 << 26, 0, 2, "auto", numerics, 2, splits)
    request = replace(request, single_copy="auto")
    if on_gpu:
        request = replace(request, num_channels=8, ranks_per_gpu=1)
    with mock.patch.object(gpu, "has_kernel", lambda *_, **__: True):
        return [
            one.name
            for one in algorithms.ALL
            if one.admits(replace(request, algorithm=one.name)) is None
        ]


def in_any_order(*, on_gpu: bool = False) -> list[str]:
    """Return the algorithms that add in another order than that of the ranks."""
    ordered = names_for(Verb.all_reduce, on_gpu=on_gpu, numerics="same_bits")
    return [name for name in names_for(Verb.all_reduce, on_gpu=on_gpu) if name not in ordered]


# ---- docstrings ----------------------------------------------------------------------------------


def _joined(names: Sequence[str]) -> str:
    quoted = [f'"{name}"' for name in names]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def choices(verb: verbs.Verb) -> str:
    """Return what an `algorithm:` entry says first."""
    core, lists = Verb[verb.core], verb.kind == "lists"
    on_cpu = names_for(core, splits=LISTS if lists else 0)
    if lists:  # on GPUs the tensors of a list are reduced one by one
        return _joined(["auto", *on_cpu])
    on_gpu = names_for(core, on_gpu=True)
    text = ", ".join(f'"{name}"' for name in ["auto", *(x for x in on_cpu if x in on_gpu)])
    if others := [name for name in on_gpu if name not in on_cpu]:
        text += f", on GPUs {_joined(others)}"
    others = [name for name in on_cpu if name not in on_gpu]
    return f"{text}, or on CPUs {_joined([*others, 'schedule:NAME'])}"


def _entry(old: str, verb: verbs.Verb) -> str:
    text = " ".join(old.split()).removeprefix("algorithm: ")
    end = re.search(r" with a name|[.;]", text)
    text = choices(verb) + (text[end.start() :] if end else "")
    orders = dict.fromkeys([*in_any_order(), *in_any_order(on_gpu=True)])
    these = ", ".join(f'"{name}"' for name in orders)
    text = re.sub(r'(?<=\. )"\w+"[^.]*?(?= and most schedules)', these, text)
    text = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\N{NO-BREAK SPACE}"), text)
    lines = textwrap.wrap(
        f"algorithm: {text}",
        verbs.WIDTH,
        initial_indent=" " * 8,
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join([*lines, ""]).replace("\N{NO-BREAK SPACE}", " ")


def _module(text: str, declared: Iterable[verbs.Verb]) -> str:
    """Return the text of a module of declarations with current names."""
    for verb in declared:
        start = text.index(f"def {verb.name}(")
        end = text.find("\n@verb\n", start)
        end = len(text) if end < 0 else end
        body = _ENTRY.sub(lambda found, verb=verb: _entry(found[0], verb), text[start:end])
        text = text[:start] + body + text[end:]
    return text


# ---- the tuning schema ---------------------------------------------------------------------------


def _everywhere(*, on_gpu: bool) -> list[str]:
    able: set[str] = set()
    for verb in Verb:
        able.update(names_for(verb, on_gpu=on_gpu))
    return [one.name for one in algorithms.ALL if one.name in able]


def _with_enum(schema: str, row: str, names: Collection[str]) -> str:
    start = schema.index(f'"{row}": {{\n')
    words = textwrap.wrap(", ".join(f'"{name}"' for name in names), verbs.WIDTH - 12)
    lines = "\n".join(" " * 12 + line for line in words)
    enum = f'"algorithm": {{\n          "enum": [\n{lines}\n          ]\n        }}'
    head, tail = schema[:start], schema[start:]
    return head + re.sub(r'"algorithm": \{\s*"enum": \[[^]]*\]\s*\}', enum, tail, count=1)


def _schema(text: str) -> str:
    text = _with_enum(text, "row", _everywhere(on_gpu=False))
    # copy_engine is never measured: it runs only where a call asks for it.
    measured = [name for name in _everywhere(on_gpu=True) if name != "copy_engine"]
    return _with_enum(text, "gpu_row", [*measured, table.NCCL_MOVES])


def written(root: Path = verbs.ROOT) -> dict[str, str]:
    """Return the files that name algorithms, by path, with the names of the registry."""
    texts = {SCHEMA: _schema((root / SCHEMA).read_text())}
    for module, declared in verbs.declared_by_module(root).items():
        path = f"{verbs.API}/{module}.py"
        texts[path] = _module((root / path).read_text(), declared)
    return texts


def outdated(root: Path = verbs.ROOT) -> list[str]:
    """Return the files of a work tree whose names are not current."""
    return [path for path, text in written(root).items() if (root / path).read_text() != text]


def main() -> None:
    """Write the names, or with --check say which files are not current."""
    paths = outdated()
    if "--check" in sys.argv:
        if paths:
            sys.exit(f"not current: {', '.join(paths)}; run scripts/algorithm_names.py")
        return
    for path, text in written().items():
        (verbs.ROOT / path).write_text(text)


if __name__ == "__main__":
    main()
