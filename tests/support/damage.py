# SPDX-License-Identifier: Apache-2.0
"""Documents with one fault at any depth, for readers of JSON."""

import copy
from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def damaged(data: st.DataObject, document: Any) -> Any:
    """Return a copy in which one value, wherever it stands, is another one or gone."""
    changed = copy.deepcopy(document)
    place, key = changed, data.draw(st.sampled_from(sorted(changed)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(keys))
    if data.draw(st.booleans()):
        place[key] = data.draw(JSON)
    else:
        del place[key]
    return changed
