"""A request's tree in shared memory: no step of the walk waits for global memory to know a node's children.

Device functions only, for ``PTX``; without it the tree stays where it is. Seven tables, an entry a node
behind one for "no node": first child, token, and the sibling 1, 2, 4, 8 and 16 places on, so that lane k of a
warp finds the kth child in five reads. Pointers outside ``[0, N)`` are -1 in them, tokens outside ``[0, V)``
too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.sibling_lists import follow, siblings

__all__ = ["first_child", "first_siblings", "tree_in_shared_memory"]

_CHILD = tl.constexpr(0)
_TOKEN = tl.constexpr(1)
_SIBLING = tl.constexpr(2)  # and the four behind it
_HOPS = tl.constexpr(5)


def _room(slots: int) -> tl.constexpr:
    """PTX: the address of room for the tables of so many slots."""
    return tl.constexpr(f"{{ .shared .align 4 .b8 tree[{7 * 4 * (slots + 1)}]; mov.u32 $0, tree; }}")


_ROOM_64, _ROOM_256, _ROOM_1024 = _room(64), _room(256), _room(1024)


@triton.jit
def _entry(tree, table, node, SLOTS: tl.constexpr):
    """The address of a node's entry; -1, no node, has one too."""
    return tree + table * (4 * (SLOTS + 1)) + 4 * (node + 1)


@triton.jit
def _look_up(tree, table, node, SLOTS: tl.constexpr):
    return tl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];",
        "=r,r",
        [_entry(tree, table, node, SLOTS)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _enter(tree, table, node, value, SLOTS: tl.constexpr):
    tl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.u32 $0, 0;",
        "=r,r,r",
        [_entry(tree, table, node, SLOTS), value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _meet():
    """A barrier that stays where it is among the accesses above."""
    tl.inline_asm_elementwise(
        "bar.sync 0; mov.u32 $0, 0;", "=r,r", [tl.zeros([], tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def tree_in_shared_memory(
    child_ptr, sibling_ptr, candidates_ptr, N, V, SLOTS: tl.constexpr, PTX: tl.constexpr
):
    """Fill the tables, and return where they are; ``SLOTS`` is a power of two from N to 1024."""
    tree = tl.zeros([], tl.int32)
    if PTX:
        ROOM: tl.constexpr = _ROOM_64 if SLOTS <= 64 else _ROOM_256 if SLOTS <= 256 else _ROOM_1024
        tree = tl.inline_asm_elementwise(ROOM, "=r,r", [tree], tl.int32, is_pure=False, pack=1)
        slots = tl.arange(0, SLOTS)
        child = tl.load(child_ptr + slots, mask=slots < N, other=-1)
        sibling = tl.load(sibling_ptr + slots, mask=slots < N, other=-1)
        token = tl.load(candidates_ptr + slots, mask=slots < N, other=-1)
        child = tl.where((child >= 0) & (child < N), child, -1).to(tl.int32)
        sibling = tl.where((sibling >= 0) & (sibling < N), sibling, -1).to(tl.int32)
        token = tl.where((token >= 0) & (token < V), token, -1).to(tl.int32)
        nothing = tl.full([], -1, tl.int32)
        for table in tl.static_range(_SIBLING + _HOPS):
            _enter(tree, table, nothing, nothing, SLOTS)
        _enter(tree, _CHILD, slots, child, SLOTS)
        _enter(tree, _TOKEN, slots, token, SLOTS)
        for bit in tl.static_range(_HOPS):
            _enter(tree, _SIBLING + bit, slots, sibling, SLOTS)
            _meet()
            if bit < _HOPS - 1:
                sibling = _look_up(tree, _SIBLING + bit, sibling, SLOTS)
    return tree


@triton.jit
def first_child(tree, child_ptr, node, N, SLOTS: tl.constexpr, PTX: tl.constexpr):
    """A node's first child or -1."""
    if PTX:
        child = _look_up(tree, _CHILD, node, SLOTS)
    else:
        child = follow(child_ptr, node, N)
    return child


@triton.jit
def first_siblings(
    tree, child_ptr, sibling_ptr, candidates_ptr, node, N, V, SLOTS: tl.constexpr, PTX: tl.constexpr
):
    """:func:`~.sibling_lists.siblings` of a node's whole list of children."""
    child = first_child(tree, child_ptr, node, N, SLOTS, PTX)
    if PTX:
        lane = tl.arange(0, 32)
        nodes = tl.where(lane < N, child, -1)
        for bit in tl.static_range(_HOPS):
            further = _look_up(tree, _SIBLING + bit, nodes, SLOTS)
            nodes = tl.where(((lane >> bit) & 1) == 1, further, nodes)
        tokens = _look_up(tree, _TOKEN, nodes, SLOTS)
        left = N - 32
        beyond = tl.max(tl.where(lane == 31, _look_up(tree, _SIBLING, nodes, SLOTS), -1), 0)
        rest = tl.where(left > 0, beyond, -1)
    else:
        nodes, tokens, rest, left = siblings(sibling_ptr, candidates_ptr, child, N, N, V)
    return nodes, tokens, rest, left
