# SPDX-License-Identifier: Apache-2.0
"""Rules of the house that no linter knows, each proven to bite on a planted violation.

The rules of imports are in pyproject.toml (import-linter); these are the rules that a search of the
text can check.
"""

import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("csrc", "kernels", "python", "tests", "bench", "docs", "examples", "scripts", ".ci")
CXX = (".h", ".inc", ".cpp", ".cu", ".cuh", ".c")
CODE = (*CXX, ".py", ".pyi", ".sh")
TEXT = (*CODE, ".md", ".toml", ".txt", ".yaml", ".json", ".in", "")

Finder = Callable[[str, str], Iterator[int]]


@dataclass(frozen=True)
class Rule:
    """`find` yields the line numbers (from 1) at which a file in scope breaks the rule."""

    name: str
    folders: tuple[str, ...]
    suffixes: tuple[str, ...]
    find: Finder
    exempt: tuple[str, ...] = ()

    def covers(self, path: str) -> bool:
        inside = any(path.startswith(f"{folder}/") or folder == "." for folder in self.folders)
        return inside and Path(path).suffix in self.suffixes and not path.startswith(self.exempt)


def lines_with(pattern: str) -> Finder:
    regex = re.compile(pattern)

    def find(path: str, text: str) -> Iterator[int]:
        del path
        for number, line in enumerate(text.splitlines(), 1):
            if regex.search(line):
                yield number

    return find


def without_licence(path: str, text: str) -> Iterator[int]:
    """Find a missing SPDX line: it is the first, or the second after a shebang."""
    del path
    lines = text.splitlines()
    where = 1 if lines and lines[0].startswith("#!") else 0
    if text.strip() and "SPDX-License-Identifier: Apache-2.0" not in "".join(
        lines[where : where + 1]
    ):
        yield where + 1


X86_ONLY = re.compile(
    r"\b(?:[a-z]mmintrin|x86intrin|x86gprintrin|cpuid)\.h|\b_mm\d*_|__builtin_ia32_"
)
# The second is set by the x86 levels of the reductions, for the files that they include.
X86_GUARDS = ("__x86_64__", "FASTCOLL_" + "F16C")
ARM_ONLY = re.compile(r"\barm_(?:neon|sve|acle)\.h|\bv(?:ld|st)\d+q?_[a-z]\d+|__builtin_aarch64_")
ARM_GUARDS = ("__aarch64__",)


def unguarded_intrinsics(path: str, text: str) -> Iterator[int]:
    """Find intrinsics and their headers outside an #if that names their architecture."""
    del path
    conditions: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        directive = re.match(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b(.*)", line)
        if directive:
            word, condition = directive.groups()
            if word in ("endif", "elif", "else") and conditions:
                conditions.pop()
            if word != "endif":
                conditions.append("" if word in ("else", "ifndef") else condition)
            continue
        code = line.split("//")[0]
        for pattern, guards in ((X86_ONLY, X86_GUARDS), (ARM_ONLY, ARM_GUARDS)):
            if pattern.search(code) and not any(
                guard in condition and f"!defined({guard})" not in condition
                for condition in conditions
                for guard in guards
            ):
                yield number


# The folders of csrc, the highest first; those of one row don't know each other.
CXX_LAYERS = (("sim",), ("python",), ("group", "cuda"), ("cpu",), ("memory",), ("",))
CXX_HEIGHT = {folder: -row for row, folders in enumerate(CXX_LAYERS) for folder in folders}


def upward_includes(path: str, text: str) -> Iterator[int]:
    """Find includes of a header of csrc that lies no lower than the file's own folder."""
    here = path.split("/")[1] if path.count("/") > 1 else ""
    for number, line in enumerate(text.splitlines(), 1):
        included = re.match(r'\s*#\s*include "([\w./]+)"', line)
        if included and (ROOT / "csrc" / included[1]).exists():
            folder = included[1].split("/")[0] if "/" in included[1] else ""
            if folder != here and CXX_HEIGHT[folder] >= CXX_HEIGHT[here]:
                yield number


def declared_variables() -> set[str]:
    text = (ROOT / "python/fastcoll/env.py").read_text()
    return set(re.findall(r'"(FASTCOLL_[A-Z0-9_]+)"', text))


def undeclared_variables(path: str, text: str) -> Iterator[int]:
    """Find undeclared variables; in C++ only a quoted name can be one, the rest are macros."""
    pattern = r'"(FASTCOLL_[A-Z0-9_]+)"' if path.endswith(CXX) else r"\b(FASTCOLL_[A-Z0-9_]+)\b"
    known = declared_variables()
    for number, line in enumerate(text.splitlines(), 1):
        if any(name not in known for name in re.findall(pattern, line)):
            yield number


RULES = [
    Rule(
        "the environment is read in env.py only",
        ("python", "kernels"),
        (".py",),
        lines_with(r"\bos\.(?:environ|getenv|putenv)|from os import .*\b(?:environ|getenv)"),
        # A module that each `import torch` loads can't import env.py.
        ("python/fastcoll/env.py", "python/fastcoll_autoload/__init__.py"),
    ),
    Rule(
        "C++ doesn't read the environment",
        ("csrc", "kernels"),
        CXX,
        lines_with(r"\b(?:secure_)?getenv\s*\("),
    ),
    Rule(
        "PTX is in prim.cuh only",
        ("kernels", "csrc/cuda", "csrc/sim"),
        CXX,
        lines_with(r"\b(?:asm|__asm__)\b\s*(?:volatile)?\s*\("),
        ("kernels/prim.cuh",),
    ),
    Rule(
        "inline PTX of Triton is in signal.py only",
        ("kernels", "python"),
        (".py",),
        lines_with(r"\binline_asm_elementwise\b"),
        ("kernels/fastcoll_kernels/signal.py",),
    ),
    Rule(
        "kernels are launched in launch.cu only",
        ("kernels", "csrc", "python"),
        CXX,
        lines_with(r"<<<|\bcudaLaunchKernel"),
        ("csrc/cuda/launch.cu",),
    ),
    Rule(
        "no torch header in csrc",
        ("csrc", "kernels"),
        CXX,
        lines_with(r"#\s*include\s*[<\"](?:torch|ATen|c10|caffe2)\b"),
    ),
    Rule("includes of csrc point downwards only", ("csrc",), CXX, upward_includes),
    Rule("intrinsics stand inside their guard", ("csrc", "kernels"), CXX, unguarded_intrinsics),
    Rule(
        "the package reaches C++ through native.py",
        ("python",),
        (".py",),
        lines_with(r"from fastcoll import .*\b_(?:C|cuda)\b|import fastcoll\._"),
        ("python/fastcoll/native.py",),
    ),
    Rule(
        "a wall clock that is set forward or back changes no limit: only steady ones are read",
        ("python", "csrc", "kernels"),
        (".py", *CXX),
        lines_with(
            r"\btime\.(?:time|time_ns|localtime|gmtime)\(|from time import .*\b(?:time|time_ns)\b"
            r"|datetime\.now|CLOCK_REALTIME|system_clock|gettimeofday|FUTEX_CLOCK_REALTIME"
        ),
        ("python/fastcoll/measure/machine.py",),  # the date of a result
    ),
    Rule(
        "a tensor is made on a named device, as torch's default one is the program's",
        ("python",),
        (".py",),
        lines_with(
            r"\btorch\.(?:empty|zeros|ones|full|tensor|arange|as_tensor|asarray)"
            r"\((?!\{)(?!.*\bdevice=)"
        ),
        ("python/fastcoll/measure/",),
    ),
    Rule("every source names its licence", FOLDERS, CODE, without_licence),
    Rule("every FASTCOLL_ variable is declared in env.py", (".",), TEXT, undeclared_variables),
    Rule(
        "no path of somebody's machine",
        (".",),
        TEXT,
        lines_with(r"(?:^|[^\w.~$}])/(?:home|root|work|Users)/"),
    ),
]

# (rule, file, text that breaks it)
PLANTED = [
    ("the environment", "python/fastcoll/api/reductions.py", "import os\nx = os.environ['A']\n"),
    ("the environment", "python/fastcoll/calls/work.py", "from os import path, getenv\n"),
    ("C++ doesn't", "csrc/python/bindings.cpp", 'auto x = std::getenv("A");\n'),
    ("PTX", "kernels/cuda/ring.cuh", 'asm volatile("ld.acquire.sys.u64 %0;");\n'),
    ("inline PTX", "kernels/fastcoll_kernels/reduce.py", "tl.inline_asm_elementwise('', '')\n"),
    ("kernels are launched", "csrc/cuda/graph.cu", "ring_kernel<<<1, 32>>>(args);\n"),
    ("no torch header", "csrc/python/bindings.cpp", "#include <torch/extension.h>\n"),
    ("no torch header", "csrc/cpu/ring.h", '#include "c10/util/Half.h"\n'),
    ("includes", "csrc/group/threads.cpp", '#include "python/errors.h"\n'),
    ("includes", "csrc/cuda/launch.h", '#include "group/threads.h"\n'),
    ("includes", "csrc/plan.h", '#include "cpu/group.h"\n'),
    ("intrinsics", "csrc/cpu/reduce.h", "#include <immintrin.h>\n"),
    ("intrinsics", "csrc/cpu/reduce.h", "#ifndef __x86_64__\n_mm_pause();\n#endif\n"),
    ("intrinsics", "csrc/cpu/reduce.h", "#if defined(__x86_64__)\n#else\n_mm_pause();\n#endif\n"),
    ("intrinsics", "csrc/cpu/reduce.h", "#if defined(__x86_64__)\n#endif\nvld1q_f32(p);\n"),
    ("the package", "python/fastcoll/calls/work.py", "from fastcoll import _C, env\n"),
    ("the package", "python/fastcoll/cli/tune.py", "    from fastcoll import _cuda  # late\n"),
    ("the package", "python/fastcoll/measure/pool.py", "import fastcoll._C as core\n"),
    ("a wall clock", "python/fastcoll/bootstrap/deadline.py", "end = time.time() + 1\n"),
    ("a wall clock", "python/fastcoll/calls/work.py", "from time import sleep, time\n"),
    ("a wall clock", "csrc/cpu/wait.cpp", "clock_gettime(CLOCK_REALTIME, &time);\n"),
    ("a wall clock", "csrc/cpu/p2p.h", "auto now = std::chrono::system_clock::now();\n"),
    ("a tensor", "python/fastcoll/nodes/small.py", "rows = torch.zeros(3, dtype=torch.uint8)\n"),
    ("a tensor", "python/fastcoll/calls/parts.py", "tensor = torch.as_tensor(array.source)\n"),
    ("every source", "tests/unit/test_new.py", '"""No licence."""\n'),
    ("every source", "scripts/new.sh", "#!/usr/bin/env bash\necho\n"),
    ("every FASTCOLL_", "README.md", "Set FASTCOLL_" + "NO_SUCH_THING=1.\n"),
    ("every FASTCOLL_", "csrc/python/bindings.cpp", 'read("FASTCOLL_' + 'NO_SUCH_THING");\n'),
    ("no path", "bench/results/a.json", '{"command": "/' + 'home/somebody/run"}\n'),
]

# (rule, file, text that must not be taken for a violation)
ALLOWED = [
    ("PTX", "csrc/cpu/atomics.h", 'asm volatile("isb" ::: "memory");\n'),
    ("intrinsics", "csrc/cpu/reduce.h", "#if defined(__x86_64__)\n_mm_pause();\n#endif\n"),
    ("the package", "python/fastcoll/calls/work.py", "from fastcoll.native import _C, _cuda\n"),
    (
        "a wall clock",
        "python/fastcoll/calls/work.py",
        "time.monotonic()\nstart = time.perf_counter()\n",
    ),
    ("a tensor", "python/fastcoll/nodes/small.py", 'torch.empty(3, device="cpu")\n'),
    ("every FASTCOLL_", "csrc/check.h", "#define FASTCOLL_" + "SOME_MACRO 1\n"),
    ("no path", "README.md", "see docs/home/page and https://example.org/home/page\n"),
]


def rule_named(start: str) -> Rule:
    [rule] = [rule for rule in RULES if rule.name.startswith(start)]
    return rule


def violations(rule: Rule, root: Path) -> list[str]:
    """Return all violations of one rule below a root, as path:line."""
    found = []
    # .git: a file, in a second work tree
    candidates = [path for path in root.iterdir() if path.is_file() and path.name != ".git"]
    for folder in FOLDERS:
        candidates += [path for path in root.glob(f"{folder}/**/*") if path.is_file()]
    for path in sorted(candidates):
        name = path.relative_to(root).as_posix()
        cache = re.search(r"__pycache__|/\.", name)
        if rule.covers(name) and not cache:
            text = path.read_text(encoding="utf-8")
            found += [f"{name}:{number}" for number in rule.find(name, text)]
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    assert violations(rule, ROOT) == []


@pytest.mark.parametrize(("start", "name", "text"), PLANTED)
def test_the_rule_finds_a_planted_violation(
    start: str, name: str, text: str, tmp_path: Path
) -> None:
    planted = tmp_path / name
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(text)
    found = violations(rule_named(start), tmp_path)
    assert len(found) == 1
    assert found[0].startswith(f"{name}:")


@pytest.mark.parametrize(("start", "name", "text"), ALLOWED)
def test_the_rule_lets_good_code_pass(start: str, name: str, text: str, tmp_path: Path) -> None:
    good = tmp_path / name
    good.parent.mkdir(parents=True, exist_ok=True)
    good.write_text(text)
    assert violations(rule_named(start), tmp_path) == []


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule_named(start).name for start, _, _ in PLANTED} == {rule.name for rule in RULES}


def test_every_variable_has_a_help_and_is_listed() -> None:
    from fastcoll import env

    known = {variable.name for variable in env.VARIABLES}
    assert known | set(env.OF_SCRIPTS) == declared_variables()
    assert all(len(variable.help) > 10 for variable in env.VARIABLES)


def rooms_described(text: str) -> list[str]:
    """Return the rooms of a README, in its order, each with a sentence of its own."""
    return re.findall(r"^## (\w+)\n\S[^\n]*\.$", text, flags=re.MULTILINE)


def layer_of_rooms() -> dict[str, int]:
    """Return the layer of each room in import-linter's contract, counted from the highest."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    return {room: i for i, layer in enumerate(layers) for room in re.findall(r"\w+", layer)}


def test_the_readme_describes_each_room_in_the_order_of_the_layers() -> None:
    package = ROOT / "python/fastcoll"
    described = rooms_described((package / "README.md").read_text())
    folders = [entry.name for entry in package.iterdir() if (entry / "__init__.py").exists()]
    assert sorted(described) == sorted(folders)
    layers = layer_of_rooms()
    assert [layers[room] for room in described] == sorted(layers[room] for room in described)


def test_the_readmes_reader_sees_a_room_without_a_sentence() -> None:
    assert rooms_described("## api\nA sentence.\n\n## calls\n\n## gpu\nNo end\n") == ["api"]
