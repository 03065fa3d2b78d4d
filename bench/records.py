# SPDX-License-Identifier: Apache-2.0
"""Result files of the programs here and of long test runs, checked against kinds.schema.json."""

from functools import partial
from pathlib import Path

from fastcoll.measure import results

KINDS = Path(__file__).with_name("kinds.schema.json")
validate = partial(results.validate, kinds=KINDS)
write = partial(results.write, kinds=KINDS)
