# SPDX-License-Identifier: Apache-2.0
"""Where no build can be kept or trusted, the Python backend serves, and one rank says why."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import on_backend
from tests.support.harness import Pool, Rank, Setup


def add(rank: Rank) -> float:
    tensor = torch.full((5,), float(rank.rank + 1))
    dist.all_reduce(tensor)
    return float(tensor[4])


def without_home(cache: Path) -> None:
    import pwd

    for name in ("HOME", "XDG_CACHE_HOME", "FASTCOLL_CACHE_DIR"):
        os.environ.pop(name, None)
    # As the C library answers of a user without an account.
    patch.object(pwd, "getpwuid", side_effect=KeyError("uid not found")).start()
    assert not cache.exists()


def behind_a_file(cache: Path) -> None:
    """As a folder that can't be made or written to; root may write anywhere else."""
    cache.parent.joinpath("file").write_text("")
    os.environ["FASTCOLL_CACHE_DIR"] = str(cache.parent / "file" / "folder")


def full(cache: Path) -> None:
    """As on a full disk: the first byte that is written to the cache is refused."""
    cache.mkdir(exist_ok=True)
    os.environ["FASTCOLL_CACHE_DIR"] = str(cache)
    compiler = cache.parent / "c++"
    compiler.write_text("#!/bin/sh\necho 'error: No space left on device' >&2\nexit 1\n")
    compiler.chmod(0o755)
    os.environ["PATH"] = f"{cache.parent}:{os.environ['PATH']}"


def open_to_all(cache: Path) -> None:
    cache.mkdir(exist_ok=True)
    cache.chmod(0o777)
    os.environ["FASTCOLL_CACHE_DIR"] = str(cache)


def serve(rank: Rank, spoil: Callable[[Path], None], cache: str, setting: str) -> tuple[float, str]:
    """Make a group of torch where the cache is spoilt; return its sum and what was said."""
    os.environ["FASTCOLL_TORCH_BACKEND"] = setting
    spoil(Path(cache))
    said = io.StringIO()
    with patch.object(sys, "stderr", said):
        result = on_backend(rank, "fastcoll", add)
        on_backend(rank, "fastcoll", add)  # a second group says nothing more
    return result, said.getvalue()


@pytest.mark.parametrize(
    ("spoil", "setting", "why"),
    [
        (without_home, "auto", "has no home to keep it in: give FASTCOLL_CACHE_DIR a folder"),
        (without_home, "compiled", "has no home to keep it in: give FASTCOLL_CACHE_DIR a folder"),
        (behind_a_file, "compiled", "Not a directory"),
        (full, "compiled", "No space left on device"),
        (open_to_all, "compiled", "other users may write to"),
    ],
)
def test_python_serves_and_one_rank_says_why(
    fresh_pool: Callable[..., Pool],
    tmp_path: Path,
    spoil: Callable[[Path], None],
    setting: str,
    why: str,
) -> None:
    pool = fresh_pool(2, Setup(init=False))
    rows = pool.run(serve, spoil, str(tmp_path / "cache"), setting)
    assert [total for total, _ in rows] == [3.0, 3.0]
    lines = "".join(said for _, said in rows).splitlines()
    assert len(lines) == 1, lines
    assert why in lines[0]
    assert not list(tmp_path.rglob("*.failed"))  # the disk may have room the next time
