# SPDX-License-Identifier: Apache-2.0
"""Tensors and arrays that change between two calls: a later call sees them as a first one does.

A known call takes a shorter way, on which C++ reads the arguments. Every check of the Python path
must hold there as well, in each kind of group. This file has the checks of memory, for each verb
and each of its two tensors. The others are made before and after good calls elsewhere:

- device, layout, dtype, wrappers, byte order, op, limit: faults/test_bad_input.py
- shapes, overlap, elements that share memory, one dtype: the same; strided: test_fast_layouts.py
- lists, parts, split sizes, roots: faults/test_bad_input.py
- peers and tags: faults/test_bad_input.py
- storage, signs, conjugation, zeros without memory, NumPy's flags: here
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastcoll import api
from tests.support.fallbacks import noting
from tests.support.harness import Pools, Rank, attempt
from tests.support.programs import run_python
from tests.support.sites import Site, each_kind, in_torch
from tests.support.verb_calls import KNOWN, NUMEL, VERB_CALLS, VerbCall, verbs_of

TRANSFERS = ("send, recv", "isend, irecv", "batch_isend_irecv")
each_verb = pytest.mark.parametrize("name", VERB_CALLS)


def verb_call(site: Site, name: str) -> VerbCall:
    """Return a verb's call; skip what a site has no function for."""
    if in_torch(site) and not VERB_CALLS[name].in_torch:
        pytest.skip("torch.distributed has no such call")
    return VERB_CALLS[name]


def test_every_verb_has_a_call() -> None:
    assert {verb for name in VERB_CALLS for verb in verbs_of(name)} == set(api.VERBS)


# ---- signs and conjugation -----------------------------------------------------------------------


def negate(values: torch.Tensor) -> torch.Tensor:
    """The same values, stored with the other sign."""
    return torch._neg_view(-values)


def conjugate(values: torch.Tensor) -> torch.Tensor:
    """The same values, stored conjugated."""
    return values.conj().resolve_conj().conj()


def with_other_data(rank: Rank, name: str, store: Callable[..., torch.Tensor]) -> list[str]:
    """Known tensors get memory that is stored otherwise; what they get then, against plain ones.

    torch gives Gloo a copy of a tensor that is stored otherwise, and drops what is written there.
    """
    verb, comm = VERB_CALLS[name], rank.comm
    dtype = torch.complex64 if store is conjugate else torch.float32
    plain, start = verb.tensors(rank.world_size, dtype)
    plain += rank.rank + (1j if dtype.is_complex else 0)
    start *= 3 - 2j if dtype.is_complex else 3
    want = verb.laid(start)
    verb.make(comm, plain, want)
    wrong = []
    for changes in ("input", "output", "both"):
        given, got = verb.laid(plain), verb.laid(start)
        verb.make_known(comm, given, got)
        got.copy_(start)
        if changes != "output":
            given.data = store(verb.laid(plain))
        if changes != "input":
            got.data = store(verb.laid(start))
        verb.make(comm, given, got)
        if not torch.equal(got.resolve_neg().resolve_conj(), want.resolve_neg().resolve_conj()):
            wrong.append(f"{changes}: {got.tolist()[:4]}, not {want.tolist()[:4]}")
    return wrong


@pytest.mark.parametrize("store", [negate, conjugate])
@each_verb
@each_kind
def test_values_are_read_as_they_mean(site: Site, name: str, store: Any) -> None:
    verb_call(site, name)
    if store is conjugate and in_torch(site):
        pytest.skip("torch.distributed takes no conjugated tensors")
    assert site.run(with_other_data, name, store) == [[]] * site.world


def with_zeros(rank: Rank, name: str) -> list[str]:
    """Inputs are zeros without memory, in a first call and in known ones; then outputs are."""
    verb, comm, wrong = VERB_CALLS[name], rank.comm, []
    plain, start = verb.tensors(rank.world_size)
    zeros, want = torch._efficientzerotensor(plain.shape), verb.laid(start)  # type: ignore[attr-defined]
    verb.make(comm, torch.zeros(plain.shape), want)
    for turn in range(KNOWN + 1):
        got = verb.laid(start)
        verb.make(comm, zeros, got)
        if not torch.equal(got, want):
            wrong.append(f"{turn}: {got.tolist()[:4]}, not {want.tolist()[:4]}")
    if all(map(verb.writes, range(rank.world_size))):
        zeros = torch._efficientzerotensor(start.shape)  # type: ignore[attr-defined]
        one = attempt(verb.make, comm, plain, zeros)
        wrong += [f"output: {one}"] if one.kind != "UsageError" else []
    verb.make_known(comm, plain, start)
    return wrong


@each_verb
@each_kind
def test_zeros_without_memory_are_read(site: Site, name: str) -> None:
    verb_call(site, name)
    assert site.run(with_zeros, name) == [[]] * site.world


# ---- storage -------------------------------------------------------------------------------------


def shrink(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(NUMEL)


def free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def with_less_memory(rank: Rank, name: str, change: Callable[..., None]) -> list[str]:
    """Calls whose memory is gone on every rank, for each tensor that every rank uses."""
    verb, comm, wrong = VERB_CALLS[name], rank.comm, []
    for side, users in enumerate((verb.reads, verb.writes)):
        if not all(map(users, range(rank.world_size))):
            continue
        tensors = verb.tensors(rank.world_size)
        verb.make_known(comm, *tensors)
        num_bytes = tensors[side].untyped_storage().nbytes()
        change(tensors[side])
        one = attempt(verb.make, comm, *tensors)
        if one.kind != "UsageError" or "freed or resized" not in one.text:
            wrong.append(f"{side}: {one}")
        tensors[side].untyped_storage().resize_(num_bytes)
        verb.make_known(comm, *tensors)
    return wrong


def transfers_with_less_memory(rank: Rank, change: Callable[..., None]) -> list[str]:
    """One by one, as a transfer that is refused leaves its other side alone."""
    comm = rank.comm
    verb, peer = VERB_CALLS["isend, irecv"], (rank.rank + 1) % rank.world_size
    tensors = verb.tensors(rank.world_size)
    verb.make_known(comm, *tensors)
    for tensor in tensors:
        change(tensor)
    calls = [(call, tensor) for tensor in tensors for call in ("send", "isend", "recv", "irecv")]
    attempts = [attempt(getattr(comm, call), tensor, peer) for call, tensor in calls]
    return [str(one) for one in attempts if "freed or resized" not in one.text]


@pytest.mark.parametrize("change", [shrink, free])
@each_kind
def test_transfers_do_not_touch_memory_that_is_gone(site: Site, change: Any) -> None:
    assert site.run(transfers_with_less_memory, change) == [[]] * site.world


@pytest.mark.parametrize("change", [shrink, free])
@pytest.mark.parametrize("name", [name for name in VERB_CALLS if name not in TRANSFERS])
def test_memory_that_is_gone_is_not_touched(pools: Pools, name: str, change: Any) -> None:
    """In a group of one rank, which is every root."""
    assert pools(1).run(with_less_memory, name, change) == [[]]


@each_kind
def test_memory_that_is_gone_is_touched_nowhere(site: Site) -> None:
    for name, verb in VERB_CALLS.items():
        if name not in TRANSFERS and (verb.in_torch or not in_torch(site)):
            assert site.run(with_less_memory, name, free) == [[]] * site.world, name


def lazily_cloned(rank: Rank, name: str) -> list[str]:
    """Outputs that share their memory with another tensor until one of the two is written."""
    verb, wrong = VERB_CALLS[name], []
    for turn in range(KNOWN + 1):
        given, original = verb.tensors(rank.world_size)
        before = original.clone()
        verb.make(rank.comm, given, torch._lazy_clone(original))
        if not torch.equal(original, before):
            wrong.append(f"turn {turn}: {original.tolist()[:4]}")
    return wrong


@each_verb
@each_kind
def test_what_a_lazy_clone_was_made_of_stays(site: Site, name: str) -> None:
    verb_call(site, name)
    assert site.run(lazily_cloned, name) == [[]] * site.world


# ---- no traces -----------------------------------------------------------------------------------


def swapped(rank: Rank, name: str) -> list[str]:
    """Return torch's refusals to swap a tensor because something holds on to it."""
    tensors = VERB_CALLS[name].tensors(rank.world_size)
    VERB_CALLS[name].make_known(rank.comm, *tensors)
    return [
        one.text
        for tensor in tensors
        if (one := attempt(torch.utils.swap_tensors, tensor, torch.zeros(3))).kind
    ]


@each_verb
@each_kind
def test_tensors_can_be_swapped_afterwards(site: Site, name: str) -> None:
    verb_call(site, name)
    assert site.run(swapped, name) == [[]] * site.world


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
    verb, comm = VERB_CALLS[name], rank.comm
    given, got = verb.tensors(rank.world_size)
    verb.make_known(comm, given, got)
    with noting("all_reduce") as passed:
        verb.make(comm, given, got)
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
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    if change != "storage":
        assert "freed or resized" in done.stdout
