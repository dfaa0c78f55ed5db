"""Lazy tree verification in one launch: walk the draft tree, read what the walk needs, draw the bonus.

**Contract.** For each request the walk of DESIGN section 2 (target-only, one coin a node, half-open buckets)
over logits (``PROBS`` false; law ``softmax(x / T)``, ``T == 0`` is the lowest-index argmax) or over
probabilities (``PROBS`` true; taken as they are), after top-k, top-p and min-p where ``FILTERS`` is on
(:mod:`.filter_cuts`). Every element of every output is written on every call. A pointer outside ``[0, N)``
counts as -1, every loop is bounded by N, a candidate outside ``[0, V)`` has mass zero: no input makes the
kernel hang or leave its buffers. A row that the walk does not visit never influences anything (its lines may
be prefetched into the L2 cache; the logits of a visited row's children are read).

**Arithmetic.** A row is cut into chunks of 1024 tokens, each summed by one warp. Each chunk yields three numbers that do not depend on who computes them: its maximum ``c``, the sum
of ``exp((x - c) / T)``, and the same sum without the children of the row's node. The row's law follows from
these triples in a fixed order: ``m = max c``, weights ``exp((c - m) / T)``. So results are bit-identical
alone, padded, permuted, in any batch and for any number of programs. Sums are trees of at most 55 roundings.
With ``r = fl(log2(e) / T)`` a chunk's mass is ``exp2(fma(x, r, -k))``, ``k = fl(c * r)``, and its weight
``exp2(fma(-m, r, k))``: ``k`` cancels, so its rounding is no error, and the exponent is rounded once. Where
``|k| >= 1024`` or T is outside [2^-64, 2^64], and for the children, the mass is ``exp2(((x - c) * s) * r)``
with a power of two ``s`` that keeps ``r``, and so the quotient, in range: three roundings in the argument.
Each factor is one ``ex2.approx.ftz`` (2^-22.5); a mass below 2^-126 is zero. A child is accepted when
its mass is positive and ``acc > coin * S``, acc being the float32 prefix sum of the children's masses, by
blocks of 32, and S the row's sum (1 for probabilities). This and ``cumsum(t) > v * S`` are decided in
float64, where the product of two float32 is exact: on dyadic probabilities the whole walk is exact.

**Co-operation.** The grid is (programs, B), a program one warp, so that no reduction leaves a warp. The
programs of a request split the chunks of each row that the walk visits, and publish what a chunk yields as
64-bit words, each a payload beside a 32-bit tag, so that one poll tells that it is there and what it is: no
fence, no counter. The first program reads them, decides, writes the outputs, and publishes the next row for
the others, who meanwhile sum what is left without the children. (All deciding alike would save that exchange,
but then every program polls every word, and that takes longer.) Tags do not repeat: a request's steps are
counted from an epoch, which the first program advances when it leaves; they would after 2^32 steps. So nothing
is cleared between calls and replays. A word is overwritten only by a program that was told to, and it is told
when all words were read; likewise the commands. Progress needs the programs of one request to be co-resident:
:func:`~.launch.launch_plan` sees to it. Two launches that may overlap in time must not share a workspace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from treeconv.kernels import launch
from treeconv.kernels.bonus_token import draw_bonus
from treeconv.kernels.filter_cuts import (
    find_cut,
    is_kept,
    publish_rest,
    publish_tails,
    rest_of_cut,
    second_key,
    unit_shift,
)
from treeconv.kernels.published_words import (
    as_float,
    command,
    first_two,
    last_one,
    order,
    publish,
)
from treeconv.kernels.row_chunks import (
    chunk_mass,
    chunk_weight,
    load_chunk,
    maximum_key,
    prefetch,
    prefetch_rows,
    slow_mass,
    total,
    unordered,
    unusable,
)
from treeconv.kernels.sibling_lists import first_child, siblings, tables, without

if TYPE_CHECKING:
    from treeconv.filters import Filters

__all__ = ["INTERPRETED", "verify_tree"]

_NAN_KEY = tl.constexpr(0x7FFFFFFF)  # above every float in the order of ordered
_INF_KEY = tl.constexpr(0x7F800000)
_EMPTY_KEY = tl.constexpr(-0x7F800001)  # -inf
_NEVER = tl.constexpr(1 << 20)  # above every packed (rank among siblings, node)
_BIG = tl.constexpr(1 << 30)  # above every token
_REST = tl.constexpr(5)  # commands, beside the stages of a filter's search: sum what a cut leaves,
_ROW = tl.constexpr(6)  # sum a row,
_END = tl.constexpr(7)  # leave


@triton.jit(do_not_specialize=["N", "depth_cap", "chunks", "leads", "speculates", "guesses"])  # Triton 3.6 fails to compile N = 1
def _verify_tree_kernel(
    candidates_ptr,  # [B, N] int64, contiguous
    child_ptr,  # [B, N] int64, contiguous: retrieve_next_token
    sibling_ptr,  # [B, N] int64, contiguous: retrieve_next_sibling
    rows_ptr,  # [B, N, V] bf16, fp16 or fp32, strides (stride_b, stride_n, 1)
    temperature_ptr,  # [B] float32; not read when PROBS
    top_k_ptr,  # [B] int64, this and the next two read with FILTERS only
    top_p_ptr,  # [B] float32
    min_p_ptr,  # [B] float32
    coins_ptr,  # [B, N] float32, contiguous
    final_ptr,  # [B] float32
    accept_index_ptr,  # [B, depth_cap] int32, out
    accept_num_ptr,  # [B] int32, out
    predicts_ptr,  # [B * N] int32, out
    status_ptr,  # [B] int32, out
    words_ptr,  # [MAX_B + AHEAD_B, 3, MAX_CHUNKS] int64, scratch
    order_ptr,  # [MAX_B, 4] int64, scratch
    epochs_ptr,  # [MAX_B] int32, scratch
    N,  # slots per tree
    V,  # vocabulary
    depth_cap,  # accept slots per request
    stride_b,  # elements
    stride_n,  # elements
    chunks,  # cdiv(V, CHUNK)
    leads,  # 1 where the first program sums no chunks, else 0
    speculates,  # 1: the first child's row is summed before it is asked for; with leads and B <= AHEAD_B only
    guesses,  # children whose rows are prefetched
    SLOTS: tl.constexpr,  # power of two >= N
    WORDS: tl.constexpr,  # power of two >= chunks, at least 32
    PLACES: tl.constexpr,  # words of a request: 3 * MAX_CHUNKS
    AHEAD: tl.constexpr,  # words between a request's two places: MAX_B * PLACES
    CHUNK: tl.constexpr,  # tokens
    VEC: tl.constexpr,  # elements of one load
    JUMP: tl.constexpr,  # N <= 64: sibling lists by tables in registers
    PROBS: tl.constexpr,
    FILTERS: tl.constexpr,  # 0: none; 1: sequential order; 2: joint order
    SHIFT: tl.constexpr,  # low bits that carry nothing in an ordered key of these rows' dtype
    EVEN: tl.constexpr,  # V is a multiple of CHUNK
    PTX: tl.constexpr,  # an NVIDIA device
):
    rank = tl.program_id(0)
    stride = tl.num_programs(0) - leads
    b = tl.program_id(1)
    lane = tl.arange(0, 32)
    place = tl.arange(0, WORDS)
    offsets = tl.arange(0, CHUNK)
    slots = tl.arange(0, SLOTS)
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")

    b64 = b.to(tl.int64)
    candidates_ptr += b64 * N
    child_ptr += b64 * N
    sibling_ptr += b64 * N
    coins_ptr += b64 * N
    predicts_ptr += b64 * N
    accept_index_ptr += b64 * depth_cap
    rows_ptr += b64 * stride_b
    words_ptr += b64 * PLACES
    order_ptr += b64 * 4
    mine = tl.where(rank < leads, chunks, rank - leads)  # this program's first chunk
    lines = tl.minimum(mine * CHUNK + tl.arange(0, CHUNK // 32) * 32, V - 1)
    if PTX:  # the first chunk, on its way before anything else
        prefetch(rows_ptr + lines)
    x = load_chunk(rows_ptr, tl.minimum(mine, chunks - 1), V, PROBS, CHUNK, EVEN)
    epoch = tl.load(epochs_ptr + b, volatile=True)

    greedy = False
    temperature = 1.0
    before = 1.0
    after = 1.0
    rate = 1.0
    limit = 0.0  # |top / T| in bits up to which a chunk's exponents are one fma
    if not PROBS:
        temperature = tl.load(temperature_ptr + b)
        greedy = temperature == 0.0
        before = tl.where(temperature > 1.8446744073709552e19, 1.262177448353619e-29, 1.0)  # 2^64, 2^-96
        after = tl.where(temperature < 5.421010862427522e-20, 7.922816251426434e28, 1.0)  # 2^-64, 2^96
        scaled = tl.where(greedy, 1.0, temperature * before * after)
        rate = tl.div_rn(tl.where(greedy, 1.0, 1.4426950408889634), scaled)  # log2(e) / T
        limit = tl.where(before * after == 1.0, 1024.0, 0.0)
    top_k = V
    top_p = 1.0
    min_p = 0.0
    filtered = False
    if FILTERS:
        top_k = tl.minimum(tl.load(top_k_ptr + b), V).to(tl.int32)
        top_p = tl.load(top_p_ptr + b)
        min_p = tl.load(min_p_ptr + b)
        filtered = ((top_k < V) | (top_p < 1.0) | (min_p > 0.0)) & (not greedy)

    nothing = tl.full([SLOTS], -1, tl.int32)
    nodes = tl.full([32], -1, tl.int32)
    tokens = nodes
    child_x = tl.zeros([32], rows_ptr.dtype.element_ty)
    low_bytes = nodes
    high_bytes = nodes
    low = nodes
    high = nodes
    low_token = nodes
    high_token = nodes
    rest = -1
    left = N
    coin = 0.0
    cap = tl.minimum(depth_cap, N)
    node = 0
    used = 1  # accept slots filled, the root's included
    step = -1
    status = 0
    bonus = 0  # greedy: the argmax of the last row
    last_chunk = 0  # where the bonus token is, what precedes it there, and its weight
    last_base = 0.0
    last_weight = 1.0
    last_key = 0
    residual_sum = 0.0
    cut = 0  # what a filter keeps of the last row: units above the cut, and at it tokens up to cut_id
    cut_ties = 0
    cut_id = 0

    guess = tl.full([], -1, tl.int32)  # the likeliest next node
    done = guess  # the node whose row is being summed ahead, under
    done_tag = epoch
    if not greedy:
        if filtered:
            speculates = 0
    active = 1
    while active == 1:
        # 1. publish this program's chunks of the node's row, each fetched while the one before is summed
        step += 1
        tag = epoch + 2 * step
        row_ptr = rows_ptr + node.to(tl.int64) * stride_n
        words = words_ptr + tl.where((speculates == 1) & (used % 2 == 0), AHEAD, 0)
        if rank == 0:
            if step == 0:
                low_bytes, high_bytes, low, high, low_token, high_token = tables(
                    child_ptr, sibling_ptr, candidates_ptr, N, V, JUMP
                )
                tl.store(predicts_ptr + slots, nothing, mask=slots < N)
                for filled in range(0, depth_cap, SLOTS):
                    tl.store(accept_index_ptr + filled + slots, nothing, mask=filled + slots < depth_cap)
                tl.debug_barrier()
                tl.store(accept_index_ptr, b * N)
            nodes, tokens, rest, left = siblings(
                sibling_ptr, candidates_ptr, low_bytes, high_bytes, low, high, low_token, high_token,
                first_child(child_ptr, low, high, node, N, JUMP), N, N, V, JUMP,
            )  # fmt: skip
            child_x = tl.load(row_ptr + tokens, mask=tokens >= 0, other=NO_MASS)
            coin = tl.load(coins_ptr + node)
            if PTX:
                if used < cap:
                    prefetch_rows(rows_ptr, nodes, guesses, stride_n, lines)
        turn = tl.where(node == done, 1, 0)
        words_tag = tl.where(node == done, done_tag, tag)
        while turn <= speculates:
            guess = tl.where(used < cap, tl.max(tl.where(lane == 0, nodes, -1), 0), -1)
            target = tl.where(turn == 0, node, guess)
            target_ptr = rows_ptr + target.to(tl.int64) * stride_n
            target_words = words_ptr + tl.where((speculates == 1) & ((used + turn) % 2 == 0), AHEAD, 0)
            if (mine < chunks) & (target >= 0):
                if step + turn > 0:
                    x = load_chunk(target_ptr, mine, V, PROBS, CHUNK, EVEN)
                for chunk in range(mine, chunks, stride):
                    start = chunk * CHUNK
                    mass = x.to(tl.float32)
                    if chunk + stride < chunks:
                        x = load_chunk(target_ptr, chunk + stride, V, PROBS, CHUNK, EVEN)
                    second = 0
                    if PROBS:
                        bad = tl.max(tl.where(mass >= 0.0, tl.where(mass == float("inf"), 1, 0), 2), 0)
                        chunk_sum = total(mass, VEC)
                        key = tl.where(chunk_sum > 0.0, 0, _EMPTY_KEY)
                        if FILTERS:
                            key = tl.where(chunk_sum > 0.0, maximum_key(mass, VEC), _EMPTY_KEY)
                            second = second_key(mass, unordered(key), VEC)
                        sum_bits = chunk_sum.to(tl.int32, bitcast=True)
                    else:
                        key = maximum_key(mass, VEC)
                        top = unordered(key)
                        if greedy:
                            bad = tl.max(tl.where(mass == mass, 0, 2), 0)
                            bad = tl.where((bad == 0) & (top == float("inf")), 1, bad)
                            sum_bits = tl.min(tl.where(mass == top, start + offsets, _BIG), 0)
                        else:
                            if FILTERS:
                                second = second_key(mass, top, VEC)
                            mass = chunk_mass(mass, top, before, after, rate, limit, PTX)
                            chunk_sum = total(mass, VEC)
                            bad = 0
                            if (chunk_sum != chunk_sum) | (top == float("inf")):
                                bad = unusable(target_ptr, start, V, CHUNK, PTX)
                            sum_bits = chunk_sum.to(tl.int32, bitcast=True)
                    key = tl.where(bad == 2, _NAN_KEY, tl.where(bad == 1, _INF_KEY, key))
                    publish(target_words, 0, chunk, key, tag + turn)
                    publish(target_words, 1, chunk, sum_bits, tag + turn)
                    if (chunk == mine) & (rank > 0):  # the children, while the first program reads that
                        if step + turn == 0:
                            low_bytes, high_bytes, low, high, low_token, high_token = tables(
                                child_ptr, sibling_ptr, candidates_ptr, N, V, JUMP
                            )
                        nodes, tokens, rest, left = siblings(
                            sibling_ptr, candidates_ptr, low_bytes, high_bytes, low, high, low_token, high_token,
                            first_child(child_ptr, low, high, target, N, JUMP), N, N, V, JUMP,
                        )  # fmt: skip
                        if PTX:
                            if used + turn < cap:
                                prefetch_rows(rows_ptr, nodes, guesses, stride_n, lines)
                    # Waited for only where the walk ends, or to find a filter's cut.
                    rest_bits = tl.where(filtered, second, sum_bits)
                    if (not greedy) & (not filtered):
                        mass, found = without(
                            mass, start, tokens, rest, left, sibling_ptr, candidates_ptr, low_bytes, high_bytes, low,
                            high, low_token, high_token, N, V, CHUNK, JUMP, PTX,
                        )  # fmt: skip
                        if found == 1:
                            rest_bits = total(mass, VEC).to(tl.int32, bitcast=True)
                    publish(target_words, 2, chunk, rest_bits, tag + turn)
            turn += 1
        done = tl.where(speculates == 1, guess, -1)
        done_tag = tag + 1

        # 2. the first program: one step of the walk
        if rank == 0:
            # The children's masses beside the largest one's, while the others are at it.
            child_top = tl.max(tl.where(tokens >= 0, child_x.to(tl.float32), float("-inf")), 0)
            q = child_x.to(tl.float32)
            if not PROBS:
                q = tl.where(q == float("-inf"), 0.0, slow_mass(q, child_top, before, after, rate, PTX))
            q_sums = tl.cumsum(q, 0)
            keys, sums = first_two(words, words_tag, chunks, WORDS, PTX)
            keys = tl.where(place < chunks, keys, -0x80000000)
            top_key = tl.max(keys, 0)
            if (top_key >= _INF_KEY) | (top_key == _EMPTY_KEY):
                status = tl.where(top_key == _NAN_KEY, 1, tl.where(top_key == _INF_KEY, 2, 3))
                active = 0
            else:
                top = unordered(top_key)
                weight = tl.where(place < chunks, 1.0, 0.0)
                row_sum = tl.full([], 1.0, tl.float32)
                if greedy:
                    bonus = tl.min(tl.where(keys == top_key, sums, _BIG), 0)
                else:
                    if not PROBS:
                        weight *= chunk_weight(unordered(keys), top, before, after, rate, limit, PTX)
                        weight = tl.where(place < chunks, weight, 0.0)
                        row_sum = tl.sum(as_float(sums) * weight, 0)
                if FILTERS:
                    if filtered:
                        if PROBS:
                            weight = tl.where(keys > 0, unordered(keys), 0.0)
                            row_sum = tl.sum(as_float(sums), 0)
                        cut, cut_ties, cut_id, row_sum, step = find_cut(
                            row_ptr, words, order_ptr, words_tag, epoch, step, mine, stride, chunks, V, keys, weight, row_sum, top_key,
                            top_k, top_p, min_p, temperature, before, after, rate, WORDS, CHUNK, VEC, SHIFT,
                            FILTERS == 2, PROBS, PTX,
                        )  # fmt: skip

                # 2a. the children, in order
                acc = 0.0
                scale = tl.full([], 1.0, tl.float32)
                if not PROBS:
                    scale = slow_mass(child_top, top, before, after, rate, PTX)
                hit = _NEVER
                last = -1  # the last child of positive mass
                turned = 0  # whether these are no longer the first children
                testing = tl.where(used < cap, 1, 0)
                while testing == 1:
                    p = q * scale
                    p = tl.where(greedy, tl.where(tokens == bonus, 1.0, 0.0), p)
                    prefix = acc + q_sums * scale
                    if FILTERS:
                        if filtered:
                            p = tl.where(is_kept(child_x.to(tl.float32), tokens, cut, cut_id, SHIFT), p, 0.0)
                            prefix = acc + tl.cumsum(p, 0)
                    packed = (lane << 10) | nodes
                    goal = tl.where(greedy, -1.0, coin.to(tl.float64) * row_sum.to(tl.float64))
                    accepts = prefix.to(tl.float64) > goal
                    hit = tl.min(tl.where((p > 0.0) & accepts, packed, _NEVER), 0)
                    testing = 0
                    if hit == _NEVER:
                        block_last = tl.max(tl.where(p > 0.0, packed, -1), 0)
                        last = tl.where(block_last >= 0, block_last & 0x3FF, last)
                        if rest >= 0:
                            testing = 1
                            turned = 1
                            acc = tl.sum(tl.where(lane == 31, prefix, 0.0), 0)
                            nodes, tokens, rest, left = siblings(
                                sibling_ptr, candidates_ptr, low_bytes, high_bytes, low, high, low_token, high_token, rest, left, N, V, JUMP
                            )
                            child_x = tl.load(row_ptr + tokens, mask=tokens >= 0, other=NO_MASS)
                            q = child_x.to(tl.float32)
                            if not PROBS:
                                q = slow_mass(q, top, before, after, rate, PTX)
                            q_sums = tl.cumsum(q, 0)
                            scale = tl.full([], 1.0, tl.float32)

                # 2b. accept, or end the walk
                chosen = hit & 0x3FF
                if hit == _NEVER:
                    residual = as_float(sums) * weight
                    if greedy:
                        residual_sum = tl.where(last >= 0, 0.0, 1.0)
                    else:
                        if filtered:
                            if FILTERS:
                                if turned == 1:
                                    nodes, tokens, rest, left = siblings(
                                        sibling_ptr, candidates_ptr, low_bytes, high_bytes, low, high, low_token, high_token,
                                        first_child(child_ptr, low, high, node, N, JUMP), N, N, V, JUMP,
                                    )  # fmt: skip
                                step += 1
                                tested = tl.where(used < cap, 1, 0)
                                command(order_ptr, epoch + 2 * step, _REST, cut, tested, top_key)
                                publish_rest(
                                    row_ptr, words, epoch + 2 * step, mine, stride, chunks, V, N, cut, tested, top, before,
                                    after, rate, tokens, rest, left, sibling_ptr, candidates_ptr, low_bytes, high_bytes,
                                    low, high, low_token, high_token, CHUNK, VEC, SHIFT, JUMP, PROBS, PTX,
                                )  # fmt: skip
                                residual = rest_of_cut(
                                    row_ptr, words, epoch + 2 * step, chunks, V, N, cut, cut_ties, cut_id, tested, top,
                                    before, after, rate, tokens, rest, left, sibling_ptr, candidates_ptr, low_bytes,
                                    high_bytes, low, high, low_token, high_token, WORDS, CHUNK, SHIFT, JUMP, PROBS, PTX,
                                )  # fmt: skip
                        else:
                            if used < cap:
                                residual = as_float(last_one(words, words_tag, chunks, WORDS, PTX)) * weight
                        residual_sum = tl.sum(residual, 0)
                    chosen = tl.where(residual_sum > 0.0, -1, last)
                    if chosen < 0:
                        active = 0
                        if residual_sum <= 0.0:
                            status = 3  # only a row rewritten during the launch gets here
                        goal = tl.load(final_ptr + b).to(tl.float64) * residual_sum.to(tl.float64)
                        prefix = tl.cumsum(residual, 0)
                        over = (prefix.to(tl.float64) > goal) & (residual > 0.0)
                        last_chunk = tl.min(tl.where(over, place, _BIG), 0)
                        final = tl.max(tl.where(residual > 0.0, place, 0), 0)
                        last_chunk = tl.where(last_chunk == _BIG, final, last_chunk)
                        last_base = tl.sum(tl.where(place == last_chunk - 1, prefix, 0.0), 0)
                        last_key = tl.max(tl.where(place == last_chunk, keys, -0x80000000), 0)
                        if not PROBS:
                            last_weight = tl.sum(tl.where(place == last_chunk, weight, 0.0), 0)
                if chosen >= 0:
                    command(order_ptr, epoch + 2 * step + 2, _ROW, chosen, 0, 0)
                    tl.store(predicts_ptr + node, tl.load(candidates_ptr + chosen).to(tl.int32))
                    tl.store(accept_index_ptr + used, b * N + chosen)
                    node = chosen
            if active == 0:
                command(order_ptr, epoch + 2 * step + 2, _END, 0, 0, 0)
        # 3. the others: what it says
        else:
            operation = _REST
            next_node = 0
            while operation < _ROW:
                step += 1
                operation, next_node, argument, key = order(order_ptr, epoch + 2 * step, PTX)
                if FILTERS:
                    if operation == _REST:
                        publish_rest(
                            row_ptr, words, epoch + 2 * step, mine, stride, chunks, V, N, next_node, argument,
                            unordered(key), before, after, rate, tokens, rest, left, sibling_ptr, candidates_ptr,
                            low_bytes, high_bytes, low, high, low_token, high_token, CHUNK, VEC, SHIFT, JUMP, PROBS, PTX,
                        )  # fmt: skip
                    if operation < _REST:
                        publish_tails(
                            row_ptr, words, epoch + 2 * step, mine, stride, chunks, V, next_node, argument,
                            operation, unordered(key), before, after, rate, CHUNK, VEC, SHIFT, PROBS, PTX,
                        )  # fmt: skip
            step -= 1  # the next row's
            node = tl.where(operation == _ROW, next_node, node)
            active = tl.where(operation == _ROW, 1, 0)
        used += active

    # 4. the bonus token
    if rank == 0:
        if (status == 0) & (not greedy):
            nodes, tokens, rest, left = siblings(
                sibling_ptr, candidates_ptr, low_bytes, high_bytes, low, high, low_token, high_token, first_child(child_ptr, low, high, node, N, JUMP),
                N, N, V, JUMP,
            )  # fmt: skip
            chunk_top = unordered(last_key)
            goal = tl.load(final_ptr + b).to(tl.float64) * residual_sum.to(tl.float64)
            bonus = draw_bonus(
                rows_ptr + node.to(tl.int64) * stride_n, last_chunk * CHUNK, V, chunk_top,
                last_base.to(tl.float64), last_weight.to(tl.float64), goal, before, after, rate, limit, filtered, cut,
                cut_id, used < cap, tokens, rest, left, sibling_ptr, candidates_ptr, low_bytes, high_bytes, low,
                high, low_token, high_token, N, CHUNK, VEC, SHIFT, JUMP, PROBS, FILTERS, PTX,
            )  # fmt: skip
        if status == 0:
            tl.store(predicts_ptr + node, bonus)
        else:
            tl.debug_barrier()
            tl.store(predicts_ptr + slots, nothing, mask=slots < N)
            tl.store(accept_index_ptr + slots, nothing, mask=slots < used)
        tl.store(accept_num_ptr + b, tl.where(status == 0, used - 1, 0))
        tl.store(status_ptr + b, status)
        tl.store(epochs_ptr + b, epoch + 2 * step + 4)


INTERPRETED = not isinstance(_verify_tree_kernel, triton.JITFunction)  # TRITON_INTERPRET=1 at import time


def verify_tree(
    candidates: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor | None,
    coins: torch.Tensor,
    coins_for_final_sampling: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    predicts: torch.Tensor,
    status: torch.Tensor,
    workspace: launch.Workspace,
    plan: launch.LaunchPlan,
    filters: Filters | None = None,
) -> None:
    """Launch the sampler on the current stream; nothing is checked, allocated or waited for.

    Args:
        candidates: ``[B, N]`` int64, contiguous, as the two pointer tensors.

        retrieve_next_token: ``[B, N]`` int64, first child or -1.

        retrieve_next_sibling: ``[B, N]`` int64, next sibling or -1.

        rows: ``[B, N, V]`` logits, or probabilities where ``temperature`` is None; last stride 1.

        temperature: ``[B]`` float32 >= 0 and finite, or None for probabilities.

        coins: ``[B, N]`` float32, contiguous.

        coins_for_final_sampling: ``[B]`` float32.

        accept_index: ``[B, depth_cap]`` int32, contiguous, written.

        accept_token_num: ``[B]`` int32, written.

        predicts: ``[B * N]`` int32, written.

        status: ``[B]`` int32, written.

        workspace: scratch on the same device.

        plan: with more than one program a request, all of them must fit the device at once.

        filters: contiguous tensors on the same device, or None: then nothing of them is compiled in.
    """
    B, N, V = rows.shape
    chunks = triton.cdiv(V, launch.CHUNK)
    _verify_tree_kernel[(plan.programs, B)](
        candidates,
        retrieve_next_token,
        retrieve_next_sibling,
        rows,
        coins if temperature is None else temperature,
        candidates if filters is None else filters.top_k,
        coins if filters is None else filters.top_p,
        coins if filters is None else filters.min_p,
        coins,
        coins_for_final_sampling,
        accept_index,
        accept_token_num,
        predicts,
        status,
        workspace.words,
        workspace.orders,
        workspace.epochs,
        N,
        V,
        accept_index.shape[1],
        rows.stride(0),
        rows.stride(1),
        chunks,
        int(plan.leads),
        int(plan.speculates),
        plan.guesses,
        SLOTS=max(32, triton.next_power_of_2(N)),
        WORDS=max(32, triton.next_power_of_2(chunks)),
        PLACES=3 * launch.MAX_CHUNKS,
        AHEAD=3 * launch.MAX_CHUNKS * launch.MAX_BATCH,
        CHUNK=launch.CHUNK,
        VEC=launch.vector_size(rows),
        JUMP=N <= launch.JUMP_LIMIT,
        PROBS=temperature is None,
        FILTERS=0 if filters is None else 1 if filters.order == "sequential" else 2,
        SHIFT=unit_shift(rows.dtype),
        EVEN=V % launch.CHUNK == 0,
        PTX=not INTERPRETED and torch.version.hip is None,
        num_warps=1,
        maxnreg=launch.REGISTERS,
        enable_fp_fusion=True,  # Triton's default until 3.10, and what the figures were measured with
    )
