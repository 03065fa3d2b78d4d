# SPDX-License-Identifier: Apache-2.0
"""Finds the mutations of a C++ source, and writes all of them into it, each with a switch.

Decides the mutations. Works on the text: the operators below rely on clang-format's spaces.
A mutation only wraps or replaces tokens, so that nested ones stand side by side; see mutant.h.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

# Calls whose statement no mutation drops: they end the function that they stand in.
KEPT_CALLS = re.compile(
    r"(?:if|for|while|switch|return|throw|void|asm|static_assert|sizeof|decltype|constexpr)\b"
    r"|[A-Z_]+$|.*\b(?:fail\w*|throw_\w+|rethrow_exception|abort|exit)$"
)
COMPARISONS = {
    "<": ("less", "<="),
    "<=": ("less_or_equal", "<"),
    ">": ("more", ">="),
    ">=": ("more_or_equal", ">"),
    "==": ("equal", "!="),
    "!=": ("unequal", "=="),
}
RELAXED = {
    "P::load_acquire": "P::load_relaxed",
    "P::store_release": "P::store_relaxed",
    "P::arrive": "P::store_relaxed",
}
# An `==` on a word or a number that only grows could be meant as `>=`.
GROWING = re.compile(r"seen|number|slot|call|taken|sequence|P::load")
UNORDERED = re.compile(r"\s*(?:[A-Z]\w*::|call_?\.plan\.root\b)")  # an enumerator, a rank
CONSTANTS = re.compile(
    r"[ \w]*\bconstexpr [^(){}]*= [^;]*;|static_assert\([^;]*;|enum [^;]*;| = (?:default|delete|0);"
    r"|\b(?!return\b)[\w:*]+ \w+\[[^\]]*\];"  # how long an array is
)


@dataclass(frozen=True)
class Mutation:
    """One change of one source.

    Attributes:
        file: The source's name.
        line: Where it stands; only for people.
        text: The line's code, which names the mutation until the code changes.
        what: The change, as "< to <=".
        nth: Which one of several with the same text and change, from 1.
    """

    file: str
    line: int
    text: str
    what: str
    nth: int

    @property
    def key(self) -> str:
        nth = f" #{self.nth}" if self.nth > 1 else ""
        return f"{self.file}: {self.text} [{self.what}]{nth}"


@dataclass
class _Edit:
    """Tokens from `start` to `end` become `opening`, or keep their place between the two texts."""

    start: int
    end: int
    opening: str
    closing: str | None = None  # None: the tokens are replaced


@dataclass
class _Source:
    file: str
    text: str
    first_id: int
    code: str = ""  # the text, with blanks where it is no code
    mutations: list[Mutation] = field(default_factory=list)
    edits: list[_Edit] = field(default_factory=list)
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, at: int, what: str) -> int:
        start = self.text.rfind("\n", 0, at) + 1
        line_text = self.text[start : self.text.index("\n", at)].split("  //")[0].strip()
        self.seen[line_text, what] += 1
        line = self.text.count("\n", 0, at) + 1
        nth = self.seen[line_text, what]
        self.mutations.append(Mutation(self.file, line, line_text, what, nth))
        return self.first_id + len(self.mutations) - 1


def blank_out(text: str) -> str:
    """Replace by blanks text that is no code, and constants, which no switch can reach."""
    tokens = re.compile(
        r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\])'|^ *#(?:\\\n|[^\n])*",
        re.DOTALL | re.MULTILINE,
    )

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    code = tokens.sub(blank, text)
    return CONSTANTS.sub(blank, code)


def closing(code: str, start: int, ends: str = "") -> int:
    """Return where the bracket at `start` closes, or else the first of `ends` outside brackets."""
    depth = 0
    for at in range(start, len(code)):
        if depth == 0 and code[at] in ends:
            return at
        if code[at] in "([{":
            depth += 1
        elif code[at] in ")]}":
            depth -= 1
            if depth < 0 or (depth == 0 and not ends):
                return at
    return len(code)


def _orders(source: _Source) -> None:
    for name, relaxed in RELAXED.items():
        for match in re.finditer(rf"\b{name}(?=\()", source.code):
            number = source.add(match.start(), f"{name} to relaxed")
            text = f"mutant::choose({number}, &{name}, &{relaxed})"
            source.edits.append(_Edit(match.start(), match.end(), text))
    call = re.compile(r"[\w.]+(?:\([\w.]*\))?\.\w+\([^()]*std::memory_order_(\w+)\)")
    for match in call.finditer(source.code):
        if match[1] == "relaxed":
            continue
        number = source.add(match.start(), f"{match[1]} to relaxed")
        relaxed = match[0].replace(match[1], "relaxed")
        text = f"(mutant::on({number}) ? {relaxed} : {match[0]})"
        source.edits.append(_Edit(match.start(), match.end(), text))


def _comparisons(source: _Source) -> None:
    for match in re.finditer(r"(?<= )(<=?|>=?|==|!=)(?=[ \n])", source.code):
        if source.code[: match.start()].rstrip().endswith(("template", "operator")):
            continue
        name, instead = COMPARISONS[match[1]]
        number = source.add(match.start(), f"{match[1]} to {instead}")
        text = f"<= mutant::Compare{{{number}, mutant::Op::{name}}} <="
        if match[1] in ("==", "!="):
            is_growing = (
                match[1] == "=="
                and GROWING.search(source.mutations[-1].text)
                and not UNORDERED.match(source.code, match.end())
            )
            if is_growing:
                source.add(match.start(), "== to >=")
            ordered = "true" if is_growing else "false"
            text = f"== mutant::Equal{{{number}, mutant::Op::{name}, {ordered}}} =="
        source.edits.append(_Edit(match.start(), match.end(), text))


def _bounds(source: _Source) -> None:
    for match in re.finditer(r"(?<= [+-] )(\d+)\b(?![.'])", source.code):
        value = int(match[1])
        number = source.add(match.start(), f"{value} to {value - 1}")
        source.add(match.start(), f"{value} to {value + 1}")
        text = f"mutant::bound({number}, {value})"
        source.edits.append(_Edit(match.start(), match.end(), text))


def _operands(source: _Source) -> None:
    for match in re.finditer(r"(?<= )(&&|\|\|)(?=[ \n])", source.code):
        left = source.add(match.start(), f"no operand left of {match[1]}")
        right = source.add(match.start(), f"no operand right of {match[1]}")
        kind, op = ("True", "|") if match[1] == "&&" else ("False", "&")
        text = f"{op} mutant::{kind}{{{left}}} {match[1]} mutant::{kind}{{{right}}} {op}"
        source.edits.append(_Edit(match.start(), match.end(), text))


def _conditions(source: _Source) -> None:
    for match in re.finditer(r"\b(if|while) \(", source.code):
        start, end = match.end(), closing(source.code, match.end() - 1)
        initial = closing(source.code, start, ";")
        if initial < end:
            start = initial + 1
        number = source.add(match.start(), f"{match[1]} never")
        variable = re.match(r"(?:const )?[\w:]+[&*]? \w+ = ", source.code[start:end])
        if variable:
            edit = _Edit(start + variable.end(), end, f"mutant::unless({number}, ", ")")
        else:
            edit = _Edit(start, end, f" !mutant::on({number}) && (", ")")
        source.edits.append(edit)


def _statements(source: _Source) -> None:
    begin = re.compile(r"(?:[;{})\]]|\belse|\b(?:default|case [\w:]+):)\s+(?=[A-Za-z_])")
    for match in begin.finditer(source.code):
        start = match.end()
        end = closing(source.code, start, ";")
        if source.code[end : end + 1] != ";":
            continue  # part of a loop's head
        statement = source.code[start:end]
        call = re.match(r"([\w:.\->\[\]]+)\(", statement)
        if re.match(r"[\w.\->\[\]()%]+ [-+|]?= [^;]*$", statement):
            what = "no store"
        elif call and statement.endswith(")") and not KEPT_CALLS.match(call[1]):
            if re.search(r"^[^(]* = ", statement) or "{" in statement.split("(")[0]:
                continue
            what = "no call"
        else:
            continue
        number = source.add(start, what)
        opening = f"mutant::on({number}) ? void() : void("
        source.edits.append(_Edit(start, end, opening, ")"))


def _claims(source: _Source) -> None:
    for match in re.finditer(r"(?<=[=(] )?\bgroup_\.claim_slot\(", source.code):
        if re.search(r"[;{})]\s*$", source.code[: match.start()]):
            continue  # a statement
        number = source.add(match.start(), "no claim")
        edit = _Edit(match.start(), match.end(), f"mutant::claim({number}, group_, ")
        source.edits.append(edit)


OPERATORS = (_orders, _comparisons, _bounds, _operands, _conditions, _statements, _claims)


def _pieces(edits: list[_Edit]) -> Iterator[tuple[tuple[int, int, int], int, str]]:
    """Yield (order, end of the replaced tokens, text): closings first, from the inside out."""
    for edit in edits:
        if edit.closing is None:
            yield (edit.start, 2, 0), edit.end, edit.opening
        else:
            yield (edit.start, 1, -edit.end), edit.start, edit.opening
            yield (edit.end, 0, -edit.start), edit.end, edit.closing


def mutate(file: str, text: str, first_id: int = 0) -> tuple[list[Mutation], str]:
    """Return a source's mutations, numbered from `first_id`, and the source with all of them."""
    source = _Source(file, text, first_id, blank_out(text))
    for operator in OPERATORS:
        operator(source)
    result, at = [], 0
    for (start, _, _), end, piece in sorted(_pieces(source.edits)):
        if start < at:
            message = f"{file}: mutations overlap at {text[start:end]!r}"
            raise ValueError(message)
        result += [text[at:start], piece]
        at = end
    return source.mutations, "".join((*result, text[at:]))
