# SPDX-License-Identifier: Apache-2.0
"""Files that another user can have written are neither loaded nor believed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fastcoll import env, trust
from fastcoll.choose import tuning
from fastcoll.errors import UsageError
from fastcoll.integrations import c10d_build
from fastcoll.trust import make_folder, require_trusted

STRANGER = 12345


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "folder" / "below" / "file"
    made.parent.mkdir(parents=True)
    made.write_text("a program")
    for part in (made, *made.parents[:2]):
        part.chmod(0o755)
    return made


def make_foreign(part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a part of a path to another user; who is not root becomes the other one."""
    if os.geteuid() == 0:
        os.chown(part, STRANGER, STRANGER, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


def test_a_file_of_ours_is_trusted(file: Path) -> None:
    assert require_trusted(file) == file.resolve()
    with pytest.raises(FileNotFoundError):
        require_trusted(file.with_name("no file"))


@pytest.mark.parametrize("mode", [0o775, 0o757])
@pytest.mark.parametrize("up", [0, 1, 2])
def test_others_may_write_to_no_part_of_the_path(file: Path, up: int, mode: int) -> None:
    part = [file, *file.parents][up]
    part.chmod(mode)
    with pytest.raises(UsageError, match=rf"write to {part}\..*chmod go-w"):
        require_trusted(file)


@pytest.mark.parametrize("up", [0, 1, 2])
def test_no_part_of_the_path_is_another_users(
    file: Path, up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = [file, *file.parents][up]
    make_foreign(part, monkeypatch)
    with pytest.raises(UsageError, match=r"user \d+ owns"):
        require_trusted(file)


def test_a_sticky_folder_is_no_danger(file: Path) -> None:
    file.parent.chmod(0o1777)
    assert require_trusted(file) == file.resolve()


@pytest.mark.parametrize("is_absolute", [True, False])
def test_links_lead_on_and_are_checked_too(
    file: Path, is_absolute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = file.parents[1] / "link"
    link.symlink_to(file.parent if is_absolute else "below")
    through = link / ".." / "below" / "file"
    assert require_trusted(through) == file.resolve()
    with monkeypatch.context() as patch:
        file.chmod(0o666)
        with pytest.raises(UsageError, match="other users may write"):
            require_trusted(through)
        file.chmod(0o644)
        make_foreign(link, patch)
        with pytest.raises(UsageError, match="owns"):
            require_trusted(through)
    link.unlink()
    link.symlink_to(link.name)
    with pytest.raises(OSError, match="symbolic links"):
        require_trusted(link)


def test_where_root_has_no_number_its_folders_count_as_roots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a user namespace of one user: the machine's root shows as the overflow user."""
    files = {"/proc/self/uid_map": "1000 1000 1\n", "/proc/sys/kernel/overflowuid": "4242\n"}
    monkeypatch.setattr(trust, "_read", files.__getitem__)
    ours = {0, os.geteuid()}
    assert trust._owners(is_folder=True) == {*ours, 4242}
    assert trust._owners(is_folder=False) == ours
    files["/proc/self/uid_map"] = "0 1000 1\n1 100000 65536\n"
    assert trust._owners(is_folder=True) == ours


def test_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folder(tmp_path / "new" / "newer")
        make_folder(tmp_path / "new" / "newer")
    finally:
        os.umask(before)
    for made in (tmp_path / "new", tmp_path / "new" / "newer"):
        assert made.stat().st_mode & 0o777 == 0o700


# ---- what is believed ----------------------------------------------------------------------------


def open_folder(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch
    planted.parent.chmod(0o777)


def open_file(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch
    planted.chmod(0o666)


Spoil = Callable[[Path, pytest.MonkeyPatch], None]
spoilt = pytest.mark.parametrize("spoil", [open_folder, open_file, make_foreign])


@spoilt
@pytest.mark.parametrize("setting", ["auto", "compiled"])
def test_a_planted_build_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Spoil, setting: str
) -> None:
    """Loaded, it would be an ImportError: it is no library."""
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.setenv(env.TORCH_BACKEND.name, setting)
    monkeypatch.setattr(c10d_build, "_outcome", c10d_build._Outcome())
    planted = c10d_build._path()
    planted.parent.mkdir()
    planted.write_text("no library")
    spoil(planted, monkeypatch)
    assert c10d_build.load() is None
    assert f"{planted} is not used" in c10d_build.reason()
    assert f"{planted} is not used" in c10d_build.report()


def test_a_strangers_reason_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path))
    path = c10d_build._path()
    c10d_build._failure(path).write_text("it failed")
    with pytest.raises(c10d_build.NotBuiltError, match="it failed"):
        c10d_build._compiler(path)
    c10d_build._failure(path).chmod(0o666)
    monkeypatch.setattr(c10d_build.shutil, "which", lambda name: name)
    assert c10d_build._compiler(path) == "c++"


@spoilt
def test_a_planted_tuning_table_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Spoil
) -> None:
    table = tmp_path / "folder" / "table.json"
    table.parent.mkdir()
    table.write_text("{}")
    monkeypatch.setenv(env.TUNING.name, str(table))
    spoil(table, monkeypatch)
    found = tuning.find()
    assert found.is_refusal
    assert f"{table} is not used" in found.reason
