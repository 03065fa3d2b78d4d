# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/ agree with the code: examples, commands, pictures, links."""

import doctest
import io
import os
import re
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
from torch.distributed import TCPStore
from typer.testing import CliRunner

from fastcoll.cli import app
from fastcoll_model.builders import build
from fastcoll_model.builders.recipes import RECIPES
from fastcoll_model.checker import check
from fastcoll_model.fabric import OneSwitch
from fastcoll_model.formulas import FORMULAS
from fastcoll_model.schedule import REDUCTIONS
from fastcoll_model.simulator import simulate
from tests.support.launched import NUMBERS, run_launched
from tests.support.programs import load_script, run_as_told, run_python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
QUICK = ("all_reduce", "ring", "two_shot", "tree", "bruck", "tiers", "rings", "buckets")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.S | re.M)


def whole_programs(text: str) -> list[str]:
    """Return the blocks that are files to run, and not typed at a prompt."""
    return [block for block in blocks(text, "python") if ">>> " not in block]


PROGRAMS = [
    pytest.param(program, id=f"{page.stem}-{program.split('.py', 1)[0].removeprefix('# ')}")
    for page in PAGES
    for program in whole_programs(page.read_text())
]


def wrong_examples(text: str) -> str:
    """Return doctest's report of a page's examples, which share their names; "" if all agree.

    They may import the page's whole programs, which may add recipes.
    """
    source = "\n\n".join(blocks(text, "python"))
    test = doctest.DocTestParser().get_doctest(source, {}, "page", None, 0)
    if not test.examples:
        return ""
    said = io.StringIO()
    with redirect_stdout(said), mock.patch.dict(RECIPES), mock.patch.dict(sys.modules):
        for program in whole_programs(text):
            name = program.split(".py", 1)[0].removeprefix("# ")
            sys.modules[name] = module = ModuleType(name)
            exec(compile(program, f"{name}.py", "exec"), vars(module))
        failed = doctest.DocTestRunner().run(test).failed
    return said.getvalue() if failed else ""


def wrong_commands(text: str) -> list[str]:
    """Return the first line of each command's block that the command does not print in turn."""
    found = []
    for block in blocks(text, "console"):
        command, *expected = block.splitlines()
        words = shlex.split(command)
        assert words[:2] == ["$", "fastcoll"]
        output = CliRunner().invoke(app, words[2:]).output
        printed = (line.rstrip() for line in output.splitlines())
        found += [line for line in expected if line != "..." and line not in printed][:1]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_what_its_programs_and_commands_print(page: Path) -> None:
    text = page.read_text()
    assert wrong_examples(text) == ""
    assert wrong_commands(text) == []


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_whole_program_of_a_page_runs(program: str, bare_pools: Any, tmp_path: Path) -> None:
    head = r"# (\w+\.py): run it with  (?:torchrun --nproc-per-node=(\d)|python) \1\n"
    told = re.match(head, program)
    assert told, "the first line names the program and its command"
    path = tmp_path / told[1]
    path.write_text(program)
    if "import jax" in program and not os.environ.get("CI"):
        pytest.importorskip("jax")
    if told[2]:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        bare_pools(int(told[2])).run(run_launched, path, next(NUMBERS), store.port)
        return
    done = run_python(path, limit_s=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


NOT_RUN = "# not run here: "


def unknown_blocks(text: str) -> list[str]:
    """Return the blocks that no test runs and that give no reason, and unknown commands."""
    kinds = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    found = [block for kind, block in kinds if kind == "bash" and not block.startswith(NOT_RUN)]
    found += [block for kind, block in kinds if kind not in ("python", "console", "bash", "text")]
    known = {each.callback.__name__ for each in app.registered_commands}
    named = re.findall(r"`(?:\S+=\S+ )?fastcoll ([a-z]+)[^`]*`", text)
    return found + [name for name in named if name not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_of_a_page_is_run_or_says_why_not(page: Path) -> None:
    assert unknown_blocks(page.read_text()) == []


def test_a_command_that_nothing_runs_is_found() -> None:
    assert unknown_blocks("```bash\nmake\n```\n") == ["make\n"]
    assert unknown_blocks(f"```bash\n{NOT_RUN}two machines\nmake\n```\n") == []
    assert unknown_blocks("run `fastcoll dokter`") == ["dokter"]


@pytest.mark.slow
def test_a_program_that_computes_something_else_fails(tmp_path: Path) -> None:
    """Change the number that the program expects: it must fail."""
    [star] = whole_programs((DOCS / "schedules.md").read_text())
    done = run_as_told(star.replace("(tensor == 6)", "(tensor == 7)"), tmp_path)
    assert done.returncode != 0
    assert "AssertionError" in done.stderr


def value(formula: str, n: int) -> float:
    """Return the value of a formula of the table of builders; with a log for n = 2^k ranks."""
    times = re.sub(r"(\d) (?=\(|log)", r"\1 * ", formula)
    names = {"n": n, "k": n.bit_length() - 1}
    return float(eval(times.replace("log n", "k"), {"__builtins__": {}}, names))


def wrong_rows(text: str) -> list[str]:
    """Return the rows of the table of builders that differ from the counts on their schedules."""
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in re.findall(r"^\| (?:all_|reduce|broad|gather|scatter).*\|$", text, re.M)
    ]
    assert [row[:2] for row in rows] == list(RECIPES)
    found = []
    for verb, algorithm, rounds, taken, order, source in rows:
        formula = FORMULAS.get((verb, algorithm))
        right = formula is None or source == formula.source
        for n in (4, 8, 16) if "log" in rounds else (3, 4, 7, 8, 12, 16):
            schedule = build(verb, algorithm, n)
            proof = check(schedule)
            latencies = simulate(schedule, OneSwitch(n, 1.0, 1.0), 0).time_us
            share = max(proof.blocks_in) / schedule.num_blocks
            ordered = verb in REDUCTIONS and proof.rank_order
            right &= value(rounds, n) == pytest.approx(latencies)
            right &= value(taken, n) == pytest.approx(share)
            right &= order == ("rank order" if ordered else "")
        found += [] if right else [f"{verb} {algorithm}"]
    return found


@pytest.mark.slow
def test_the_table_of_builders_is_true() -> None:
    text = (DOCS / "schedules.md").read_text()
    assert wrong_rows(text) == []
    assert wrong_rows(
        text.replace("| all_reduce | tree | 2 log n |", "| all_reduce | tree | log n |")
    )
    assert wrong_rows(text.replace("| 1/2 + (n - 1)/n |", "| 2 (n - 1)/n |"))
    assert wrong_rows(
        text.replace("| chain | 2 (n - 1) | 2 | rank order |", "| chain | 2 (n - 1) | 2 | |")
    )


def test_a_wrong_number_would_be_noticed() -> None:
    """Plant a wrong number, a wrong example and a wrong output."""
    text = (DOCS / "worked_examples.md").read_text()
    assert "86.62 ms" in wrong_examples(text.replace("86.62", "86.63"))
    assert wrong_examples("```python\n>>> 2 + 2\n5\n```\n")
    text = "```console\n$ fastcoll topo dgx-1v --hosts a\n# on a\n...\n```\n"
    assert wrong_commands(text) == []
    assert wrong_commands(text.replace("# on a", "# on b")) == ["# on b"]


def test_every_page_and_picture_is_linked_and_every_link_leads_somewhere() -> None:
    script = load_script(DOCS / "make_pictures.py")
    reached = set()
    for page in [*PAGES, ROOT / "README.md"]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            path = (page.parent / target).resolve()
            assert path.exists(), f"{page.name} -> {target}"
            reached.add(path)
    pictures = {DOCS / "pictures" / f"{name}.svg" for name in script.PICTURES}
    assert pictures == set((DOCS / "pictures").iterdir())
    assert pictures | set(PAGES) <= reached


def parts(svg: str) -> list[tuple[str, str, str, list[float]]]:
    """Return of every element its tag, its text, its attributes, and their numbers.

    Leaves out the metadata (the version of matplotlib), and names made of hashes.
    """
    found = []
    for element in ElementTree.fromstring(svg).iter():
        tag = element.tag.split("}")[1]
        if "svg" not in element.tag or tag == "metadata":
            continue
        said = " ".join(element.get(name, "") for name in ("d", "x", "y", "transform", "style"))
        numbers = [float(number) for number in NUMBER.findall(said)]
        found.append((tag, (element.text or "").strip(), NUMBER.sub("#", said), numbers))
    return found


def same_picture(one: str, other: str) -> bool:
    """Return whether two pictures are the same, but for a point: layouts differ by version."""
    first, second = parts(one), parts(other)
    return [each[:3] for each in first] == [each[:3] for each in second] and all(
        a[3] == pytest.approx(b[3], abs=1.0) for a, b in zip(first, second, strict=True)
    )


def check_picture(name: str) -> None:
    from fastcoll_model.figures import as_svg

    made = as_svg(load_script(DOCS / "make_pictures.py").PICTURES[name]())
    committed = (DOCS / "pictures" / f"{name}.svg").read_text()
    assert same_picture(made, committed), f"{name}.svg: run python docs/make_pictures.py"


@pytest.mark.parametrize("name", QUICK)
def test_a_picture_is_up_to_date(name: str) -> None:
    pytest.importorskip("matplotlib")
    check_picture(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(set(load_script(DOCS / "make_pictures.py").PICTURES) - set(QUICK))
)
def test_a_picture_that_takes_simulations_is_up_to_date(name: str) -> None:
    pytest.importorskip("matplotlib")
    check_picture(name)


def test_a_picture_that_is_out_of_date_would_be_noticed() -> None:
    """Plant another algorithm, another number in a text, and a point elsewhere."""
    ring = (DOCS / "pictures" / "ring.svg").read_text()
    assert same_picture(ring, ring)
    assert not same_picture(ring, (DOCS / "pictures" / "two_shot.svg").read_text())
    assert not same_picture(ring, ring.replace("rank 3", "rank 4"))
    moved = re.sub(r'd="M (\d+)', lambda match: f'd="M {int(match[1]) + 3}', ring, count=5)
    assert not same_picture(ring, moved)
