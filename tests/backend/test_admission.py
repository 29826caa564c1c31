"""Who may run: nobody is refused for ever, neither kind starves, and memory is always accounted for."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.engine.admission import Admission, QueueFullError
from backend.engine.prefix_cache import PrefixCache
from backend.engine.tasks import DecodeTask, Task, VerifyTask
from backend.protocol import Sampling

SIZE = 4
GREEDY = Sampling(temperature=0.0)


def stream(context: list[int], count: int) -> DecodeTask:
    return DecodeTask(context, count, GREEDY, frozenset(), top=0, is_draft=False)


def draft(context: list[int], count: int) -> DecodeTask:
    return DecodeTask(context, count, GREEDY, frozenset(), top=0, is_draft=True)


def call(context: list[int], drafted: int = 0) -> VerifyTask:
    return VerifyTask(context, [0] * drafted, GREEDY, frozenset(), top=0)


def admission(blocks: int, places: int = 8, waiting: int = 64) -> tuple[Admission, PrefixCache]:
    cache = PrefixCache(blocks, SIZE, first=2)
    return Admission(cache, places, waiting), cache


def test_a_call_that_needs_all_memory_is_admitted_beside_a_partial_match() -> None:
    admit, _ = admission(blocks=4)
    first = call([1, 2, 3])
    admit.submit(first)
    admit.admit()
    first.computed = 3
    admit.end(first)
    whole = draft([1, 2, 9], 14)
    admit.submit(whole)
    assert admit.admit().admitted == [whole]


def test_calls_take_memory_from_the_youngest_streams() -> None:
    admit, cache = admission(blocks=12)
    streams = [stream([10 + i] * 8, 40) for i in range(4)]
    for each in streams:
        admit.submit(each)
    assert admit.admit().admitted == streams
    assert admit.admit().preempted == []
    wanting = call([1] * 20, drafted=5)
    admit.submit(wanting)
    assert admit.admit().admitted == [], "streams are left alone until they have produced a block"
    for each in streams:
        each.tokens += [0] * SIZE
    admit.end(wanting)
    wanting = call([1] * 20, drafted=5)
    admit.submit(wanting)
    changes = admit.admit()
    assert changes.admitted == [wanting]
    assert changes.preempted == [streams[3], streams[2], streams[1]], "as many as the call needs"
    cache.check_integrity()
    admit.end(wanting)
    assert admit.admit().admitted == streams[1:3], "they come back in their order"


def test_streams_keep_a_quarter_of_memory_from_calls() -> None:
    admit, _ = admission(blocks=8)
    running = stream([1] * 4, 40)
    admit.submit(running)
    admit.admit()
    greedy_call = call([2] * 32)
    admit.submit(greedy_call)
    changes = admit.admit()
    assert changes.admitted == [] and changes.preempted == [], "a stream of a quarter is left alone"
    later = stream([3] * 4, 4)
    admit.submit(later)
    assert admit.admit().admitted == [], "streams do not overtake a call that waits for memory"
    admit.end(running)
    assert admit.admit().admitted == [greedy_call]


def test_waiting_streams_are_left_memory_by_calls() -> None:
    admit, _ = admission(blocks=8)
    admit.submit(call([1] * 20))
    admit.admit()
    waiting = stream([2] * 16, 40)
    admit.submit(waiting)
    assert admit.admit().admitted == []
    admit.submit(call([3] * 8))
    assert admit.admit().admitted == [], "the call would take what the stream waits for"


def test_a_stream_that_needs_nearly_all_memory_is_served_under_endless_calls() -> None:
    """Calls keep coming; the stream is let in after some have passed it, and gets on a block at a time."""
    admit, cache = admission(blocks=16)
    big = stream([1] * 48, 12)
    running: list[Task] = [call([100 + i] * 16) for i in range(4)]
    for task in running:
        admit.submit(task)
    admit.admit()
    admit.submit(big)
    for number in range(2000):
        if running:
            admit.end(running.pop(0))
        task = call([200 + number] * 16)
        admit.submit(task)
        running.append(task)
        for admitted in admit.admit().admitted:
            if admitted is big:
                big.computed = len(big.tokens) - 1
        if big.lease is not None:
            admit.make_room([big])
            big.tokens.append(0)
            big.computed += 1
        if len(big.tokens) == 60:
            return
        cache.check_integrity()
    raise AssertionError(f"the stream has {len(big.tokens)} tokens: {admit!r}")


@pytest.mark.parametrize("first_kind", ["streams", "calls"])
def test_each_kind_has_places_of_its_own(first_kind: str) -> None:
    admit, _ = admission(blocks=400, places=8)
    many: list[Task] = [stream([i, i], 9) if first_kind == "streams" else call([i, i]) for i in range(20)]
    for task in many:
        admit.submit(task)
    assert admit.admit().admitted == many[:6]
    other: list[Task] = [call([50 + i, 1]) if first_kind == "streams" else stream([50 + i, 1], 9) for i in range(3)]
    for task in other:
        admit.submit(task)
    assert admit.admit().admitted == other[:2]


def test_a_stream_grows_by_preempting_the_youngest() -> None:
    admit, _ = admission(blocks=4)
    old, young = stream([1] * 4, 40), stream([2] * 4, 40)
    for each in (old, young):
        admit.submit(each)
    assert admit.admit().admitted == [old, young]
    old.tokens, old.computed = [1] * 9, 8
    young.tokens, young.computed = [2] * 7, 6
    changes = admit.make_room([old, young])
    assert changes.preempted == [young] and len(changes.fresh) == 1
    assert old.lease is not None and len(old.lease.blocks) == 3
    admit.end(old)
    assert admit.admit().admitted == [young]
    assert young.lease is not None and young.lease.cached == 4, "what was not evicted is found again"


def test_the_queue_is_bounded() -> None:
    admit, _ = admission(blocks=4, waiting=2)
    for number in range(2):
        admit.submit(call([number]))
    with pytest.raises(QueueFullError):
        admit.submit(stream([9], 3))


class AdmissionMachine(RuleBasedStateMachine):
    """Random tasks that run a row at a time; each one ends at last."""

    @initialize(blocks=st.integers(4, 16), places=st.integers(4, 9))
    def build(self, blocks: int, places: int) -> None:
        self.blocks = blocks
        self.admission, self.cache = admission(blocks, places)
        self.unfinished: list[Task] = []

    @precondition(lambda self: len(self.unfinished) < 20)
    @rule(
        context=st.lists(st.integers(0, 1), min_size=1, max_size=20), count=st.integers(1, 20), kind=st.integers(0, 2)
    )
    def submit(self, context: list[int], count: int, kind: int) -> None:
        limit = self.blocks * SIZE
        context, count = context[: limit - 1], min(count, limit - min(len(context), limit - 1))
        task: Task = call(context, count - 1) if kind == 0 else (draft if kind == 1 else stream)(context, count)
        self.admission.submit(task)
        self.unfinished.append(task)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        task = self.unfinished.pop(data.draw(st.integers(0, len(self.unfinished) - 1)))
        self.admission.end(task)

    @rule()
    def step(self) -> None:
        for task in self.admission.admit().admitted:
            assert task.lease is not None
            task.computed = min(task.lease.cached, len(task.tokens) - 1)
        streams = [t for t in self.unfinished if isinstance(t, DecodeTask) and not t.is_draft and t.lease]
        self.admission.make_room(streams)
        for task in [task for task in self.unfinished if task.lease is not None]:
            assert task.lease is not None
            task.computed += 1
            assert task.computed <= len(task.lease.blocks) * SIZE, "a row has no block"
            if task.computed == len(task.tokens) and len(task.tokens) < task.capacity:
                task.tokens.append(len(task.tokens) % 2)
            elif task.computed >= task.capacity:
                self.unfinished.remove(task)
                self.admission.end(task)

    @invariant()
    def sound(self) -> None:
        self.cache.check_integrity()
        assert len(self.admission.running) == self.cache.leased_calls
        assert len(self.admission.running) + self.admission.waiting == len(self.unfinished)

    def teardown(self) -> None:
        if hasattr(self, "admission"):
            for _ in range(4000):
                if not self.unfinished:
                    return
                self.step()
            raise AssertionError(f"starved: {self.admission!r} {self.unfinished!r}")


AdmissionMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAdmission = AdmissionMachine.TestCase
