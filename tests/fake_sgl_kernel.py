"""What SGLang's operators are known to do, faults included, in plain NumPy: for tests without a GPU.

Written from the observed behaviour (DESIGN section 8, known-faults B01, B02, B13): a child is accepted where
``coin <= acc``, rejected masses are subtracted from the bonus row through ``draft_probs``, which is never
cleared, and an empty residual emits token V - 1.
"""

from __future__ import annotations

import numpy as np

__version__ = "0.0-fake"


def _sample(row, scratch, coin, at_cap):
    residual = row if at_cap else np.maximum(row - scratch, np.float32(0))
    residual = np.nan_to_num(residual, nan=0.0)
    running = np.cumsum(residual, dtype=np.float32)
    hits = np.flatnonzero((running > np.float32(coin) * running[-1]) & (residual > 0))
    if hits.size:
        return int(hits[0])
    valid = np.flatnonzero(residual > 0)
    return int(valid[-1]) if valid.size else len(row) - 1


def tree_speculative_sampling_target_only(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    draft_probs,
    threshold_single=1.0,
    threshold_acc=1.0,
    deterministic=True,
):
    assert deterministic
    assert (threshold_single, threshold_acc) == (1.0, 1.0)
    tokens, index = candidates.numpy(), retrive_index.numpy()
    child_of, sibling_of = retrive_next_token.numpy(), retrive_next_sibling.numpy()
    coins, final = uniform_samples.numpy(), uniform_samples_for_final_sampling.numpy()
    probs, scratch = target_probs.numpy(), draft_probs.numpy()
    out, accepted, counts = predicts.numpy(), accept_index.numpy(), accept_token_num.numpy()
    for b in range(tokens.shape[0]):
        node, count = 0, 0
        accepted[b, 0] = index[b, 0]
        while count + 1 < accepted.shape[1]:
            acc, child = np.float32(0), child_of[b, node]
            while child != -1:
                mass = probs[b, node, tokens[b, child]]
                acc = np.float32(acc + mass)
                if coins[b, node] <= acc or mass >= 1:
                    break
                scratch[b, node, tokens[b, child]] = mass
                child = sibling_of[b, child]
            if child == -1:
                break
            out[index[b, node]] = tokens[b, child]
            count += 1
            accepted[b, count] = index[b, child]
            node = child
        counts[b] = count
        at_cap = count == accepted.shape[1] - 1
        out[index[b, node]] = _sample(probs[b, node], scratch[b, node], final[b], at_cap)


def verify_tree_greedy(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    for b in range(candidates.shape[0]):
        node, count = 0, 0
        accept_index[b, 0] = retrive_index[b, 0]
        while count + 1 < accept_index.shape[1]:
            child = int(retrive_next_token[b, node])
            while child != -1 and candidates[b, child] != target_predict[b, node]:
                child = int(retrive_next_sibling[b, child])
            if child == -1:
                break
            predicts[retrive_index[b, node]] = target_predict[b, node]
            count += 1
            accept_index[b, count] = retrive_index[b, child]
            node = child
        accept_token_num[b] = count
        predicts[retrive_index[b, node]] = target_predict[b, node]


def build_tree_kernel_efficient(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    """Nodes keep the order of their candidates; siblings are linked in that order, masks walk to the root."""
    assert parent_list.shape[1] == topk * (depth - 1) + 1
    where = 0
    for b in range(parent_list.shape[0]):
        numbers, prefix = selected_index[b].tolist(), int(verified_seq_len[b])
        node_of = {number: node for node, number in enumerate(numbers, start=1)}
        parents = [-1]
        for number in numbers:
            beam = number // topk
            parents.append(node_of[int(parent_list[b, beam])] if beam else 0)
        last = {}
        for node, parent in enumerate(parents):
            retrive_index[b, node] = b * draft_token_num + node
            if node and parent in last:
                retrive_next_sibling[b, last[parent]] = node
            elif node:
                retrive_next_token[b, parent] = node
            last[parent] = node
            path = [node]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            positions[b * draft_token_num + node] = prefix + len(path) - 1
            row = b * draft_token_num + node
            if tree_mask_mode == 2:
                tree_mask.numpy()[row] = sum(1 << seen for seen in path)
                continue
            keys = prefix if tree_mask_mode == 0 else 0
            end = where + keys + draft_token_num
            tree_mask[where + keys : end] = False
            tree_mask[[where + keys + seen for seen in path]] = True
            where = end
