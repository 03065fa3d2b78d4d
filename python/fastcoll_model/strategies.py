# SPDX-License-Identifier: Apache-2.0
"""Parallel training as sentences: which verbs, how often, over how many bytes, in which groups.

Decides the calls of each strategy, the part that can hide behind computation, and the memory
needed. Prices come from simulation, with all groups of a kind at work at the same time.

Sources: volumes and memory of ZeRO: Rajbhandari et al. 2020 (ZeRO, SC20): 2 + 2 + 12 bytes per
parameter with Adam and half types; tensor parallelism: Shoeybi et al. 2019 (Megatron-LM); sequence:
Korthikanti et al. 2022; pipeline bubble: Narayanan et al. 2021; experts: Lepikhin et al. 2020
(GShard); 6 operations per parameter and token: Kaplan et al. 2020.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from fastcoll_model.buckets import Layer, best_bucket_bytes, overlap
from fastcoll_model.errors import ModelError
from fastcoll_model.groups import Groups, consecutive, groups_us, strided
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.machines.machine import cards_of

_STATE_BYTES = 12  # per parameter: fp32 copy, momentum, variance
MAX_RANKS = 128  # simulated step by step


@dataclass(frozen=True)
class Workload:
    """A transformer in training.

    Attributes:
        num_params: All parameters.
        num_layers, hidden: Its shape.
        tokens: Tokens per rank and step; groups that share a model share their ranks' tokens.
        dtype_bytes: Of weights, gradients and activations.
        utilisation: Share of the peak operations that computation reaches.
    """

    num_params: float
    num_layers: int
    hidden: int
    tokens: int
    dtype_bytes: int = 2
    utilisation: float = 0.4


@dataclass(frozen=True)
class Phrase:
    """One verb of a sentence.

    Attributes:
        verb: The collective, or "send".
        times: How often per step.
        size_bytes: The larger of a rank's input and output, each time.
        ranks: Ranks of a group.
        links: "node", or "network" where a group spans nodes.
        time_us: All of it, per step.
        exposed_us: The part that does not hide behind computation.
    """

    verb: str
    times: int
    size_bytes: float
    ranks: int
    links: str
    time_us: float
    exposed_us: float


@dataclass(frozen=True)
class Sentence:
    """A strategy with its price.

    Attributes:
        memory_gb: Weights, gradients and optimiser state of a rank, 10^9 bytes; no activations.
        bubble_us: Idle time of a pipeline that fills and drains.
        problem: Why it can't be used, or "".
    """

    strategy: str
    phrases: list[Phrase] = field(default_factory=list)
    memory_gb: float = 0.0
    compute_us: float = 0.0
    bubble_us: float = 0.0
    problem: str = ""

    @property
    def exposed_us(self) -> float:
        """Time that ranks wait, per step."""
        return self.bubble_us + sum(phrase.exposed_us for phrase in self.phrases)

    @property
    def efficiency(self) -> float:
        """Share of a step that is computation."""
        return self.compute_us / (self.compute_us + self.exposed_us)


class Planner:
    """Prices strategies for one workload on one cluster.

    Raises:
        ModelError: The machine's speed is not known, or there are too many ranks to simulate.
    """

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        if not cluster.machine.tflops:
            raise ModelError(
                f"{cluster.machine.name} does not say how fast a rank computes: add tflops to it"
            )
        if cluster.num_ranks > MAX_RANKS:
            raise ModelError(
                f"{cluster.num_ranks} ranks are more than a plan simulates ({MAX_RANKS}): "
                "use fastcoll explain for single collectives of larger worlds"
            )
        self.workload = workload
        self.cluster = cluster
        self.num_ranks = cluster.num_ranks
        self.node = min(cluster.local_size, cluster.num_ranks)
        self.known: dict[tuple[str, str, int], tuple[float, float]] = {}

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of all weights, and of all gradients."""
        return self.workload.num_params * self.workload.dtype_bytes

    @cached_property
    def compute_us(self) -> float:
        """Computation per step: 2 operations forward, 4 backward, per parameter and token."""
        work = 6 * self.workload.num_params * self.workload.tokens
        return work / (self.cluster.machine.tflops * self.workload.utilisation * 1e6)

    def all(self) -> list[Sentence]:
        """Return every strategy, most efficient first; those that can't be used last."""
        makers: list[Callable[[], Sentence]] = [
            self.ddp,
            lambda: self.zero(1),
            lambda: self.zero(2),
            self.fsdp,
            self.hsdp,
            self.tensor,
            self.sequence,
            self.pipeline,
            self.expert,
        ]
        sentences = [make() for make in makers]
        return sorted(sentences, key=lambda s: (bool(s.problem), -s.efficiency))

    def ddp(self) -> Sentence:
        """Return DDP: every rank has all weights; one all_reduce of the gradients."""
        everyone = consecutive(self.num_ranks, self.num_ranks)
        phrases = [self._gradients("all_reduce", everyone, self.weight_bytes)]
        return self._sentence("DDP", phrases, 1, 1, 1)

    def zero(self, stage: int) -> Sentence:
        """ZeRO-1 shares out the optimiser state, ZeRO-2 the gradients too: the volume of DDP."""
        everyone = consecutive(self.num_ranks, self.num_ranks)
        phrases = [
            self._gradients("reduce_scatter", everyone, self.weight_bytes),
            self._phrase("all_gather", everyone, self.weight_bytes, 1, hides=False),
        ]
        shared = self.num_ranks if stage == 2 else 1
        return self._sentence(f"ZeRO-{stage}", phrases, 1, shared, self.num_ranks)

    def fsdp(self) -> Sentence:
        """Return ZeRO-3, or FSDP: weights are gathered layer by layer, forward and backward."""
        everyone = consecutive(self.num_ranks, self.num_ranks)
        n = self.num_ranks
        return self._sentence("ZeRO-3 / FSDP", self._sharded(everyone), n, n, n)

    def hsdp(self) -> Sentence:
        """Return HSDP: FSDP within a node, all_reduce of a rank's share between nodes."""
        inside = consecutive(self.num_ranks, self.node)
        phrases = [*self._sharded(inside), self._between_replicas()]
        return self._sentence("HSDP", phrases, self.node, self.node, self.node)

    def tensor(self) -> Sentence:
        """Return tensor parallelism within a node: 4 all_reduces of activations per layer."""
        phrases = [self._activations("all_reduce", 4), self._between_replicas()]
        return self._sentence("tensor x data", phrases, self.node, self.node, self.node)

    def sequence(self) -> Sentence:
        """Return sequence parallelism: each all_reduce is a reduce_scatter and an all_gather."""
        phrases = [
            self._activations("reduce_scatter", 4),
            self._activations("all_gather", 4),
            self._between_replicas(),
        ]
        return self._sentence("tensor + sequence x data", phrases, self.node, self.node, self.node)

    def expert(self) -> Sentence:
        """Return experts within a node, which hold all weights: 4 all_to_alls per layer."""
        size = self.workload.tokens * self.workload.hidden * self.workload.dtype_bytes
        inside = consecutive(self.num_ranks, self.node)
        times = 4 * self.workload.num_layers
        phrases = [
            self._phrase("all_to_all", inside, size, times, hides=False),
            self._between_replicas(),
        ]
        return self._sentence("expert x data", phrases, self.node, self.node, self.node)

    def pipeline(self) -> Sentence:
        """Return a stage per node (per rank on one node), 1F1B with 4 micro-batches per stage."""
        several = self.num_ranks > self.node
        stages = self.num_ranks // self.node if several else self.node
        num_micro = 4 * stages
        work = self.workload
        size = work.tokens * stages / num_micro * work.hidden * work.dtype_bytes
        once_us = self._send_us(self.node if several else 1, size) if stages > 1 else 0.0
        # Sends hide behind other micro-batches, but for those that fill and drain the pipeline.
        sends = Phrase(
            "send",
            2 * num_micro * (stages > 1),
            size,
            2,
            "network" if several else "node",
            2 * num_micro * once_us,
            2 * (stages - 1) * once_us,
        )
        replicas = consecutive(self.num_ranks, self.num_ranks // stages)
        phrases = [sends, self._gradients("all_reduce", replicas, self.weight_bytes / stages)]
        bubble_us = self.compute_us * (stages - 1) / num_micro
        return self._sentence("pipeline x data", phrases, stages, stages, stages, bubble_us)

    def _send_us(self, peer: int, size_bytes: float) -> float:
        """Return the time from rank 0 to a peer, while all ranks of the node send alike."""
        route = self.cluster.route(0, peer)
        slowest = min(map(self.cluster.bytes_per_us, route.links))
        cards = cards_of(self.cluster.machine)
        shared = max(cards.values(), default=1) if peer >= self.node else 1
        return route.latency_us + size_bytes * shared / slowest

    def _sharded(self, groups: Groups) -> list[Phrase]:
        layers = self.workload.num_layers
        per_layer = self.weight_bytes / layers
        gathers = self._phrase("all_gather", groups, per_layer, 2 * layers, hides=True)
        return [gathers, self._gradients("reduce_scatter", groups, self.weight_bytes)]

    def _activations(self, verb: str, per_layer: int) -> Phrase:
        tokens = self.workload.tokens * self.node
        size = tokens * self.workload.hidden * self.workload.dtype_bytes
        inside = consecutive(self.num_ranks, self.node)
        return self._phrase(verb, inside, size, per_layer * self.workload.num_layers, hides=False)

    def _between_replicas(self) -> Phrase:
        """Return the all_reduce of a rank's part of the gradients; every node is a replica."""
        replicas = strided(self.num_ranks, self.num_ranks // self.node)
        return self._gradients("all_reduce", replicas, self.weight_bytes / self.node)

    def _cost(self, verb: str, groups: Groups) -> Callable[[float], float]:
        """Return the time of a verb as a function of its size: a line through two simulations."""
        key = (verb, str(groups[0]), len(groups))
        if key not in self.known:
            least = groups_us(verb, self.cluster, groups, 1.0)
            large = 1e9
            slope = (groups_us(verb, self.cluster, groups, large) - least) / large
            self.known[key] = (least, slope)
        least, slope = self.known[key]
        return lambda size: least + slope * size

    def _links(self, groups: Groups) -> str:
        nodes = {self.cluster.node_of(rank) for rank in groups[0]}
        return "network" if len(nodes) > 1 else "node"

    def _phrase(
        self, verb: str, groups: Groups, size_bytes: float, times: int, *, hides: bool
    ) -> Phrase:
        """Return a verb; one that `hides` overlaps with the layer before, all but the first."""
        once_us = self._cost(verb, groups)(size_bytes) if len(groups[0]) > 1 else 0.0
        exposed_us = times * once_us
        if hides:
            behind_us = self.compute_us / (2 * self.workload.num_layers)
            exposed_us = once_us + (times - 1) * max(0.0, once_us - behind_us)
        links = self._links(groups)
        return Phrase(verb, times, size_bytes, len(groups[0]), links, times * once_us, exposed_us)

    def _gradients(self, verb: str, groups: Groups, size_bytes: float) -> Phrase:
        """Return the reduction of gradients in buckets, behind the backward pass."""
        ranks, links = len(groups[0]), self._links(groups)
        if ranks == 1:
            return Phrase(verb, 0, 0.0, 1, links, 0.0, 0.0)
        layers = self.workload.num_layers
        each = Layer(size_bytes / layers, self.compute_us * 2 / 3 / layers)
        cost_us = self._cost(verb, groups)
        best = best_bucket_bytes([each] * layers, cost_us)
        found = overlap([each] * layers, best, cost_us)
        sizes = [bucket.size_bytes for bucket in found.buckets]
        return Phrase(
            verb, len(sizes), max(sizes), ranks, links, found.communication_us, found.exposed_us
        )

    def _sentence(
        self,
        name: str,
        phrases: list[Phrase],
        weights_by: int,
        gradients_by: int,
        state_by: int,
        bubble_us: float = 0.0,
    ) -> Sentence:
        """Return the sentence; weights, gradients and state are shared by so many ranks."""
        half = self.workload.dtype_bytes
        per_param = half / weights_by + half / gradients_by + _STATE_BYTES / state_by
        memory_gb = self.workload.num_params * per_param / 1e9
        there_gb = self.cluster.machine.memory_gb
        problem = ""
        if memory_gb > there_gb:
            problem = f"needs {memory_gb:.0f} GB of the {there_gb:g} GB of a rank"
        said = [phrase for phrase in phrases if phrase.times]
        return Sentence(name, said, memory_gb, self.compute_us, bubble_us, problem)
