"""Deliberately wrong converters, masks and tree checks: each stands in for what the laws about trees call."""

from dataclasses import replace
from itertools import pairwise

import torch
from registry import planting

from treeconv import convert
from treeconv.commit import commit
from treeconv.errors import InvalidTree
from treeconv.tree import DraftTree, TreeMaskMode

FAULTS, fault = planting()


class Layout:
    patches = "treeconv.tree_laws.to_verify_input"

    def __call__(self, trees, num_draft_tokens, prefix_lens):
        return self.changed(convert.to_verify_input(trees, num_draft_tokens, prefix_lens), list(trees))


class Mask:
    """``changed`` edits the square mask; both of the other modes are made of it."""

    patches = "treeconv.tree_laws.tree_mask"

    def __call__(self, batch, mode):
        square = convert.tree_mask(batch, TreeMaskMode.QLEN_ONLY)
        if mode is TreeMaskMode.QLEN_ONLY:
            return self.changed(square.clone(), batch)
        return convert.tree_mask(batch, mode)

    def depths(self, batch):
        return batch.positions - batch.prefix_lens[:, None]


class Made:
    """``DraftTree``, checking too little."""

    patches = "treeconv.tree_laws.DraftTree"

    def __call__(self, parents, token_ids):
        try:
            return DraftTree(parents, token_ids)
        except InvalidTree as error:
            return self.excused(str(error), parents, token_ids)


def refuse(text):
    raise InvalidTree(text)


# --- K6 -----------------------------------------------------------------------------------------------


@fault("K6", "round-trip")
class SiblingsLinkedBackwards(Layout):
    def changed(self, batch, trees):
        first, sibling = batch.retrieve_next_token.clone(), batch.retrieve_next_sibling.clone()
        for request, tree in enumerate(trees):
            for node, kids in enumerate(tree.children):
                for kid, following in pairwise([*kids[::-1], -1]):
                    sibling[request, kid] = following
                if kids:
                    first[request, node] = kids[-1]
        return replace(batch, retrieve_next_token=first, retrieve_next_sibling=sibling)


@fault("K6", "round-trip")
class FourthSiblingUnlinked(Layout):
    def changed(self, batch, trees):
        sibling = batch.retrieve_next_sibling.clone()
        for request, tree in enumerate(trees):
            for kids in tree.children:
                if len(kids) > 3:
                    sibling[request, kids[2]] = -1
        return replace(batch, retrieve_next_sibling=sibling)


@fault("K6", "round-trip")
class TokenZeroIsPadding:
    patches = "treeconv.tree_laws.to_draft_trees"

    def __call__(self, batch):
        trees = []
        for tree in convert.to_draft_trees(batch):
            size = len(tree)
            while size > 1 and tree.token_ids[size - 1] == 0:
                size -= 1
            trees.append(DraftTree(tree.parents[:size], tree.token_ids[:size]))
        return trees


@fault("K6", "round-trip")
class EagleParentsCountTheRootTwice:
    patches = "treeconv.tree_laws.from_eagle"

    def __call__(self, draft):
        shifted = []
        for tree in convert.from_eagle(draft):
            parents = tuple(
                max(0, parent - 1) if node > 1 else parent for node, parent in enumerate(tree.parents)
            )
            try:
                shifted.append(DraftTree(parents, tree.token_ids))
            except InvalidTree:
                shifted.append(tree)
        return shifted


@fault("K6", "round-trip")
class MaskReadsTheFirstAncestor:
    """The parent is taken to be the first ancestor behind the root, not the last."""

    patches = "treeconv.tree_laws.from_tree_mask"

    def __call__(self, mask, candidates, mode, prefix_lens):
        wrong = []
        for tree in convert.from_tree_mask(mask, candidates, mode, prefix_lens):
            parents = [-1, *(tree.path(node)[:-1][:2][-1] for node in range(1, len(tree)))]
            try:
                wrong.append(DraftTree(tuple(parents), tree.token_ids))
            except InvalidTree:
                wrong.append(tree)
        return wrong


@fault("K6", "malformed-refused")
class DuplicateSiblingsTaken(Made):  # B13
    def excused(self, error, parents, token_ids):
        return "a tree" if "token" in error and len(set(token_ids)) < len(token_ids) else refuse(error)


@fault("K6", "malformed-refused")
class ParentBehindItsChildTaken(Made):  # B38
    def excused(self, error, parents, token_ids):
        ahead = any(parent > node for node, parent in enumerate(parents) if parent < len(parents))
        return "a tree" if ahead else refuse(error)


@fault("K6", "malformed-refused")
class NodeUnnamed(Made):
    def excused(self, error, parents, token_ids):
        return refuse("the tree is malformed")


# --- K7 -----------------------------------------------------------------------------------------------


@fault("K7", "mask-and-positions")
class PositionIsTheFlatIndex(Layout):  # B42
    def changed(self, batch, trees):
        flat = torch.arange(batch.num_draft_tokens)[None] + batch.prefix_lens[:, None]
        return replace(batch, positions=flat)


@fault("K7", "mask-and-positions")
class PrefixLostBehindTheFirstRequest(Layout):
    def changed(self, batch, trees):
        positions = batch.positions.clone()
        positions[1:] -= batch.prefix_lens[1:, None]
        return replace(batch, positions=positions)


@fault("K7", "mask-and-positions")
class MaskIsLowerTriangular(Mask):  # B44
    def changed(self, square, batch):
        return square | torch.ones_like(square).tril() & (self.depths(batch) > 0)[..., None]


@fault("K7", "mask-and-positions")
class OneMaskServesTheBatch(Mask):  # B45
    def changed(self, square, batch):
        return square[:1].expand_as(square).contiguous()


@fault("K7", "mask-and-positions", "round-trip")
class RootUnseenFromDepthThree(Mask):
    def changed(self, square, batch):
        square[..., 0] &= self.depths(batch) < 3
        return square


@fault("K7", "mask-and-positions")
class SiblingSeen(Mask):
    def changed(self, square, batch):
        for request, siblings in enumerate(batch.retrieve_next_sibling.tolist()):
            for node, following in enumerate(siblings):
                if following != -1:
                    square[request, following, node] = True
        return square


@fault("K7", "mask-and-positions")
class PrefixShortByThePadding(Mask):  # B43
    def __call__(self, batch, mode):
        full = convert.tree_mask(batch, mode)
        if mode is TreeMaskMode.FULL_MASK and batch.prefix_lens[0] > 0:
            full = full.clone()
            full[0] = not bool((batch.retrieve_next_token[0, -1:] == -1).all())
        return full


# --- K9, stop tokens ----------------------------------------------------------------------------------


class Stopping:
    """``commit``; ``changed`` edits what it made of an output and stop tokens per request."""

    patches = "treeconv.tree_laws.commit"

    def __call__(self, output, stops):
        return self.changed(commit(output, stops), output, stops)


@fault("K9", "stop-tokens")
class KeptBehindTheStop(Stopping):  # B84, transformers#47912
    def changed(self, made, output, stops):
        return commit(output)


@fault("K9", "stop-tokens")
class CountedPastTheStop(Stopping):  # B85, vllm#56101
    def changed(self, made, output, stops):
        return replace(made, num_accepted=output.accept_token_num)


@fault("K9", "stop-tokens")
class RefusedStopEnds(Stopping):  # B87, openvino.genai PR#3293
    def changed(self, made, output, stops):
        predicts = output.predicts.view(len(stops), -1).tolist()
        seen = [bool({*row} & {*ending}) for row, ending in zip(predicts, stops, strict=True)]
        return replace(made, is_finished=torch.tensor(seen))


@fault("K9", "stop-tokens")
class StopTokenItselfDropped(Stopping):
    def changed(self, made, output, stops):
        return replace(made, num_emitted=made.num_emitted - made.is_finished.int())


@fault("K9", "stop-tokens")
class StopsOfRequestZero(Stopping):
    def changed(self, made, output, stops):
        return commit(output, [stops[0]] * len(stops))


@fault("K9", "stop-tokens")
class BonusIsNoStop(Stopping):
    def changed(self, made, output, stops):
        drafts = replace(output, accept_token_num=output.accept_token_num - 1)
        return replace(made, is_finished=commit(drafts, stops).is_finished)


@fault("K9", "stop-tokens")
class SlotsKeptBehindTheStop(Stopping):
    def changed(self, made, output, stops):
        return replace(made, accept_index=output.accept_index)


@fault("K9", "stop-tokens")
class StopsAmongTheFirstSixOnly(Stopping):
    """A fixed window of the step's tokens is searched for stops."""

    def changed(self, made, output, stops):
        return commit(output) if (made.num_emitted[made.is_finished] > 6).any() else made


@fault("K9", "stop-tokens")
class StopsAmongTheFirstTwelveOnly(Stopping):
    def changed(self, made, output, stops):
        return commit(output) if (made.num_emitted[made.is_finished] > 12).any() else made
