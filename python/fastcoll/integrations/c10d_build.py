# SPDX-License-Identifier: Apache-2.0
"""The compiled part of the torch backend: c10d_backend.cpp, built against the installed torch.

Decides the place of the build, when it is made, and by which process. A failure is never an error:
the group then runs in Python. Must not know groups.

Compiling takes most of a minute of CPU time, so nothing starts it unasked. `fastcoll build` does it
once for each torch; FASTCOLL_TORCH_BACKEND=compiled does it at first use. The default, `auto`, uses
a build that is there; `fastcoll doctor` says which and why. Compiling in the background was
dropped: it would take a core from a job that may be a measurement, and outlive a short job.
"""

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from fastcoll import env
from fastcoll.calls.pool import end_pool
from fastcoll.errors import UsageError
from fastcoll.text import say_once
from fastcoll.trust import make_folder, require_trusted
from fastcoll_autoload.ends import at_the_end

# A compiler on a busy machine; alone it takes 15 s.
LIMIT_S = 300.0
_SOURCE = Path(__file__).with_name("c10d_backend.cpp")
# Errors of a compiler that may be gone at the next try.
_PASSING = ("No space left", "Disk quota", "Killed", "annot allocate memory")
_FLAGS = ("-std=c++20", "-O2", "-g0", "-fPIC", "-fvisibility=hidden")


class NotBuiltError(Exception):
    """There is no compiled backend; the text says why."""


class NotAskedForError(NotBuiltError):
    """Nothing is amiss: the settings want no compiled backend."""


class _Outcome:
    """The result of the setting that `load` met last; no setting is tried twice in a row."""

    setting: str | None = None
    module: ModuleType | None = None
    reason = "no group of torch.distributed was made yet"
    is_failure = False
    loaded: ModuleType | None = None  # it stays, whatever groups ask for later


_outcome = _Outcome()
_users: list[Callable[[ModuleType], None]] = []


def load() -> ModuleType | None:
    """Return the compiled backend, or None; `reason` then says why.

    FASTCOLL_TORCH_BACKEND is read at each call, as a program may set it between its groups. The
    backend is built here only where that is "compiled". Else the start of a program must not wait
    for a compiler.

    Raises:
        UsageError: FASTCOLL_TORCH_BACKEND has no such value.
    """
    setting = env.TORCH_BACKEND.get()
    if setting != _outcome.setting:
        _outcome.setting, _outcome.module = setting, None
        _outcome.reason, _outcome.is_failure = "", False
        try:
            _outcome.module = _import_once(setting)
        except NotBuiltError as error:
            _outcome.reason = str(error)
            _outcome.is_failure = not isinstance(error, NotAskedForError)
        except (OSError, ImportError, subprocess.SubprocessError) as error:
            _outcome.reason = f"{type(error).__name__}: {error}"
            _outcome.is_failure = True
    return _outcome.module


def loaded() -> ModuleType | None:
    """Return the compiled backend if this process has it, whatever the setting has become."""
    return _outcome.loaded


def give_once_loaded(user: Callable[[ModuleType], None]) -> None:
    """Call `user` with the compiled backend: now, or when it is loaded later, if ever."""
    if _outcome.loaded is None:
        _users.append(user)
    else:
        user(_outcome.loaded)


def report_failure() -> None:
    """Write to stderr, once, why `load` returned None, unless the settings are the reason."""
    if _outcome.is_failure:
        say_once(
            f"torch.distributed is served in Python, which is slower: {_outcome.reason} "
            "(FASTCOLL_TORCH_BACKEND=python asks for that, without this line)"
        )


def reason() -> str:
    """Return why the last `load` gave no compiled backend, or "" if it did."""
    return _outcome.reason


def report() -> str:
    """Return the backend that a group would use and why, without building anything."""
    try:
        if env.TORCH_BACKEND.get() != "compiled":
            return f"compiled: {_ready()}"
        path = _path()
        compiler = _compiler(path)
    except (NotBuiltError, OSError) as error:
        return f"in Python: {error}"
    return f"compiled: {path}" if compiler is None else f"{compiler} compiles it at first use"


def build() -> Path:
    """Return the path of the build, once it is there.

    Raises:
        NotBuiltError: There is no compiler, or it refused, or others can write where it lies.
        OSError: The cache folder can't be made or written to.
    """
    path = _path()
    compiler = _compiler(path)
    if compiler is None:
        return path
    make_folder(path.parent)
    end = time.monotonic() + LIMIT_S
    with open(path.with_suffix(".lock"), "w") as lock:
        _take(lock.fileno(), end)
        if _compiler(path) is not None:  # no other process built it meanwhile
            _compile(compiler, path, end - time.monotonic())
    return path


def forget_failure() -> None:
    """Let the next `build` try again after a compiler failed."""
    _failure(_path()).unlink(missing_ok=True)


def _ready() -> Path:
    """Return the path of the build that the setting admits."""
    setting = env.TORCH_BACKEND.get()
    if setting == "python":
        raise NotAskedForError("FASTCOLL_TORCH_BACKEND=python")
    if setting == "compiled":
        return build()
    path = _path()
    if not _is_there(path):
        raise NotBuiltError("it is not compiled yet: `fastcoll build` does that once")
    return path


def _path() -> Path:
    """Return where the build for this source, torch and interpreter lies, or will."""
    folder = env.cache_dir()
    if folder is None:
        raise NotBuiltError(
            f"user {os.getuid()} has no home to keep it in: give FASTCOLL_CACHE_DIR a folder"
        )
    return folder / f"c10d_backend-{_fingerprint()}.so"


def _is_there(path: Path) -> bool:
    """Return whether there is a build that can be trusted."""
    try:
        _find_trusted(path)
    except FileNotFoundError:
        return False
    return True


def _find_trusted(path: Path) -> Path:
    """Return the real path of a build; one that others can have written is none."""
    try:
        return require_trusted(path)
    except UsageError as error:
        raise NotBuiltError(str(error)) from None


def _compiler(path: Path) -> str | None:
    """Return the compiler for the build; None if the build is there."""
    if _is_there(path):
        return None
    with contextlib.suppress(FileNotFoundError, UsageError):  # another user's word is not taken
        said = require_trusted(_failure(path)).read_text(errors="replace")
        raise NotBuiltError(f"{said} (to try again, remove {_failure(path)})")
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise NotBuiltError("no C++ compiler: neither c++ nor g++ is on PATH")
    return compiler


def _failure(path: Path) -> Path:
    """Return where it is kept why a compiler refused, so that not every start tries again."""
    return path.with_suffix(".failed")


def _take(lock: int, end: float) -> None:
    """Take the lock, which the kernel takes back from a rank that dies."""
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise NotBuiltError(
                    f"another process has been building it for {LIMIT_S:g} s"
                ) from None
            time.sleep(0.05)


def _fingerprint() -> str:
    parts = (
        _SOURCE.read_bytes(),
        *(header.read_bytes() for header in sorted(Path(__file__).parent.glob("*.h"))),
        " ".join(_FLAGS).encode(),
        torch.__version__.encode(),
        str(torch.__file__).encode(),
        str(sysconfig.get_config_var("SOABI")).encode(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _compile(compiler: str, path: Path, limit_s: float) -> None:
    home = Path(torch.__file__).parent
    includes = [home / "include", home / "include/torch/csrc/api/include"]
    includes.append(Path(sysconfig.get_path("include")))
    # Renamed when it is complete: no process loads half of it.
    draft = path.with_suffix(f".{os.getpid()}.draft")
    translated = path.with_suffix(f".{os.getpid()}.o")
    compiling = [
        *_FLAGS,
        "-DTORCH_EXTENSION_NAME=c10d_backend",
        "-DUSE_DISTRIBUTED",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{folder}" for folder in includes),
        *("-c", str(_SOURCE), f"-o{translated}"),
    ]
    libraries = ("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10")
    linking = ["-shared", str(translated), f"-L{home / 'lib'}", *libraries, f"-o{draft}"]
    end = time.monotonic() + max(limit_s, 1)
    try:
        # Two steps: ccache keeps the results of compiling, not of linking.
        for arguments in (compiling, linking):
            _carry_out([compiler, *arguments], path, end - time.monotonic())
        draft.chmod(0o644)  # for any umask: a file that others may write to is not loaded
        draft.replace(path)
    except subprocess.TimeoutExpired:
        raise NotBuiltError(f"{compiler} did not finish within {limit_s:.0f} s") from None
    finally:
        translated.unlink(missing_ok=True)
        draft.unlink(missing_ok=True)


def _carry_out(command: list[str], path: Path, limit_s: float) -> None:
    """Run one step of the compiler."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        said = (lines or done.stderr.splitlines() or ["it said nothing"])[0]
        text = f"{command[0]} could not compile c10d_backend.cpp: {said}"
        if not any(word in done.stderr for word in _PASSING):
            _failure(path).write_text(text)
        raise NotBuiltError(text)


def _import_once(setting: str) -> ModuleType:
    """Return the compiled backend if the setting admits it; it serves the operators at once."""
    if setting == "python" or _outcome.loaded is None:
        _outcome.loaded = _import(_ready())
        while _users:
            _users.pop()(_outcome.loaded)
    return _outcome.loaded


def _import(path: Path) -> ModuleType:
    path = _find_trusted(path)
    loader = importlib.machinery.ExtensionFileLoader("c10d_backend", str(path))
    spec = importlib.util.spec_from_file_location("c10d_backend", path, loader=loader)
    if spec is None:
        raise NotBuiltError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    # Before the groups are closed, and long before the interpreter ends. The pool ends first.
    at_the_end.extend([module.finish, end_pool])
    return module
