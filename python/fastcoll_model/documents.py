# SPDX-License-Identifier: Apache-2.0
"""JSON files that people write: read, and held against a schema.

Decides the text of a refusal: the file, the path in it, the fault, and the remedy.
"""

import json
from pathlib import Path
from typing import Any

from fastcoll_model.errors import ModelError


def read_json(path: Path) -> Any:
    """Return the content of a file.

    Raises:
        ModelError: It can't be read, or is no JSON; NaN and Infinity are none.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: can't be read as JSON: {error}") from None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def check(document: object, schema: dict[str, Any], path: str) -> None:
    """Hold a document against a schema, whose descriptions explain its entries.

    Raises:
        ModelError: It does not fit.
    """
    import jsonschema  # here: most of the model does without

    for fault in jsonschema.Draft202012Validator(schema).iter_errors(document):
        where = "/".join(map(str, fault.absolute_path)) or "the top"
        fix = fault.schema.get("description") if isinstance(fault.schema, dict) else None
        text = f"{path}: at {where}: {fault.message[:200]}"
        raise ModelError(f"{text}: {fix}" if fix else text)
