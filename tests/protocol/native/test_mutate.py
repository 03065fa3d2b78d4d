# SPDX-License-Identifier: Apache-2.0
"""The mutation run itself: the mutations of a source, the reports, the allowed survivors."""

import re
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.protocol.native import mutate
from tests.protocol.native.mutation_points import Mutation
from tests.protocol.native.mutation_points import mutate as mutate_source
from tests.support.programs import need, run

HERE = Path(__file__).parent

TOY = """
struct P {
  static int load_acquire(const int& word) { return word; }
  static int load_relaxed(const int& word) { return word; }
};
inline constexpr int kNone = 3 - 2;  // a + 1 < b: no code
template <class Word>
bool has_come(const Word& word, int first, const char* name) {
  const bool is_named = name && *name != 0;
  if (P::load_acquire(word) < first + 1) return false;
  return is_named;
}
inline void publish(int& word, int value) {
  word = value;
}
inline void publish_both(int& left, int& right, int value) {
  publish(left, value);
  publish(right, value);
}
"""
PROGRAM = """
#include "toy.h"
int main() {
  int left = 0, right = 0;
  publish_both(left, right, 4);
  const bool is_right = !has_come(3, 3, "name") && has_come(left, 3, "name") && right == 4;
  return is_right && !has_come(left, 3, nullptr) ? 0 : 1;
}
"""
# The two loads are the same, and no name is empty.
SURVIVES = {"P::load_acquire to relaxed", "no operand right of &&"}


@pytest.fixture(scope="module")
def mutations() -> list[Mutation]:
    return [
        mutation
        for path in sorted((mutate.ROOT / "csrc/cpu").iterdir())
        if path.suffix in (".h", ".cpp") and not path.name.startswith(mutate.LEFT_OUT)
        for mutation in mutate_source(path.name, path.read_text())[0]
    ]


def test_mutations_of_a_source_are_found() -> None:
    found, _ = mutate_source("toy.h", TOY)
    assert Counter(mutation.what for mutation in found) == {
        "no operand left of &&": 1,
        "no operand right of &&": 1,
        "!= to ==": 1,
        "if never": 1,
        "P::load_acquire to relaxed": 1,
        "< to <=": 1,
        "1 to 0": 1,
        "1 to 2": 1,
        "no store": 1,
        "no call": 2,
    }


def test_a_mutation_is_known_by_its_text() -> None:
    before, _ = mutate_source("toy.h", TOY)
    after, _ = mutate_source("toy.h", "// another line\n" + TOY)
    assert [mutation.key for mutation in before] == [mutation.key for mutation in after]
    assert len({mutation.key for mutation in before}) == len(before)
    assert "toy.h: publish(right, value); [no call]" in {mutation.key for mutation in before}


def test_fatal_mutations_are_killed_and_others_survive(tmp_path: Path) -> None:
    need("g++")
    found, text = mutate_source("toy.h", TOY)
    (tmp_path / "toy.h").write_text(text)
    (tmp_path / "toy.cpp").write_text(PROGRAM)
    program = str(tmp_path / "toy")
    flags = ["-std=c++20", "-w", "-include", str(HERE / "mutant.h")]
    built = run(["g++", *flags, str(tmp_path / "toy.cpp"), "-o", program], 60)
    assert built.returncode == 0, built.stdout
    assert run([program], 10).returncode == 0, "the source without a mutation"
    trace = tmp_path / "trace"
    run(["env", f"MUTANT_TRACE={trace}", program], 10)
    reached = frozenset(map(int, trace.read_text().split()))
    check = mutate.Check("toy", (program,), 0.1, 0.1, reached)
    results, killer = mutate.Results(None), mutate.Killer([check])
    end = time.monotonic() + 60
    seen = dict(mutate.run_round(enumerate(found), killer, results, end, 2))
    assert {mutation.what for mutation, by in seen.items() if by is None} == SURVIVES


def test_what_no_check_comes_past_survives() -> None:
    killer = mutate.Killer([mutate.Check("never run", ("false",), 0.1, 0.1, frozenset({7}))])
    missed, killed = mutate.Outcome(), mutate.Outcome()
    killer.try_kill(6, missed)
    killer.try_kill(7, killed)
    assert missed == mutate.Outcome(None, [])
    assert killed == mutate.Outcome("never run: it fails", [])


def test_a_survivor_passes_every_check_and_a_deadly_one_runs_first() -> None:
    passes = [mutate.Check(name, ("true",), 0.1, 0.1, frozenset({1})) for name in ("one", "two")]
    slow = mutate.Check("slow", ("false",), 9, 9, frozenset({1}))
    killer = mutate.Killer([*passes, slow])
    outcome = mutate.Outcome()
    killer.try_kill(1, outcome)
    assert outcome == mutate.Outcome("slow: it fails", ["one", "two"])
    deadly = mutate.Check("deadly", ("false",), 0.2, 0.2, frozenset({1}))
    killer = mutate.Killer([*passes, deadly])
    for _ in range(10):
        killer.try_kill(1, mutate.Outcome())
    last = mutate.Outcome()
    killer.try_kill(1, last)
    assert last == mutate.Outcome("deadly: it fails", [])


@pytest.mark.long
def test_an_endless_loop_ends_by_cpu_time() -> None:
    loop = mutate.Check("loop", ("sh", "-c", "while :; do :; done"), 60, 0, frozenset({1}))
    began = time.monotonic()
    assert loop.kills(1) == "it does not end"
    assert time.monotonic() - began < 200
    waits = mutate.Check("waits", ("sh", "-c", "echo it waited 4 s; exit 1"), 1, 1, frozenset({1}))
    assert waits.kills(1) == "a wait"


def test_results_are_kept_from_run_to_run(tmp_path: Path) -> None:
    found, _ = mutate_source("toy.h", TOY)
    path = tmp_path / "results"
    results = mutate.Results(path)
    results.outcome(found[0]).killed_by = "a check"
    results.outcome(found[1]).survived.append("another")
    for mutation in found[:2]:
        results.keep(mutation)
    assert mutate.Results(path).outcomes == results.outcomes


def test_every_listed_survivor_is_a_mutation(mutations: list[Mutation]) -> None:
    keys = Counter(mutation.key for mutation in mutations)
    assert max(keys.values()) == 1
    assert mutate.read_survivors().keys() <= keys.keys()


def test_every_survivor_has_one_reason() -> None:
    sections = tomllib.loads(mutate.SURVIVORS.read_text())
    assert sections.keys() <= {"equivalent", "open"}
    entries = [entry for section in sections.values() for entry in section.items()]
    assert all(re.search(r"\w{3}.*\.$", reason) for reason, _ in entries)
    named = Counter(key for _, keys in entries for key in keys)
    assert all(count == 1 for count in named.values()), named.most_common(1)


def test_findings_are_where_the_run_and_the_list_differ() -> None:
    found, _ = mutate_source("toy.h", TOY)
    proven, killed, other = found[:3]
    allowed = {proven.key: "equivalent", killed.key: "open", "toy.h: gone [no call]": "open"}
    assert mutate.without_proven(enumerate(found[:3]), allowed) == [(1, killed), (2, other)]
    seen = {proven: None, killed: "a check", other: None}
    assert mutate.findings(seen, found, allowed) == [
        f"{killed.key}: is killed; take it out of mutation_survivors.toml",
        f"{other.key}: survived, and is not in mutation_survivors.toml",
        "toy.h: gone [no call]: is no more; take it out of mutation_survivors.toml",
    ]


@pytest.mark.parametrize(
    ("operator", "text"),
    [
        ("P::load_acquire to relaxed", "P::load_acquire(*awaited.word)"),
        ("P::arrive to relaxed", "P::arrive(word, value);"),
        ("no claim", "group_.claim_slot(k)"),
        ("no call", "group_.wait_staged(peer, k + 1);"),
        ("no store", "peers_[peer].known_done = segment;"),
        ("acq_rel to relaxed", "compare_exchange_strong"),
        ("== to >=", "seen == awaited.target"),
    ],
)
def test_what_the_protocol_rests_on_is_mutated(
    operator: str, text: str, mutations: list[Mutation]
) -> None:
    assert any(one.what == operator and text in one.text for one in mutations)
