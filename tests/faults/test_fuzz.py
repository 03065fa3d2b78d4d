# SPDX-License-Identifier: Apache-2.0
"""Damaged messages (fuzz.py): some rounds here, as many as you like by its command."""

import random
from collections.abc import Callable

import pytest

from fastcoll.bootstrap import farewell, identity
from tests.faults import fuzz

ROUNDS = 60


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_damaged_messages_do_no_harm(target: Callable[[random.Random], None]) -> None:
    before = fuzz.num_fds()
    for seed in range(ROUNDS):
        fuzz.play(target, seed)
    assert fuzz.num_fds() == before


def test_an_unchecked_field_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds reach what they are to reach: with the check away they fail."""
    monkeypatch.setattr(identity, "_checked", lambda rank, row, form: identity.Hello(**row))
    with pytest.raises((TypeError, AttributeError)):
        for seed in range(ROUNDS):
            fuzz.play(fuzz.fuzz_introduction, seed)
    monkeypatch.setattr(farewell, "farewell_in", lambda message: message.decode())
    with pytest.raises((UnicodeDecodeError, AssertionError)):
        for seed in range(ROUNDS):
            fuzz.play(fuzz.fuzz_farewell, seed)
