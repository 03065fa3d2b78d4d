# SPDX-License-Identifier: Apache-2.0
"""Tensors and arrays that change between two calls: a later call sees them as a first one does.

A known call takes a shorter way, on which C++ reads the arguments. Every check of the Python path
must hold there as well. This file has the checks of memory, for each verb and each of its two
tensors. The others are made before and after good calls elsewhere:

| check of the Python path | made after good calls by |
|---|---|
| device, layout, dtype, wrappers, byte order, op, limit | faults/test_bad_input.py |
| shapes, overlap, elements that share memory, one dtype | the same; strided: test_fast_layouts.py |
| lists, parts, split sizes, roots | test_parts.py |
| lists of tensors of any sizes | test_coalesced.py |
| peers and tags | test_p2p_failures.py |
| storage, signs, conjugation, NumPy's flags | here |
"""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastcoll import api
from tests.support.harness import Pools, Rank, attempt
from tests.support.written import KNOWN, NOBODY, NUMEL, VERBS, make_known

TRANSFERS = ("send, recv", "isend, irecv")


# ---- signs and conjugation -----------------------------------------------------------------------


def negate(values: torch.Tensor) -> torch.Tensor:
    """The same values, stored with the other sign."""
    return torch._neg_view(-values)


def conjugate(values: torch.Tensor) -> torch.Tensor:
    """The same values, stored conjugated."""
    return values.conj().resolve_conj().conj()


def with_other_data(rank: Rank, name: str, store: Callable[..., torch.Tensor]) -> list[str]:
    """Known tensors get memory that is stored otherwise; what they get then, against plain ones."""
    verb, comm = VERBS[name], rank.comm
    dtype = torch.complex64 if store is conjugate else torch.float32
    plain, want = verb.tensors(rank.world_size, dtype)
    plain += rank.rank + (1j if dtype.is_complex else 0)
    verb.call(comm, plain, want)
    wrong = []
    for changes in ("input", "output", "both"):
        given, got = verb.laid(plain), verb.laid(want)
        make_known(verb, comm, given, got)
        got.zero_()
        if changes != "output":
            given.data = store(verb.laid(plain))
        if changes != "input":
            got.data = store(verb.laid(want * 0))
        verb.call(comm, given, got)
        if not torch.equal(got.resolve_neg().resolve_conj(), want):
            wrong.append(f"{changes}: {got.tolist()[:4]}, not {want.tolist()[:4]}")
    return wrong


@pytest.mark.parametrize("store", [negate, conjugate])
@pytest.mark.parametrize("name", VERBS)
def test_values_are_read_as_they_mean(pools: Pools, name: str, store: Any) -> None:
    assert pools(2).run(with_other_data, name, store) == [[], []]


# ---- storage -------------------------------------------------------------------------------------


def shrink(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(NUMEL)


def free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def with_less_memory(rank: Rank, name: str, change: Callable[..., None]) -> list[str]:
    """A group of one rank, which is every root: both tensors are used."""
    verb, comm, wrong = VERBS[name], rank.comm, []
    for side in ("input", "output"):
        given, got = verb.tensors(1, torch.float32)
        if NOBODY in (verb.reads, verb.writes) and side == "input":
            continue
        if name == "broadcast" and side == "output":
            continue
        changed = given if side == "input" else got
        make_known(verb, comm, given, got)
        num_bytes = changed.untyped_storage().nbytes()
        change(changed)
        one = attempt(verb.call, comm, given, got)
        if one.kind != "UsageError" or "freed or resized" not in one.text:
            wrong.append(f"{side}: {one}")
        changed.untyped_storage().resize_(num_bytes)
        make_known(verb, comm, given, got)
    return wrong


def transfers_with_less_memory(rank: Rank, change: Callable[..., None]) -> list[str]:
    """One by one, as a transfer that is refused leaves its other side alone."""
    comm = rank.comm
    tensors = VERBS["isend, irecv"].tensors(1, torch.float32)
    make_known(VERBS["isend, irecv"], comm, *tensors)
    for tensor in tensors:
        change(tensor)
    calls = [(call, tensor) for tensor in tensors for call in ("send", "isend", "recv", "irecv")]
    attempts = [attempt(getattr(comm, call), tensor, 0) for call, tensor in calls]
    return [str(one) for one in attempts if "freed or resized" not in one.text]


@pytest.mark.parametrize("change", [shrink, free])
def test_transfers_do_not_touch_memory_that_is_gone(pools: Pools, change: Any) -> None:
    assert pools(1).run(transfers_with_less_memory, change) == [[]]


@pytest.mark.parametrize("change", [shrink, free])
@pytest.mark.parametrize("name", [name for name in VERBS if name not in TRANSFERS])
def test_memory_that_is_gone_is_not_touched(pools: Pools, name: str, change: Any) -> None:
    assert pools(1).run(with_less_memory, name, change) == [[]]


def lazily_cloned(rank: Rank, name: str) -> list[str]:
    """Outputs that share their memory with another tensor until one of the two is written."""
    verb, wrong = VERBS[name], []
    for turn in range(KNOWN + 1):
        given, original = verb.tensors(rank.world_size, torch.float32)
        verb.call(rank.comm, given, torch._lazy_clone(original))
        if bool(original.any()):
            wrong.append(f"turn {turn}: {original.tolist()[:4]}")
    return wrong


@pytest.mark.parametrize("name", VERBS)
def test_what_a_lazy_clone_was_made_of_stays(pools: Pools, name: str) -> None:
    assert pools(2).run(lazily_cloned, name) == [[], []]


# ---- no traces -----------------------------------------------------------------------------------


def swapped(rank: Rank, name: str) -> list[str]:
    """What torch refuses where something holds on to a tensor."""
    given, got = VERBS[name].tensors(rank.world_size, torch.float32)
    make_known(VERBS[name], rank.comm, given, got)
    tensors = (given, got)
    return [
        one.text
        for tensor in tensors
        if (one := attempt(torch.utils.swap_tensors, tensor, torch.zeros(3))).kind
    ]


@pytest.mark.parametrize("name", VERBS)
def test_tensors_can_be_swapped_afterwards(pools: Pools, name: str) -> None:
    assert pools(2).run(swapped, name) == [[], []]


# ---- arrays --------------------------------------------------------------------------------------


def changed_arrays(rank: Rank) -> list[str]:
    """Arrays that are known, then changed in place."""
    comm, wrong = rank.comm, []

    def known(numel: int = NUMEL) -> np.ndarray:
        array = np.ones(numel, np.float32)
        for _ in range(KNOWN):
            array[:] = 1
            comm.all_reduce(array)
        array[:] = 1
        return array

    def expect(array: np.ndarray, kind: str, word: str) -> None:
        one = attempt(comm.all_reduce, array)
        if one.kind != kind or word not in one.text:
            wrong.append(f"{word}: {one}")

    array = known()
    array.setflags(write=False)
    expect(array, "UsageError", "read-only")
    array = known()
    array.dtype = array.dtype.newbyteorder()
    expect(array, "UnsupportedError", "byte order")
    array = known()
    array.dtype = np.dtype([("a", "<f4")])
    expect(array, "UnsupportedError", "dtype")
    array = known()
    array.shape = 8, -1
    other = known().reshape(8, -1)
    comm.all_reduce(array, out=other)
    wrong += [] if (other == rank.world_size).all() else [f"shape: {other}"]
    array = known()
    array.resize(5 * NUMEL, refcheck=False)
    array[:] = 2
    comm.all_reduce(array)
    wrong += [] if (array == 2 * rank.world_size).all() else [f"resize: {array}"]
    array = known()
    array.dtype = np.int32
    array[:] = 3
    comm.all_reduce(array)
    wrong += [] if (array == 3 * rank.world_size).all() else [f"dtype: {array}"]
    return wrong


@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype)")
def test_arrays_are_read_anew(pools: Pools) -> None:
    assert pools(2).run(changed_arrays) == [[], []]


# ---- a torch whose tensors C++ can't read --------------------------------------------------------


def needs_python(rank: Rank, name: str) -> bool:
    """Whether a known call is passed on to Python."""
    from fastcoll import _C

    usual = api.VERBS["all_reduce"]
    passed: list[Any] = []

    def count(*args: Any, **options: Any) -> None:
        passed.append(usual(*args, **options))

    given, got = VERBS[name].tensors(rank.world_size, torch.float32)
    make_known(VERBS[name], rank.comm, given, got)
    try:
        _C.set_fallback("all_reduce", count)
        VERBS[name].call(rank.comm, given, got)
    finally:
        _C.set_fallback("all_reduce", usual)
    return bool(passed)


def test_this_torch_is_read_by_cpp(pools: Pools) -> None:
    assert pools(2).run(needs_python, "all_reduce") == [False, False]


FOREIGN = """
import torch, weakref
from torch.distributed import HashStore
{change}
import fastcoll
from fastcoll import api
group = fastcoll.init(store=HashStore(), rank=0, world_size=1)
assert not api.READS_TENSORS
passed, usual = [], api.VERBS["all_reduce"]
fastcoll._C.set_fallback("all_reduce", lambda *a, **o: passed.append(usual(*a, **o)))
values = torch.ones(3)
for _ in range(4):
    fastcoll.all_reduce(values)
assert len(passed) == 4
values.data = torch._neg_view(torch.ones(3))
out = torch.zeros(3)
fastcoll.all_reduce_coalesced([out, out.clone()])
fastcoll.all_reduce(values, out=out)
assert out.tolist() == [-1.0] * 3 and out._version > 0, out
values.data = torch.ones(3)
values.untyped_storage().resize_(4)
try:
    fastcoll.all_reduce(values)
except fastcoll.UsageError as error:
    print(error)
"""
CHANGES = {
    "keys": "torch._C._dispatch_keys = lambda tensor: type('', (), {'raw_repr': lambda _: 5})()",
    "no keys": "del torch._C._dispatch_keys",
    "storage": "torch.UntypedStorage.nbytes = lambda storage: 77",
    "version": "torch.Tensor._version = 12345",
    "impl": "torch.Tensor._cdata = property(id)",
}


@pytest.mark.parametrize(
    "change", ["keys", *(pytest.param(name, marks=pytest.mark.slow) for name in [*CHANGES][1:])]
)
def test_a_torch_that_is_not_understood_takes_the_python_path(change: str) -> None:
    program = FOREIGN.format(change=CHANGES[change])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    if change != "storage":
        assert "freed or resized" in done.stdout
