# SPDX-License-Identifier: Apache-2.0
"""Random calls against the oracle while ranks are killed, stopped, late or abort; the rest go on.

    python -m tests.faults.soak --seconds 600        # everything at random
    python -m tests.faults.soak --kills 200          # only SIGKILL, at that many random points

Every episode has a seed, which is printed: `--seed N --episodes 1` plays it again, the same calls
and faults; how the ranks interleave is the machine's choice. Decides what is called, what goes
wrong, and what an episode must show. Every rank that is left gets a named error, shrinks the group,
and computes the right bits in it; nothing stays behind.
"""

import argparse
import dataclasses
import os
import random
import signal
import statistics
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from bench.records import write
from fastcoll.measure.results import provenance
from tests.support import oracle
from tests.support.calls import MOVES, REDUCTIONS, ROOTED, Call, Place, difference, expected
from tests.support.harness import LATE_S, Outcome, Pool, Rank, Setup
from tests.support.held import describe_more_held, list_held
from tests.support.perform import Started, _arenas

LIMIT_S = 5.0  # of a wait for a rank that lives
WORLD_SIZES = (2, 3, 3, 4)
FAULTS = ("kill", "stop", "pause", "abort", "skip", "swap", "other size")
OTHERS = ("barrier", "ring of sends", "objects", "subgroup", "asynchronous")
ERRORS = {
    "kill": {"PeerLostError"},
    "stop": {"CollectiveTimeout", "PeerLostError"},
    "pause": set[str](),
    "abort": {"AbortedError"},
    # Which error comes first depends on the call, and on the rank that finds out.
    "skip": {"DesyncError", "CollectiveTimeout", "AbortedError", "PeerLostError"},
    "swap": {"DesyncError", "CollectiveTimeout", "AbortedError", "PeerLostError"},
    "other size": {"DesyncError", "CollectiveTimeout", "AbortedError", "PeerLostError"},
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """An act or accident of one rank of the world, at call `number` of the group it is in then."""

    kind: str
    rank: int
    number: int


@dataclasses.dataclass
class Life:
    """A rank's report of an episode: which errors it met and when, and what it held at the end."""

    num_checked: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    errors: list[tuple[float, str, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    members: list[int] = dataclasses.field(default_factory=list)
    left_out: bool = False
    left_over: str = ""


def random_call(plan: random.Random, world: int) -> Call:
    """Any verb, dtype, size and place."""
    verb = plan.choice([*REDUCTIONS, *MOVES])
    dtype = plan.choice(["float32", "bfloat16", "int64", "uint8", "complex64"])
    op = plan.choice(oracle.ops_of(dtype)) if verb in REDUCTIONS else "SUM"
    algorithm = "auto"
    if verb in REDUCTIONS:
        algorithm = plan.choice(["auto", "auto", "one_shot", "two_shot"])
        if verb != "reduce" and plan.random() < 0.2:
            algorithm = "chain"
    numel = plan.choice([0, 1, 7, 60, 500, 4000, plan.randrange(120_000)])
    kinds = ["private", "private", "symmetric", "strided", "numpy"]
    if dtype == "bfloat16":
        kinds.remove("numpy")
    kind = plan.choice(kinds)
    place = Place(kind, plan.randrange(9), kind != "strided" and plan.random() < 0.5)
    root = plan.randrange(world) if verb in ROOTED else 0
    return Call(verb, dtype, numel, op, algorithm, None, root, (place,), plan.randrange(1000))


def do_other(group: Any, what: str, number: int) -> str:
    """Make a call that is none of the eight verbs; return what was wrong."""
    me, world = group.rank, group.world_size
    if what == "barrier":
        group.barrier()
        return ""
    if what == "ring of sends":
        mine, theirs = torch.full((5000,), number + me), torch.empty(5000, dtype=torch.int64)
        sending = group.isend(mine, (me + 1) % world, tag=number)
        group.recv(theirs, (me - 1) % world, tag=number)
        sending.wait()
        return "" if bool((theirs == number + (me - 1) % world).all()) else "wrong message"
    if what == "objects":
        # The same each time: who skipped such a call can't be told by the next one.
        found: list[Any] = [None] * world
        group.all_gather_object(found, (me, "x" * 30))
        return "" if found == [(rank, "x" * 30) for rank in range(world)] else "wrong objects"
    tensor = torch.full((3000,), float(me))
    if what == "subgroup":
        part = group.new_group()
        part.all_reduce(tensor)
        part.close()
    else:
        works = [group.all_reduce(torch.ones(2000), async_op=True) for _ in range(3)]
        group.all_reduce(tensor)
        for work in works:
            work.wait()
    return "" if bool((tensor == world * (world - 1) / 2).all()) else "wrong sum"


def next_call(plan: random.Random, world_size: int) -> Call | str:
    """Draw the next call: a verb's, or the name of another one."""
    return plan.choice(OTHERS) if plan.random() < 0.2 else random_call(plan, world_size)


def one_call(group: Any, plan: random.Random, number: int, life: Life) -> None:
    """Make the group's next call, and hold the result against the oracle."""
    call = next_call(plan, group.world_size)
    if isinstance(call, str):
        problem = do_other(group, call, number)
        problem = problem and f"{call}: {problem}"
    else:
        words, problem = Started(group, call).result()
        want = expected(call, group.world_size)[group.rank]
        problem = problem or difference(call, group.world_size, group.rank, want, words)
    life.num_checked += 1
    life.wrong += [problem] if problem else []


def suffer(group: Any, fault: Fault, plan: random.Random, number: int, life: Life) -> None:
    """Do the fault in place of, or besides, the group's next call."""
    if fault.kind == "pause":
        time.sleep(0.3)
    if fault.kind in ("kill", "stop"):
        # From another process's view at a random moment of the call: after so many microseconds.
        pid = os.fork()
        if pid == 0:
            time.sleep(random.Random(fault.number).random() * 0.003)
            os.kill(os.getppid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            os._exit(0)
    if fault.kind == "abort":
        group.abort("a fault")
    if fault.kind == "skip":
        next_call(plan, group.world_size)  # goes on with the one after it
        return
    if fault.kind == "swap":
        group.broadcast(torch.ones(33), 0)
    if fault.kind == "other size":
        group.all_reduce(torch.ones(77_777))
    one_call(group, plan, number, life)


def live(rank: Rank, seed: int, faults: list[Fault], num_calls: int) -> Life:
    """Call and call until a generation of the group ends without an error; shrink after each."""
    import fastcoll

    fastcoll.destroy()
    before = list_held()
    life, generation = Life(), 0
    store = torch.distributed.PrefixStore(f"soak {seed}", rank.store)
    whole = fastcoll.Communicator.from_store(store, rank.rank, rank.world_size, timeout_s=20)
    group = whole.new_group(timeout_s=LIMIT_S)
    whole.barrier()
    whole.close()
    life.members = list(range(rank.world_size))
    mine = [fault for fault in faults if fault.rank == rank.rank]
    while True:
        plan = random.Random(f"{seed} {generation}")
        members = life.members
        try:
            for number in range(num_calls):
                due = [fault for fault in mine if fault.number == number]
                if due:
                    mine.remove(due[0])
                    suffer(group, due[0], plan, number, life)
                else:
                    one_call(group, plan, number, life)
            group.all_reduce(torch.ones(12_345))  # as no other call, so that none stands in for it
            break
        except fastcoll.FastcollError as error:
            ranks = tuple(members[one] for one in getattr(error, "ranks", ()))
            life.errors.append((time.monotonic(), type(error).__name__, ranks))
        try:
            told = torch.tensor([rank.rank])
            group = group.shrink()
            gathered = [torch.empty_like(told) for _ in range(group.world_size)]
            group.all_gather(gathered, told)
            life.members = [int(one) for one in gathered]
        except fastcoll.PeerLostError as error:
            if "went on without" in str(error):
                life.left_out = True
                break
        except fastcoll.FastcollError:
            pass  # one more was lost meanwhile: the next call says so again
        generation += 1
    group.close()
    del group
    _arenas.clear()
    life.left_over = describe_more_held(before)
    return life


@dataclasses.dataclass(frozen=True)
class Result:
    """The findings of an episode."""

    num_faults: int
    num_checked: int
    problems: list[str]
    heard_s: list[float]  # from a rank's death to every error that names it


def episode(seed: int, kinds: tuple[str, ...] = FAULTS, num_calls: int = 25) -> Result:
    """Start ranks, let them live through some faults, and judge what they tell."""
    plan = random.Random(seed)
    world = plan.choice(WORLD_SIZES)
    victims = plan.sample(range(world), plan.randint(1, world - 1))
    faults = [Fault(plan.choice(kinds), one, plan.randrange(num_calls)) for one in victims]
    pool = Pool(world, Setup(init=False))
    try:
        pool.start(live, seed, faults, num_calls)
        deaths = Deaths(pool)
        stopped = [fault.rank for fault in faults if fault.kind == "stop"]
        lasting = [rank for rank in range(world) if rank not in stopped]
        outcomes = pool.collect(90, lasting)
        for rank in stopped:  # it may not have been reached
            os.kill(pool.pids[rank], signal.SIGCONT)
        outcomes += pool.collect(90, stopped) if stopped else []
        lives = [one.value for one in outcomes if one.ok]
        heard_s = deaths.heard_s(lives)
        problems = judge(faults, outcomes)
        problems += [f"a death was heard of after {one:.2f} s" for one in heard_s if one > LATE_S]
        return Result(len(faults), sum(life.num_checked for life in lives), problems, heard_s)
    finally:
        pool.close(grace_s=0.5)


class Deaths:
    """When the ranks of a pool ended, by the clock that they share."""

    def __init__(self, pool: Pool) -> None:
        self._times: dict[int, float] = {}
        self._ranks = {process.sentinel: rank for rank, process in enumerate(pool.processes)}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._is_over = False
        self._thread.start()

    def _watch(self) -> None:
        while self._ranks and not self._is_over:
            for sentinel in wait(list(self._ranks), 0.05):
                self._times[self._ranks.pop(sentinel)] = time.monotonic()

    def heard_s(self, lives: list[Life]) -> list[float]:
        """How long after each death every survivor raised the error that names it."""
        self._is_over = True
        self._thread.join()
        return [
            max(0.0, when - self._times[rank])
            for life in lives
            for when, name, ranks in life.errors
            for rank in ranks
            if name == "PeerLostError" and rank in self._times
        ]


def judge(faults: list[Fault], outcomes: list[Outcome]) -> list[str]:
    """Return what an episode must not show."""
    problems = []
    allowed = set().union(*(ERRORS[fault.kind] for fault in faults))
    kinds = {fault.rank: fault.kind for fault in faults}
    may_leave = {"stop", "skip", "swap", "other size"}  # may miss the end of an agreement, too
    for outcome in outcomes:
        kind = kinds.get(outcome.rank, "")
        who = f"rank {outcome.rank} ({kind or 'no fault'})"
        if outcome.exit_code is not None:
            if kind != "kill" or outcome.exit_code != -signal.SIGKILL:
                problems.append(f"{who} ended: {outcome.describe()}")
            continue
        if not outcome.ok:
            problems.append(f"{who}: {outcome.describe()}")
            continue
        life = outcome.value
        problems += [f"{who}: {one}" for one in life.wrong]
        problems += [f"{who}: {life.left_over}"] if life.left_over else []
        if life.left_out and kind not in may_leave:
            problems.append(f"{who} was left out")
        for _, name, ranks in life.errors:
            guilty = {rank for rank in ranks if rank in kinds}
            if name not in allowed:
                problems.append(f"{who}: {name} {ranks}")
            if name == "PeerLostError" and allowed == {"PeerLostError"} and set(ranks) != guilty:
                problems.append(f"{who}: {name} blames {ranks}")
    # A rank that was stopped behind its part of the last call has heard of nothing when it goes on.
    ends = {
        tuple(one.value.members)
        for one in outcomes
        if one.ok and not one.value.left_out and (kinds.get(one.rank) != "stop" or one.value.errors)
    }
    if len(ends) != 1:
        problems.append(f"the survivors ended in different groups: {sorted(ends)}")
    return problems


def main() -> int:
    """Run episodes until the time or the number is reached; say what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--json", type=Path, help="where to leave a record of the run")
    options = parser.parse_args()
    kinds = ("kill",) if options.kills else FAULTS
    start, faults, checked, seed = time.monotonic(), 0, 0, options.seed
    findings: list[str] = []
    heard_s: list[float] = []
    origin = provenance()
    while True:
        result = episode(seed, kinds)
        heard_s += result.heard_s
        faults += result.num_faults
        checked += result.num_checked
        for problem in result.problems:
            findings.append(f"seed {seed}: {problem}")
            print(findings[-1], flush=True)
        seed += 1
        if (seed - options.seed) % 20 == 0:
            done = f"{seed - options.seed} episodes, {faults} faults, {len(findings)} problems"
            print(done, flush=True)
        took_s = time.monotonic() - start
        enough = seed - options.seed >= options.episodes if options.episodes else True
        if enough and took_s >= options.seconds and faults >= options.kills:
            break
    episodes = seed - options.seed
    print(
        f"{episodes} episodes from seed {options.seed} in {took_s:.0f} s: {len(findings)} problems"
    )
    print(f"{faults} faults, {checked} results checked")
    deaths: dict[str, float] = {"num_heard": len(heard_s)}
    if heard_s:
        median, most = statistics.median(heard_s), max(heard_s)
        late = sum(one > 1 for one in heard_s)
        deaths |= {"median_s": median, "most_s": most, "num_after_a_second": late}
        print(f"deaths heard of {len(heard_s)} times, after {median:.3f} s (median), {most:.3f} s")
        print(f"(most); {late} times after more than a second")
    if options.json:
        record = {
            "kind": "reliability",
            **origin,
            "settings": {"seed": options.seed, "faults": kinds, "world_sizes": WORLD_SIZES},
            "took_s": round(took_s),
            "counts": {"episodes": episodes, "faults": faults, "results": checked},
            "deaths_heard": deaths,
            "findings": findings,
        }
        write(record, options.json)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
