# SPDX-License-Identifier: Apache-2.0
"""Closed formulas: the time of a collective on ranks that a switch connects, all pairs alike.

The machine is `fabric.OneSwitch`: alpha until a message arrives, beta per byte, gamma per byte
added.
The formulas are those of the books, for the schedules of `builders`; where the two charge alpha
differently, the note says so. The simulator gives the same numbers (tests/model/test_formulas.py).

Sources:
    Hockney 1994: R. W. Hockney, The communication challenge for MPP, Parallel Computing 20.
    Thakur 2005: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication
        operations in MPICH, Int. J. High Performance Computing Applications 19(1).
    Rabenseifner 2004: Optimization of collective reduction operations, ICCS 2004.
    Patarasuk 2009: P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of
        workstations, J. Parallel and Distributed Computing 69(2).
    Bruck 1997: J. Bruck et al., Efficient algorithms for all-to-all communications in multiport
        message-passing systems, IEEE Trans. Parallel and Distributed Systems 8(11).
    Chan 2007: E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, Collective communication:
        theory, practice, and experience, Concurrency and Computation 19(13).
"""

from collections.abc import Callable
from dataclasses import dataclass

from fastcoll_model.errors import ModelError


@dataclass(frozen=True)
class Constants:
    """The machine: `alpha_us` per message, `beta_us_per_byte` moved, `gamma_us_per_byte` added."""

    alpha_us: float
    beta_us_per_byte: float
    gamma_us_per_byte: float = 0.0

    def message_us(self, size_bytes: float) -> float:
        """Return the time of one message (Hockney 1994)."""
        return self.alpha_us + size_bytes * self.beta_us_per_byte

    @property
    def crossover_bytes(self) -> float:
        """Size at which latency and transfer take equally long: Hockney's n_1/2 = alpha / beta."""
        return self.alpha_us / self.beta_us_per_byte


@dataclass(frozen=True)
class Terms:
    """Messages one after the other, and how many times the message's bytes are moved and added."""

    messages: float
    moved: float
    added: float = 0.0

    def __add__(self, other: "Terms") -> "Terms":
        return Terms(
            self.messages + other.messages, self.moved + other.moved, self.added + other.added
        )

    def time_us(self, size_bytes: float, constants: Constants) -> float:
        """Return the time for a message of `size_bytes`."""
        per_byte = self.moved * constants.beta_us_per_byte
        per_byte += self.added * constants.gamma_us_per_byte
        return self.messages * constants.alpha_us + size_bytes * per_byte


def _log(n: int) -> int:
    """Return the rounds of doubling until n are reached."""
    return (n - 1).bit_length()


def _share(n: int) -> float:
    return (n - 1) / n


def _folded(n: int) -> int:
    """Return 1 if some ranks are outside the largest power of two."""
    return int(n & (n - 1) != 0)


def _doubling_all_reduce(n: int, m: int) -> Terms:
    del m
    rounds, extra = n.bit_length() - 1, _folded(n)
    return Terms(rounds + 2 * extra, rounds + 2 * extra, rounds + extra)


def _halving(n: int, *, served: bool = True) -> Terms:
    """Return recursive halving; guests hand in the message, and get their chunk if `served`."""
    core, extra = 1 << (n.bit_length() - 1), _folded(n)
    share = min(1.0, (1 + extra) * (core - 1) / n)  # a host answers for two chunks
    rounds = core.bit_length() - 1 + extra + extra * served
    return Terms(rounds, share + extra + extra * served / n, share + extra)


def _doubling(n: int, *, collected: bool = True) -> Terms:
    """Return recursive doubling; guests get the whole, and hand in their chunk if `collected`."""
    halving = _halving(n, served=collected)
    return Terms(halving.messages, halving.moved)


def _rabenseifner(n: int, m: int) -> Terms:
    del m
    return _halving(n, served=False) + _doubling(n, collected=False)


def _bruck_all_to_all(n: int, m: int) -> Terms:
    del m
    travelling = sum(way.bit_count() for way in range(n))
    return Terms(_log(n), travelling / n)


@dataclass(frozen=True)
class Formula:
    """One algorithm's time.

    Attributes:
        terms: (number of ranks, number of segments) -> terms.
        source: Where it is from.
        powers_only: Exact for 2^k ranks. For others within a quarter and three messages, for three
            reasons. Ranks outside the core hand in their part and get their share back. Unequal
            shares make some ranks wait on busy links. Some branches of a tree are shorter.
        note: Differences from the source's count.
    """

    terms: Callable[[int, int], Terms]
    source: str
    powers_only: bool = False
    note: str = ""


_PIPELINED = (
    "alpha is latency and overlaps with the next segment; Hockney's machine, whose alpha keeps the "
    "sender busy, takes (n - 2 + m)(alpha + S beta / m)"
)
_PARALLEL = "the channels of a rank add side by side, hence half of gamma"

FORMULAS: dict[tuple[str, str], Formula] = {
    ("all_reduce", "one_shot"): Formula(lambda n, m: Terms(1, n - 1, n - 1), "this project"),
    ("all_reduce", "two_shot"): Formula(
        lambda n, m: Terms(2, 2 * _share(n), _share(n)), "Chan 2007, section 7.1, on a switch"
    ),
    ("all_reduce", "ring"): Formula(
        lambda n, m: Terms(2 * (n - 1), 2 * _share(n), _share(n)), "Patarasuk 2009, section 3"
    ),
    ("all_reduce", "bidirectional_ring"): Formula(
        lambda n, m: Terms(2 * (n - 1), 2 * _share(n), _share(n) / 2),
        "Patarasuk 2009",
        False,
        _PARALLEL,
    ),
    ("all_reduce", "tree"): Formula(
        lambda n, m: Terms(2 * _log(n), 2 * _log(n), _log(n)), "Thakur 2005, section 4.4", True
    ),
    ("all_reduce", "recursive_doubling"): Formula(
        _doubling_all_reduce, "Thakur 2005, section 4.4", True
    ),
    ("all_reduce", "rabenseifner"): Formula(
        _rabenseifner, "Rabenseifner 2004; Thakur 2005, section 4.4", True
    ),
    ("reduce_scatter", "one_shot"): Formula(
        lambda n, m: Terms(1, _share(n), _share(n)), "Chan 2007, on a switch"
    ),
    ("reduce_scatter", "ring"): Formula(
        lambda n, m: Terms(n - 1, _share(n), _share(n)), "Patarasuk 2009"
    ),
    ("reduce_scatter", "bidirectional_ring"): Formula(
        lambda n, m: Terms(n - 1, _share(n), _share(n) / 2), "Patarasuk 2009", False, _PARALLEL
    ),
    ("reduce_scatter", "pairwise"): Formula(
        lambda n, m: Terms(n - 1, _share(n), _share(n)), "Thakur 2005, section 4.3"
    ),
    ("reduce_scatter", "recursive_halving"): Formula(
        lambda n, m: _halving(n), "Thakur 2005, section 4.3", True
    ),
    ("all_gather", "direct"): Formula(lambda n, m: Terms(1, _share(n)), "Chan 2007, on a switch"),
    ("all_gather", "ring"): Formula(
        lambda n, m: Terms(n - 1, _share(n)), "Thakur 2005, section 4.1"
    ),
    ("all_gather", "bidirectional_ring"): Formula(
        lambda n, m: Terms(n - 1, _share(n)), "Thakur 2005, section 4.1"
    ),
    ("all_gather", "recursive_doubling"): Formula(
        lambda n, m: _doubling(n), "Thakur 2005, section 4.1", True
    ),
    ("all_gather", "bruck"): Formula(
        lambda n, m: Terms(_log(n), _share(n)), "Bruck 1997; Thakur 2005, section 4.1"
    ),
    ("broadcast", "direct"): Formula(
        lambda n, m: Terms(1, n - 1), "this project", False, "the root's link carries all"
    ),
    ("broadcast", "chain"): Formula(
        lambda n, m: Terms(n - 1, (n - 2 + m) / m), "Chan 2007, section 7.2", False, _PIPELINED
    ),
    ("broadcast", "tree"): Formula(
        lambda n, m: Terms(_log(n), _log(n)), "Thakur 2005, section 4.2", True
    ),
    ("broadcast", "scatter_all_gather"): Formula(
        lambda n, m: Terms(_log(n), _share(n)) + _doubling(n),
        "Thakur 2005, section 4.2 (van de Geijn)",
        True,
    ),
    ("reduce", "one_shot"): Formula(lambda n, m: Terms(1, n - 1, n - 1), "this project"),
    ("reduce", "chain"): Formula(
        lambda n, m: Terms(n - 1, (n - 2 + m) / m, (n - 2 + m) / m),
        "Chan 2007, section 7.2",
        False,
        _PIPELINED,
    ),
    ("reduce", "tree"): Formula(
        lambda n, m: Terms(_log(n), _log(n), _log(n)), "Thakur 2005, section 4.4", True
    ),
    ("reduce", "rabenseifner"): Formula(
        lambda n, m: _halving(n) + Terms(_log(n), _share(n)),
        "Rabenseifner 2004; Thakur 2005, section 4.4",
        True,
    ),
    ("gather", "direct"): Formula(lambda n, m: Terms(1, _share(n)), "this project"),
    ("gather", "tree"): Formula(
        lambda n, m: Terms(_log(n), _share(n)), "Chan 2007, section 4", True
    ),
    ("scatter", "direct"): Formula(lambda n, m: Terms(1, _share(n)), "this project"),
    ("scatter", "tree"): Formula(
        lambda n, m: Terms(_log(n), _share(n)), "Chan 2007, section 4", True
    ),
    ("all_to_all", "direct"): Formula(lambda n, m: Terms(1, _share(n)), "Thakur 2005, section 4.5"),
    ("all_to_all", "pairwise"): Formula(
        lambda n, m: Terms(n - 1, _share(n)), "Thakur 2005, section 4.5"
    ),
    ("all_to_all", "bruck"): Formula(_bruck_all_to_all, "Bruck 1997; Thakur 2005, section 4.5"),
}


def estimate_us(
    verb: str,
    algorithm: str,
    world_size: int,
    size_bytes: float,
    constants: Constants,
    *,
    num_segments: int = 1,
) -> float:
    """Return the time of one collective; see `FORMULAS`.

    Args:
        size_bytes: The larger of a rank's input and output.

    Raises:
        ModelError: The algorithm has no closed formula.
    """
    formula = FORMULAS.get((verb, algorithm))
    if formula is None:
        raise ModelError(
            f"{verb} by {algorithm} has no closed formula; fastcoll_model.simulator prices it"
        )
    if world_size == 1:
        return 0.0
    return formula.terms(world_size, num_segments).time_us(size_bytes, constants)


def naive_all_reduce_us(world_size: int, size_bytes: float, constants: Constants) -> float:
    """Return the time if all ranks send to one, which sends back: 2 (n - 1) full messages."""
    return 2 * (world_size - 1) * constants.message_us(size_bytes)


def hierarchical_all_reduce_us(
    num_nodes: int, local_size: int, size_bytes: float, inside: Constants, between: Constants
) -> float:
    """Return the time of one_shot reduce_scatter, Rabenseifner between nodes, direct all_gather.

    Every rank has its own link to the network. Exact for 2^k nodes.
    """
    share = size_bytes / local_size
    return (
        estimate_us("reduce_scatter", "one_shot", local_size, size_bytes, inside)
        + estimate_us("all_reduce", "rabenseifner", num_nodes, share, between)
        + estimate_us("all_gather", "direct", local_size, size_bytes, inside)
    )
