from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_hyprank.batching import Batching
from tests import tiny


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=80),
    max_sequences=st.one_of(st.none(), st.integers(1, 70)),
    max_tokens=st.integers(1, 5000),
    pass_tokens=st.integers(0, 600),
    max_logits=st.integers(1, 5000),
)
def test_a_plan_keeps_the_limits(lengths, max_sequences, max_tokens, pass_tokens, max_logits):
    lengths.sort(reverse=True)
    batching = Batching(max_sequences, max_tokens, 0, pass_tokens, max_logits)
    sizes = batching.plan(lengths)
    assert sum(sizes) == len(lengths)
    start = 0
    for size in sizes:
        assert 1 <= size <= (max_sequences or len(lengths))
        assert size == 1 or size * lengths[start] <= min(max_tokens, max_logits)
        start += size


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    max_sequences=st.one_of(st.none(), st.integers(1, 8)),
    max_tokens=st.integers(1, 200),
    pass_tokens=st.integers(0, 60),
)
def test_a_plan_costs_least(lengths, max_sequences, max_tokens, pass_tokens):
    """Against every way to cut the list."""
    lengths.sort(reverse=True)
    limit = max_sequences or len(lengths)

    def cost(sizes: list[int]) -> float:
        starts = itertools.accumulate(sizes, initial=0)
        total = 0.0
        for start, size in zip(starts, sizes, strict=False):
            padded = size * lengths[start]
            if size > 1 and (size > limit or padded > max_tokens):
                return float("inf")
            total += padded + pass_tokens
        return total

    def cuts(count: int) -> Iterator[list[int]]:
        if count == 0:
            yield []
        for size in range(1, count + 1):
            yield from ([size, *rest] for rest in cuts(count - size))

    found = Batching(max_sequences, max_tokens, 0, pass_tokens).plan(lengths)
    assert cost(found) == min(map(cost, cuts(len(lengths))))


@pytest.mark.parametrize(("vocabulary", "most"), [(320, 32), (49_152, 32), (262_144, 16)])
def test_a_wide_vocabulary_makes_smaller_batches_where_logits_are_held(vocabulary, most):
    with torch.device("meta"):
        model = tiny.llama(vocabulary)
    assert max(Batching.for_model(model, torch.device("cpu"), 32).plan([16] * 32)) == most
    assert max(Batching.for_model(model, torch.device("cpu"), 7).plan([16] * 32)) == 7


@pytest.mark.parametrize(
    ("vocabulary", "free", "most"),
    [
        (128_256, 2**31, 697),
        (128_256, 2**35, 11_162),
        (128_256, 2**37, 16_384),
        (262_144, 2**28, 512),
    ],
)
def test_a_gpus_free_memory_limits_the_batch(monkeypatch, vocabulary, free, most):
    """Half of it for logits and their float32 copies, three rows of four bytes a token."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**40))
    with torch.device("meta"):
        model = tiny.llama(vocabulary)
    batching = Batching.for_model(model, torch.device("cuda"), None)
    assert batching.max_tokens == most
    assert batching.min_saving > Batching.for_model(model, torch.device("cpu"), None).min_saving
