# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""A pass of torch's compiler: all_reduce, addition and RMSNorm become one operator.

Decides which sums of a graph are replaced together with what follows them, and counts them. The
operator's call has the place of the sum's, so the order of a rank's calls stays. A chain goes only
as a whole (`norm_chains.py`): no other part of the program gets another value. Imported only where
the code generator is: see `compile.py`.
"""

import logging
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.graph import Graph

from fastcoll import env
from fastcoll.integrations import graph_names, norm_chains, row_ops
from fastcoll.text import say
from fastcoll.types import Op

_FUSED = torch.ops.fastcoll.all_reduce_rms_norm.default
_REDUCE = torch.ops.fastcoll.all_reduce.default
_TORCHS = torch.ops._c10d_functional
_EFFECTS = torch.ops.higher_order.with_effects
_OPS = {"sum": int(Op.SUM), "avg": int(Op.AVG)}  # by torch's names
_LOCAL = ("aten", "prims")  # the operators of these wait for no rank


# ---- where the compiler finds it -----------------------------------------------------------------


def install(enabled: bool) -> None:
    """Put the pass behind the compiler's others of that place, or take it out."""
    passes = [one for one in _each(config.post_grad_custom_pre_pass) if one is not FUSING]
    config.post_grad_custom_pre_pass = _joined([*passes, FUSING] if enabled else passes)


def add_pass(passes: Any, last: CustomGraphPass) -> Any:
    """Return a value of the compiler's setting `post_grad_custom_pre_pass`, and one more pass."""
    return _joined([*_each(passes), last])


def _each(passes: Any) -> list[Any]:
    if isinstance(passes, Several):
        return passes.passes
    return [*passes] if isinstance(passes, list | tuple) else [passes] * (passes is not None)


def _joined(passes: list[Any]) -> Any:
    if len(passes) < 2:
        return passes[0] if passes else None
    takes_several = hasattr(custom_graph_pass, "get_custom_graph_passes")  # torch 2.13 does
    return passes if takes_several else Several(passes)


class Several(CustomGraphPass):
    """Passes one after another, for a torch that takes only one."""

    def __init__(self, passes: list[Callable[[Graph], None]]) -> None:
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        """Run each of them."""
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any:
        """Return a key of the compiler's cache; None where one of them has none."""
        keys = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.passes]
        return None if None in keys else tuple(keys)


class FusingPass(CustomGraphPass):
    """The pass, with the number of all_reduces that it has seen, and of chains replaced."""

    def __init__(self) -> None:
        self.num_fused = self.num_sums = 0

    def __call__(self, graph: Graph) -> None:
        """Replace each chain of a graph."""
        sums = [*_sums_in(graph)]
        if not sums:
            return
        num_fused = sum(_fuse(graph, one) for one in sums)
        self.num_fused += num_fused
        self.num_sums += len(sums)
        if env.LOG.get() == "plan" and graph_names.named(sums[0].group).rank == 0:
            text = f"torch.compile: a norm follows {num_fused} of {len(sums)} all_reduces, fused"
            say(text, logging.DEBUG)

    def uuid(self) -> Any:
        """Return a key of the compiler's cache: programs, and torch's groups that are fastcoll's.

        A graph names torch's groups, and the same name may be a group of Gloo elsewhere.
        """
        names = dist.distributed_c10d._world.pg_names.values()
        groups = (name for name in names if graph_names.name_at_torch(name) is not None)
        return custom_graph_pass.get_hash_for_files(_FILES), tuple(sorted(groups))


FUSING = FusingPass()
_FILES = (__file__, norm_chains.__file__, row_ops.__file__)


# ---- the sums of a graph -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sum:
    """An all_reduce of a graph."""

    call: fx.Node  # the node that begins it
    plain: fx.Node  # its result
    place: fx.Node  # the node at which a rank waits for the others
    op: int  # by fastcoll's code
    group: str  # by the operators' name
    effects: bool  # whether the graph keeps its order by a token


def _sums_in(graph: Graph) -> Iterator[_Sum]:
    for node in graph.nodes:
        found = None
        if node.target is _EFFECTS:
            found = _sum_by_operator(node)
        elif node.target is _TORCHS.all_reduce.default:
            found = _sum_by_torch(node)
        if found is not None:
            yield found


def _sum_by_operator(node: fx.Node) -> _Sum | None:
    terms: tuple[Any, ...] = node.args[2:]
    if node.args[1] is not _REDUCE or len(terms) != 3 or terms[1] not in _OPS.values():
        return None
    if any(user.target is not operator.getitem for user in node.users):
        return None
    results = [user for user in node.users if user.args[1] == 1]
    if len(results) != 1:
        return None
    return _Sum(node, results[0], node, terms[1], terms[2], effects=True)


def _sum_by_torch(node: fx.Node) -> _Sum | None:
    """Return torch's own all_reduce, if it is fastcoll's and nothing else happens until its end."""
    [*waits] = node.users
    if len(waits) != 1 or waits[0].target is not _TORCHS.wait_tensor.default:
        return None
    if len(node.args) != 3:
        return None
    op, group = _OPS.get(str(node.args[1])), graph_names.name_at_torch(node.args[2])
    if op is None or group is None or not all(map(_is_local, _between(node, waits[0]))):
        return None
    return _Sum(node, waits[0], waits[0], op, group, effects=False)


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _is_local(node: fx.Node) -> bool:
    """Return whether a node computes on this rank alone, draws no number and writes no tensor."""
    if node.op in ("placeholder", "get_attr") or node.target is operator.getitem:
        return True
    target = node.target
    is_random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return getattr(target, "namespace", "") in _LOCAL and not is_random and not _writes(node)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


# ---- the replacement -----------------------------------------------------------------------------


def _fuse(graph: Graph, one: _Sum) -> bool:
    """Replace a sum with what follows it; return whether that is an addition and a norm."""
    chain = norm_chains.find_chain(one.plain)
    # The operator reads the residual and the weight earlier than the program did.
    if chain is None or any(map(_writes, _between(one.place, chain.norm.out))):
        return False
    late = _computed_behind(one.place, chain.read)
    if not all(map(_is_local, late)):
        return False
    for node in sorted(late):
        one.place.prepend(node)
    pair = _put_operator(graph, one, chain)
    with graph.inserting_after(pair):
        normed = graph.call_function(operator.getitem, (pair, 0))
        total = graph.call_function(operator.getitem, (pair, 1))
    for old, new in ((chain.norm.out, normed), (chain.summed, total)):
        if old is not None:
            new.meta.update(old.meta)
            old.replace_all_uses_with(new)
    # By hand: the compiler keeps calls of collectives, also of those that nobody reads.
    for old in reversed((one.call, one.plain, *chain.steps)):
        if not old.users:
            graph.erase_node(old)
    return True


def _computed_behind(place: fx.Node, tensors: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes from a place on that tensors depend on, itself included.

    The compiler moves a computation to its first reader, so the usual residual can be behind a sum.
    """
    found: set[fx.Node] = set()
    open_nodes = [*tensors]
    while open_nodes:
        node = open_nodes.pop()
        if node not in found and not node < place:
            found.add(node)
            open_nodes.extend(node.all_input_nodes)
    return found


def _put_operator(graph: Graph, one: _Sum, chain: norm_chains.Chain) -> fx.Node:
    """Put the operator in place of the sum; return the node of its pair of results."""
    norm = chain.norm
    x = one.call.args[2 if one.effects else 0]
    numbers = (norm.eps, norm.offset, norm.rounds_first, norm.wide_sum, one.op, one.group)
    terms = (x, chain.residual, norm.weight, *numbers)
    values = [*chain.results]
    with graph.inserting_before(one.place):
        if not one.effects:
            pair = graph.call_function(_FUSED, terms)
        else:
            made = graph.call_function(_EFFECTS, (one.call.args[0], _FUSED, *terms))
            made.meta["val"] = (one.call.meta["val"][0], values)
            pair = graph.call_function(operator.getitem, (made, 1))
            for token in [user for user in one.call.users if user is not one.plain]:
                token.replace_input_with(one.call, made)
    pair.meta["val"] = values
    return pair
