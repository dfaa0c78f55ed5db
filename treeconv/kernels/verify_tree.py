"""Lazy tree verification in one launch: walk the draft tree, read only what the walk may need, draw the bonus.

**Contract.** For each request the walk of DESIGN section 2 (target-only, one coin a node, half-open buckets)
over logits (``PROBS`` false; law ``softmax(x / T)``, ``T == 0`` is the lowest-index argmax) or over
probabilities (``PROBS`` true; taken as they are). Every element of every output is written on every call.
A pointer outside ``[0, N)`` counts as -1, every loop is bounded by N, a candidate outside ``[0, V)`` has mass
zero: no input makes the kernel hang or leave its buffers. A row the walk does not visit may be read ahead
(few requests, below) and never influences anything.

**Arithmetic.** A row is cut into chunks of ``CHUNK`` tokens, a function of V alone. Each chunk yields three
numbers that do not depend on who computes them: its maximum ``c``, the sum of ``exp((x - c) / T)``, and the
same sum without the children of the row's node. The row's law follows from the chunk triples in a fixed
order: ``m = max c``, weights ``exp((c - m) / T)``. So results are bit-identical alone, padded, permuted, in
any batch and for any number of programs. Sums are trees (depth <= 45 roundings at V = 262144). The exponent
is ``exp2(((x - m) * s) * r)`` with ``r = log2(e) / (T * s)`` rounded once from float64 and ``s`` a power of
two, 1 unless T is below 2^-64 or above 2^64, which keeps r, and so the quotient, in range for every T > 0:
three roundings in the argument and one ``ex2.approx`` (2^-22.5) per factor, two factors a term. A child is
accepted when ``p > 0`` and ``coin < acc``, acc being the float32 prefix sum (by blocks of 32 children) of
``p``. ``cumsum(t) > v * S`` is decided in float64, where the product of two float32 is exact: on dyadic
probabilities the whole walk is exact. A mass that underflows float32 is zero.

**Co-operation.** ``programs`` programs share a request. First they split the chunks of rows ``0 ..
read_ahead - 1`` (the nodes a best-first builder thinks likeliest); then, for each further row the walk
reaches, that row's chunks. A triple is published as three 64-bit words, each a float beside a 32-bit tag, so
that one poll tells that it is there and what it is: no fence, no counter. Tags never repeat (an epoch per
request, advanced by the last program to leave), so nothing is cleared between calls and replays. All walking
programs take the same decisions from the same words; the one that owns the chunk of the bonus token writes
the outputs. Progress needs the programs of one request to be co-resident: :func:`launch_plan` sees to it.
Two launches that may overlap in time must not share a :class:`Workspace`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = ["INTERPRETED", "MAX_BATCH", "MAX_NODES", "MAX_VOCAB", "LaunchPlan", "Workspace", "launch_plan", "verify_tree"]

MAX_BATCH = 1024
MAX_NODES = 1024
MAX_VOCAB = 262144  # token ids fit 18 bits of a packed key, and a row 64 chunks

_CHUNKS = 32  # at most, per row: what every program repeats for a row is one warp's lanes wide
_TOKENS_PER_THREAD = 16
_REGISTERS = 64  # per thread, so that the 64 Ki registers of a multiprocessor hold 32 warps
_WARPS_PER_SM = 32
_CHILDREN = 32  # children tested at once: one warp's lanes
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
def _siblings(sibling_ptr, candidates_ptr, hops, child, left, N, V, CHILDREN: tl.constexpr, JUMP: tl.constexpr):
    """The next up to ``CHILDREN`` nodes of a sibling list, ``child`` first.

    ``hops`` holds the tables of 1, 2, 4, 8 and 16 hops along siblings, in halves, if ``JUMP``. Returns nodes and tokens
    (-1 in unused lanes; a token outside [0, V) becomes -1), the node after them or -1, and how many more
    may be visited before the list is taken for a cycle.
    """
    lane = tl.arange(0, CHILDREN)
    if JUMP:
        nodes = tl.full([CHILDREN], -1, tl.int32)
        nodes = tl.where(lane < left, child, nodes)
        for bit in tl.static_range(5):
            nodes = tl.where(((lane >> bit) & 1) == 1, _hop(hops[2 * bit], hops[2 * bit + 1], nodes), nodes)
        left -= CHILDREN
        after = tl.max(tl.where(lane == CHILDREN - 1, _hop(hops[0], hops[1], nodes), -1), 0)
        child = tl.where(left > 0, after, -1)
    else:
        nodes = tl.full([CHILDREN], -1, tl.int32)
        taken = 0
        while (child >= 0) & (taken < CHILDREN):
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
    mass, index, start, end, tokens, rest, left, sibling_ptr, candidates_ptr, hops, N, V,
    CHILDREN: tl.constexpr, JUMP: tl.constexpr,
):  # fmt: skip
    """A chunk's masses with the children's zeroed, and whether the chunk holds any of them.

    ``tokens``, ``rest`` and ``left`` are the first block of the sibling list, as from :func:`_siblings`.
    """
    found = 0
    more = 1
    while more == 1:
        token = tl.min(tl.where((tokens >= start) & (tokens < end), tokens, _BIG), 0)
        while token < _BIG:
            mass = tl.where(index == token, 0.0, mass)
            found = 1
            token = tl.min(tl.where((tokens > token) & (tokens < end), tokens, _BIG), 0)
        more = tl.where(rest >= 0, 1, 0)
        if more == 1:
            _, tokens, rest, left = _siblings(
                sibling_ptr, candidates_ptr, hops, rest, left, N, V, CHILDREN, JUMP
            )
    return mass, found


@triton.jit
def _unusable(row_ptr, index, V):
    """2 if a chunk of logits holds NaN, else 1 if +inf, else 0; reads it again to keep registers free."""
    x = tl.load(row_ptr + index, mask=index < V, other=0.0).to(tl.float32)
    return tl.max(tl.where(x == x, tl.where(x == float("inf"), 1, 0), 2), 0)


@triton.jit
def _word(bits, tag):
    """One published word: 32 bits of payload over 32 bits of tag."""
    return (bits.to(tl.int64) << 32) | (tag.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _wait_for_row(slot_ptr, chunks: tl.constexpr, tag, CHUNKS: tl.constexpr, SHARED: tl.constexpr):
    """The words of one row, [CHUNKS] int64 each, once every chunk carries ``tag``."""
    lane = tl.arange(0, CHUNKS)
    inside = lane < chunks
    if not SHARED:
        tl.debug_barrier()  # this program's own stores
    tops = tl.load(slot_ptr + lane, mask=inside, other=0, volatile=True)
    sums = tl.load(slot_ptr + CHUNKS + lane, mask=inside, other=0, volatile=True)
    rests = tl.load(slot_ptr + 2 * CHUNKS + lane, mask=inside, other=0, volatile=True)
    if SHARED:
        stale = (tops.to(tl.int32) ^ tag) | (sums.to(tl.int32) ^ tag) | (rests.to(tl.int32) ^ tag)
        while tl.max(tl.where(inside & (stale != 0), 1, 0), 0) == 1:
            tops = tl.load(slot_ptr + lane, mask=inside, other=0, volatile=True)
            sums = tl.load(slot_ptr + CHUNKS + lane, mask=inside, other=0, volatile=True)
            rests = tl.load(slot_ptr + 2 * CHUNKS + lane, mask=inside, other=0, volatile=True)
            stale = (tops.to(tl.int32) ^ tag) | (sums.to(tl.int32) ^ tag) | (rests.to(tl.int32) ^ tag)
    return tops, sums, rests


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
    words_ptr,  # [B * read_ahead + 2 * B, 3, CHUNKS] int64, scratch
    epochs_ptr,  # [3, MAX_B] int32, scratch: epoch, next epoch, programs that left
    N,  # slots per tree
    V,  # vocabulary
    depth_cap,  # accept slots per request
    stride_b,  # elements
    stride_n,  # elements
    read_ahead,  # rows taken in the first step, in [0, N]; 0: only the root's, like any later row
    SLOTS: tl.constexpr,  # power of two >= N
    CHUNKS: tl.constexpr,  # power of two >= chunks
    chunks: tl.constexpr,  # cdiv(V, CHUNK)
    CHUNK: tl.constexpr,  # tokens
    CHILDREN: tl.constexpr,
    JUMP: tl.constexpr,  # sibling lists by tables in registers: N is small
    MAX_B: tl.constexpr,
    PROBS: tl.constexpr,
    SHARED: tl.constexpr,  # more than one program per request: the grid is (programs, B)
    PTX: tl.constexpr,  # an NVIDIA device
):
    rank = tl.program_id(0)
    programs = tl.num_programs(0)
    b = tl.program_id(1)
    requests = tl.num_programs(1)
    walkers = tl.minimum(programs, chunks)
    slots = tl.arange(0, SLOTS)
    chunk_lane = tl.arange(0, CHUNKS)
    real_chunk = chunk_lane < chunks
    lane = tl.arange(0, CHILDREN)
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")

    b64 = b.to(tl.int64)
    candidates_ptr += b64 * N
    child_ptr += b64 * N
    sibling_ptr += b64 * N
    rows_ptr += b64 * stride_b
    offsets = tl.arange(0, CHUNK)

    # The first chunk is on its way before anything else; `x` belongs to row `ready`, chunk `rank`.
    ready = rank // chunks
    first_index = (rank - ready * chunks) * CHUNK + offsets
    x = tl.load(
        rows_ptr + ready.to(tl.int64) * stride_n + first_index,
        mask=first_index < tl.where(rank < tl.maximum(read_ahead, 1) * chunks, V, 0),
        other=NO_MASS,
    )
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
        scaled = temperature.to(tl.float64) * before.to(tl.float64) * after.to(tl.float64)
        rate = (1.4426950408889634 / tl.where(greedy, 1.0, scaled)).to(tl.float32)  # log2(e) / T
        limit = tl.where(before * after == 1.0, 1024.0, 0.0)

    a1 = lane
    hops = (a1, a1, a1, a1, a1, a1, a1, a1, a1, a1)
    if JUMP:  # by doubling; CHILDREN is 32, N at most 64
        a1 = tl.load(sibling_ptr + lane, mask=lane < N, other=-1)
        b1 = tl.load(sibling_ptr + 32 + lane, mask=lane + 32 < N, other=-1)
        a1 = tl.where((a1 >= 0) & (a1 < N), a1, -1).to(tl.int32)
        b1 = tl.where((b1 >= 0) & (b1 < N), b1, -1).to(tl.int32)
        a2, b2 = _hop(a1, b1, a1), _hop(a1, b1, b1)
        a4, b4 = _hop(a2, b2, a2), _hop(a2, b2, b2)
        a8, b8 = _hop(a4, b4, a4), _hop(a4, b4, b4)
        hops = (a1, b1, a2, b2, a4, b4, a8, b8, _hop(a8, b8, a8), _hop(a8, b8, b8))

    cap = tl.minimum(depth_cap, N)
    node = 0
    used = 1  # accept slots filled, the root's included
    step = -1
    status = 0
    bonus = 0  # greedy: the argmax of the last row
    last_chunk = 0
    last_top = 0.0
    last_base = tl.full([], 0.0, tl.float64)
    goal = tl.full([], 0.0, tl.float64)
    whole = 0  # the bonus comes from all of p: nothing was tested
    path = tl.where(slots == 0, 0, -1)
    predicts = tl.full([SLOTS], -1, tl.int32)
    held = -1  # the node whose children these are
    nodes = tl.full([CHILDREN], -1, tl.int32)
    tokens = nodes
    rest = -1
    left = N

    active = 1
    while active == 1:
        # 1. publish the chunks of this step's rows
        if (step < 0) | (node >= read_ahead):
            step += 1
            ahead = (step == 0) & (read_ahead > 0)
            place = requests * (read_ahead + (step & 1)) + b
            tag = epoch + step
            items = tl.where(ahead, read_ahead * chunks, chunks)
            stride = tl.where(ahead, programs, walkers)
            if ready != tl.where(ahead, rank // chunks, node):
                x = tl.load(
                    rows_ptr + node.to(tl.int64) * stride_n + rank * CHUNK + offsets,
                    mask=rank * CHUNK + offsets < V,
                    other=NO_MASS,
                )
            ready = -1  # consumed
            for item in range(rank, items, stride):
                slot = item // chunks
                chunk = item - slot * chunks
                row_node = tl.where(ahead, slot, node)
                index = chunk * CHUNK + offsets
                row_ptr = rows_ptr + row_node.to(tl.int64) * stride_n
                following = item + stride
                next_slot = following // chunks
                next_index = (following - next_slot * chunks) * CHUNK + offsets
                next_x = tl.load(
                    rows_ptr + tl.where(ahead, next_slot, node).to(tl.int64) * stride_n + next_index,
                    mask=next_index < tl.where(following < items, V, 0),
                    other=NO_MASS,
                )
                if row_node != held:
                    held = row_node
                    nodes, tokens, rest, left = _siblings(
                        sibling_ptr, candidates_ptr, hops, _follow(child_ptr, row_node, N), N, N, V, CHILDREN, JUMP
                    )
                value = x.to(tl.float32)
                x = next_x
                mass = value
                if PROBS:
                    bad = tl.max(tl.where(value >= 0.0, tl.where(value == float("inf"), 1, 0), 2), 0)
                    total = tl.sum(value, 0)
                    key = tl.where(total > 0.0, 0, _EMPTY_KEY)
                else:
                    top = tl.max(value, 0) + 0.0  # -0.0 and 0.0 are a tie: one key
                    key = _ordered(top)
                    bad = 0
                    if greedy:
                        bad = _unusable(row_ptr, index, V)
                        total = tl.min(tl.where(value == top, index, _BIG), 0).to(tl.float32, bitcast=True)
                    else:
                        mass = _chunk_mass(value, top, before, after, rate, limit, PTX)
                        total = tl.sum(mass, 0)
                        if (total != total) | (top == float("inf")):
                            bad = _unusable(row_ptr, index, V)
                key = tl.where(bad == 2, _NAN_KEY, tl.where(bad == 1, _INF_KEY, key))
                rest_sum = total
                if not greedy:
                    mass, found = _without(
                        mass, index, chunk * CHUNK, chunk * CHUNK + CHUNK, tokens, rest, left,
                        sibling_ptr, candidates_ptr, hops, N, V, CHILDREN, JUMP,
                    )  # fmt: skip
                    if found == 1:
                        rest_sum = tl.sum(mass, 0)
                out = words_ptr + tl.where(ahead, b * read_ahead + slot, place) * (3 * CHUNKS) + chunk
                tl.store(out, _word(key, tag))
                tl.store(out + CHUNKS, _word(total.to(tl.int32, bitcast=True), tag))
                tl.store(out + 2 * CHUNKS, _word(rest_sum.to(tl.int32, bitcast=True), tag))

        # 2. one step of the walk, from the published triples
        if rank >= walkers:
            active = 0
        else:
            if node != held:
                held = node
                nodes, tokens, rest, left = _siblings(
                    sibling_ptr, candidates_ptr, hops, _follow(child_ptr, node, N), N, N, V, CHILDREN, JUMP
                )
            row_ptr = rows_ptr + node.to(tl.int64) * stride_n
            child_x = tl.load(row_ptr + tokens, mask=tokens >= 0, other=NO_MASS)
            if used < cap:  # the likeliest next row, fetched while waiting
                guess = _follow(child_ptr, node, N)
                if (guess >= read_ahead) & (guess != ready):
                    ready = guess
                    x = tl.load(
                        rows_ptr + guess.to(tl.int64) * stride_n + rank * CHUNK + offsets,
                        mask=rank * CHUNK + offsets < V,
                        other=NO_MASS,
                    )
            coin = tl.load(coins_ptr + b64 * N + node)
            ahead = node < read_ahead
            place = tl.where(ahead, b * read_ahead + node, requests * (read_ahead + (step & 1)) + b)
            tops, sums, rests = _wait_for_row(
                words_ptr + place * (3 * CHUNKS), chunks, tl.where(ahead, epoch, epoch + step), CHUNKS, SHARED
            )
            keys = tl.where(real_chunk, (tops >> 32).to(tl.int32), -0x80000000)
            top_key = tl.max(keys, 0)
            if (top_key >= _INF_KEY) | (top_key == _EMPTY_KEY):
                status = tl.where(top_key == _NAN_KEY, 1, tl.where(top_key == _INF_KEY, 2, 3))
                active = 0
            else:
                top = _unordered(top_key)
                payload = (sums >> 32).to(tl.int32)
                weight = tl.full([CHUNKS], 1.0, tl.float32)
                row_sum = 1.0
                if not PROBS:
                    if greedy:
                        bonus = tl.min(tl.where(keys == top_key, payload, _BIG), 0)
                    else:
                        weight = _chunk_weight(_unordered(keys), top, before, after, rate, limit, PTX)
                all_sums = tl.where(real_chunk, payload.to(tl.float32, bitcast=True) * weight, 0.0)
                if not PROBS:
                    if not greedy:
                        row_sum = tl.sum(all_sums, 0)

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
                            acc = tl.sum(tl.where(lane == CHILDREN - 1, prefix, 0.0), 0)
                            nodes, tokens, rest, left = _siblings(
                                sibling_ptr, candidates_ptr, hops, rest, left, N, V, CHILDREN, JUMP
                            )
                            child_x = tl.load(row_ptr + tokens, mask=tokens >= 0, other=NO_MASS)

                # 2b. accept, or end the walk
                chosen = hit & 0x3FF
                if hit == _NEVER:
                    rest_sums = (rests >> 32).to(tl.int32).to(tl.float32, bitcast=True) * weight
                    residual = tl.where(real_chunk, tl.where(used < cap, rest_sums, all_sums), 0.0)
                    residual_sum = tl.sum(residual, 0)
                    if greedy:
                        residual_sum = tl.where(last >= 0, 0.0, 1.0)
                    chosen = tl.where(residual_sum > 0.0, -1, last)
                    if chosen < 0:
                        active = 0
                        whole = tl.where(used < cap, 0, 1)
                        if residual_sum <= 0.0:
                            status = 3  # only a row rewritten during the launch gets here
                        goal = tl.load(final_ptr + b).to(tl.float64) * residual_sum.to(tl.float64)
                        cumulative = tl.cumsum(residual, 0)
                        over = (cumulative.to(tl.float64) > goal) & (residual > 0.0)
                        last_chunk = tl.min(tl.where(over, chunk_lane, CHUNKS), 0)
                        if last_chunk == CHUNKS:
                            last_chunk = tl.max(tl.where(residual > 0.0, chunk_lane, 0), 0)
                        up_to = tl.where(chunk_lane == last_chunk - 1, cumulative, 0.0)
                        last_base = tl.sum(up_to, 0).to(tl.float64)
                        last_top = top
                if chosen >= 0:
                    token = tl.load(candidates_ptr + chosen).to(tl.int32)
                    predicts = tl.where(slots == node, token, predicts)
                    node = chosen
                    path = tl.where(slots == used, node, path)
                    used += 1

    # 3. the last program to leave opens the next epoch
    if SHARED:
        if rank == 0:
            tl.store(epochs_ptr + MAX_B + b, epoch + step + 1)
        gone = tl.atomic_add(epochs_ptr + 2 * MAX_B + b, 1, sem="acq_rel", scope="gpu")
        if gone == programs - 1:
            tl.store(epochs_ptr + b, tl.load(epochs_ptr + MAX_B + b, volatile=True))
            tl.store(epochs_ptr + 2 * MAX_B + b, 0)

    # 4. the bonus token and the outputs, by the program that read the bonus token's chunk
    drawing = (status == 0) & (greedy == 0)
    writer = tl.where(drawing, last_chunk % walkers, 0)
    if rank == writer:
        if drawing:
            start = last_chunk * CHUNK
            index = start + offsets
            row_ptr = rows_ptr + node.to(tl.int64) * stride_n
            value = tl.load(row_ptr + index, mask=index < V, other=NO_MASS).to(tl.float32)
            weight = 1.0
            if PROBS:
                mass = value
            else:
                top = tl.max(value, 0) + 0.0
                mass = _chunk_mass(value, top, before, after, rate, limit, PTX)
                weight = _chunk_weight(top, last_top, before, after, rate, limit, PTX)
            if whole == 0:
                if held != node:
                    nodes, tokens, rest, left = _siblings(
                        sibling_ptr, candidates_ptr, hops, _follow(child_ptr, node, N), N, N, V, CHILDREN, JUMP
                    )
                mass, _ = _without(
                    mass, index, start, start + CHUNK, tokens, rest, left,
                    sibling_ptr, candidates_ptr, hops, N, V, CHILDREN, JUMP,
                )  # fmt: skip
            cumulative = last_base + tl.cumsum(mass, 0).to(tl.float64) * weight
            bonus = tl.min(tl.where((mass > 0.0) & (cumulative > goal), index, _BIG), 0)
            if bonus == _BIG:
                bonus = tl.max(tl.where(mass > 0.0, index, 0), 0)
        if status == 0:
            predicts = tl.where(slots == node, bonus, predicts)
        else:
            predicts = tl.full([SLOTS], -1, tl.int32)
            path = tl.full([SLOTS], -1, tl.int32)
            used = 1
        tl.store(predicts_ptr + b64 * N + slots, predicts, mask=slots < N)
        flat = tl.where(path >= 0, b * N + path, -1)
        accept_index_ptr += b64 * depth_cap
        tl.store(accept_index_ptr + slots, flat, mask=slots < depth_cap)
        for filled in range(SLOTS, depth_cap, SLOTS):
            beyond = filled + slots
            tl.store(accept_index_ptr + beyond, tl.full([SLOTS], -1, tl.int32), mask=beyond < depth_cap)
        tl.store(accept_num_ptr + b, used - 1)
        tl.store(status_ptr + b, status)


INTERPRETED = not isinstance(_verify_tree_kernel, triton.JITFunction)  # TRITON_INTERPRET=1 at import time


@dataclass(frozen=True)
class LaunchPlan:
    """How a launch is cut up; a function of shapes and of the device alone. Never changes a result.

    Args:
        programs: programs per request, >= 1.

        read_ahead: rows (nodes ``0 .. read_ahead - 1``) whose chunks are taken in the first step, in
            ``[0, N]``; 0 takes the root's row alone, as any later one.
    """

    programs: int
    read_ahead: int = 0


def _chunk_size(V: int) -> int:
    """Tokens per chunk: a power of two >= 1024 that cuts a row into at most 32 chunks."""
    return max(1024, triton.next_power_of_2(triton.cdiv(V, _CHUNKS)))


def _warps(chunk: int) -> int:
    """Warps per program: a function of the chunk alone, since it shapes the sums."""
    return chunk // (32 * _TOKENS_PER_THREAD)


def launch_plan(B: int, N: int, V: int, multiprocessors: int) -> LaunchPlan:
    """Cut B requests of N rows of V tokens over a device.

    Unless it is one program a request, which waits for nobody, ``B * programs`` never exceeds the 32 warps
    a multiprocessor which the kernel's register limit lets be co-resident. With programs to spare, each
    takes one chunk and later nodes' rows are read ahead.
    """
    chunk = _chunk_size(V)
    chunks = triton.cdiv(V, chunk)
    share = max(1, _WARPS_PER_SM // _warps(chunk) * multiprocessors // B)
    if share < 2 * chunks:
        return LaunchPlan(programs=triton.cdiv(chunks, triton.cdiv(chunks, share)))
    read_ahead = min(N, share // chunks, 16)
    return LaunchPlan(programs=read_ahead * chunks, read_ahead=read_ahead)


class Workspace:
    """Scratch for one stream of launches on one device; 3.7 MB, whatever N and V.

    Holds the published chunk triples and the epochs. Launches that use it must not overlap in time.
    """

    # Two rows of 32 chunks per request, and read-ahead: up to 2800 co-resident programs of a chunk each.
    words_needed = _FIELDS * _CHUNKS * (2 * MAX_BATCH + 2800)

    def __init__(self, device: torch.device | str) -> None:
        self.words = torch.full((self.words_needed,), -1, dtype=torch.int64, device=device)
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
        CHUNKS=_CHUNKS,
        chunks=triton.cdiv(V, chunk),
        CHUNK=chunk,
        CHILDREN=_CHILDREN,
        JUMP=N <= _JUMP_LIMIT,
        MAX_B=MAX_BATCH,
        PROBS=temperature is None,
        SHARED=plan.programs > 1,
        PTX=not INTERPRETED and torch.version.hip is None,
        num_warps=_warps(chunk),
        maxnreg=_REGISTERS,
        enable_fp_fusion=True,  # Triton's default until 3.10, and what the figures were measured with
    )
