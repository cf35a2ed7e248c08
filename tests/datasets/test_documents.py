from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lm_eval_hyprank.datasets.documents import shuffled


def test_permutation_is_pinned() -> None:
    """Published results depend on it: these values must never change."""
    assert shuffled("Physics/101103physrevlett132061801", 16) == [
        14, 9, 2, 5, 3, 12, 10, 11, 6, 13, 0, 15, 8, 1, 4, 7,
    ]  # fmt: skip


def test_gold_position_is_uniform() -> None:
    papers = 4800
    positions = Counter(shuffled(f"Math/{n}", 16).index(0) for n in range(papers))
    expected = papers / 16
    statistic = sum((positions[k] - expected) ** 2 / expected for k in range(16))
    assert statistic < 30.58  # chi-square, 15 degrees of freedom, p = .01


@given(st.text(), st.integers(1, 32))
def test_order_is_a_permutation_of_the_sample_id_alone(sample_id: str, size: int) -> None:
    state = random.getstate()
    order = shuffled(sample_id, size)
    assert sorted(order) == list(range(size))
    assert order == shuffled(sample_id, size)
    assert random.getstate() == state
