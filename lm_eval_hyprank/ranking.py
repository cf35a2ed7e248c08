"""Scores to the rank of the gold, with one fair rule for ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GoldRank:
    """Where the gold stands among its candidates when scores are sorted, lowest first.

    Ties are kept, not broken: the gold's rank under random tie-breaking is uniform over
    ``better + 1 .. better + tied + 1``, and every figure below is the expectation over it.
    A scorer that gives all candidates the same score therefore gets exactly what a random
    ranking gets, wherever the gold stands in the input.

    Attributes:
        better: Number of negatives with a strictly lower (better) score than the gold.
        tied: Number of negatives with exactly the gold's score.
        candidates: Number of candidates, the gold included.
    """

    better: int
    tied: int
    candidates: int

    def hit(self, k: int) -> float:
        """Probability that the gold is among the first ``k`` (Hit@k of one item)."""
        return min(max(k - self.better, 0), self.tied + 1) / (self.tied + 1)

    @property
    def reciprocal_rank(self) -> float:
        """Expected reciprocal rank of the gold."""
        ranks = range(self.better + 1, self.better + self.tied + 2)
        return math.fsum(1 / rank for rank in ranks) / len(ranks)

    @property
    def win_rate(self) -> float:
        """Share of negatives the gold beats, a tie counting one half (the AUC of the item)."""
        negatives = self.candidates - 1
        return (negatives - self.better - self.tied / 2) / negatives


def gold_rank(scores: Sequence[float], gold: int) -> GoldRank:
    """Ranks the gold of one item by ascending score.

    Args:
        scores: One score a candidate, lower is better; at least two.
        gold: Index of the gold in ``scores``.

    Raises:
        ValueError: A score is NaN or infinite, there are fewer than two candidates, or
            ``gold`` is not an index of ``scores``. Such an item has no rank.
    """
    if len(scores) < 2:
        raise ValueError(f"ranking needs at least two candidates, got {len(scores)}")
    if not 0 <= gold < len(scores):
        raise ValueError(f"gold index {gold} is not one of {len(scores)} candidates")
    if not all(math.isfinite(score) for score in scores):
        raise ValueError("a score is NaN or infinite: the item cannot be ranked")
    own = scores[gold]
    better = sum(score < own for score in scores)
    tied = sum(score == own for score in scores) - 1
    return GoldRank(better, tied, len(scores))
