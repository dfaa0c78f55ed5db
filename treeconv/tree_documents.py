"""Draft trees as people write them: the JSON that ``treeconv convert`` reads."""

from __future__ import annotations

import json
from typing import Any

from treeconv.errors import InvalidArgument
from treeconv.tree import DraftTree

__all__ = ["parse_trees"]


def parse_trees(raw: bytes | str, where: str) -> tuple[list[DraftTree], list[int] | None, int | None]:
    """Trees, and what stands beside them.

    Args:
        raw: JSON, as text or UTF-8: ``{"parents": [-1, 0, 0], "token_ids": [9, 5, 7]}``, a list of those, or
            ``{"trees": [...]}``; ``prefix_lens`` and ``num_draft_tokens`` may stand beside.

        where: what messages call it.

    Returns:
        The trees, ``prefix_lens`` and ``num_draft_tokens``; None where they are not given. Whether those two
        fit the trees is the converter's to say.

    Raises:
        InvalidArgument: not UTF-8, not JSON, or not of that form; the message says where.
    """
    try:
        document = json.loads(raw if isinstance(raw, str) else raw.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}: no JSON: {error}") from None
    beside: dict[str, Any] = {"prefix_lens": None, "num_draft_tokens": None}
    if isinstance(document, dict):
        known = {"trees", "parents", "token_ids", *beside}
        if unknown := sorted(set(document) - known):
            raise InvalidArgument(
                f"{where}: unknown key {unknown[0]!r}, but must be one of {', '.join(sorted(known))}"
            )
        beside |= {key: document.pop(key) for key in beside if key in document}
        items = document.pop("trees") if set(document) == {"trees"} else [document]
    else:
        items = document
    if not isinstance(beside["prefix_lens"], (list, type(None))):
        raise InvalidArgument(
            f"{where}: prefix_lens={beside['prefix_lens']!r}, but must be a list of integers"
        )
    if not isinstance(items, list) or not items:
        raise InvalidArgument(f"{where}: must hold a tree, or a list of at least one")
    trees = []
    for index, item in enumerate(items):
        if not isinstance(item, dict) or set(item) != {"parents", "token_ids"}:
            keys = sorted(item) if isinstance(item, dict) else type(item).__name__
            raise InvalidArgument(
                f"{where}: tree {index}: must hold parents and token_ids alone, but holds {keys}"
            )
        if not all(isinstance(values, list) for values in item.values()):
            raise InvalidArgument(f"{where}: tree {index}: parents and token_ids must be lists of integers")
        try:
            trees.append(DraftTree(tuple(item["parents"]), tuple(item["token_ids"])))
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: tree {index}: {error}") from None
    return trees, beside["prefix_lens"], beside["num_draft_tokens"]
