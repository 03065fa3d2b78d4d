# SPDX-License-Identifier: Apache-2.0
"""How the ranks' blocks meet: the words of the Triton sub-area and every wait on them.

Decides where a word lies, how it is published and awaited, and how a missing peer breaks the group.
The contract of every word stands in kernels/README.md. Knows nothing of data.

A channel is one program: program c waits only for program c of its peers. Every word has one writer
(but `poison`) and lies in the memory of the rank that waits for it, so that polling stays local.
Epochs live in device memory and are advanced by the kernels: a captured graph can be replayed.
"""

import time
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

MAX_WORLD = tl.constexpr(16)
MAX_CHANNELS = tl.constexpr(64)

# Offsets of the words, in int32 words.
POISON = tl.constexpr(0)
CLAIM = tl.constexpr(1)
EPOCH = tl.constexpr(16)
MEET = tl.constexpr(EPOCH.value + MAX_CHANNELS.value)
NUM_WORDS = tl.constexpr(MEET.value + MAX_CHANNELS.value * MAX_WORLD.value)

# Offsets in the verdict, in int32 words. First comes the value of `poison`. Then come the target
# and the last value of this rank's own first wait that ran out.
VERDICT = tl.constexpr(0)
EXPECTED = tl.constexpr(1)
SEEN = tl.constexpr(2)
VERDICT_WORDS = tl.constexpr(3)

# Polls between two looks at the clock and at `poison`: a look costs as much as several polls.
POLLS_PER_LOOK = tl.constexpr(256)

if triton.knobs.runtime.interpret:

    def now_ns() -> int:
        """The interpreter has no device clock."""
        return time.monotonic_ns()

else:

    @triton.jit
    def now_ns():
        """A clock that all blocks share."""
        return globaltimer()


class Group(NamedTuple):
    """A kernel's facts of its group, as one argument.

    Attributes:
        signals: int64[world], address of every rank's words.
        scratch: int64[world], address of every rank's scratch.
        buffer_bytes: Bytes of one of the two buffers of a channel, a multiple of 16.
        verdict: int32[VERDICT_WORDS] of this rank, readable by the host.
        rank: int32[1] of the device, this rank. A number would be compiled in, as 0, as 1 and as
            others: ranks would compile binaries of their own while peers wait in kernels.
        limit_ns: How long one wait may last.
    """

    signals: Any
    scratch: Any
    buffer_bytes: Any
    verdict: Any
    rank: Any
    limit_ns: Any


@triton.jit
def load_acquire(word):
    """Adding 0 compiles to ld.acquire.sys, without a read-modify-write."""
    return tl.atomic_add(word, 0, sem="acquire", scope="sys")


@triton.jit
def store_release(word, value, mask=None):
    """Store a value with release: earlier loads and stores of this thread come before it.

    Triton has no releasing store, so this is an exchange: peers' memory must take atomics.
    """
    tl.atomic_xchg(word, value, mask=mask, sem="release", scope="sys")


@triton.jit
def words(group, rank):
    """The words of a rank."""
    return tl.load(group.signals + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def own_rank(group):
    """This rank."""
    return tl.load(group.rank)


@triton.jit
def own_words(group):
    """The words of this rank."""
    return words(group, own_rank(group))


@triton.jit
def buffer(group, index):
    """Offset in bytes of buffer 0 or 1 of this program's channel in the scratch of any rank."""
    return (tl.program_id(0).to(tl.int64) * 2 + index) * group.buffer_bytes


@triton.jit
def pointer(table, rank, offset_bytes, DTYPE: tl.constexpr):
    """An address of a table plus an offset, both multiples of a pack, as a pointer.

    The table lies in the device's memory. Or it is a tuple of the launch, and `rank` a constant.
    """
    if isinstance(table, tl.tensor):
        address = tl.load(table + rank) + offset_bytes
    else:
        address = table[rank] + offset_bytes
    # Without the hint every load is as narrow as an element.
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def condemn(group, peer, target, seen, WORLD: tl.constexpr):
    """Make "`peer` did not come to this channel" the group's verdict, unless it has one.

    Writer    any rank; rank 0's word decides between several, and all words get the winner.
    Ordering  acquire and release; `poison` is the whole verdict, so nothing needs to follow it.
    Reuse     never: only new words (zeroed memory) end it.
    """
    found = 1 + peer + MAX_WORLD * (own_rank(group) + MAX_WORLD * tl.program_id(0))
    earlier = tl.atomic_cas(words(group, 0) + POISON, 0, found, sem="acq_rel", scope="sys")
    agreed = tl.where(earlier == 0, found, earlier)
    rank = 0
    while rank < WORLD:
        tl.atomic_cas(words(group, rank) + POISON, 0, agreed, sem="acq_rel", scope="sys")
        rank += 1
    claim = own_words(group) + CLAIM
    if tl.atomic_cas(claim, 0, 1, sem="acq_rel", scope="sys") == 0:
        tl.store(group.verdict + EXPECTED, target)
        tl.store(group.verdict + SEEN, seen)


@triton.jit
def wait(group, alive, word, target, peer, WORLD: tl.constexpr):
    """Poll a word of this rank until it has reached `target`; return 0 if that will not happen.

    Writer    `peer` alone, through store_release.
    Ordering  acquire: the peer's work before its store is visible to the polling thread.
    Reuse     words only grow, on the circle. A fast peer may be ahead, so >=, never ==.
    Limit     group.limit_ns from the first look; then, or when a peer has poisoned the group, 0.
    Callers   put tl.debug_barrier() behind it before other threads use the peer's data.
    """
    seen = load_acquire(word)
    polls = 0
    start = tl.full((), 0, tl.int64)
    while (seen - target < 0) & (alive != 0):
        polls += 1
        if polls == POLLS_PER_LOOK:
            polls = 0
            now = now_ns()
            if start == 0:
                start += now
            if load_acquire(own_words(group) + POISON) != 0:
                alive = 0
            elif now - start > group.limit_ns:
                condemn(group, peer, target, seen, WORLD)
                alive = 0
        seen = load_acquire(word)
    return alive


@triton.jit
def meet(group, epoch, WORLD: tl.constexpr):
    """Tell every rank that this channel has reached `epoch`, wait until all have; 0 if broken.

    The peers are signalled side by side, each by another thread: one after another they would take
    the time of one crossing each. The waits are one after another. Those of several words at once
    would be exchanges, not loads, and 16 times the work of the interpreter.
    """
    row = MEET + tl.program_id(0) * MAX_WORLD
    mine = own_words(group) + row
    peers = tl.arange(0, MAX_WORLD)
    is_peer = peers < WORLD
    addresses = tl.load(group.signals + peers, mask=is_peer, other=0)
    theirs = addresses.to(tl.pointer_type(tl.int32)) + row + own_rank(group)
    tl.debug_barrier()  # so that the release covers the stores and loads of the whole block
    store_release(theirs, epoch, is_peer)
    alive = 1
    peer = 0
    while peer < WORLD:
        alive = wait(group, alive, mine + peer, epoch, peer, WORLD)
        peer += 1
    tl.debug_barrier()  # so that no thread reads ahead of the acquire
    return alive


@triton.jit
def is_sound(group):
    """1, or 0 if the group was poisoned before this kernel began."""
    return (load_acquire(own_words(group) + POISON) == 0).to(tl.int32)


@triton.jit
def report(group):
    """Tell the host that the group is broken; it reads when the kernel has ended."""
    tl.store(group.verdict + VERDICT, load_acquire(own_words(group) + POISON))
