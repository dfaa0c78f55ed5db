"""Write SGLang's published test vectors into ``corpus/seeds/``: the values, and where they were printed.

``python ci/write_vectors.py``: files that are there already stay untouched (same content, same name).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from treeconv.corpus import CorpusEntry, EagleCase, Expected, RawCase, save_entry

SAMPLING = (
    "sgl-project/sglang sgl-kernel/tests/speculative/test_speculative_sampling.py at"
    " 120affb9613cc3f5bcd055ec09c7621d3ced0ebc"
)
BUILDING = (
    "sgl-project/sglang test/registered/spec/utils/test_build_eagle_tree.py at"
    " 05f70dc503324fcbc7cb999e78ab990f27a9597e"
)

# Request 1's root has children in slots 4, then 1: no tree in node order, hence a RawCase.
CANDIDATES = ((0, 1, 2, 3, 4, 5), (7, 8, 9, 10, 11, 12))
NEXT_TOKEN = ((1, 2, -1, 4, 5, -1), (4, 2, 3, -1, 5, -1))
NEXT_SIBLING = ((-1, 3, -1, -1, -1, -1), (-1, -1, -1, -1, 1, -1))
VOCAB_SIZE = 20
PEAKS = ((0, 0, 3), (0, 3, 4), (0, 4, 5), (1, 0, 11), (1, 4, 12))  # (request, slot, token)
OTHER_PEAK = 18  # in every row without one of those
TEMPERATURE = 0.01

LOSSLESS = Expected(
    accept_index=((0, 3, 4, 5), (6, 10, 11, -1)),
    accept_token_num=(3, 2),
    predicts=(3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18),
    tokens=((3, 4, 5, 18), (11, 12, 18)),
)
# With both thresholds 0 whatever comes first is accepted, tokens of zero mass included.
LOSSY = Expected(
    accept_index=((0, 1, 2, -1), (6, 10, 11, -1)),
    accept_token_num=(2, 2),
    predicts=(1, 2, 18, -1, -1, -1, 11, -1, -1, -1, 12, 18),
    tokens=((1, 2, 18), (11, 12, 18)),
)


def sampling_entries() -> list[CorpusEntry]:
    """2 requests x 6 nodes at both threshold settings, under several coins.

    The source draws coins at random. Rows are one-hot at this temperature, so any coins in [0, 1) will do:
    all 0, all just under 1, and one random draw.
    """
    rows = np.ones((2, 6, VOCAB_SIZE), np.float32)
    for request, slot, token in PEAKS:
        rows[request, slot, token] = 10
    rows[rows.max(-1) < 10, OTHER_PEAK] = 10
    rng = np.random.default_rng(0)
    coins = {
        "coins all 0": (np.zeros((2, 6), np.float32), np.zeros(2, np.float32)),
        "coins all 1 - 2^-24": (
            np.full((2, 6), 1 - 2.0**-24, np.float32),
            np.full(2, 1 - 2.0**-24, np.float32),
        ),
        "coins random": (rng.random((2, 6), np.float32), rng.random(2, np.float32)),
    }
    entries = []
    for name, (accept, final) in coins.items():
        case = RawCase(
            candidates=CANDIDATES,
            retrieve_next_token=NEXT_TOKEN,
            retrieve_next_sibling=NEXT_SIBLING,
            rows=rows,
            temperature=(TEMPERATURE, TEMPERATURE),
            accept=accept,
            final=final,
            depth_cap=4,
        )
        for lossless, expected in ((True, LOSSLESS), (False, LOSSY)):
            threshold = 1.0 if lossless else 0.0
            entries.append(
                CorpusEntry(
                    law="oracle-agreement",
                    case=case,
                    note=f"SGLang's kernel test, thresholds ({threshold:.0f}, {threshold:.0f}), {name}",
                    source=SAMPLING,
                    lossless=lossless,
                    thresholds=(threshold, threshold),
                    expected=expected,
                )
            )
    return entries


def building_entry() -> CorpusEntry:
    """2 trees x 8 nodes: EAGLE's draft tensors (topk 4, 4 steps) and the layout printed for them."""
    case = EagleCase(
        parent_list=(
            (-1, 0, 1, 2, 3, 4, 8, 9, 10, 20, 24, 21, 28),
            (-1, 0, 1, 2, 3, 4, 5, 6, 7, 24, 28, 20, 21),
        ),
        top_scores_index=((0, 1, 4, 8, 20, 24, 36), (0, 4, 5, 6, 7, 24, 36)),
        draft_tokens=(
            (29896, 29906, 29889, 29974, 29946, 29896, 29946),
            (13, 22550, 4136, 16492, 8439, 29871, 29941),
        ),
        root_token_ids=(29974, 13),
        topk=4,
        prefix_lens=(5, 10),
        candidates=(
            (29974, 29896, 29906, 29889, 29974, 29946, 29896, 29946),
            (13, 13, 22550, 4136, 16492, 8439, 29871, 29941),
        ),
        retrieve_index=(tuple(range(8)), tuple(range(8, 16))),
        retrieve_next_token=((1, 3, 4, 5, 6, 7, -1, -1), (1, 2, -1, 6, -1, -1, 7, -1)),
        retrieve_next_sibling=((-1, 2, -1, -1, -1, -1, -1, -1), (-1, -1, 3, 4, 5, -1, -1, -1)),
        positions=((5, 6, 6, 7, 7, 8, 8, 9), (10, 11, 12, 12, 12, 12, 13, 14)),
    )
    return CorpusEntry("round-trip", case, note="SGLang's printed 8-node build example", source=BUILDING)


def main() -> None:
    """Write them all and print the paths."""
    parser = argparse.ArgumentParser(description="Write SGLang's published vectors into corpus/seeds.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "corpus" / "seeds")
    out = parser.parse_args().out
    for entry in (*sampling_entries(), building_entry()):
        print(save_entry(out, entry))


if __name__ == "__main__":
    main()
