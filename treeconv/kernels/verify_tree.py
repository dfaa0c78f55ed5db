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

_WARPS = 4
_REGISTERS = 64  # per thread: 8 programs of 4 warps fit the 64 Ki registers of one multiprocessor
_CHILDREN = 32  # children tested at once: one warp's lanes
_FIELDS = 3  # words of a published triple: maximum, sum, sum without the children
_ROWS_PER_REQUEST = 3  # scratch rows besides read-ahead: one for the root, two that later rows alternate in

_NAN_KEY = tl.constexpr(0x7FFFFFFF)  # above every float in the order of _ordered
_INF_KEY = tl.constexpr(0x7F800000)
_EMPTY_KEY = tl.constexpr(-0x7F800001)  # -inf
_NEVER = tl.constexpr(1 << 40)  # above every packed (rank, node, token) and every token
_BIG = tl.constexpr(1 << 30)


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
def _follow(pointer, node, N):
    """``pointer[node]``, or -1 where that is no node."""
    target = tl.load(pointer + node)
    return tl.where((target >= 0) & (target < N), target, -1).to(tl.int32)


@triton.jit
def _siblings(sibling_ptr, candidates_ptr, child, left, N, V, CHILDREN: tl.constexpr):
    """The next up to ``CHILDREN`` nodes of a sibling list.

    Returns their nodes and tokens (-1 in unused lanes; a token outside [0, V) becomes -1), the node after
    them or -1, and how many more may be visited before the list is taken for a cycle.
    """
    lane = tl.arange(0, CHILDREN)
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
def _mass(x, top, before, after, rate):
    """``exp((x - top) / T)``; ``before`` and ``after`` are powers of two, at most one of them not 1."""
    return tl.exp2(((x * before - top * before) * after) * rate)


@triton.jit
def _without(mass, index, end, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHILDREN: tl.constexpr):
    """A chunk's masses with the children's zeroed, and whether the chunk holds any of them.

    ``tokens``, ``rest`` and ``left`` are the first block of the sibling list, as from :func:`_siblings`.
    """
    start = tl.min(index, 0)
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
            _, tokens, rest, left = _siblings(sibling_ptr, candidates_ptr, rest, left, N, V, CHILDREN)
    return mass, found


@triton.jit
def _word(bits, tag):
    """One published word: 32 bits of payload over 32 bits of tag."""
    return (bits.to(tl.int64) << 32) | (tag.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _wait_for_row(slot_ptr, chunks, tag, CHUNKS: tl.constexpr, SHARED: tl.constexpr):
    """The words of one row, [CHUNKS] int64 each, once every chunk carries ``tag``."""
    lane = tl.arange(0, CHUNKS)
    inside = lane < chunks
    want = tag.to(tl.int64) & 0xFFFFFFFF
    if not SHARED:
        tl.debug_barrier()  # this program's own stores
    tops = tl.load(slot_ptr + lane, mask=inside, other=0, volatile=True)
    sums = tl.load(slot_ptr + CHUNKS + lane, mask=inside, other=0, volatile=True)
    rests = tl.load(slot_ptr + 2 * CHUNKS + lane, mask=inside, other=0, volatile=True)
    if SHARED:
        stale = ((tops ^ want) | (sums ^ want) | (rests ^ want)) & 0xFFFFFFFF
        waiting = tl.max(tl.where(inside & (stale != 0), 1, 0), 0)
        while waiting != 0:
            tops = tl.load(slot_ptr + lane, mask=inside, other=0, volatile=True)
            sums = tl.load(slot_ptr + CHUNKS + lane, mask=inside, other=0, volatile=True)
            rests = tl.load(slot_ptr + 2 * CHUNKS + lane, mask=inside, other=0, volatile=True)
            stale = ((tops ^ want) | (sums ^ want) | (rests ^ want)) & 0xFFFFFFFF
            waiting = tl.max(tl.where(inside & (stale != 0), 1, 0), 0)
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
    programs,  # per request
    read_ahead,  # rows taken in the first step, <= N
    SLOTS: tl.constexpr,  # power of two >= N
    CHUNKS: tl.constexpr,  # power of two >= cdiv(V, CHUNK)
    CHUNK: tl.constexpr,  # tokens
    CHILDREN: tl.constexpr,
    MAX_B: tl.constexpr,
    PROBS: tl.constexpr,
    SHARED: tl.constexpr,  # programs > 1
):
    b = tl.program_id(0) // programs
    rank = tl.program_id(0) % programs
    requests = tl.num_programs(0) // programs
    chunks = tl.cdiv(V, CHUNK)
    walkers = tl.minimum(programs, chunks)
    slots = tl.arange(0, SLOTS)
    chunk_lane = tl.arange(0, CHUNKS)
    real_chunk = chunk_lane < chunks

    b64 = b.to(tl.int64)
    candidates_ptr += b64 * N
    child_ptr += b64 * N
    sibling_ptr += b64 * N
    rows_ptr += b64 * stride_b
    epoch = tl.load(epochs_ptr + b, volatile=True)

    greedy = False
    before = 1.0
    after = 1.0
    rate = 1.0
    if not PROBS:
        temperature = tl.load(temperature_ptr + b)
        greedy = temperature == 0.0
        before = tl.where(temperature > 1.8446744073709552e19, 1.262177448353619e-29, 1.0)  # 2^64, 2^-96
        after = tl.where(temperature < 5.421010862427522e-20, 7.922816251426434e28, 1.0)  # 2^-64, 2^96
        scaled = temperature.to(tl.float64) * before.to(tl.float64) * after.to(tl.float64)
        rate = (1.4426950408889634 / tl.where(greedy, 1.0, scaled)).to(tl.float32)  # log2(e) / T

    cap = tl.minimum(depth_cap, N)
    node = 0
    used = 1  # accept slots filled, the root's included
    step = 0
    fresh = 1  # the first step is still to come
    status = 0
    bonus = 0  # greedy: the argmax of the last row
    last_chunk = 0
    last_top = 0.0
    last_base = tl.full([], 0.0, tl.float64)
    goal = tl.full([], 0.0, tl.float64)
    whole = 0  # the bonus comes from all of p: nothing was tested
    path = tl.where(slots == 0, 0, -1)
    predicts = tl.full([SLOTS], -1, tl.int32)

    active = 1
    while active == 1:
        # 1. publish the chunks of this step's rows
        if (fresh == 1) | (node >= read_ahead):
            share = programs
            items = read_ahead * chunks
            if fresh == 0:
                step += 1
                share = walkers
                items = chunks
            held = -1
            held_nodes = tl.full([CHILDREN], -1, tl.int32)
            held_tokens = held_nodes
            held_rest = -1
            held_left = N
            for item in range(rank, items, share):
                slot = item // chunks
                chunk = item - slot * chunks
                row_node = tl.where(fresh == 1, slot, node)
                index = chunk * CHUNK + tl.arange(0, CHUNK)
                row_ptr = rows_ptr + row_node.to(tl.int64) * stride_n
                x = tl.load(row_ptr + index, mask=index < V, other=0.0 if PROBS else float("-inf"))
                x = x.to(tl.float32)
                if row_node != held:
                    held = row_node
                    first = _follow(child_ptr, row_node, N)
                    held_nodes, held_tokens, held_rest, held_left = _siblings(
                        sibling_ptr, candidates_ptr, first, N, N, V, CHILDREN
                    )
                end = chunk * CHUNK + CHUNK
                rest_sum = 0.0
                if PROBS:
                    bad = tl.max(tl.where(x >= 0.0, tl.where(x == float("inf"), 1, 0), 2), 0)
                    total = tl.sum(x, 0)
                    key = tl.where(total > 0.0, 0, _EMPTY_KEY)
                    mass = x
                else:
                    top = tl.max(x, 0) + 0.0  # -0.0 and 0.0 are a tie: one key
                    key = _ordered(top)
                    bad = 0
                    if greedy:
                        bad = tl.max(tl.where(x == x, tl.where(x == float("inf"), 1, 0), 2), 0)
                        arg = tl.min(tl.where(x == top, index, _BIG), 0)
                        total = arg.to(tl.float32, bitcast=True)
                        mass = x
                    else:
                        mass = _mass(x, tl.where(top == float("-inf"), 0.0, top), before, after, rate)
                        total = tl.sum(mass, 0)
                        if (total != total) | (top == float("inf")):
                            bad = tl.max(tl.where(x == x, tl.where(x == float("inf"), 1, 0), 2), 0)
                key = tl.where(bad == 2, _NAN_KEY, tl.where(bad == 1, _INF_KEY, key))
                rest_sum = total
                if not greedy:
                    mass, found = _without(
                        mass, index, end, held_tokens, held_rest, held_left,
                        sibling_ptr, candidates_ptr, N, V, CHILDREN,
                    )  # fmt: skip
                    if found == 1:
                        rest_sum = tl.sum(mass, 0)
                place = tl.where(fresh == 1, b * read_ahead + slot, requests * (read_ahead + (step & 1)) + b)
                out = words_ptr + place * (3 * CHUNKS) + chunk
                tag = epoch + step
                tl.store(out, _word(key, tag))
                tl.store(out + CHUNKS, _word(total.to(tl.int32, bitcast=True), tag))
                tl.store(out + 2 * CHUNKS, _word(rest_sum.to(tl.int32, bitcast=True), tag))
            fresh = 0

        # 2. one step of the walk, from the published triples
        if rank >= walkers:
            active = 0
        else:
            first = _follow(child_ptr, node, N)
            first = tl.where(used < cap, first, -1)
            nodes, tokens, rest, left = _siblings(sibling_ptr, candidates_ptr, first, N, N, V, CHILDREN)
            row_ptr = rows_ptr + node.to(tl.int64) * stride_n
            child_x = tl.load(row_ptr + tokens, mask=tokens >= 0, other=0.0 if PROBS else float("-inf"))
            coin = tl.load(coins_ptr + b64 * N + node)
            ahead = node < read_ahead
            place = tl.where(ahead, b * read_ahead + node, requests * (read_ahead + (step & 1)) + b)
            tops, sums, rests = _wait_for_row(
                words_ptr + place * (3 * CHUNKS), chunks, tl.where(ahead, epoch, epoch + step), CHUNKS, SHARED
            )
            keys = tl.where(real_chunk, (tops >> 32).to(tl.int32), -0x80000000)
            top_key = tl.max(keys, 0)
            if top_key >= _INF_KEY:
                status = tl.where(top_key == _NAN_KEY, 1, 2)
                active = 0
            elif top_key == _EMPTY_KEY:
                status = 3
                active = 0
            else:
                top = _unordered(top_key)
                payload = (sums >> 32).to(tl.int32)
                weight = tl.full([CHUNKS], 1.0, tl.float32)
                if greedy:
                    bonus = tl.min(tl.where(keys == top_key, payload, _BIG), 0)
                if not PROBS:
                    weight = _mass(_unordered(keys), top, before, after, rate)
                all_sums = tl.where(real_chunk, payload.to(tl.float32, bitcast=True) * weight, 0.0)
                rest_sums = (rests >> 32).to(tl.int32).to(tl.float32, bitcast=True)
                rest_sums = tl.where(real_chunk, rest_sums * weight, 0.0)
                row_sum = tl.sum(all_sums, 0)

                # 2a. the children, in order
                acc = 0.0
                hit = tl.full([], _NEVER, tl.int64)
                last = tl.full([], -1, tl.int64)  # the last child of positive mass
                testing = tl.where(first >= 0, 1, 0)
                lane = tl.arange(0, CHILDREN)
                while testing == 1:
                    if PROBS:
                        p = tl.where(tokens >= 0, child_x.to(tl.float32), 0.0)
                    else:
                        p = _mass(child_x.to(tl.float32), top, before, after, rate)
                        p = tl.div_rn(p, tl.where(greedy, 1.0, row_sum))
                        p = tl.where(greedy, tl.where(tokens == bonus, 1.0, 0.0), p)
                    prefix = acc + tl.cumsum(p, 0)
                    acc = tl.sum(tl.where(lane == CHILDREN - 1, prefix, 0.0), 0)
                    packed = (lane.to(tl.int64) << 28) | (nodes.to(tl.int64) << 18) | tokens.to(tl.int64)
                    hit = tl.min(tl.where((p > 0.0) & (coin < prefix), packed, _NEVER), 0)
                    block_last = tl.max(tl.where(p > 0.0, packed, -1), 0)
                    last = tl.where(block_last >= 0, block_last, last)
                    testing = tl.where((hit == _NEVER) & (rest >= 0), 1, 0)
                    if testing == 1:
                        nodes, tokens, rest, left = _siblings(
                            sibling_ptr, candidates_ptr, rest, left, N, V, CHILDREN
                        )
                        child_x = tl.load(
                            row_ptr + tokens, mask=tokens >= 0, other=0.0 if PROBS else float("-inf")
                        )

                # 2b. accept, or end the walk
                residual = tl.where(used < cap, rest_sums, all_sums)
                whole = tl.where(used < cap, 0, 1)
                residual_sum = tl.sum(residual, 0)
                if greedy:
                    residual_sum = tl.where(last >= 0, 0.0, 1.0)
                if (hit == _NEVER) & (residual_sum > 0.0):
                    active = 0
                    if not greedy:
                        goal = tl.load(final_ptr + b).to(tl.float64) * residual_sum.to(tl.float64)
                        cumulative = tl.cumsum(residual, 0)
                        over = (cumulative.to(tl.float64) > goal) & (residual > 0.0)
                        last_chunk = tl.min(tl.where(over, chunk_lane, CHUNKS), 0)
                        if last_chunk == CHUNKS:
                            last_chunk = tl.max(tl.where(residual > 0.0, chunk_lane, 0), 0)
                        before_it = tl.where(chunk_lane == last_chunk - 1, cumulative, 0.0)
                        last_base = tl.sum(before_it, 0).to(tl.float64)
                        last_top = top
                elif (hit == _NEVER) & (last < 0):
                    status = 3  # only a row rewritten during the launch gets here
                    active = 0
                else:
                    hit = tl.where(hit == _NEVER, last, hit)
                    token = (hit & 0x3FFFF).to(tl.int32)
                    predicts = tl.where(slots == node, token, predicts)
                    node = ((hit >> 18) & 0x3FF).to(tl.int32)
                    path = tl.where(slots == used, node, path)
                    used += 1

    # 3. the bonus token and the outputs, by one program
    drawing = (status == 0) & (greedy == 0)
    writer = (rank < walkers) & (rank == tl.where(drawing, last_chunk % walkers, 0))
    if writer:
        if drawing:
            index = last_chunk * CHUNK + tl.arange(0, CHUNK)
            row_ptr = rows_ptr + node.to(tl.int64) * stride_n
            x = tl.load(row_ptr + index, mask=index < V, other=0.0 if PROBS else float("-inf")).to(tl.float32)
            weight = 1.0
            if PROBS:
                mass = x
            else:
                top = tl.max(x, 0) + 0.0
                mass = _mass(x, tl.where(top == float("-inf"), 0.0, top), before, after, rate)
                weight = _mass(top, last_top, before, after, rate)
            if whole == 0:
                first = _follow(child_ptr, node, N)
                nodes, tokens, rest, left = _siblings(sibling_ptr, candidates_ptr, first, N, N, V, CHILDREN)
                end = last_chunk * CHUNK + CHUNK
                mass, _ = _without(
                    mass, index, end, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHILDREN
                )
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

    # 4. the last to leave opens the next epoch
    if SHARED:
        if rank == 0:
            tl.store(epochs_ptr + MAX_B + b, epoch + step + 1)
        gone = tl.atomic_add(epochs_ptr + 2 * MAX_B + b, 1, sem="acq_rel", scope="gpu")
        if gone == programs - 1:
            tl.store(epochs_ptr + b, tl.load(epochs_ptr + MAX_B + b, volatile=True))
            tl.store(epochs_ptr + 2 * MAX_B + b, 0)


INTERPRETED = not isinstance(_verify_tree_kernel, triton.JITFunction)  # TRITON_INTERPRET=1 at import time


@dataclass(frozen=True)
class LaunchPlan:
    """How a launch is cut up; a function of shapes and of the device alone. Never changes a result.

    Args:
        programs: programs per request, >= 1.

        read_ahead: rows (nodes ``0 .. read_ahead - 1``) whose chunks are taken in the first step, >= 1.
    """

    programs: int
    read_ahead: int


def _chunk_size(V: int) -> int:
    """Tokens per chunk: at most 64 chunks a row, and enough of them to spread a row over a GPU."""
    if V > 131072:
        return 4096
    return 2048 if V > 65536 else 1024


def launch_plan(B: int, N: int, V: int, multiprocessors: int) -> LaunchPlan:
    """Cut B requests of N rows of V tokens over a device; one program a request if it has none to spare.

    ``B * programs`` never exceeds 8 programs a multiprocessor, which the kernel's register limit lets be
    co-resident.
    """
    chunks = triton.cdiv(V, _chunk_size(V))
    share = max(1, 8 * multiprocessors // B)
    if share == 1:
        return LaunchPlan(programs=1, read_ahead=1)
    read_ahead = min(N, 16 if B <= 2 else 8 if B <= 6 else 2 if B <= 24 else 1)
    return LaunchPlan(programs=min(share, read_ahead * chunks, 256), read_ahead=read_ahead)


class Workspace:
    """Scratch for one stream of launches on one device; 4.7 MB, whatever N and V.

    Holds the published chunk triples and the epochs. Launches that use it must not overlap in time.
    """

    rows = MAX_BATCH * _ROWS_PER_REQUEST

    def __init__(self, device: torch.device | str) -> None:
        self.words = torch.full((self.rows, _FIELDS, 64), -1, dtype=torch.int64, device=device)
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
    _verify_tree_kernel[(B * plan.programs,)](
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
        plan.programs,
        plan.read_ahead,
        SLOTS=triton.next_power_of_2(N),
        CHUNKS=triton.next_power_of_2(triton.cdiv(V, chunk)),
        CHUNK=chunk,
        CHILDREN=_CHILDREN,
        MAX_B=MAX_BATCH,
        PROBS=temperature is None,
        SHARED=plan.programs > 1,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        enable_fp_fusion=True,  # Triton's default until 3.10, and what the figures were measured with
    )
