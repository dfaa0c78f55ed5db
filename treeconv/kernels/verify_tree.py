"""Lazy tree verification in one launch: walk the draft tree, read what the walk needs, draw the bonus.

**Contract.** For each request the walk of DESIGN section 2 (target-only, one coin a node, half-open buckets)
over logits (``PROBS`` false; law ``softmax(x / T)``, ``T == 0`` is the lowest-index argmax) or over
probabilities (``PROBS`` true; taken as they are), after top-k, top-p and min-p where ``FILTERS`` is on
(:mod:`.filtered_rows`). Logits are those that a bias and a bitmask leave where there are any
(:mod:`.row_values`). Every element of every output is written on every call. A pointer outside ``[0, N)``
counts as -1, every loop is bounded by N, a candidate outside ``[0, V)`` has mass zero: no input makes the
kernel hang or leave its buffers. Settings out of range silence their request, and ``status`` says so. A row
the walk does not visit is never read (its lines may be prefetched into the L2 cache).

**Arithmetic.** A row is cut into at most 64 chunks of ``CHUNK`` tokens, a function of V alone. Each chunk
yields three numbers that do not depend on who computes them: its maximum ``c``, the sum of
``exp((x - c) / T)``, and the same sum without the children of the row's node. The row's law follows from
these triples in a fixed order: ``m = max c``, weights ``exp((c - m) / T)``. So results are bit-identical
alone, padded, permuted, in any batch and for any number of programs. Sums are trees of at most 48 roundings.
With ``r = fl(log2(e) / T)`` a chunk's mass is ``exp2(fma(x, r, -k))``, ``k = fl(c * r)``, and its weight
``exp2(fma(-m, r, k))``: ``k`` cancels, so its rounding is no error, and the exponent is rounded once. The
chunk's sum is made of its warps' in the same way, each with the ``c`` and ``k`` of its own tokens, weighing
``exp2(k_warp - k)``; of what is left without the children, less than 2^-100 of ``c``'s mass counts as none.
Where a ``|k| >= 1024`` or T is outside [2^-64, 2^64], and for the children, the mass is
``exp2(((x - c) * s) * r)`` with a power of two ``s`` that keeps ``r``, and so the quotient, in range: three
roundings in the argument, and ``c`` is the chunk's. Each factor is one ``ex2.approx.ftz`` (2^-22.5); a mass
below 2^-126 is zero. A child is accepted when
its mass is positive and ``acc > coin * S``, acc being the float32 prefix sum of the children's masses, by
blocks of 32, and S the row's sum (1 for probabilities). This and ``cumsum(t) > v * S`` are decided in
float64, where the product of two float32 is exact: on dyadic probabilities the whole walk is exact.

**Co-operation.** The grid is (programs, B). The programs of a request split the chunks of each row that the
walk visits. A triple is published as one word of 128 bits, with a tag in it, so that one load tells that it
is there and what it is: no fence, no counter (:mod:`.published_words`). Tags do not repeat (an epoch per
request, advanced at the end by the program that writes the outputs; they would after 2^32 rows), so nothing
is cleared between calls and replays. Rows alternate between two places in scratch: no program writes a place
before every program of the request has read what it held. All programs take the same decisions from the same
words; the one that summed the bonus's chunk, and still has it in its cache, draws the bonus and writes the
outputs. Progress needs the programs of one request to be co-resident:
:func:`~.launch.programs_per_request` sees to it. Two launches that may overlap in time must not share a
workspace, and rows must not be written to while a launch reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from treeconv.kernels import launch
from treeconv.kernels.bonus_tokens import bonus_token
from treeconv.kernels.child_tests import NEVER, first_accepted
from treeconv.kernels.chunk_triples import EMPTY_KEY, INF_KEY, NAN_KEY, chunk_triple
from treeconv.kernels.filter_units import unit_shift
from treeconv.kernels.filtered_rows import decide
from treeconv.kernels.halves import drawn, greatest
from treeconv.kernels.published_words import OWN, all_words, keys_of, masses_of, place_of, publish
from treeconv.kernels.row_chunks import (
    chunk_weight,
    opaque,
    prefetch,
    scales,
    unordered,
)
from treeconv.kernels.row_values import fetch, read, readable, values
from treeconv.kernels.tree_tables import first_child, first_siblings, tree_in_shared_memory

if TYPE_CHECKING:
    from treeconv.filters import Filters
    from treeconv.processors import Processors

__all__ = ["INTERPRETED", "verify_tree"]

_BIG = tl.constexpr(1 << 30)  # above every token


@triton.jit
def _are_usable(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, FILTERS: tl.constexpr, PROBS: tl.constexpr):
    """Whether a request's settings are in their ranges; NaN is in none.

    Asked at the end, and loaded anew: known before the walk, it would cost registers all along. A walk by bad
    settings ends, too, and what it found is not told.
    """
    usable = tl.full([], 1, tl.int1)
    if not PROBS:
        temperature = tl.load(temperature_ptr)
        usable &= (temperature >= 0.0) & (temperature < float("inf"))
    if FILTERS:
        top_p = tl.load(top_p_ptr)
        min_p = tl.load(min_p_ptr)
        usable &= (tl.load(top_k_ptr) >= 1) & (top_p > 0.0) & (top_p <= 1.0) & (min_p >= 0.0) & (min_p <= 1.0)
    return usable


@triton.jit(do_not_specialize=["N", "depth_cap"])  # N = 1 as a constant makes Triton 3.6 fail
def _verify_tree_kernel(
    candidates_ptr,  # [B, N] int64, contiguous
    child_ptr,  # [B, N] int64, contiguous: retrieve_next_token
    sibling_ptr,  # [B, N] int64, contiguous: retrieve_next_sibling
    rows_ptr,  # [B, N, V] bf16, fp16 or fp32, strides (stride_b, stride_n, 1)
    bias_ptr,  # [B, V] float32, strides (bias_stride_b, 1); or None, as its stride then is
    mask_ptr,  # [B, N, cdiv(V, 32)] int32, strides (mask_stride_b, mask_stride_n, 1); or None, likewise
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
    words_ptr,  # [MAX_BATCH, 640] int64, scratch
    epochs_ptr,  # [MAX_BATCH] int32, scratch
    N,  # slots per tree
    V,  # vocabulary
    depth_cap,  # accept slots per request
    stride_b,  # elements
    stride_n,  # elements
    bias_stride_b,
    mask_stride_b,
    mask_stride_n,
    SLOTS: tl.constexpr,  # power of two >= N and >= 32
    chunks: tl.constexpr,  # cdiv(V, CHUNK), at most 64
    CHUNK: tl.constexpr,  # tokens
    THREADS: tl.constexpr,  # per program
    VEC: tl.constexpr,  # elements of one load
    PROBS: tl.constexpr,
    FILTERS: tl.constexpr,  # 0: none; 1: sequential order; 2: joint order
    SHIFT: tl.constexpr,  # low bits that carry nothing in an ordered key of these rows' dtype
    PTX: tl.constexpr,  # an NVIDIA device, sm_80 or newer
):
    rank = tl.program_id(0)
    programs = tl.num_programs(0)
    b = tl.program_id(1)
    lane = tl.arange(0, 32)
    slots = tl.arange(0, SLOTS)
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    TWO: tl.constexpr = chunks > 32  # a row's words fill both halves

    b64 = b.to(tl.int64)
    candidates_ptr += b64 * N
    child_ptr += b64 * N
    sibling_ptr += b64 * N
    coins_ptr += b64 * N
    predicts_ptr += b64 * N
    accept_index_ptr += b64 * depth_cap
    rows_ptr += b64 * stride_b
    if bias_ptr is not None:
        bias_ptr += b64 * bias_stride_b
    if mask_ptr is not None:
        mask_ptr += b64 * mask_stride_b

    # All that the root's step waits for, before anything waits. The root is no constant here, so that its
    # row's address is as aligned as any, and its chunks are laid out likewise.
    root = opaque(tl.zeros([], tl.int32), PTX)
    row = (rows_ptr + root.to(tl.int64) * stride_n, bias_ptr, mask_ptr)
    fetched = fetch(row, rank * CHUNK, V, NO_MASS, CHUNK, VEC)
    epoch = tl.load(epochs_ptr + b, volatile=True)
    final = tl.load(final_ptr + b)
    temperature = 1.0
    if not PROBS:
        temperature = tl.load(temperature_ptr + b)
    tree = tree_in_shared_memory(child_ptr, sibling_ptr, candidates_ptr, N, V, SLOTS, PTX)

    greedy = False
    before, after, rate = 1.0, 1.0, 1.0
    limit = 0.0  # |top / T| in bits up to which a chunk's exponents are one fma
    if not PROBS:
        greedy = temperature == 0.0
        before, after, rate, limit = scales(temperature)
    filtered = False
    if FILTERS:
        top_k = tl.minimum(tl.load(top_k_ptr + b), V).to(tl.int32)
        top_p = tl.load(top_p_ptr + b)
        min_p = tl.load(min_p_ptr + b)
        filtered = (top_k < V) | (top_p < 1.0) | (min_p > 0.0)
        if not PROBS:
            filtered = filtered & (temperature != 0.0)

    cap = tl.minimum(depth_cap, N)
    node = 0
    used = 1  # accept slots filled, the root's included
    path = tl.where(slots == 0, 0, -1)  # the nodes in them
    follows = tl.full([SLOTS], -1, tl.int32)  # of each node the accepted child
    step = -1
    status = 0
    bonus = 0  # greedy: the argmax of the last row
    # Where the bonus token is, what precedes it there, and the maxima of the row and the chunk.
    last_chunk = 0
    last_base = 0.0
    last_top = 0.0
    chunk_top = 0.0
    residual_sum = 0.0
    cut = 0  # what a filter keeps of the last row: units above the cut, and at it tokens up to cut_id
    cut_id = 0
    tokens = tl.full([32], -1, tl.int32)  # the last row's children: the first block, and what is behind it
    rest = -1
    left = 0

    active = 1
    while active == 1:
        # 1. publish this program's chunks of the node's row, each fetched while the one before is summed
        step += 1
        tag = epoch + step
        row = (rows_ptr + node.to(tl.int64) * stride_n, bias_ptr, mask_ptr)
        if mask_ptr is not None:
            row = (row[0], bias_ptr, mask_ptr + node.to(tl.int64) * mask_stride_n)
        place = place_of(words_ptr + OWN * b, step)
        nodes, tokens, rest, left = first_siblings(
            tree, child_ptr, sibling_ptr, candidates_ptr, node, N, V, SLOTS, PTX
        )
        child = first_child(tree, child_ptr, node, N, SLOTS, PTX)
        for chunk in range(rank, chunks, programs):
            start = chunk * CHUNK
            following = (chunk + programs) * CHUNK
            current = fetched
            fetched = fetch(row, following, V, NO_MASS, CHUNK, VEC)
            mass = values(current, row, start, V, CHUNK, VEC)
            key, chunk_sum, rest_sum, fetched = chunk_triple(
                mass, row, start, V, N, greedy, filtered, before, after, rate, limit, child, tokens, rest,
                left, sibling_ptr, candidates_ptr, fetched, following, CHUNK, THREADS, VEC, PROBS, FILTERS,
                PTX,
            )  # fmt: skip
            publish(place, chunk, key, chunk_sum, rest_sum, tag, PTX)

        # 2. one step of the walk, from the published triples
        child_x = read(row, tokens, tokens >= 0, NO_MASS)
        coin = tl.load(coins_ptr + node)
        if PTX:  # the likeliest next row, on its way to L2 while waiting
            guess = first_child(tree, child_ptr, node, N, SLOTS, PTX)
            if (guess >= 0) & (used < cap):
                line = tl.minimum(rank * CHUNK + tl.arange(0, CHUNK // 32) * 32, V - 1)
                prefetch(rows_ptr + guess.to(tl.int64) * stride_n + line)
        tops, sums, rests, tops2, sums2, rests2 = all_words(place, tag, chunks, PTX)
        keys = keys_of(tops, 0, chunks)
        keys2 = keys_of(tops2, 1, chunks)
        top_key = greatest(keys, keys2, TWO)
        if (top_key >= INF_KEY) | (top_key == EMPTY_KEY):
            status = tl.where(top_key == NAN_KEY, 1, tl.where(top_key == INF_KEY, 2, 3))
            active = 0
        else:
            top = unordered(top_key)
            weight = tl.full([32], 1.0, tl.float32)
            weight2 = weight
            row_sum = tl.full([], 1.0, tl.float32)
            if not PROBS:
                if greedy:
                    arg = tl.where(keys == top_key, sums, _BIG)
                    if TWO:
                        arg2 = tl.where(keys2 == top_key, sums2, _BIG)
                        arg = tl.minimum(arg, arg2)
                    bonus = tl.min(arg, 0)
                else:
                    weight = chunk_weight(unordered(keys), top, before, after, rate, limit, PTX)
                    weight = tl.where(lane < chunks, weight, 0.0)
                    row_sums = masses_of(sums, weight)
                    if TWO:
                        weight2 = chunk_weight(unordered(keys2), top, before, after, rate, limit, PTX)
                        weight2 = tl.where(lane + 32 < chunks, weight2, 0.0)
                        row_sums += masses_of(sums2, weight2)
                    row_sum = tl.sum(row_sums, 0)

            # 2a. the children, in order
            if FILTERS:
                # Loaded anew, or they would be kept, and spilled, while a row is summed.
                top_k = tl.minimum(tl.load(top_k_ptr + b), V).to(tl.int32)
                top_p = tl.load(top_p_ptr + b)
                min_p = tl.load(min_p_ptr + b)
                hit, last, filtered_sum, cut_chunk, cut_base, cut, cut_id, step = decide(
                    tree, node, child_x, nodes, tokens, rest, left, coin, final, used < cap, row, row_sum,
                    tops, sums, tops2, sums2, words_ptr + OWN * b, epoch, step, rank, programs, filtered,
                    top_k, top_p, min_p, greedy, bonus, temperature, top_key, before, after, rate, limit,
                    child_ptr, sibling_ptr, candidates_ptr, N, V, chunks, CHUNK, THREADS, VEC, SLOTS, SHIFT,
                    FILTERS, PROBS, PTX,
                )  # fmt: skip
            else:
                hit, last, _ = first_accepted(
                    child_x, nodes, tokens, rest, left, used < cap, row, coin, row_sum, row_sum, 1,
                    filtered, 0, 0, greedy, bonus, top, before, after, rate, sibling_ptr, candidates_ptr,
                    N, V, SHIFT, PROBS, FILTERS, PTX,
                )  # fmt: skip

            # 2b. accept, or end the walk
            chosen = hit & 0x3FF
            if hit == NEVER:
                residual = masses_of(tl.where(used < cap, rests, sums), weight)
                residual2 = residual
                if TWO:
                    residual2 = masses_of(tl.where(used < cap, rests2, sums2), weight2)
                residual_sum, last_chunk, last_base = drawn(residual, residual2, final, TWO)
                if FILTERS:
                    residual_sum = tl.where(filtered, filtered_sum, residual_sum)
                if greedy:
                    residual_sum = tl.where(last >= 0, 0.0, 1.0)
                chosen = tl.where(residual_sum > 0.0, -1, last)
                if chosen < 0:
                    active = 0
                    if residual_sum <= 0.0:
                        status = 3  # only a row rewritten during the launch gets here
                    if FILTERS:
                        last_chunk = tl.where(filtered, cut_chunk, last_chunk)
                        last_base = tl.where(filtered, cut_base, last_base)
                    last_top = top
                    last_key = tl.where(lane == last_chunk, keys, EMPTY_KEY)
                    last_key2 = tl.where(lane + 32 == last_chunk, keys2, EMPTY_KEY)
                    chunk_top = unordered(greatest(last_key, last_key2, TWO))
            if chosen >= 0:
                follows = tl.where(slots == node, chosen, follows)
                path = tl.where(slots == used, chosen, path)
                node = chosen
                used += 1
                row = (rows_ptr + node.to(tl.int64) * stride_n, bias_ptr, mask_ptr)
                if mask_ptr is not None:
                    row = (row[0], bias_ptr, mask_ptr + node.to(tl.int64) * mask_stride_n)
                fetched = fetch(row, rank * CHUNK, V, NO_MASS, CHUNK, VEC)

    # 3. the bonus token and the outputs, by the program that has the bonus's chunk in its cache
    if rank == tl.where((status == 0) & (greedy == 0), last_chunk % programs, 0):
        usable = _are_usable(temperature_ptr + b, top_k_ptr + b, top_p_ptr + b, min_p_ptr + b, FILTERS, PROBS)
        predicted = tl.load(candidates_ptr + follows, mask=follows >= 0, other=-1).to(tl.int32)
        if (status == 0) & (greedy == 0):
            goal = final.to(tl.float64) * residual_sum.to(tl.float64)
            bonus = bonus_token(
                row, last_chunk * CHUNK, chunk_top, last_top, last_base, goal, used < cap, filtered, cut,
                cut_id, before, after, rate, limit, tokens, rest, left, sibling_ptr, candidates_ptr, N, V,
                CHUNK, THREADS, VEC, SHIFT, PROBS, FILTERS, PTX,
            )  # fmt: skip
        status = tl.where(usable, status, 4)
        predicted = tl.where(slots == node, bonus, predicted)
        predicted = tl.where(status == 0, predicted, -1)
        accepted = tl.where(path >= 0, b * N + path, -1)
        accepted = tl.where(status == 0, accepted, -1)
        tl.store(predicts_ptr + slots, predicted, mask=slots < N)
        tl.store(accept_index_ptr + slots, accepted, mask=slots < depth_cap)
        for filled in range(SLOTS, depth_cap, SLOTS):
            nothing = tl.full([SLOTS], -1, tl.int32)
            tl.store(accept_index_ptr + filled + slots, nothing, mask=filled + slots < depth_cap)
        tl.store(accept_num_ptr + b, tl.where(status == 0, used - 1, 0))
        tl.store(status_ptr + b, status)
        # The next epoch; all programs of the request have read this one, since all have published under it.
        tl.store(epochs_ptr + b, epoch + step + 1)


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
    programs: int,
    filters: Filters | None = None,
    processors: Processors | None = None,
) -> None:
    """Launch the sampler on the current stream; nothing is checked, allocated or waited for.

    Args:
        candidates: ``[B, N]`` int64, contiguous, as the two pointer tensors.

        retrieve_next_token: ``[B, N]`` int64, first child or -1.

        retrieve_next_sibling: ``[B, N]`` int64, next sibling or -1.

        rows: ``[B, N, V]`` logits, or probabilities where ``temperature`` is None; last stride 1.

        temperature: ``[B]`` float32 >= 0 and finite, or None for probabilities; of others ``status`` says so.

        coins: ``[B, N]`` float32, contiguous.

        coins_for_final_sampling: ``[B]`` float32.

        accept_index: ``[B, depth_cap]`` int32, contiguous, written.

        accept_token_num: ``[B]`` int32, written.

        predicts: ``[B * N]`` int32, written.

        status: ``[B]`` int32, written.

        workspace: scratch on the same device.

        programs: per request, at most the row's chunks; if more than one, ``B * programs`` of them must fit
            the device at once.

        filters: contiguous tensors on the same device, or None: then nothing of them is compiled in.

        processors: bias and bitmask on the same device, either of them None: likewise. For logits alone.
    """
    B, N, V = rows.shape
    chunk = launch.chunk_size(V)
    bias = None if processors is None else readable(processors.logit_bias)
    mask = None if processors is None else readable(processors.token_bitmask)
    _verify_tree_kernel[(programs, B)](
        candidates,
        retrieve_next_token,
        retrieve_next_sibling,
        rows,
        bias,
        mask,
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
        workspace.epochs,
        N,
        V,
        accept_index.shape[1],
        rows.stride(0),
        rows.stride(1),
        None if bias is None else bias.stride(0),
        None if mask is None else mask.stride(0),
        None if mask is None else mask.stride(1),
        SLOTS=max(32, triton.next_power_of_2(N)),
        chunks=triton.cdiv(V, chunk),
        CHUNK=chunk,
        THREADS=32 * launch.WARPS,
        VEC=launch.vector_size(rows),
        PROBS=temperature is None,
        FILTERS=0 if filters is None else 1 if filters.order == "sequential" else 2,
        SHIFT=unit_shift(torch.float32 if bias is not None else rows.dtype),
        PTX=not INTERPRETED and launch.speaks_ptx(rows.device),
        num_warps=launch.WARPS,
        maxnreg=launch.REGISTERS,
        enable_fp_fusion=True,  # Triton's default until 3.10, and what the figures were measured with
    )
