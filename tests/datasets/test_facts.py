from __future__ import annotations

import pytest

from lm_eval_hyprank.datasets.facts import describe
from lm_eval_hyprank.datasets.validation import Paper


def paper(doi: str, gold: str, lengths: list[int], discipline: str = "Math") -> Paper:
    texts = tuple("n" * length for length in lengths)
    return Paper("Math/1", discipline, doi, "", "survey", "question", gold, texts[:5], texts[5:])


def test_facts_by_hand() -> None:
    facts = describe(
        [
            # Alone the shortest; all ratios are 2.
            paper("10.1/a", "The authors", [22] * 15, "Physics"),
            # The shortest together with three others: counts 1/4. Ratios 1 (3 times) and 1.3.
            paper("10.1/A", "g" * 10, [10] * 3 + [13] * 12),
            # The longest together with one other: counts 1/2. Ratios 1 and 0.5 (14 times).
            paper("10.1/b", "In this study, found", [20] + [10] * 14),
            # Neither. Ratios 0.5 (7 times), 4 (8 times).
            paper("", "A paper on studies.x", [10] * 7 + [80] * 8),
        ]
    )
    assert facts.papers == 4
    assert facts.by_discipline == {"Math": 3, "Physics": 1}
    assert (facts.dois, facts.sharing_doi, facts.without_doi) == (2, 2, 1)
    # Sorted ratios: 21 times 0.5, 4 times 1, 12 times 1.3, 15 times 2, 8 times 4.
    assert facts.length_ratio == pytest.approx(1.3)
    assert facts.longer == pytest.approx(23 / 60)
    assert facts.gold_shortest == pytest.approx((1 + 1 / 4) / 4)
    assert facts.gold_longest == pytest.approx((1 / 2) / 4)
    assert facts.self_reference == pytest.approx(2 / 4)


def test_equal_lengths_are_chance() -> None:
    facts = describe([paper("", "gold", [4] * 15)])
    assert facts.gold_shortest == pytest.approx(1 / 16)
    assert facts.gold_longest == pytest.approx(1 / 16)


def test_no_papers() -> None:
    with pytest.raises(ValueError, match="no paper"):
        describe([])
