"""treeconv checks that tree speculative sampling is lossless at every temperature.

Importing this package loads neither torch nor hypothesis.
"""

from treeconv import oracle
from treeconv._verify import verify, verify_probs
from treeconv.case import Request, VerifyCase
from treeconv.commit import Commit, commit
from treeconv.convert import (
    EagleDraft,
    from_eagle,
    from_tree_mask,
    to_draft_trees,
    to_eagle,
    to_verify_input,
    tree_mask,
)
from treeconv.draft import build_draft_tree
from treeconv.errors import (
    BackendUnavailable,
    CorpusError,
    InvalidArgument,
    InvalidTree,
    LawBroken,
    TreeconvError,
)
from treeconv.sampling import draw_coins
from treeconv.tree import Coins, DraftTree, RowStatus, TreeMaskMode, VerifyInput, VerifyOutput

__all__ = [
    "BackendUnavailable",
    "Coins",
    "Commit",
    "CorpusError",
    "DraftTree",
    "EagleDraft",
    "InvalidArgument",
    "InvalidTree",
    "LawBroken",
    "Request",
    "RowStatus",
    "TreeMaskMode",
    "TreeconvError",
    "VerifyCase",
    "VerifyInput",
    "VerifyOutput",
    "build_draft_tree",
    "commit",
    "draw_coins",
    "from_eagle",
    "from_tree_mask",
    "oracle",
    "to_draft_trees",
    "to_eagle",
    "to_verify_input",
    "tree_mask",
    "verify",
    "verify_probs",
]

__version__ = "0.1.0"
