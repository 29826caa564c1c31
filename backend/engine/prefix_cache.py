"""Which block holds the keys and values of which tokens: accounting for the KV pool, without the pool.

A tree of blocks. A full block is the child of the block before it, under its own tokens; a partly filled block hangs
off its parent as a tail. Each node counts the leading positions whose KV came from the fixed lane (`fixed`); since a
verified position needs a verified prefix, the fixed part of a sequence is always a prefix of it.

A call leases blocks, computes into them and releases them with what it computed. Full blocks are shared between
leases: the fast lane never writes a position that is already cached, and the fixed lane only replaces fast KV by fixed
KV or by the same bits. Tails are not shared: an idle tail is taken over whole, any other partial match is copied.

Owns no tensors, reads no clock. The least recently used idle leaf is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Node:
    """One cached block. `users` counts the leases that share it; a node is evictable while that is 0."""

    block: int
    tokens: tuple[int, ...]
    fixed: int
    parent: _Node | None
    users: int = 0
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    tails: list[_Node] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks for one call, in order of position.

    The first `cached` tokens have KV already, the first `fixed` of them from the fixed lane. Before it computes, the
    holder clears the blocks in `fresh` and then performs `copy`: (source block, target block, leading positions).
    """

    blocks: list[int]
    cached: int
    fixed: int
    fresh: list[int]
    copy: tuple[int, int, int] | None
    shared: list[_Node]


class PrefixCache:
    """Hands out `blocks` blocks, numbered from `first`, of `block_size` positions each."""

    def __init__(self, blocks: int, block_size: int, first: int):
        self.block_size = block_size
        self._total = blocks
        self._free = list(range(first + blocks - 1, first - 1, -1))
        self._root = _Node(block=-1, tokens=(), fixed=0, parent=None)
        self._idle: OrderedDict[_Node, None] = OrderedDict()  # Least recently used first; children before parents.
        self._leases: list[Lease] = []
        self.evictions = 0

    def __repr__(self) -> str:
        return (
            f"<PrefixCache {len(self._free)} free, {len(self._idle)} idle of {self._total}, {len(self._leases)} leases>"
        )

    @property
    def leased_calls(self) -> int:
        """Leases not yet released."""
        return len(self._leases)

    @property
    def available(self) -> int:
        """Blocks that hold nothing, or what can be evicted."""
        return len(self._free) + len(self._idle)

    @property
    def total(self) -> int:
        """Blocks in all."""
        return self._total

    def acquire(self, tokens: Sequence[int], capacity: int, prefer_fixed: bool) -> Lease | None:
        """Lease blocks for `capacity` tokens that begin with `tokens`, reusing what is cached of them.

        `prefer_fixed` ranks partial matches by their fixed length. None where memory does not suffice for now.
        """
        size = self.block_size
        shared = self._full_matches(tokens)
        parent = shared[-1] if shared else self._root
        rest = tuple(tokens[len(shared) * size : (len(shared) + 1) * size])
        source, common = _best_match(parent, rest, prefer_fixed)
        takes_over = source is not None and source in parent.tails and common == len(source.tokens)
        pinned = [*shared, *([] if source is None else [source])]
        for node in pinned:
            self._pin(node)
        needed = self._blocks_for(capacity) - len(shared) - takes_over
        if source is not None and not takes_over and needed > self.available:
            # Memory is too tight to keep what would be copied; its block is needed itself.
            self._unpin(pinned.pop())
            source, common = None, 0
        if needed > self.available:
            for node in reversed(pinned):
                self._unpin(node)
            return None

        fresh = [self._take() for _ in range(needed)]
        owned = fresh
        copy: tuple[int, int, int] | None = None
        if source is not None:
            if takes_over:
                parent.tails.remove(source)
                owned = [source.block, *fresh]
            else:
                self._unpin(source)
                copy = (source.block, fresh[0], common)
        fixed = _leading_fixed(shared, size)
        if source is not None and fixed == len(shared) * size:
            fixed += min(source.fixed, common)
        lease = Lease(
            blocks=[node.block for node in shared] + owned,
            cached=len(shared) * size + common,
            fixed=fixed,
            fresh=fresh,
            copy=copy,
            shared=shared,
        )
        self._leases.append(lease)
        return lease

    def grow(self, lease: Lease) -> int | None:
        """Add a block to the end of a lease; the holder clears it. None where memory does not suffice for now."""
        if not self.available:
            return None
        lease.blocks.append(self._take())
        return lease.blocks[-1]

    def release(self, lease: Lease, tokens: Sequence[int], fixed: int) -> None:
        """Give a lease back; `tokens` have valid KV in its blocks, the first `fixed` of them from the fixed lane."""
        self._leases.remove(lease)
        size = self.block_size
        for index, node in enumerate(lease.shared):
            node.fixed = max(node.fixed, min(fixed - index * size, size))
        parent = lease.shared[-1] if lease.shared else self._root
        path = [*lease.shared]
        owned = lease.blocks[len(lease.shared) :]
        for index, block in enumerate(owned, start=len(lease.shared)):
            chunk = tuple(tokens[index * size : (index + 1) * size])
            if not chunk:
                self._free.append(block)
                continue
            kept = self._insert(parent, block, chunk, max(0, min(fixed - index * size, size)))
            if kept is not None:
                self._pin(kept)
                path.append(kept)
                parent = kept
                # A twin that others use can hold less fixed KV than ours did; nothing behind it counts as fixed then.
                if kept.fixed < size:
                    fixed = min(fixed, index * size + kept.fixed)
        # Leaf first, so that a parent is always more recently used than its children.
        for node in reversed(path):
            self._unpin(node)

    def check_integrity(self) -> None:
        """Assert that every block has exactly one owner and that the order of eviction is sound."""
        nodes: list[_Node] = []
        stack = [self._root]
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                assert key == child.tokens and len(key) == self.block_size
            for child in (*node.children.values(), *node.tails):
                assert child.parent is node
                assert 0 <= child.fixed <= len(child.tokens)
                assert child.fixed == 0 or node is self._root or node.fixed == self.block_size
                nodes.append(child)
                stack.append(child)
            assert all(0 < len(tail.tokens) < self.block_size and not tail.children for tail in node.tails)
        owned = [block for lease in self._leases for block in lease.blocks[len(lease.shared) :]]
        blocks = sorted([*self._free, *owned, *(node.block for node in nodes)])
        assert len(blocks) == self._total and len(set(blocks)) == self._total
        shared = [node for lease in self._leases for node in lease.shared]
        for node in nodes:
            assert node.users == sum(other is node for other in shared)
            assert (node.users == 0) == (node in self._idle)
        order = {node: rank for rank, node in enumerate(self._idle)}
        assert all(order[node] < order[node.parent] for node in order if node.parent in order)

    def _blocks_for(self, capacity: int) -> int:
        return -(-capacity // self.block_size)

    def _full_matches(self, tokens: Sequence[int]) -> list[_Node]:
        node, matches = self._root, []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            child = node.children.get(tuple(tokens[start : start + self.block_size]))
            if child is None:
                break
            matches.append(child)
            node = child
        return matches

    def _insert(self, parent: _Node, block: int, chunk: tuple[int, ...], fixed: int) -> _Node | None:
        """Hang a block into the tree, or free it where the tree holds as much already; the node to go on from."""
        full = len(chunk) == self.block_size
        if full and (twin := parent.children.get(chunk)) is not None:
            if twin.users == 0 and twin.fixed < fixed:
                self._free.append(twin.block)
                twin.block, twin.fixed = block, fixed
            else:
                self._free.append(block)
            return twin
        for tail in tuple(parent.tails):
            if len(tail.tokens) <= len(chunk) and chunk[: len(tail.tokens)] == tail.tokens and tail.fixed <= fixed:
                parent.tails.remove(tail)
                self._idle.pop(tail)
                self._free.append(tail.block)
            elif tail.tokens[: len(chunk)] == chunk and tail.fixed >= fixed:
                self._free.append(block)
                return None
        node = _Node(block=block, tokens=chunk, fixed=fixed, parent=parent)
        self._idle[node] = None
        if full:
            parent.children[chunk] = node
        else:
            parent.tails.append(node)
        return node

    def _pin(self, node: _Node) -> None:
        if node.users == 0:
            self._idle.pop(node)
        node.users += 1

    def _unpin(self, node: _Node) -> None:
        node.users -= 1
        if node.users == 0:
            self._idle[node] = None

    def _take(self) -> int:
        """A free block, evicting the least recently used idle one where there is none."""
        if self._free:
            return self._free.pop()
        node, _ = self._idle.popitem(last=False)
        self.evictions += 1
        parent = node.parent
        assert parent is not None and not node.children and not node.tails, "eviction must be leaf first"
        if parent.children.get(node.tokens) is node:
            del parent.children[node.tokens]
        else:
            parent.tails.remove(node)
        return node.block


def _leading_fixed(nodes: Sequence[_Node], size: int) -> int:
    """Length of the fixed prefix over consecutive full blocks."""
    total = 0
    for node in nodes:
        total += node.fixed
        if node.fixed < size:
            break
    return total


def _best_match(parent: _Node, rest: tuple[int, ...], prefer_fixed: bool) -> tuple[_Node | None, int]:
    """The block below `parent` that shares the longest prefix with `rest`, and the length of that prefix."""
    best: _Node | None = None
    best_rank, best_common = (0, 0), 0
    for node in (*parent.tails, *parent.children.values()):
        common = _common_prefix(node.tokens, rest)
        fixed = min(node.fixed, common)
        rank = (fixed, common) if prefer_fixed else (common, fixed)
        if common and rank > best_rank:
            best, best_rank, best_common = node, rank, common
    return best, best_common


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
