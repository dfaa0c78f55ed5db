"""Every id of the known-faults list is tested here or waits with a reason; none is both, none is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_walk_table import WALKS

#: the ids of shared/known-faults.md, in its order
_LIST = """
B01 B02 B04 B05
B06 B07 B08 B09 B10 B11 B12 B13 B14
B15 B16 B17 B18 B19 B20 B21 B22 B23
B24 B25 B27 B28
B29 B30 B31 B33 B34 B35
B37 B38 B39 B40 B41
B42 B43 B44 B45
B48 B49 B50
B52 B53 B54 B56 B57 B58 B59
B60 B61 B62 B63
B64 B65 B66 B67 B68 B70 B71 B72 B73
B74 B75
B76 B77 B78 B79 B81 B82 B83
B84 B85 B86 B87
X1 X2 X3 X4 X5 X6
"""
KNOWN = _LIST.split()

#: id -> the stage it waits for
WAITING = {"B37": "needs a builder over sharded vocabularies"}


def covered_ids() -> set[str]:
    """Ids in the walk table and in test names here (``test_b29_b30_...``)."""
    ids = {word for case in WALKS for word in case.id.split() if re.fullmatch(r"[BX]\d+", word)}
    for file in Path(__file__).parent.glob("test_*.py"):
        for name in re.findall(r"^def test_((?:[bx]\d+_)+)", file.read_text(), re.MULTILINE):
            ids |= {word.upper() for word in name.split("_") if word}
    return ids


@pytest.mark.parametrize("fault", KNOWN)
def test_is_tested_or_waits(fault):
    assert (fault in covered_ids()) != (fault in WAITING)


def test_no_id_is_unknown():
    assert set() == (covered_ids() | set(WAITING)) - set(KNOWN)


def test_no_id_is_listed_twice():
    assert len(KNOWN) == len(set(KNOWN))
