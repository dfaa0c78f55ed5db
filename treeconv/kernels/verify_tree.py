"""Lazy tree verification in one launch: walk the draft tree, read only what the walk may need, draw the bonus.

**Contract.** For each request the walk of DESIGN section 2 (target-only, one coin a node, half-open buckets)
over logits (``PROBS`` false; law ``softmax(x / T)``, ``T == 0`` is the lowest-index argmax) or over
probabilities (``PROBS`` true; taken as they are). Every element of every output is written on every call.
A pointer outside ``[0, N)`` counts as -1, every loop is bounded by N, a candidate outside ``[0, V)`` has mass
zero: no input makes the kernel hang or leave its buffers. A row the walk does not visit may be read ahead
(few requests, below) and never influences anything.

**Arithmetic.** A row is cut into at most 64 chunks of ``CHUNK`` tokens, a function of V alone. Each chunk
yields three numbers that do not depend on who computes them: its maximum ``c``, the sum of
``exp((x - c) / T)``, and the same sum without the children of the row's node. The row's law follows from
these triples in a fixed order: ``m = max c``, weights ``exp((c - m) / T)``. So results are bit-identical
alone, padded, permuted, in any batch and for any number of programs. Sums are trees of at most 48 roundings.
With ``r = fl(log2(e) / T)`` a chunk's mass is ``exp2(fma(x, r, -k))``, ``k = fl(c * r)``, and its weight
``exp2(fma(-m, r, k))``: ``k`` cancels, so its rounding is no error, and the exponent is rounded once. Where
``|k| >= 1024`` or T is outside [2^-64, 2^64], and for the children, the mass is ``exp2(((x - c) * s) * r)``
with a power of two ``s`` that keeps ``r``, and so the quotient, in range: three roundings in the argument.
Each factor is one ``ex2.approx.ftz`` (2^-22.5); a mass below 2^-126 is zero. A child is accepted when
``p > 0`` and ``coin < acc``, acc being the float32 prefix sum of ``p`` over the children, by blocks of 32.
``cumsum(t) > v * S`` is decided in float64, where the product of two float32 is exact: on dyadic
probabilities the whole walk is exact.

**Co-operation.** The grid is (programs, B). The programs of a request first split the chunks of rows ``0 ..
read_ahead - 1`` (the nodes a best-first builder thinks likeliest), if any; then, for each further row the
walk reaches, that row's chunks. A triple is published as three 64-bit words, each a payload beside a 32-bit
tag, so that one poll tells that it is there and what it is: no fence, no counter. Tags do not repeat (an
epoch per request, advanced by the last program to leave; they would after 2^32 rows), so nothing is cleared
between calls and replays. Later rows alternate between two places in scratch: no program writes a place
before every walking program has read what it held. All walking programs take the same decisions from the
same words; the first one writes the outputs. Progress needs the programs of one request to be co-resident:
:func:`launch_plan` sees to it. Two launches that may overlap in time must not share a :class:`Workspace`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = ["AHEAD_BATCH", "AHEAD_ROWS", "INTERPRETED", "MAX_BATCH", "MAX_NODES", "MAX_VOCAB", "LaunchPlan", "Workspace", "launch_plan", "verify_tree"]

MAX_BATCH = 1024
MAX_NODES = 1024
MAX_VOCAB = 262144
AHEAD_BATCH = 64  # requests, and rows of each, for which scratch has room to read ahead
AHEAD_ROWS = 16

_CHUNKS = 64  # at most, per row: what every program repeats for a row is twice a warp's lanes wide
_TOKENS_PER_THREAD = 32
_REGISTERS = 128  # per thread, so that the 64 Ki registers of a multiprocessor hold 16 warps
_WARPS_PER_SM = 16
_JUMP_LIMIT = 64  # N up to which sibling lists are followed through tables in registers
_FIELDS = 3  # words of a published triple: maximum, sum, sum without the children

_NAN_KEY = tl.constexpr(0x7FFFFFFF)  # above every float in the order of _ordered
_INF_KEY = tl.constexpr(0x7F800000)
_EMPTY_KEY = tl.constexpr(-0x7F800001)  # -inf
_NEVER = tl.constexpr(1 << 20)  # above every packed (rank among siblings, node)
_BIG = tl.constexpr(1 << 30)  # above every token


@triton.jit
def _ordered(value):
    """Float32 -> int32 with the order of the floats; also its own inverse on bit patterns."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(key):
    """Inverse of :func:`_ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _exp2(x, PTX: tl.constexpr):
    """2^x; a result below 2^-126 may be flushed to zero."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.exp2(x)


@triton.jit
def _opaque(value, PTX: tl.constexpr):
    """``value``, so that nothing computed from it is moved to before this point (rare paths stay rare)."""
    if PTX:
        return tl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [value], tl.int32, False, 1)
    else:
        return value


@triton.jit
def _prefetch(pointers):
    """Ask for the cache lines at ``pointers`` in L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, False, 1
    )


@triton.jit
def _slow_mass(x, top, before, after, rate, PTX: tl.constexpr):
    """``exp((x - top) / T)`` for any T > 0; of the powers of two ``before`` and ``after`` one is 1."""
    return _exp2(((x * before - top * before) * after) * rate, PTX)


@triton.jit
def _chunk_mass(x, top, before, after, rate, limit, PTX: tl.constexpr):
    """Masses of a chunk relative to its own maximum, see *Arithmetic*."""
    if tl.abs(top) * rate < limit:
        mass = _exp2(tl.fma(x, rate, -(top * rate)), PTX)
    else:
        mass = _slow_mass(x, tl.where(top == float("-inf"), 0.0, top), before, after, rate, PTX)
    return mass


@triton.jit
def _chunk_weight(chunk_top, top, before, after, rate, limit, PTX: tl.constexpr):
    """What turns masses from :func:`_chunk_mass` into masses relative to the row's maximum ``top``."""
    fast = tl.abs(chunk_top) * rate < limit
    exponent = tl.fma(top + tl.zeros_like(chunk_top), -rate, chunk_top * rate)
    return tl.where(fast, _exp2(exponent, PTX), _slow_mass(chunk_top, top, before, after, rate, PTX))


@triton.jit
def _follow(pointer, node, N):
    """``pointer[node]``, or -1 where that is no node."""
    target = tl.load(pointer + node)
    return tl.where((target >= 0) & (target < N), target, -1).to(tl.int32)


@triton.jit
def _hop(low, high, nodes):
    """A table of 64 entries, as two halves of a warp's 32 lanes, at ``nodes``; -1 stays -1."""
    near = tl.gather(low, nodes & 31, 0)
    far = tl.gather(high, nodes & 31, 0)
    return tl.where(nodes >= 0, tl.where(nodes >= 32, far, near), -1)


@triton.jit
def _siblings(sibling_ptr, candidates_ptr, child, left, N, V, JUMP: tl.constexpr):
    """The next up to 32 nodes of a sibling list, ``child`` first.

    Returns nodes and tokens ([32] int32, -1 in unused lanes; a token outside [0, V) becomes -1), the node
    after them or -1, and how many more may be visited before the list is taken for a cycle.
    """
    lane = tl.arange(0, 32)
    if JUMP:  # lane k makes k hops by powers of two, over tables that double as it goes
        low = tl.load(sibling_ptr + lane, mask=lane < N, other=-1)
        high = tl.load(sibling_ptr + 32 + lane, mask=lane + 32 < N, other=-1)
        low = tl.where((low >= 0) & (low < N), low, -1).to(tl.int32)
        high = tl.where((high >= 0) & (high < N), high, -1).to(tl.int32)
        nodes = tl.where(lane < left, child, -1)
        for bit in tl.static_range(5):
            nodes = tl.where(((lane >> bit) & 1) == 1, _hop(low, high, nodes), nodes)
            low, high = _hop(low, high, low), _hop(low, high, high)
        left -= 32
        beyond = tl.max(tl.where(lane == 0, _hop(low, high, nodes), -1), 0)  # 32 hops from the first
        child = tl.where(left > 0, beyond, -1)
    else:
        nodes = tl.full([32], -1, tl.int32)
        taken = 0
        while (child >= 0) & (taken < 32):
            nodes = tl.where(lane == taken, child, nodes)
            child = _follow(sibling_ptr, child, N)
            taken += 1
            left -= 1
            child = tl.where(left > 0, child, -1)
    tokens = tl.load(candidates_ptr + nodes, mask=nodes >= 0, other=-1)
    tokens = tl.where((tokens >= 0) & (tokens < V), tokens, -1).to(tl.int32)
    return nodes, tokens, child, left


@triton.jit
def _without(
    mass, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V,
    CHUNK: tl.constexpr, JUMP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A chunk's masses with the children's zeroed, and whether the chunk holds any of them.

    ``tokens``, ``rest`` and ``left`` are the first block of the sibling list, as from :func:`_siblings`.
    """
    found = 0
    more = 1
    while more == 1:
        token = tl.min(tl.where((tokens >= start) & (tokens < start + CHUNK), tokens, _BIG), 0)
        while token < _BIG:
            mass = tl.where(_opaque(start, PTX) + tl.arange(0, CHUNK) == token, 0.0, mass)
            found = 1
            token = tl.min(tl.where((tokens > token) & (tokens < start + CHUNK), tokens, _BIG), 0)
        more = tl.where(rest >= 0, 1, 0)
        if more == 1:
            _, tokens, rest, left = _siblings(sibling_ptr, candidates_ptr, rest, left, N, V, JUMP)
    return mass, found


@triton.jit
def _unusable(row_ptr, start, V, CHUNK: tl.constexpr, PTX: tl.constexpr):
    """2 if a chunk of logits holds NaN, else 1 if +inf, else 0; reads it again to keep registers free."""
    index = _opaque(start, PTX) + tl.arange(0, CHUNK)
    x = tl.load(row_ptr + index, mask=index < V, other=0.0).to(tl.float32)
    return tl.max(tl.where(x == x, tl.where(x == float("inf"), 1, 0), 2), 0)


@triton.jit
def _word(bits, tag):
    """One published word: 32 bits of payload over 32 bits of tag."""
    return (bits.to(tl.int64) << 32) | (tag.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _words(row_words_ptr, half, chunks: tl.constexpr):
    """One half of a row's words, three [32] int64: maxima, sums, sums without the children."""
    lane = tl.arange(0, 32) + half * 32
    inside = lane < chunks
    tops = tl.load(row_words_ptr + lane, mask=inside, other=0, volatile=True)
    sums = tl.load(row_words_ptr + 64 + lane, mask=inside, other=0, volatile=True)
    rests = tl.load(row_words_ptr + 128 + lane, mask=inside, other=0, volatile=True)
    return tops, sums, rests


@triton.jit
def _waiting(tops, sums, rests, half, tag, chunks: tl.constexpr):
    """Nonzero in the lanes of one half whose chunk is not published under ``tag`` yet."""
    stale = (tops.to(tl.int32) ^ tag) | (sums.to(tl.int32) ^ tag) | (rests.to(tl.int32) ^ tag)
    return tl.where((tl.arange(0, 32) + half * 32 < chunks) & (stale != 0), 1, 0)


@triton.jit
def _keys(tops, half, chunks: tl.constexpr):
    """The maxima of one half in the order of :func:`_ordered`; below all of them in unused lanes."""
    return tl.where(tl.arange(0, 32) + half * 32 < chunks, (tops >> 32).to(tl.int32), -0x80000000)


@triton.jit
def _masses(words, weight):
    """Float payloads times their chunks' weights; zero in unused lanes, whose words are zero."""
    return (words >> 32).to(tl.int32).to(tl.float32, bitcast=True) * weight


@triton.jit
def _verify_tree_kernel(
    candidates_ptr,  # [B, N] int64, contiguous
    child_ptr,  # [B, N] int64, contiguous: retrieve_next_token
    sibling_ptr,  # [B, N] int64, contiguous: retrieve_next_sibling
    rows_ptr,  # [B, N, V] bf16, fp16 or fp32, strides (stride_b, stride_n, 1)
    temperature_ptr,  # [B] float32; not read when PROBS
    coins_ptr,  # [B, N] float32, contiguous
    final_ptr,  # [B] float32
    accept_index_ptr,  # [B, depth_cap] int32, out
    accept_num_ptr,  # [B] int32, out
    predicts_ptr,  # [B * N] int32, out
    status_ptr,  # [B] int32, out
    words_ptr,  # [2 * MAX_B + AHEAD_B * AHEAD, 3, 64] int64, scratch
    epochs_ptr,  # [3, MAX_B] int32, scratch: epoch, next epoch, programs that left
    N,  # slots per tree
    V,  # vocabulary
    depth_cap,  # accept slots per request
    stride_b,  # elements
    stride_n,  # elements
    read_ahead,  # rows taken in the first step, at most min(N, AHEAD); 0: the root's, like any later row
    SLOTS: tl.constexpr,  # power of two >= N
    chunks: tl.constexpr,  # cdiv(V, CHUNK), at most 64
    CHUNK: tl.constexpr,  # tokens
    JUMP: tl.constexpr,  # N <= 64: sibling lists by tables in registers
    MAX_B: tl.constexpr,
    AHEAD: tl.constexpr,
    PROBS: tl.constexpr,
    SHARED: tl.constexpr,  # more than one program per request: the grid is (programs, B)
    PTX: tl.constexpr,  # an NVIDIA device
):
    rank = tl.program_id(0)
    programs = tl.num_programs(0)
    b = tl.program_id(1)
    walkers = tl.minimum(programs, chunks)
    lane = tl.arange(0, 32)
    offsets = tl.arange(0, CHUNK)
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
    if PTX:  # the first chunk, on its way before anything else
        first_row = tl.minimum(rank // chunks, N - 1)
        first_line = rank % chunks * CHUNK + tl.arange(0, CHUNK // 32) * 32
        _prefetch(rows_ptr + first_row.to(tl.int64) * stride_n + tl.minimum(first_line, V - 1))
    epoch = tl.load(epochs_ptr + b, volatile=True)

    greedy = False
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

    if rank == 0:  # this program writes the outputs, as the walk goes
        tl.store(predicts_ptr + slots, tl.full([SLOTS], -1, tl.int32), mask=slots < N)
        for filled in range(0, depth_cap, SLOTS):
            tl.store(
                accept_index_ptr + filled + slots, tl.full([SLOTS], -1, tl.int32), mask=filled + slots < depth_cap
            )
        tl.debug_barrier()
        tl.store(accept_index_ptr, b * N)

    cap = tl.minimum(depth_cap, N)
    node = 0
    used = 1  # accept slots filled, the root's included
    step = -1
    status = 0
    bonus = 0  # greedy: the argmax of the last row
    last_chunk = 0  # where the bonus token is, what precedes it there, and the row's maximum
    last_base = 0.0
    last_top = 0.0
    residual_sum = 0.0
    held = -1  # the node whose children these are
    nodes = tl.full([32], -1, tl.int32)
    tokens = nodes
    rest = -1
    left = N

    active = 1
    while active == 1:
        # 1. publish the chunks of this step's rows
        if (step < 0) | (node >= read_ahead):
            step += 1
            ahead = (step == 0) & (read_ahead > 0)
            tag = epoch + step
            items = tl.where(ahead, read_ahead * chunks, chunks)
            stride = tl.where(ahead, programs, walkers)
            for item in range(rank, items, stride):
                slot = item // chunks
                chunk = item - slot * chunks
                start = chunk * CHUNK
                row_node = tl.where(ahead, slot, node)
                row_ptr = rows_ptr + row_node.to(tl.int64) * stride_n
                x = tl.load(row_ptr + start + offsets, mask=start + offsets < V, other=NO_MASS)
                if PTX:
                    following = item + stride
                    if (not ahead) & (following < items):
                        line = following * CHUNK + tl.arange(0, CHUNK // 32) * 32
                        _prefetch(row_ptr + tl.minimum(line, V - 1))
                if row_node != held:
                    held = row_node
                    nodes, tokens, rest, left = _siblings(
                        sibling_ptr, candidates_ptr, _follow(child_ptr, row_node, N), N, N, V, JUMP
                    )
                mass = x.to(tl.float32)
                bad = 0
                if PROBS:
                    bad = tl.max(tl.where(mass >= 0.0, tl.where(mass == float("inf"), 1, 0), 2), 0)
                    total = tl.sum(mass, 0)
                    key = tl.where(total > 0.0, 0, _EMPTY_KEY)
                else:
                    top = tl.max(mass, 0) + 0.0  # -0.0 and 0.0 are a tie: one key
                    key = _ordered(top)
                    if greedy:
                        bad = _unusable(row_ptr, start, V, CHUNK, PTX)
                        index = _opaque(start, PTX) + tl.arange(0, CHUNK)
                        total = tl.min(tl.where(mass == top, index, _BIG), 0).to(tl.float32, bitcast=True)
                    else:
                        mass = _chunk_mass(mass, top, before, after, rate, limit, PTX)
                        total = tl.sum(mass, 0)
                        if (total != total) | (top == float("inf")):
                            bad = _unusable(row_ptr, start, V, CHUNK, PTX)
                key = tl.where(bad == 2, _NAN_KEY, tl.where(bad == 1, _INF_KEY, key))
                rest_sum = total
                if not greedy:
                    mass, found = _without(
                        mass, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, JUMP, PTX
                    )
                    if found == 1:
                        rest_sum = tl.sum(mass, 0)
                place = tl.where(ahead, 2 * MAX_B + b * AHEAD + slot, 2 * b + (step & 1))
                out = words_ptr + place * 192 + chunk
                tl.store(out, _word(key, tag))
                tl.store(out + 64, _word(total.to(tl.int32, bitcast=True), tag))
                tl.store(out + 128, _word(rest_sum.to(tl.int32, bitcast=True), tag))

        # 2. one step of the walk, from the published triples
        if rank >= walkers:
            active = 0
        else:
            if node != held:
                held = node
                nodes, tokens, rest, left = _siblings(
                    sibling_ptr, candidates_ptr, _follow(child_ptr, node, N), N, N, V, JUMP
                )
            row_ptr = rows_ptr + node.to(tl.int64) * stride_n
            child_x = tl.load(row_ptr + tokens, mask=tokens >= 0, other=NO_MASS)
            coin = tl.load(coins_ptr + node)
            if PTX:  # the likeliest next row, on its way to L2 while waiting
                guess = _follow(child_ptr, node, N)
                if (guess >= read_ahead) & (used < cap):
                    line = tl.minimum(rank * CHUNK + tl.arange(0, CHUNK // 32) * 32, V - 1)
                    _prefetch(rows_ptr + guess.to(tl.int64) * stride_n + line)
            ahead = node < read_ahead
            tag = tl.where(ahead, epoch, epoch + step)
            place = tl.where(ahead, 2 * MAX_B + b * AHEAD + node, 2 * b + (step & 1))
            row_words = words_ptr + place * 192
            if not SHARED:
                tl.debug_barrier()  # this program's own stores
            tops, sums, rests = _words(row_words, 0, chunks)
            late = _waiting(tops, sums, rests, 0, tag, chunks)
            if TWO:
                tops2, sums2, rests2 = _words(row_words, 1, chunks)
                late = late | _waiting(tops2, sums2, rests2, 1, tag, chunks)
            if SHARED:
                while tl.max(late, 0) == 1:
                    tops, sums, rests = _words(row_words, 0, chunks)
                    late = _waiting(tops, sums, rests, 0, tag, chunks)
                    if TWO:
                        tops2, sums2, rests2 = _words(row_words, 1, chunks)
                        late = late | _waiting(tops2, sums2, rests2, 1, tag, chunks)
            keys = _keys(tops, 0, chunks)
            both_keys = keys
            if TWO:
                keys2 = _keys(tops2, 1, chunks)
                both_keys = tl.maximum(keys, keys2)
            top_key = tl.max(both_keys, 0)
            if (top_key >= _INF_KEY) | (top_key == _EMPTY_KEY):
                status = tl.where(top_key == _NAN_KEY, 1, tl.where(top_key == _INF_KEY, 2, 3))
                active = 0
            else:
                top = _unordered(top_key)
                weight = tl.full([32], 1.0, tl.float32)
                weight2 = weight
                row_sum = 1.0
                if not PROBS:
                    if greedy:
                        arg = tl.where(keys == top_key, (sums >> 32).to(tl.int32), _BIG)
                        if TWO:
                            arg = tl.minimum(arg, tl.where(keys2 == top_key, (sums2 >> 32).to(tl.int32), _BIG))
                        bonus = tl.min(arg, 0)
                    else:
                        weight = _chunk_weight(_unordered(keys), top, before, after, rate, limit, PTX)
                        weight = tl.where(lane < chunks, weight, 0.0)
                        row_sums = _masses(sums, weight)
                        if TWO:
                            weight2 = _chunk_weight(_unordered(keys2), top, before, after, rate, limit, PTX)
                            weight2 = tl.where(lane + 32 < chunks, weight2, 0.0)
                            row_sums += _masses(sums2, weight2)
                        row_sum = tl.sum(row_sums, 0)

                # 2a. the children, in order
                acc = 0.0
                hit = _NEVER
                last = -1  # the last child of positive mass
                testing = tl.where(used < cap, 1, 0)
                while testing == 1:
                    if PROBS:
                        p = child_x.to(tl.float32)
                    else:
                        p = _slow_mass(child_x.to(tl.float32), top, before, after, rate, PTX)
                        p = tl.div_rn(p, row_sum + tl.zeros_like(p))
                        p = tl.where(greedy, tl.where(tokens == bonus, 1.0, 0.0), p)
                    prefix = acc + tl.cumsum(p, 0)
                    packed = (lane << 10) | nodes
                    hit = tl.min(tl.where((p > 0.0) & (coin < prefix), packed, _NEVER), 0)
                    testing = 0
                    if hit == _NEVER:
                        block_last = tl.max(tl.where(p > 0.0, packed, -1), 0)
                        last = tl.where(block_last >= 0, block_last & 0x3FF, last)
                        if rest >= 0:
                            testing = 1
                            held = -1  # these are no longer the node's first children
                            acc = tl.sum(tl.where(lane == 31, prefix, 0.0), 0)
                            nodes, tokens, rest, left = _siblings(
                                sibling_ptr, candidates_ptr, rest, left, N, V, JUMP
                            )
                            child_x = tl.load(row_ptr + tokens, mask=tokens >= 0, other=NO_MASS)

                # 2b. accept, or end the walk
                chosen = hit & 0x3FF
                if hit == _NEVER:
                    residual = _masses(tl.where(used < cap, rests, sums), weight)
                    both = residual
                    if TWO:
                        residual2 = _masses(tl.where(used < cap, rests2, sums2), weight2)
                        both = residual + residual2
                    residual_sum = tl.sum(both, 0)
                    if greedy:
                        residual_sum = tl.where(last >= 0, 0.0, 1.0)
                    chosen = tl.where(residual_sum > 0.0, -1, last)
                    if chosen < 0:
                        active = 0
                        if residual_sum <= 0.0:
                            status = 3  # only a row rewritten during the launch gets here
                        goal = tl.load(final_ptr + b).to(tl.float64) * residual_sum.to(tl.float64)
                        prefix = tl.cumsum(residual, 0)
                        over = (prefix.to(tl.float64) > goal) & (residual > 0.0)
                        last_chunk = tl.min(tl.where(over, lane, _BIG), 0)
                        final = tl.max(tl.where(residual > 0.0, lane, -1), 0)
                        if TWO:
                            first_half = tl.sum(tl.where(lane == 31, prefix, 0.0), 0)
                            prefix2 = first_half + tl.cumsum(residual2, 0)
                            over2 = (prefix2.to(tl.float64) > goal) & (residual2 > 0.0)
                            last_chunk = tl.minimum(last_chunk, tl.min(tl.where(over2, lane + 32, _BIG), 0))
                            final = tl.maximum(final, tl.max(tl.where(residual2 > 0.0, lane + 32, -1), 0))
                        last_chunk = tl.where(last_chunk == _BIG, tl.maximum(final, 0), last_chunk)
                        last_base = tl.sum(tl.where(lane == last_chunk - 1, prefix, 0.0), 0)
                        if TWO:
                            last_base += tl.sum(tl.where(lane == last_chunk - 33, prefix2, 0.0), 0)
                        last_top = top
                if chosen >= 0:
                    if rank == 0:
                        tl.store(predicts_ptr + node, tl.load(candidates_ptr + chosen).to(tl.int32))
                        tl.store(accept_index_ptr + used, b * N + chosen)
                    node = chosen
                    used += 1

    # 3. the last program to leave opens the next epoch
    if SHARED:
        if rank == 0:
            tl.store(epochs_ptr + MAX_B + b, epoch + step + 1)
        gone = tl.atomic_add(epochs_ptr + 2 * MAX_B + b, 1, sem="acq_rel", scope="gpu")
        if gone == programs - 1:
            tl.store(epochs_ptr + b, tl.load(epochs_ptr + MAX_B + b, volatile=True))
            tl.store(epochs_ptr + 2 * MAX_B + b, 0)

    # 4. the bonus token
    if rank == 0:
        if (status == 0) & (greedy == 0):
            start = last_chunk * CHUNK
            index = start + offsets
            x = tl.load(rows_ptr + node.to(tl.int64) * stride_n + index, mask=index < V, other=NO_MASS)
            mass = x.to(tl.float32)
            weight = 1.0
            if not PROBS:
                top = tl.max(mass, 0) + 0.0
                mass = _chunk_mass(mass, top, before, after, rate, limit, PTX)
                weight = _chunk_weight(top, last_top, before, after, rate, limit, PTX)
            if used < cap:
                if held != node:
                    nodes, tokens, rest, left = _siblings(
                        sibling_ptr, candidates_ptr, _follow(child_ptr, node, N), N, N, V, JUMP
                    )
                mass, _ = _without(
                    mass, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, JUMP, PTX
                )
            goal = tl.load(final_ptr + b).to(tl.float64) * residual_sum.to(tl.float64)
            prefix = last_base.to(tl.float64) + tl.cumsum(mass, 0).to(tl.float64) * weight
            bonus = tl.min(tl.where((mass > 0.0) & (prefix > goal), index, _BIG), 0)
            if bonus == _BIG:
                bonus = tl.max(tl.where(mass > 0.0, index, 0), 0)
        if status == 0:
            tl.store(predicts_ptr + node, bonus)
        else:
            tl.debug_barrier()
            tl.store(predicts_ptr + slots, tl.full([SLOTS], -1, tl.int32), mask=slots < N)
            tl.store(accept_index_ptr + slots, tl.full([SLOTS], -1, tl.int32), mask=slots < tl.minimum(used, depth_cap))
        tl.store(accept_num_ptr + b, tl.where(status == 0, used - 1, 0))
        tl.store(status_ptr + b, status)


INTERPRETED = not isinstance(_verify_tree_kernel, triton.JITFunction)  # TRITON_INTERPRET=1 at import time


@dataclass(frozen=True)
class LaunchPlan:
    """How a launch is cut up; a function of shapes and of the device alone. Never changes a result.

    Args:
        programs: programs per request, >= 1.

        read_ahead: rows (nodes ``0 .. read_ahead - 1``) whose chunks are taken in the first step, at most
            ``min(N, AHEAD_ROWS)``, and 0 if B is above ``AHEAD_BATCH``; 0 takes the root's row alone, as
            any later one.
    """

    programs: int
    read_ahead: int = 0


def _chunk_size(V: int) -> int:
    """Tokens per chunk: a power of two >= 1024 that cuts a row into at most 64 chunks."""
    return max(1024, triton.next_power_of_2(triton.cdiv(V, _CHUNKS)))


def _warps(chunk: int) -> int:
    """Warps per program: a function of the chunk alone, since it shapes the sums."""
    return max(2, chunk // (32 * _TOKENS_PER_THREAD))  # Triton 3.6 fails to compile the kernel for one


def launch_plan(B: int, N: int, V: int, multiprocessors: int) -> LaunchPlan:
    """Cut B requests of N rows of V tokens over a device.

    Unless it is one program a request, which waits for nobody, ``B * programs`` never exceeds the 16 warps
    a multiprocessor which the kernel's register limit lets be co-resident. With programs to spare, each
    takes one chunk and later nodes' rows are read ahead.
    """
    chunk = _chunk_size(V)
    chunks = triton.cdiv(V, chunk)
    share = max(1, _WARPS_PER_SM // _warps(chunk) * multiprocessors // B)
    if share < 2 * chunks or B > AHEAD_BATCH:
        return LaunchPlan(programs=triton.cdiv(chunks, triton.cdiv(chunks, min(share, chunks))))
    read_ahead = min(N, share // chunks, AHEAD_ROWS)
    return LaunchPlan(programs=read_ahead * chunks, read_ahead=read_ahead)


class Workspace:
    """Scratch for one stream of launches on one device; 4.7 MB, whatever N and V.

    Holds the published chunk triples and the epochs. Launches that use it must not overlap in time.
    """

    # A word's place belongs to one request, whatever the shapes of a call: tags count per request, so a
    # place shared between requests could hold another one's word under the very tag that is waited for.
    places = 2 * MAX_BATCH + AHEAD_BATCH * AHEAD_ROWS

    def __init__(self, device: torch.device | str) -> None:
        self.words = torch.full((self.places, _FIELDS, _CHUNKS), -1, dtype=torch.int64, device=device)
        self.epochs = torch.zeros((3, MAX_BATCH), dtype=torch.int32, device=device)


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
    workspace: Workspace,
    plan: LaunchPlan,
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
    """
    B, N, V = rows.shape
    chunk = _chunk_size(V)
    _verify_tree_kernel[(plan.programs, B)](
        candidates,
        retrieve_next_token,
        retrieve_next_sibling,
        rows,
        coins if temperature is None else temperature,
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
        plan.read_ahead,
        SLOTS=max(32, triton.next_power_of_2(N)),
        chunks=triton.cdiv(V, chunk),
        CHUNK=chunk,
        JUMP=N <= _JUMP_LIMIT,
        MAX_B=MAX_BATCH,
        AHEAD=AHEAD_ROWS,
        PROBS=temperature is None,
        SHARED=plan.programs > 1,
        PTX=not INTERPRETED and torch.version.hip is None,
        num_warps=_warps(chunk),
        maxnreg=_REGISTERS,
        enable_fp_fusion=True,  # Triton's default until 3.10, and what the figures were measured with
    )
