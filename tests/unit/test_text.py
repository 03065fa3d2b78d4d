# SPDX-License-Identifier: Apache-2.0
"""Text from other processes: what is printable stays, all else is escaped."""

import os
import pickle
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcoll import _C, CollectiveTimeout, DesyncError, FastcollError
from fastcoll.bootstrap.farewell import farewell_in, say_farewell
from fastcoll.errors import PeerLostError
from fastcoll.nodes.verdict.board import error_from_text, text_of_error
from fastcoll.text import printable, printable_lines

HARMFUL = ("Cc", "Zl", "Zp", "Cs", "Co")
HIDING = "\u200b\u200e\u200f\u202a\u202e\u2066\u2069\ufeff"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("world/1, node 0", "world/1, node 0"),
        ("Größe 模型 🚀", "Größe 模型 🚀"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\r\nb\tc", r"a\x0d\nb\x09c"),
        ("\x7f\x9b\u202e\ufeff", r"\x7f\x9b\u202e\ufeff"),
        ("\U000e0041\U000e0100\U0010fffd", r"\U000e0041\U000e0100\U0010fffd"),
        ("\0", r"\x00"),
        ("\ud800", "?"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text() | st.text(HIDING))
def test_nothing_harmful_is_left(text: str) -> None:
    shown = printable(text)
    assert not [one for one in shown if unicodedata.category(one) in HARMFUL or one in HIDING]
    assert printable(shown) == shown


# Plane 14 is left out: its tags and variation selectors have no shape, and are escaped.
@given(st.characters(max_codepoint=0xDFFFF, exclude_categories=[*HARMFUL, "Cf", "Cn"]))
def test_what_has_a_shape_stays(one: str) -> None:
    assert printable(one) == one


@given(st.binary())
def test_any_bytes_become_printable(raw: bytes) -> None:
    shown = _C.printable(raw)
    assert printable(shown) == shown


@given(st.text())
def test_bytes_that_are_text_are_read_as_text(text: str) -> None:
    raw = text.encode(errors="replace")
    assert _C.printable(raw) == printable(text)
    assert _C.printable(b"\xff" + raw) == "\ufffd" + printable(text)


def test_lines_stay_lines() -> None:
    assert printable_lines("a\x1b\nb\r\n") == "a\\x1b\nb\\x0d\n"


@pytest.mark.parametrize("kind", [FastcollError, DesyncError])
def test_an_error_holds_printable_text(kind: type[FastcollError]) -> None:
    error = pickle.loads(pickle.dumps(kind("rank 1: \x1b[2J\nnext")))
    assert str(error) == "rank 1: \\x1b[2J\nnext"


def test_an_error_with_ranks_holds_printable_text() -> None:
    error = pickle.loads(pickle.dumps(CollectiveTimeout("rank 1: \x1b[2J", [1])))
    assert (str(error), error.ranks) == (r"rank 1: \x1b[2J", (1,))


def test_the_reasons_of_peers_are_printable() -> None:
    reader, writer = os.pipe()
    say_farewell([writer], 1, PeerLostError("", [1]))
    message = os.read(reader, 4096) + b"\x1b]0;owned\x07"
    assert str(farewell_in(message)) == r"\x1b]0;owned\x07"
    damaged = text_of_error(PeerLostError("", [1])).replace('"text": ""', '"text": "\\u001b[2J"')
    assert str(error_from_text(damaged)) == r"\x1b[2J"
