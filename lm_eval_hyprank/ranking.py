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


@dataclass(frozen=True)
class BestGoldRank(GoldRank):
    """Where the best-ranked of several golds stands; ties as in :class:`GoldRank`.

    Hit@k and reciprocal rank are those of the first gold in the ranking (another gold never
    stands before it). The win rate is over all pairs of a gold and a negative.

    Attributes:
        better: Number of negatives with a strictly lower (better) score than every gold.
        tied: Number of negatives with exactly the best gold's score.
        candidates: Number of candidates, the golds included.
        golds: Number of golds with that score.
        pairs_won: Share of the pairs in which the gold beats the negative, a tie counting one half.
    """

    golds: int
    pairs_won: float

    def hit(self, k: int) -> float:
        """Probability that a gold is among the first ``k`` (Hit@k of one item)."""
        places = min(max(k - self.better, 0), self.tied + self.golds)
        # All of the first places of the tied group may go to negatives.
        missed = math.comb(self.tied, places) / math.comb(self.tied + self.golds, places)
        return 1 - missed

    @property
    def reciprocal_rank(self) -> float:
        """Expected reciprocal rank of the first gold."""
        ranks = range(self.better + 1, self.better + self.tied + 2)
        return math.fsum((self.hit(rank) - self.hit(rank - 1)) / rank for rank in ranks)

    @property
    def win_rate(self) -> float:
        """Share of (gold, negative) pairs that the gold wins (the AUC of the item)."""
        return self.pairs_won


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


def chance_rank(candidates: int) -> GoldRank:
    """The gold's rank under a scorer that says nothing: tied with all the negatives."""
    return GoldRank(better=0, tied=candidates - 1, candidates=candidates)


def best_gold_rank(scores: Sequence[float], golds: Sequence[int]) -> BestGoldRank:
    """Ranks the golds of one item by ascending score.

    Args:
        scores: One score a candidate, lower is better.
        golds: Distinct indices of the golds in ``scores``; at least one, and not all.

    Raises:
        ValueError: A score is NaN or infinite, or the golds are none or all of the candidates, or
            no indices of them. Such an item has no rank.
    """
    if not golds or len(set(golds)) < len(golds):
        raise ValueError(f"gold indices are {list(golds)}; give each gold once")
    outside = [gold for gold in golds if not 0 <= gold < len(scores)]
    if outside:
        raise ValueError(f"gold index {outside[0]} is not one of {len(scores)} candidates")
    negatives = [score for index, score in enumerate(scores) if index not in golds]
    ranks = [gold_rank([scores[gold], *negatives], 0) for gold in golds]
    best = min(scores[gold] for gold in golds)
    first = min(ranks, key=lambda rank: (rank.better, rank.tied))
    return BestGoldRank(
        better=first.better,
        tied=first.tied,
        candidates=len(scores),
        golds=sum(scores[gold] == best for gold in golds),
        pairs_won=math.fsum(rank.win_rate for rank in ranks) / len(ranks),
    )
