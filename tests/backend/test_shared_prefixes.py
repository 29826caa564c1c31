"""Prompts that share long beginnings, in random batches, out of a warm, a fresh or a crowded cache: one answer each."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch

from backend.engine.kv_pool import RESERVED_BLOCKS, block_bytes
from backend.protocol import Sampling
from backend.settings import Dtype
from tests.backend.harness import TINY, Calls, running_engine, tiny_checkpoint

CONFIG = replace(TINY, max_position=8192)
SHARED = (1, 511, 2048, 4097)
"""Of these lengths one is a multiple of a block, and two are a token away from one."""
EACH = 2
TOKENS = 12
BLOCKS = 80
"""A prompt of the longest takes 65."""

Answer = tuple[tuple[int, float], ...]


def answers(calls: Calls, prompts: list[list[int]], rng: random.Random) -> list[set[Answer]]:
    """What each prompt is answered, asked twice among all others in random order and windows."""
    found: list[set[Answer]] = [set() for _ in prompts]
    order = [*range(len(prompts))] * 2
    rng.shuffle(order)

    def ask(index: int, windows: tuple[int, ...]) -> None:
        sampling = Sampling(temperature=0.6, seed=index)
        found[index].add(tuple(calls.complete(prompts[index], TOKENS, sampling, windows)))

    askers = [threading.Thread(target=ask, args=(index, (rng.randint(1, 9), rng.randint(1, 9)))) for index in order]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    return found


@pytest.mark.slow
def test_prompts_that_share_prefixes_have_one_answer_each(dtype: Dtype) -> None:
    rng = random.Random(5)
    text = [rng.randrange(CONFIG.vocab_size) for _ in range(max(SHARED))]
    prompts = [[*text[:length], rng.randrange(CONFIG.vocab_size), end] for length in SHARED for end in range(EACH)]
    rng.shuffle(prompts)
    checkpoint = tiny_checkpoint(config=CONFIG)
    with running_engine(checkpoint, dtype) as calls:
        first = answers(calls, prompts, rng)
        warm = answers(calls, prompts, rng)
    crowded = (BLOCKS + RESERVED_BLOCKS) * block_bytes(CONFIG, getattr(torch, dtype))
    with running_engine(checkpoint, dtype, kv_bytes=crowded) as calls:
        evicting = answers(calls, prompts, rng)
        assert calls.engine._cache.evictions > 0
    assert all(len(one) == 1 for one in first)
    assert first == warm == evicting
    assert len(set.union(*first)) == len(prompts)
