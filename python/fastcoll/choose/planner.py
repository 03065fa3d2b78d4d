# SPDX-License-Identifier: Apache-2.0
"""The plans of one group's calls.

Decides the request to the selection, and keeps its choices. The only module that sees both
selection and algorithms. Must not know how a plan is carried out.
"""

import logging
from typing import Any, Protocol

from fastcoll import env
from fastcoll.calls.lists import ListCall, ListOperands
from fastcoll.calls.parts import PartsCall, PartsOperands
from fastcoll.calls.settings import Settings
from fastcoll.calls.tensors import Call, Operands
from fastcoll.choose import Choice, algorithms, select
from fastcoll.choose.tuning import Tuning
from fastcoll.errors import UsageError
from fastcoll.machine import cpu
from fastcoll.native import _C
from fastcoll.text import LOGGER, say
from fastcoll.types import REDUCTIONS, Request, SingleCopy

_MOST_PLANS = 4096  # a program of ever new shapes must not grow without end


class GpuTerms(Protocol):
    """The terms of a plan where the tensors are on GPUs; see `fastcoll.gpu.terms.Terms`."""

    @property
    def no_table(self) -> str: ...
    def of_request(self) -> dict[str, Any]: ...


class Planner:
    """The plans of a group's calls; those of the usual calls go into its C++ table, too."""

    def __init__(
        self,
        group: _C.Group,
        settings: Settings,
        tuning: Tuning,
        num_cpus: int,
        single_copy: SingleCopy,
    ) -> None:
        self._group = group
        self._settings = settings
        self._num_cpus = num_cpus
        self._single_copy = single_copy
        self._cpu_vendor = cpu.vendor()
        if env.LOG.get() == "plan":
            LOGGER.setLevel(logging.DEBUG)
        self._plans: dict[Request, tuple[_C.Plan, tuple[int, int]]] = {}
        self.tuning = tuning

    def plan(
        self,
        call: Call | PartsCall | ListCall,
        operands: Operands | PartsOperands | ListOperands,
        terms: GpuTerms | None = None,
    ) -> _C.Plan:
        """Return the plan of a call whose operands were checked; `terms` are a GPU call's.

        Raises:
            UsageError: The algorithm or the numerics that it asks for are unknown.
            UnsupportedError: That algorithm does not admit it.
        """
        numerics = self._settings.numerics_of(call.numerics, on_gpus=terms is not None)
        if not isinstance(call.algorithm, str):
            raise UsageError(f"algorithm must be a name, not {call.algorithm!r}")
        request = Request(
            verb=call.verb,
            dtype=operands.dtype,
            op=operands.op,
            numel=operands.numel,
            root=operands.root,
            world_size=self._group.world_size,
            algorithm=call.algorithm,
            numerics=numerics if call.verb in REDUCTIONS else "same_bits",
            num_cpus=self._num_cpus,
            splits=operands.splits,
            single_copy=self._single_copy,
            cpu_vendor=self._cpu_vendor,
            **(terms.of_request() if terms else {}),
        )
        known = self._plans.get(request)
        if known is None:
            chosen = self.choose(request, terms)
            if self._group.rank == 0 and LOGGER.isEnabledFor(logging.DEBUG):
                say(f'"{self._group.name}" {chosen.plan.describe()}', logging.DEBUG)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            known = self._plans[request] = _C.Plan(*chosen.plan.args()), chosen.numels
        plan, numels = known
        fast = None if call.numerics is None else call.numerics == "fast"
        asks_algorithm = call.algorithm != "auto"
        if terms is not None:
            self._group.cache_gpu_plan(plan, asks_algorithm, fast)
        elif not request.is_scheduled:  # the table knows none of those
            self._group.cache_plan(plan, asks_algorithm, fast, numels)
        return plan

    def choose(self, request: Request, terms: GpuTerms | None = None) -> Choice:
        """Choose the plan of a request; a pure function of it and of the ranks' agreed terms.

        `terms` are a GPU call's.

        Raises:
            UsageError: The algorithm that it asks for is unknown.
            UnsupportedError: That algorithm does not admit it.
        """
        if not request.is_scheduled:
            table = None if terms is not None and terms.no_table else self.tuning.table
            return select(request, algorithms.ALL, table)
        from fastcoll.choose import schedules  # the model, which few programs need

        plan, schedule = schedules.plan_of(request)
        words = schedule.programs[self._group.rank]
        self._group.add_program(plan.splits, schedule.blocks, words)
        return Choice(plan, {}, (request.numel, request.numel))

    def known(self) -> list[_C.Plan]:
        """Return the plans so far, the oldest first."""
        return [plan for plan, _ in self._plans.values()]
