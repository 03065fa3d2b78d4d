# SPDX-License-Identifier: Apache-2.0
"""The output of commands as a page: tables, trees, lines and pictures in one HTML file.

Decides how a page looks. It needs nothing from outside the file, and knows nothing of its contents.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from fastcoll_model.figures import as_svg

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
section { margin-top: 2.5rem; } h2 { border-bottom: 1px solid #ccc; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .8rem 0; }
caption { text-align: left; font-weight: bold; padding: .2rem 0; white-space: nowrap; }
th, td { padding: .15rem .6rem; border-bottom: 1px solid #e4e4e4; text-align: left;
  vertical-align: top; white-space: pre-line; }
th, .right { white-space: nowrap; }
.right { text-align: right; font-variant-numeric: tabular-nums; }
li { white-space: pre-line; }
img { min-width: 40rem; max-width: 100%; display: block; margin: .8rem 0; }
"""


@dataclass
class Section:
    """A part of a page, with a heading; its parts are tables, trees, lines or figures."""

    title: str
    parts: list[Any] = field(default_factory=list)


def page(title: str, lines: Sequence[str], sections: Sequence[Section]) -> str:
    """Return a whole page: a heading, some lines below it, a list of contents, the sections."""
    contents = [f'<a href="#part{i}">{escape(each.title)}</a>' for i, each in enumerate(sections)]
    body = [f"<h1>{escape(title)}</h1>", *map(_line, lines)]
    body.append(_list(contents))
    for i, section in enumerate(sections):
        body.append(f'<section id="part{i}"><h2>{escape(section.title)}</h2>')
        body += map(_part, section.parts)
        body.append("</section>")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _part(part: Any) -> str:
    if isinstance(part, Table):
        return _table(part)
    if isinstance(part, Tree):
        return _list([_branch(part)])
    return _line(part) if isinstance(part, str) else _picture(part)


def _plain(markup: Any) -> str:
    """Return a text without rich's marks, safe to stand in HTML."""
    return escape(Text.from_markup(str(markup)).plain)


def _line(text: str) -> str:
    return f"<p>{_plain(text)}</p>"


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def _branch(tree: Tree) -> str:
    label = _plain(tree.label)
    return label + (_list(map(_branch, tree.children)) if tree.children else "")


def _table(table: Table) -> str:
    marks = [' class="right"' if column.justify == "right" else "" for column in table.columns]
    head = [_plain(column.header) for column in table.columns]
    rows = zip(*([_plain(cell) for cell in column.cells] for column in table.columns), strict=True)
    return (
        f'<div class="wide"><table><caption>{_plain(table.title or "")}</caption>'
        f"<thead>{_row('th', head, marks)}</thead>\n<tbody>"
        + "\n".join(_row("td", row, marks) for row in rows)
        + "</tbody></table></div>"
    )


def _row(tag: str, cells: Iterable[str], marks: Sequence[str]) -> str:
    pairs = zip(cells, marks, strict=True)
    return "<tr>" + "".join(f"<{tag}{mark}>{cell}</{tag}>" for cell, mark in pairs) + "</tr>"


def _picture(figure: Any) -> str:
    """Return a figure as an image: inside a page of several, the ids of SVGs would clash."""
    title = escape(figure.axes[0].get_title())
    data = base64.b64encode(as_svg(figure).encode()).decode()
    return f'<div class="wide"><img alt="{title}" src="data:image/svg+xml;base64,{data}"></div>'
