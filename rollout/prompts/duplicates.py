"""Drops rows that say what an earlier row says: data sets on the hub repeat themselves up to a hundred times."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from rollout.prompts.columns import MISSING, find

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.prompts.readers import Row, SourceSpec


def drop_duplicates(rows: Sequence[Row], spec: SourceSpec) -> list[Row]:
    """The first row of each prompt with its answer and its reward, in order. Other columns are not compared.

    Compared as they are in the data set, before any is tokenized. Rows without a prompt stay, for `render` to refuse.
    """
    seen: set[bytes] = set()
    kept: list[Row] = []
    for row in rows:
        key = _key(row, spec)
        if key is None or key not in seen:
            kept.append(row)
        if key is not None:
            seen.add(key)
    return kept


def _key(row: Row, spec: SourceSpec) -> bytes | None:
    names = (spec.prompt_column, spec.answer_column, *([spec.reward_column] if spec.reward_column else []))
    values = [find(row.columns, name) for name in names]
    if values[0] is MISSING:
        return None
    # The type goes in with the value, or a missing answer and the text "null" would be the same.
    told = [["missing"] if value is MISSING else [type(value).__name__, value] for value in values]
    return hashlib.blake2b(json.dumps(told, sort_keys=True, default=repr).encode(), digest_size=16).digest()
