#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write from the declared verbs the table of C++, the stubs and the names of torch's calls.

Reads the text of the modules in python/fastcoll/api: with a new verb the package can't be imported
before the compiled table has it. Run the script after each change of a declaration, and build anew.
`--check` writes nothing and fails if a file is not current.
"""

import ast
import re
import runpy
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
API = "python/fastcoll/api"
# Module of declarations -> kind of its verbs in C++, but for those that make a PartsCall.
KINDS = {"reductions": "tensors", "moves": "tensors", "lists": "lists", "transfers": "transfer"}
# Argument -> its meaning in C++. Every other one is an array, but for what only Python reads.
MEANINGS = {
    "op": "kOp",
    "src": "kRoot",
    "dst": "kRoot",
    "tag": "kTag",
    "input_split_sizes": "kInSplits",
    "output_split_sizes": "kOutSplits",
    "group": "kGroup",
    "async_op": "kAsyncOp",
    "wire": "kWire",
    "algorithm": "kAlgorithm",
    "numerics": "kNumerics",
    "timeout_s": "kTimeout",
    "then": "kThen",
}
CALLS = ("Call", "ListCall", "PartsCall")  # what a declaration makes
PYTHON_ONLY = ("group_src", "group_dst", "device_ids", "timeout")
WIDTH = 100
NO_BREAK = "\N{NO-BREAK SPACE}"
TORCH_NAMES = "python/fastcoll/integrations/torch_names.py"
WRITTEN_FILES = (
    "csrc/python/verbs.inc",
    "python/fastcoll/calls/methods.pyi",
    "python/fastcoll/api/verbs.pyi",
    "python/fastcoll/integrations/c10d_names.h",
)
WRITTEN = "Written by scripts/verbs.py from the declarations in python/fastcoll/api."
FROM_NAMES = "Written by scripts/verbs.py from torch_names.py. Part of c10d_verbs.h."


@dataclass(frozen=True)
class Argument:
    """One argument: the source text of its type and default; "" is no default."""

    name: str
    type: str
    default: str
    by_name_only: bool

    @property
    def text(self) -> str:
        """The argument as a stub has it."""
        return f"{self.name}: {self.type}" + (f" = {self.default}" if self.default else "")

    @property
    def shown(self) -> str:
        """The argument as help() shows it: `inspect` reads literals only."""
        if not self.default:
            return self.name
        ast.literal_eval(self.default)
        return f"{self.name}={self.default.replace(chr(34), chr(39))}"


@dataclass(frozen=True)
class Verb:
    """One declaration.

    Attributes:
        core: The member of `fastcoll.types.Verb` that carries it out; "" for a transfer.
        input: The argument that holds what a rank gives.
        output: The argument that the result goes to.
    """

    name: str
    kind: str
    arguments: tuple[Argument, ...]
    returns: str
    aliases: tuple[str, ...]
    core: str = ""
    input: str = ""
    output: str = ""

    @property
    def first(self) -> str:
        """The argument that C++ calls kTensor: `tensor`, if there is one, else the first array."""
        arrays = [one.name for one in self.arguments if one.name not in (*MEANINGS, *PYTHON_ONLY)]
        return "tensor" if "tensor" in arrays else arrays[0] if arrays else ""

    def read(self) -> list[tuple[Argument, str]]:
        """Return the arguments that C++ reads, each with its meaning."""
        read = [one for one in self.arguments if one.name not in PYTHON_ONLY]
        by_place = [one for one in self.arguments if not one.by_name_only]
        seen = [one for one in read if not one.by_name_only]
        if by_place[: len(seen)] != seen:
            raise ValueError(f"{self.name}: arguments that C++ does not read must come last")
        return [(one, MEANINGS.get(one.name) or self._array(one)) for one in read]

    def _array(self, argument: Argument) -> str:
        if not re.search(r"\bArray\b|\bP2POp\b", argument.type):
            raise ValueError(f"{self.name}: {argument.name} is no array: add it to MEANINGS")
        return "kTensor" if argument.name == self.first else "kSecond"

    def lists(self) -> set[str]:
        """Return the arguments that are lists of arrays."""
        return {one.name for one in self.arguments if "Sequence[Array]" in one.type}

    def methods_arguments(self) -> list[Argument]:
        """Return the arguments of the method."""
        return [one for one in self.arguments if one.name != "group"]


def declared(root: Path = ROOT) -> list[Verb]:
    """Read the declarations of a work tree."""
    return [verb for verbs in declared_by_module(root).values() for verb in verbs]


def declared_by_module(root: Path = ROOT) -> dict[str, list[Verb]]:
    """Read the declarations of a work tree, by the module of each."""
    return {module: [*_declared_in(root / API, module)] for module in KINDS}


def _declared_in(folder: Path, module: str) -> Iterator[Verb]:
    text = (folder / f"{module}.py").read_text()
    body = ast.parse(text).body
    others = [(node.targets[0], node.value) for node in body if isinstance(node, ast.Assign)]
    for node in body:
        if isinstance(node, ast.FunctionDef) and "verb" in map(ast.unparse, node.decorator_list):
            aliases = [ast.unparse(name) for name, of in others if ast.unparse(of) == node.name]
            returns = ast.unparse(node.returns) if node.returns else "None"
            made, fields = _call_of(node)
            kind = "parts" if made == "PartsCall" else KINDS[module]
            arguments = (*_arguments(node.args, text.splitlines()),)
            yield Verb(node.name, kind, arguments, returns, (*aliases,), **fields)


def _call_of(node: ast.FunctionDef) -> tuple[str, dict[str, str]]:
    """Return the class of the call that a declaration makes, and who has which part in it."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and (made := ast.unparse(one.func)) in CALLS:
            values = {keyword.arg: keyword.value for keyword in one.keywords}
            sides = {"input": "input", "output": "output", "inputs": "input", "outputs": "output"}
            fields = {side: _source(values[name]) for name, side in sides.items() if name in values}
            return made, fields | {"core": ast.unparse(values["verb"]).removeprefix("Verb.")}
    return "", {}


def _source(value: ast.expr) -> str:
    """Return the argument that a field is taken from: of two the one that may be left out."""
    return ast.unparse(value.orelse if isinstance(value, ast.IfExp) else value)


def _arguments(given: ast.arguments, lines: list[str]) -> Iterator[Argument]:
    left_out = [None] * (len(given.args) - len(given.defaults))
    pairs = [*zip(given.args, [*left_out, *given.defaults], strict=True)]
    by_name = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    for i, (one, default) in enumerate([*pairs, *by_name]):
        kind, value = (  # each on one line; ast.get_source_segment would split the file again
            lines[part.lineno - 1][part.col_offset : part.end_col_offset] if part else ""
            for part in (one.annotation, default)
        )
        yield Argument(one.arg, kind, value, by_name_only=i >= len(pairs))


def _wrapped(words: list[str], width: int) -> list[str]:
    """Return lines of words with commas between them, broken between words only."""
    whole = ", ".join(word.replace(" ", NO_BREAK) for word in words)
    lines = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in lines]


# ---- C++ -----------------------------------------------------------------------------------------


def cxx_table(verbs: list[Verb]) -> str:
    """Return csrc/python/verbs.inc."""
    aliases = [(alias, verb.name) for verb in verbs for alias in verb.aliases]
    return "\n".join(
        [
            "// SPDX-License-Identifier: Apache-2.0",
            f"// {WRITTEN} Part of verbs.h.",
            "",
            "enum class FastVerb {",
            *(f"  {verb.name}," for verb in verbs),
            "};",
            f"inline constexpr int kNumFastVerbs = {len(verbs)};",
            "",
            "inline constexpr Signature kSignatures[kNumFastVerbs] = {",
            *(line for verb in verbs for line in _cxx_row(verb)),
            "};",
            "",
            "inline constexpr Alias kAliases[] = {",
            *(f'    {{"{alias}", FastVerb::{name}}},' for alias, name in aliases),
            "};",
            "",
        ]
    )


def _cxx_row(verb: Verb) -> Iterator[str]:
    read = verb.read()
    meanings = [meaning for _, meaning in read]
    takes_root = verb.kind != "transfer" and "kRoot" in meanings
    yield f'    {{.name = "{verb.name}",'
    yield (
        f"     .kind = VerbKind::{verb.kind}, .takes_root = {str(takes_root).lower()}, "
        f".takes_sequences = {str(bool(verb.lists())).lower()},"
    )
    if verb.core:
        meaning_of = {one.name: meaning for one, meaning in read}
        output = meaning_of.get(verb.output, "kTensor")
        yield f"     .core = Verb::{verb.core}, .output = {output},"
    yield (
        f"     .num_positional = {sum(not one.by_name_only for one, _ in read)}, "
        f".num_params = {len(read)}, .group_place = {meanings.index('kGroup')},"
    )
    lines = _wrapped([f'{{"{one.name}", {meaning}}}' for one, meaning in read], WIDTH - 18)
    yield "     .params = {" + f"\n{' ' * 16}".join(lines) + "},"
    yield "     .doc ="
    yield from _cxx_string(f"{verb.name}({_shown(verb.arguments)})", "", "")
    yield "     .method_doc ="
    ranks = (
        "; ranks are those of this group" if "kRoot" in meanings or verb.kind == "transfer" else ""
    )
    text = f"See `fastcoll.{verb.name}`{ranks}."
    yield from _cxx_string(f"{verb.name}({_shown(verb.methods_arguments(), '$self')})", text, "}")


def _shown(arguments: tuple[Argument, ...] | list[Argument], *before: str) -> str:
    return ", ".join([*before, *_words(arguments, "shown")])


def _words(arguments: tuple[Argument, ...] | list[Argument], form: str) -> Iterator[str]:
    """Yield the arguments as `Argument` has them in a form, and the mark before those by name."""
    for i, one in enumerate(arguments):
        if one.by_name_only and not (i and arguments[i - 1].by_name_only):
            yield "*"
        yield getattr(one, form)


def _cxx_string(signature: str, text: str, end: str) -> Iterator[str]:
    """Yield lines with a literal that `inspect` reads: a signature, a mark, and a text."""
    for line in textwrap.wrap(signature, WIDTH - 16, drop_whitespace=False):
        yield f'         "{line}"'
    yield f'         "\\n--\\n\\n{text}"{end},'


# ---- Python --------------------------------------------------------------------------------------


def methods_stub(verbs: list[Verb], root: Path = ROOT) -> str:
    """Return python/fastcoll/calls/methods.pyi."""
    lines = (line for verb in verbs for line in _typed(verb, verb.methods_arguments(), 4))
    return _stub(["class VerbMethods:", *(f"    {line}" for line in lines)], root)


def functions_stub(verbs: list[Verb], root: Path = ROOT) -> str:
    """Return python/fastcoll/api/verbs.pyi."""
    return _stub([line for verb in verbs for line in _typed(verb, [*verb.arguments], 0)], root)


def _stub(lines: list[str], root: Path) -> str:
    # One argument a line, as ruff has long signatures, would make twice the lines.
    heads = ("# SPDX-License-Identifier: Apache-2.0", f"# {WRITTEN}", "# fmt: off")
    return "\n".join([*heads, *_imports("\n".join(lines), root), *lines, ""])


def _typed(verb: Verb, arguments: list[Argument], indent: int) -> Iterator[str]:
    """Yield the signatures of a verb: one for each type of its result, and one for all."""
    forms = [*_forms(verb, arguments)]
    for form, returns in forms:
        if len(forms) > 1:
            yield "@overload"
        yield from _definition(verb.name, form, returns, is_method=indent > 0)
    apart = [""] if verb.aliases and not indent else []  # as ruff formats a module
    yield from (*apart, *(f"{alias} = {verb.name}" for alias in verb.aliases), *apart)


def _forms(verb: Verb, arguments: list[Argument]) -> Iterator[tuple[list[Argument], str]]:
    """Yield the arguments of each signature, and the type of its result."""
    names = [one.name for one in arguments]
    if "async_op" not in names:
        yield arguments, verb.returns
        return
    at = names.index("async_op")
    now = replace(arguments[at], type="Literal[False]")
    for i, one in enumerate(arguments):  # one that has to be given and may be None: then made
        if one.type.endswith(" | None") and not one.default:
            made = [replace(one, type="None") if other is one else other for other in arguments]
            made[at] = now
            yield made, verb.returns.removeprefix("Work | ").removesuffix(" | None")
            arguments = [*arguments]
            arguments[i] = replace(one, type=one.type.removesuffix(" | None"))
    yield [*arguments[:at], now, *arguments[at + 1 :]], "None"
    later = replace(arguments[at], type="Literal[True]", default="")
    others = [replace(one, by_name_only=True) for one in (later, *arguments[at + 1 :])]
    yield [*arguments[:at], *others], "Work"
    yield arguments, "Work | None"


def _definition(
    name: str, arguments: list[Argument], returns: str, *, is_method: bool
) -> Iterator[str]:
    words = [*["self"] * is_method, *_words(arguments, "text")]
    width = WIDTH - 4 * is_method
    start, end = f"def {name}(", f") -> {returns}: ..."
    line = ", ".join(words)
    if len(start + line + end) <= width:
        yield start + line + end
    else:
        yield from (start, *(f"    {one}" for one in _wrapped(words, width - 4)), end)


def _imports(text: str, root: Path) -> Iterator[str]:
    """Yield the imports of the declarations that a text needs, sorted as ruff sorts them."""
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    whole: dict[str, str] = {}  # module -> its line
    parts = {"typing": used & {"Literal", "overload"}}  # module -> names
    for module in KINDS:
        for node in ast.parse((root / API / f"{module}.py").read_text()).body:
            for name in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                if (name.asname or name.name) not in used:
                    continue
                if isinstance(node, ast.Import):
                    whole[name.name] = "import " + ast.unparse(name)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    parts.setdefault(node.module, set()).add(ast.unparse(name))
    for section in range(3):
        lines = [whole[module] for module in sorted(whole) if _section(module) == section]
        lines += [
            f"from {module} import {', '.join(sorted(parts[module]))}"
            for module in sorted(parts)
            if _section(module) == section
        ]
        yield from [*lines, ""] if lines else ()


def _section(module: str) -> int:
    package = module.split(".")[0]
    return 2 if package == "fastcoll" else int(package not in sys.stdlib_module_names)


# ---- torch's calls -------------------------------------------------------------------------------


def torch_names(root: Path = ROOT) -> str:
    """Return python/fastcoll/integrations/c10d_names.h."""
    calls = runpy.run_path(str(root / TORCH_NAMES))["TORCH_CALLS"]
    lines = ["// SPDX-License-Identifier: Apache-2.0", f"// {FROM_NAMES}", "#pragma once", ""]
    for call in calls:
        name = "".join(part.capitalize() for part in call.method.split("_"))
        start = f"constexpr Verb k{name}{{"
        titles = f'"{call.title("fastcoll")}", "{call.title("gloo")}"'
        words = f'{titles}, "{call.method}", OpType::{call.op_type}}};'
        first, *others = textwrap.wrap(words, WIDTH - len(start))
        lines += [start + first, *(" " * len(start) + line for line in others)]
    return "\n".join([*lines, ""])


def written(root: Path = ROOT) -> dict[str, str]:
    """Return the files that are made from a work tree's declarations, by path."""
    verbs = declared(root)
    stubs = methods_stub(verbs, root), functions_stub(verbs, root)
    texts = cxx_table(verbs), *stubs, torch_names(root)
    return dict(zip(WRITTEN_FILES, texts, strict=True))


def outdated(root: Path = ROOT) -> list[str]:
    """Return the written files of a work tree that are not current."""
    return [
        path
        for path, text in written(root).items()
        if not (root / path).exists() or (root / path).read_text() != text
    ]


def main() -> None:
    """Write the files, or with --check say which are not current."""
    if "--check" in sys.argv:
        if paths := outdated():
            sys.exit(f"not current: {', '.join(paths)}; run scripts/verbs.py")
        return
    for path, text in written().items():
        (ROOT / path).write_text(text)


if __name__ == "__main__":
    main()
