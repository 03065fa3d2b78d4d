# SPDX-License-Identifier: Apache-2.0
"""The numbers of a report on a topology. Decides which calls are priced; knows no page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastcoll.choose.table import SCHEMA_NAME as TABLE_FORM
from fastcoll.choose.table import validate as validate_table
from fastcoll.cli.console import quiet_progress
from fastcoll.cli.explain import libraries
from fastcoll.cli.plan import plan_json
from fastcoll.documents import read_json
from fastcoll.errors import UsageError
from fastcoll.measure.results import SCHEMA_NAME as RESULT_FORM
from fastcoll.measure.results import validate
from fastcoll_model.errors import ModelError
from fastcoll_model.explain import Comparison, compare
from fastcoll_model.libraries import Offer
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.published import Row, held_out_rows, unfitted_rows
from fastcoll_model.schedule import VERBS
from fastcoll_model.strategies import Planner, Sentence, Workload

_SIZES = tuple(1 << shift for shift in range(10, 31, 4))  # 1 KiB to 1 GiB
_SHOWN = (16 << 10, 64 << 20)  # one where latency counts, one where bandwidth does
Json = dict[str, Any]


@dataclass(frozen=True)
class Findings:
    """The numbers of a report."""

    cluster: Cluster
    curve: list[Comparison]  # all_reduce in any order of summation, at every size of the curves
    tables: list[Comparison]  # every verb in rank order, at two sizes
    others: list[list[Offer]]  # for each of these, the times that libraries can reach
    workload: Workload
    plan: list[Sentence]
    no_plan: str  # why there is no plan, or ""
    fitted: list[Row]  # published times of this machine that a fitted line predicts
    unfitted: list[Row]  # published times of this machine that its constants predict
    measured: list[Json]  # results of `fastcoll regret`, tables of `fastcoll tune`

    def as_json(self) -> Json:
        cluster = self.cluster
        return {
            "topology": cluster.machine.name,
            "network": cluster.network.name if cluster.network else None,
            "num_ranks": cluster.num_ranks,
            "all_reduce_fast": [asdict(one) for one in self.curve],
            "same_bits": [
                {**asdict(one), "libraries": [asdict(offer) for offer in others]}
                for one, others in zip(self.tables, self.others, strict=True)
            ],
            "workload": asdict(self.workload),
            "plan": self.no_plan or plan_json(self.plan),
            "published": {
                "fitted": [{**asdict(row), "error": row.error} for row in self.fitted],
                "unfitted": [{**asdict(row), "error": row.error} for row in self.unfitted],
            },
            "measured": self.measured,
        }


def find_all(
    cluster: Cluster, ranks: int, workload: Workload, measured: Sequence[Path]
) -> Findings:
    """Simulate, plan, and read the measurements.

    Args:
        cluster: The machines.
        ranks: Number of ranks that take part: the first ones.
        workload: The workload to plan.
        measured: Files of `fastcoll regret` and `fastcoll tune`.

    Raises:
        UsageError: The ranks don't fit, or a file is none of those.
    """
    documents = [read_measured(path) for path in measured]
    price = partial(compare, cluster=cluster, world_size=ranks)
    todo = [(verb, size) for verb in VERBS for size in _SHOWN]
    with quiet_progress("simulating", len(_SIZES) + len(todo) + 1) as show:

        def priced(verb: str, size: int, **options: Any) -> Comparison:
            found = price(verb, size_bytes=size, **options)
            show(advance=1)
            return found

        curve = [priced("all_reduce", size, numerics="fast") for size in _SIZES]
        tables = [priced(verb, size) for verb, size in todo]
        others = [libraries(one, cluster, "same_bits") for one in tables]
        plan, no_plan = plan_or_reason(cluster, ranks, workload)
    name = cluster.machine.name
    published = held_out_rows(name), unfitted_rows(name)
    priced_all = curve, tables, others
    return Findings(cluster, *priced_all, workload, plan, no_plan, *published, documents)


def plan_or_reason(cluster: Cluster, ranks: int, workload: Workload) -> tuple[list[Sentence], str]:
    """Return all strategies, or none and why not."""
    if ranks % cluster.local_size:
        return [], "a plan needs whole nodes"
    try:
        return Planner(workload, cluster).all(), ""
    except ModelError as error:
        return [], str(error)


def read_measured(path: Path) -> Json:
    """Read a result of `fastcoll regret` or a table of `fastcoll tune`.

    Raises:
        UsageError: The file is neither.
    """
    import jsonschema  # here: machines with GPUs may have none, and need the other commands

    document: Json = read_json(path)
    form = document.get("schema") if isinstance(document, dict) else None
    try:
        if form == TABLE_FORM:
            validate_table(document)
        elif form == RESULT_FORM and document.get("kind") == "regret":
            validate(document)
        else:
            raise UsageError("written by neither fastcoll regret nor fastcoll tune")
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except jsonschema.ValidationError as error:
        raise UsageError(f"{path}: {error.json_path[1:]}: {error.message[:200]}") from None
    return document
