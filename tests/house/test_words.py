# SPDX-License-Identifier: Apache-2.0
"""Comments and docstrings have short sentences, each about a thing with a name.

A sentence has at most 25 words, and none begins with What or Who. Reads Python by its syntax tree
and C++ by its comment lines. Prose of Markdown is left out.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tree import source_files

ROOT = Path(__file__).parents[2]
MAX_WORDS = 25
SUFFIXES = {
    ".py": "#",
    ".pyi": "#",
    ".h": "//",
    ".inc": "//",
    ".cpp": "//",
    ".cuh": "//",
    ".cu": "//",
}
# Between two sentences; entries of a list and of Args, Returns and the like stand alone.
BREAK = re.compile(r"\n\s*\n|\n\s*[-*] |\n\s*\d+\. |\n\s+[\w*`., ]+: |\n\w+:\n")
SENTENCE = re.compile(r"(?<=[.!?;:])\s+(?=[A-Z`\"(])")
SUBJECTLESS = re.compile(r"(What|Who|Whoever|Whatever)\b")


def comments_of(text: str, mark: str) -> Iterator[str]:
    """Yield each run of whole-line comments."""
    lines = [re.match(rf"\s*{mark}(?: |$)(.*)", line) for line in text.splitlines()]
    run: list[str] = []
    for found in [*lines, None]:
        if found:
            run.append(found[1])
        elif run:
            yield "\n".join(run)
            run = []


def docstrings_of(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def sentences_of(text: str, suffix: str) -> Iterator[str]:
    """Yield the sentences of a source file's comments and docstrings, without code blocks."""
    prose = [*comments_of(text, SUFFIXES[suffix])]
    if suffix in (".py", ".pyi"):
        prose += docstrings_of(text)
    for part in prose:
        for piece in BREAK.split(part):
            yield from SENTENCE.split(" ".join(piece.split()))


def complaints(text: str, suffix: str) -> list[str]:
    found = []
    for sentence in sentences_of(text, suffix):
        if len(sentence.split()) > MAX_WORDS:
            found.append(f"{len(sentence.split())} words: {sentence}")
        elif SUBJECTLESS.match(sentence):
            found.append(f"no subject: {sentence}")
    return found


def sources() -> list[str]:
    return [path for path in source_files() if Path(path).suffix in SUFFIXES]


@pytest.mark.long
def test_sentences_are_short_and_have_a_subject() -> None:
    paths = sources()
    assert len(paths) > 300
    found = {path: complaints((ROOT / path).read_text(), Path(path).suffix) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        ('def f():\n    """What this rank gives."""\n', ".py"),
        ("# Who waits is told.\nx = 1\n", ".py"),
        ("// " + " ".join(["word"] * 26) + ".\nint x;\n", ".h"),
        ("// one two three four five six seven eight nine ten\n" * 3, ".cuh"),
    ],
)
def test_a_sentence_against_the_rule_is_found(text: str, suffix: str) -> None:
    assert len(complaints(text, suffix)) == 1


def test_short_sentences_pass() -> None:
    text = "// " + " ".join(["word"] * 20) + ".\n// Another one. " + " ".join(["Word"] * 20) + ".\n"
    assert complaints(text, ".h") == []
