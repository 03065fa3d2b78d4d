# SPDX-License-Identifier: Apache-2.0
"""The logger "fastcoll": stderr by default, the program's handlers where it has some."""

import io
import logging
import sys
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from fastcoll import env
from fastcoll.text import LOGGER, say
from tests.support.harness import Pool, Rank, Setup

PLAN = Setup(env={env.LOG.name: "plan"})


def test_a_line_goes_to_stderr_where_nothing_else_takes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    say("one\x1b\nline %s")
    say("not worth a line", logging.DEBUG)
    assert capsys.readouterr().err == "fastcoll: one\\x1b\\nline %s\n"


@pytest.mark.parametrize("whose", ["", "fastcoll"])
def test_the_programs_handlers_take_its_place(
    whose: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(LOGGER, "handlers", [*LOGGER.handlers])
    took = io.StringIO()
    logging.getLogger(whose).addHandler(logging.StreamHandler(took))
    say("a line")
    assert took.getvalue() == "a line\n"
    assert capsys.readouterr().err == ""


def test_a_program_can_silence_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(LOGGER, "disabled", True)
    say("a line")
    assert capsys.readouterr().err == ""


def reduce_twice(rank: Rank) -> str:
    said = io.StringIO()
    with patch.object(sys, "stderr", said):
        for _ in range(2):
            rank.comm.all_reduce(torch.ones(12))
    return said.getvalue()


def test_the_first_rank_logs_plans_where_that_is_set(fresh_pool: Callable[..., Pool]) -> None:
    first, second = fresh_pool(2, PLAN).run(reduce_twice)
    assert first.startswith('fastcoll: "world" all_reduce 12 x float32 SUM -> ')
    assert first.count("\n") == 1
    assert second == ""


def log_plans(rank: Rank) -> list[tuple[str, str]]:
    took: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = took.append  # type: ignore[method-assign]
    logging.basicConfig(level=logging.DEBUG, handlers=[handler])
    said = reduce_twice(rank)
    assert said == ""
    return [(one.levelname, one.getMessage()[:18]) for one in took if one.name == "fastcoll"]


def test_a_program_that_logs_at_debug_has_them_too(fresh_pool: Callable[..., Pool]) -> None:
    first, second = fresh_pool(2).run(log_plans)
    assert first == [("DEBUG", '"world" all_reduce')]
    assert second == []
