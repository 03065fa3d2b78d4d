# SPDX-License-Identifier: Apache-2.0
"""JSON files that people write or pass on: read, and held against a schema.

Decides how a refusal is worded: the file, the path in it, the fault and the text to write instead.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fastcoll.errors import UsageError


def read_json(path: Path) -> Any:
    """Return the contents of a file.

    Raises:
        UsageError: It can't be read, or is no JSON; NaN and Infinity are none.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise UsageError(f"{path}: can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: can't be read as JSON: {error}") from None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def worst_fault(document: Any, schema_path: Path) -> Exception | None:
    """Return the jsonschema.ValidationError that says best why a document is not valid.

    The schema is read, and itself checked, once.
    """
    return _finder(schema_path)(document)


@cache
def _finder(schema_path: Path) -> Callable[[Any], Exception | None]:
    import jsonschema  # here: fastcoll itself needs torch and numpy alone

    schema = json.loads(schema_path.read_text())
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    faults = validator(schema).iter_errors
    return lambda document: jsonschema.exceptions.best_match(faults(document))
