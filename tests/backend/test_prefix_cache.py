"""The KV accounting under random leases, releases and evictions."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.engine.prefix_cache import Lease, PrefixCache

SIZE = 4


class CacheMachine(RuleBasedStateMachine):
    """Holds, beside the cache, what each block's positions would contain: (token prefix, lane) as the pool would."""

    @initialize(blocks=st.integers(3, 14))
    def build(self, blocks: int) -> None:
        self.blocks = blocks
        self.cache = PrefixCache(blocks, SIZE, first=2)
        self.pool: dict[int, list[tuple[tuple[int, ...], bool] | None]] = {}
        self.leases: list[tuple[Lease, list[int], int]] = []

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=22),
        extra=st.integers(0, 6),
        prefer_fixed=st.booleans(),
    )
    def acquire(self, tokens: list[int], extra: int, prefer_fixed: bool) -> None:
        capacity = len(tokens) + extra
        held = len({block for lease, _, _ in self.leases for block in lease.blocks})
        lease = self.cache.acquire(tokens, capacity, prefer_fixed)
        if lease is None:
            assert held + -(-capacity // SIZE) > self.blocks, "refused though the blocks suffice"
            return
        assert len(lease.blocks) == -(-capacity // SIZE) and len(set(lease.blocks)) == len(lease.blocks)
        assert 0 <= lease.fixed <= lease.cached <= len(tokens)
        for block in lease.fresh:
            self.pool[block] = [None] * SIZE
        if lease.copy is not None:
            source, target, positions = lease.copy
            assert target in lease.fresh
            self.pool[target][:positions] = self.pool[source][:positions]
        for position in range(lease.cached):
            content = self.pool[lease.blocks[position // SIZE]][position % SIZE]
            assert content is not None and content[0] == tuple(tokens[: position + 1])
            assert content[1] or position >= lease.fixed
        self.leases.append((lease, tokens, capacity))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), fixed_lane=st.booleans())
    def compute_and_release(self, data: st.DataObject, fixed_lane: bool) -> None:
        lease, tokens, capacity = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        tokens = tokens + data.draw(st.lists(st.integers(0, 1), max_size=capacity - len(tokens)))
        start = lease.fixed if fixed_lane else lease.cached
        end = data.draw(st.integers(start, len(tokens)))
        for position in range(start, end):
            self.pool[lease.blocks[position // SIZE]][position % SIZE] = (tuple(tokens[: position + 1]), fixed_lane)
        # A verification may be released with less than it computed; everything it keeps is the fixed lane's.
        kept = data.draw(st.integers(0, end)) if fixed_lane else max(end, lease.cached)
        self.cache.release(lease, tokens[:kept], kept if fixed_lane else lease.fixed)

    @invariant()
    def sound(self) -> None:
        self.cache.check_integrity()


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPrefixCache = CacheMachine.TestCase


def test_a_verified_window_is_found_again_as_fixed() -> None:
    cache = PrefixCache(8, SIZE, first=2)
    prompt = [1, 2, 3, 4, 5, 6]
    lease = cache.acquire(prompt, 6, prefer_fixed=True)
    assert lease is not None and lease.cached == 0
    cache.release(lease, prompt, fixed=6)
    again = cache.acquire([*prompt, 7], 10, prefer_fixed=False)
    assert again is not None and (again.cached, again.fixed, again.copy) == (6, 6, None)


def test_a_diverging_tail_is_copied_not_overwritten() -> None:
    cache = PrefixCache(8, SIZE, first=2)
    lease = cache.acquire([1, 2, 3], 3, prefer_fixed=False)
    assert lease is not None
    cache.release(lease, [1, 2, 3], fixed=0)
    other = cache.acquire([1, 2, 9], 4, prefer_fixed=False)
    assert other is not None and other.cached == 2 and other.copy == (lease.blocks[0], other.blocks[0], 2)
    first = cache.acquire([1, 2, 3, 4], 5, prefer_fixed=False)
    assert first is not None and first.cached == 3 and first.blocks[0] == lease.blocks[0]


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    cache = PrefixCache(4, SIZE, first=2)
    for start in (10, 20):
        lease = cache.acquire([start] * 8, 8, prefer_fixed=False)
        assert lease is not None
        cache.release(lease, [start] * 8, fixed=0)
    touched = cache.acquire([10] * 8, 8, prefer_fixed=False)
    assert touched is not None and touched.cached == 8
    cache.release(touched, [10] * 8, fixed=0)
    lease = cache.acquire([30] * 8, 8, prefer_fixed=False)
    assert lease is not None
    cache.release(lease, [], fixed=0)
    kept = cache.acquire([10] * 8, 8, prefer_fixed=False)
    assert kept is not None and kept.cached == 8
