# SPDX-License-Identifier: Apache-2.0
"""The writes of a call: those of its outputs, which autograd is told of, and no others."""

import mmap
import os

import pytest
import torch

from tests.contract.test_changed_memory import each_verb, verb_call
from tests.support.harness import Rank, attempt
from tests.support.sites import Site, each_kind
from tests.support.verb_calls import KNOWN, NUMEL, VERB_CALLS


def saved(rank: Rank, name: str) -> list[str]:
    """A tensor that autograd needs is written, in a first call and in a known one; or read."""
    verb, comm, wrong = VERB_CALLS[name], rank.comm, []
    for turn in range(KNOWN + 1):
        leaves = [one.requires_grad_() for one in verb.tensors(rank.world_size)]
        given, got = (leaf * 1 for leaf in leaves)
        losses = [(one * one).sum() for one in (given, got)]
        with torch.no_grad():
            verb.make(comm, given, got)
        read, written = (attempt(loss.backward) for loss in losses)
        if read.kind:
            wrong.append(f"turn {turn}: an input that was only read: {read.text}")
        if not verb.writes(rank.rank) and written.kind:
            wrong.append(f"turn {turn}: an output of other ranks: {written.text}")
        is_told = written.kind == "RuntimeError" and "inplace operation" in written.text
        if verb.writes(rank.rank) and not is_told:
            wrong.append(f"turn {turn}: nothing was said of what was written: {written}")
    return wrong


@each_verb
@each_kind
def test_autograd_sees_what_is_written(site: Site, name: str) -> None:
    verb_call(site, name)
    assert site.run(saved, name) == [[]] * site.world


def without_versions(rank: Rank, name: str) -> list[bool]:
    """Leaves outside of no_grad, as torch.distributed takes them; and tensors without a version."""
    verb, comm = VERB_CALLS[name], rank.comm
    given, got = verb.tensors(rank.world_size)
    leaf, other = given.clone().requires_grad_(), got.clone().requires_grad_()
    start = got.clone()
    verb.make_known(comm, given, got)
    verb.make_known(comm, leaf, other)
    with torch.inference_mode():
        inner, outer = (torch.zeros_like(one).copy_(one) for one in (given, start))
        verb.make_known(comm, inner, outer)
        return [torch.equal(other.detach(), got), torch.equal(outer, got)]


@each_verb
@each_kind
def test_leaves_and_inference_tensors_are_taken(site: Site, name: str) -> None:
    verb_call(site, name)
    assert site.run(without_versions, name) == [[True, True]] * site.world


def read_only(values: torch.Tensor) -> torch.Tensor:
    """The same values in memory of a file, as datasets have it: a write there ends the process."""
    fd = os.memfd_create("values")
    try:
        os.write(fd, values.numpy().tobytes())
        return torch.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), dtype=values.dtype)
    finally:
        os.close(fd)


def with_fixed_inputs(rank: Rank, name: str, numel: int) -> list[str]:
    """Inputs that can't be written, in a first call and in known ones."""
    verb, comm, wrong = VERB_CALLS[name], rank.comm, []
    given, start = verb.tensors(rank.world_size, numel=numel)
    fixed, want = read_only(given), verb.laid(start)
    for turn in range(KNOWN + 1):
        got = verb.laid(start)
        verb.make(comm, fixed, got)
        if turn == 0:
            verb.make(comm, given, want)
        if not torch.equal(got, want):
            wrong.append(f"turn {turn}: {got.tolist()[:4]}, not {want.tolist()[:4]}")
    return wrong


@pytest.mark.parametrize("numel", [NUMEL, 30_000])  # over nodes in a packet, and in phases
@each_verb
@each_kind
def test_inputs_are_not_written(site: Site, name: str, numel: int) -> None:
    verb_call(site, name)
    assert site.run(with_fixed_inputs, name, numel) == [[]] * site.world
