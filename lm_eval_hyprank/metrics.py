"""Hit@k, MRR and win rate: per item for our own tasks, over ranks for any task's YAML.

lm-eval prints a standard error only for the aggregation ``mean``, so the tasks of this
package emit one value an item (:func:`process_results`) and aggregate by ``mean``. The
aggregations registered here serve other YAML tasks, whose metric is a rank:
``aggregation: hit@5`` or ``aggregation: mrr``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lm_eval.api.metrics  # noqa: F401  # registers the aggregation "mean"
from lm_eval.api.registry import register_aggregation, register_metric

from lm_eval_hyprank.ranking import GoldRank, best_gold_rank, gold_rank

HIT_KS = (1, 2, 3, 5)
"""The cut-offs k of Hit@k that are reported."""


def rank_metrics(rank: GoldRank) -> dict[str, float]:
    """Hit@k for all of `HIT_KS`, MRR and win rate of one item."""
    hits = {f"hit@{k}": rank.hit(k) for k in HIT_KS}
    return {**hits, "mrr": rank.reciprocal_rank, "win_rate": rank.win_rate}


def process_results(doc: Mapping[str, Any], scores: Sequence[float]) -> dict[str, float]:
    """Metrics of one item under one scorer; lm-eval calls it once for every filter.

    Args:
        doc: The item, with ``gold``: the index of the gold candidate, or a list of indices; of
            several golds the best-ranked one counts (`lm_eval_hyprank.ranking.BestGoldRank`).
        scores: One score a candidate in the order of the item's candidates, lower is better.

    Returns:
        ``hit@1``, ``hit@2``, ``hit@3``, ``hit@5``, ``mrr``, ``win_rate``, ``tie_rate`` (1 if
        a negative has exactly the gold's score) and ``invalid`` 0. An item with a score that
        is NaN or infinite has only ``invalid`` 1: it is counted, never ranked.
    """
    if not all(math.isfinite(score) for score in scores):
        return {"invalid": 1.0}
    gold = doc["gold"]
    rank = gold_rank(scores, gold) if isinstance(gold, int) else best_gold_rank(scores, gold)
    return {**rank_metrics(rank), "tie_rate": float(rank.tied > 0), "invalid": 0.0}


def _checked(ranks: Sequence[float]) -> Sequence[float]:
    if not ranks:
        raise ValueError("no ranks to aggregate")
    wrong = [rank for rank in ranks if not (math.isfinite(rank) and rank >= 1)]
    if wrong:
        raise ValueError(f"ranks start at 1; got {wrong[0]!r} ({len(wrong)} of {len(ranks)})")
    return ranks


def _hit_at(k: int) -> Callable[[Sequence[float]], float]:
    def aggregate(ranks: Sequence[float]) -> float:
        return sum(rank <= k for rank in _checked(ranks)) / len(ranks)

    aggregate.__name__ = f"hit_at_{k}"
    aggregate.__doc__ = f"Share of ranks (1 is best) that are at most {k}."
    register_aggregation(f"hit@{k}")(aggregate)
    return aggregate


hit_at_1, hit_at_2, hit_at_3, hit_at_5 = (_hit_at(k) for k in HIT_KS)


@register_aggregation("mrr")
def mrr(ranks: Sequence[float]) -> float:
    """Mean reciprocal rank of a list of ranks (1 is best)."""
    return math.fsum(1 / rank for rank in _checked(ranks)) / len(ranks)


@register_metric(metric="hit@1", higher_is_better=True, aggregation="hit@1")
@register_metric(metric="hit@2", higher_is_better=True, aggregation="hit@2")
@register_metric(metric="hit@3", higher_is_better=True, aggregation="hit@3")
@register_metric(metric="hit@5", higher_is_better=True, aggregation="hit@5")
@register_metric(metric="mrr", higher_is_better=True, aggregation="mrr")
@register_metric(metric="win_rate", higher_is_better=True, aggregation="mean")
def passthrough(items: Any) -> Any:
    """The metric function lm-eval wants beside an aggregation: hands its items on."""
    return items
