# SPDX-License-Identifier: Apache-2.0
"""From a request to a plan: a pure function of facts that all ranks know to be equal.

`planner` builds the request and keeps plans. `select` chooses. `algorithms` admit and estimate.
The measurements are in `table` and `tuning`. `schedules` runs schedules of the model.
"""

from fastcoll.choose.select import Candidate, Choice, select
from fastcoll.choose.table import TuningTable, read_table

__all__ = ["Candidate", "Choice", "TuningTable", "read_table", "select"]
