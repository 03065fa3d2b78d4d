# SPDX-License-Identifier: Apache-2.0
"""Make the site's pages that are not in docs/: those elsewhere in the checkout, and generated ones.

Decides which files of the checkout are on the site, and the addresses of their links. Pages link to
each other as files do, so the links also hold where a page is read in the checkout.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from fastcoll import env
from fastcoll.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# The site has another name for these: its own index is the README.
NAMES = {"README.md": "index.md", "docs/README.md": "learn.md"}
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def site_name(path: Path) -> str:
    """Return the name on the site of a file of the checkout."""
    name = path.relative_to(ROOT).as_posix()
    return NAMES.get(name, name.removeprefix("docs/"))


def linked(page: Path) -> Iterator[Path]:
    """Yield the files of the checkout that a page links to."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        if path.is_file() and path.is_relative_to(ROOT):
            yield path


def pages_and_their_links() -> set[Path]:
    """Return the pages of docs/, the README, and all files that links lead to from there."""
    found: set[Path] = set()
    waiting = [ROOT / "README.md", *DOCS.rglob("*.md")]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            if path.suffix == ".md":
                waiting += linked(path)
    return found


def settings_page() -> str:
    """Return the table of the environment variables."""
    lines = [
        "# Settings",
        "",
        "fastcoll reads these environment variables when a group is made.",
        "`fastcoll doctor` shows their values in force, and names a variable that is misspelt.",
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
    ]
    for one in sorted(env.VARIABLES, key=lambda variable: variable.name):
        default = f"`{one.default}`" if one.default != "" else ""
        lines.append(f"| `{one.name}` | {default} | {one.help.replace('|', ', ')} |")
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """Return the help of every command, as typer writes it."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="fastcoll")
    text: str = get_docs_for_click(obj=command, ctx=context, name="fastcoll", title="Command line")
    # Each command's line of its own help is no news.
    return text.replace("* `--help`: Show this message and exit.\n", "")


GENERATED = {"settings.md": settings_page, "cli.md": commands_page}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from elsewhere and the generated ones."""
    if (learn := files.get_file_from_path("README.md")) is not None:
        files.remove(learn)
    for path in sorted(pages_and_their_links()):
        if files.get_file_from_path(site_name(path)) is None:
            files.append(File.generated(config, site_name(path), abs_src_path=str(path)))
    for name, make in GENERATED.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the checkout into links between pages of the site."""
    del config, files
    source = page.file.abs_src_path
    if source is None:
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def on_the_site(match: re.Match[str]) -> str:
        path = (Path(source).parent / match[1]).resolve()
        if not path.is_relative_to(ROOT) or not path.is_file():
            return match[1]  # a generated page, or a mistake that the strict build tells
        return posixpath.relpath(site_name(path), here or ".")

    return LINK.sub(on_the_site, markdown)
