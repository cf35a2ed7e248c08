"""Agreement of a model's ranking with experts' judgements, and of the experts with each other.

A judgement is one expert's values for the candidates of an item, higher is better, None for a
candidate that the expert did not judge: grades of relevance (0 or more) or negated ranks (-1 or
less). Equal values are ties. Whatever cannot be computed is left out, never counted as 0: a
judgement that puts all candidates level, say, orders nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import krippendorff
import numpy as np
from lm_eval.api.registry import register_aggregation
from scipy import stats
from sklearn.metrics import ndcg_score

Judgement = Sequence[float | None]

NDCG_KS = (5, 10)
"""The cut-offs k of NDCG@k that are reported."""


def process_results(doc: Mapping[str, Any], scores: Sequence[float]) -> dict[str, Any]:
    """Metrics of one item under one scorer; lm-eval calls it once for every filter.

    Args:
        doc: The item, with ``judgements``: one of the module's judgements for each expert.
        scores: One score a candidate in the order of the item's candidates, lower is better.

    Returns:
        Those that are defined of

        * ``kendall_tau`` (tau-b) and ``spearman``: the model against each expert, over the
          candidates that the expert judged, averaged over the experts;
        * ``top1``: whether the model's first candidate is one that the expert puts first,
          averaged over the experts; of a tie for the model's first place, the share that is;
        * ``ndcg@5``, ``ndcg@10``: with the :func:`consensus` as gains, ties in the model's scores
          averaged;
        * the ceiling, where there are several experts: ``expert_kendall_tau``, tau-b averaged
          over the pairs of experts, ``kendall_w`` where everyone judged every candidate, and
          ``krippendorff_alpha``, for which the judgements are handed to :func:`alpha`;
        * ``invalid`` 0. An item with a score that is NaN or infinite has only ``invalid`` 1.
    """
    if not all(math.isfinite(score) for score in scores):
        return {"invalid": 1.0}
    model = [-score for score in scores]
    judgements = [judgement for judgement in doc["judgements"] if _orders(judgement)]
    found: dict[str, Any] = {
        "kendall_tau": _mean(_kendall(model, judgement) for judgement in judgements),
        "spearman": _mean(_spearman(model, judgement) for judgement in judgements),
        "top1": _mean(_top1(model, judgement) for judgement in judgements),
        **_ndcg(model, consensus(doc["judgements"])),
        "expert_kendall_tau": _mean(
            _kendall(one, other) for one, other in itertools.combinations(judgements, 2)
        ),
        "kendall_w": _kendall_w(doc["judgements"]),
    }
    if _comparable(doc["judgements"]):
        found["krippendorff_alpha"] = [list(judgement) for judgement in doc["judgements"]]
    found = {name: value for name, value in found.items() if value is not None}
    return {**found, "invalid": 0.0}


def consensus(judgements: Sequence[Judgement]) -> list[float | None]:
    """What the experts say together, one value a candidate, higher is better.

    Grades are taken as they are. Ranks become the share of the other judged candidates that the
    expert puts below the candidate, a tie counting one half (Borda's count, scaled to 0..1), of
    which the mean over the experts who judged the candidate is taken.

    Args:
        judgements: One of each expert.

    Returns:
        The values; None for a candidate that no expert judged beside another one.
    """
    if len(judgements) == 1 and all(value is None or value >= 0 for value in judgements[0]):
        return list(judgements[0])
    shares: list[list[float]] = [[] for _ in judgements[0]]
    for judgement in judgements:
        judged = [index for index, value in enumerate(judgement) if value is not None]
        if len(judged) > 1:
            ranks = stats.rankdata([judgement[index] for index in judged])
            for index, rank in zip(judged, ranks, strict=True):
                shares[index].append(float(rank - 1) / (len(judged) - 1))
    return [fmean(values) if values else None for values in shares]


@register_aggregation("krippendorff_alpha")
def alpha(items: Sequence[Sequence[Judgement]]) -> float:
    """Krippendorff's alpha (ordinal) of the experts over the candidates of all items.

    Args:
        items: The judgements of each item, of the same experts in the same order.

    Returns:
        At most 1; NaN, for lack of a better, where all values that could be compared are equal.
    """
    data = np.array(
        [
            [math.nan if value is None else value for item in items for value in item[expert]]
            for expert in range(len(items[0]))
        ]
    )
    compared = data[:, np.isfinite(data).sum(axis=0) > 1]
    if len(np.unique(compared[np.isfinite(compared)])) < 2:
        return math.nan
    return float(krippendorff.alpha(compared, level_of_measurement="ordinal"))


def _orders(judgement: Judgement) -> bool:
    """Whether the judgement puts any candidate above another."""
    return len({value for value in judgement if value is not None}) > 1


def _comparable(judgements: Sequence[Judgement]) -> bool:
    """Whether two experts judged some same candidate."""
    return any(
        len(candidate) - candidate.count(None) > 1 for candidate in zip(*judgements, strict=True)
    )


def _mean(values: Any) -> float | None:
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined else None


def _both(one: Judgement, other: Judgement) -> tuple[list[float], list[float]]:
    """The values of the candidates that have two."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _correlation(function: Callable[..., Any], one: Judgement, other: Judgement) -> float | None:
    first, second = _both(one, other)
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return float(function(first, second).statistic)


def _kendall(one: Judgement, other: Judgement) -> float | None:
    return _correlation(stats.kendalltau, one, other)  # tau-b is its default


def _spearman(one: Judgement, other: Judgement) -> float | None:
    return _correlation(stats.spearmanr, one, other)


def _top1(model: Sequence[float], judgement: Judgement) -> float | None:
    scores, values = _both(model, judgement)
    best = max(values)
    return fmean(
        value == best for score, value in zip(scores, values, strict=True) if score == max(scores)
    )


def _ndcg(model: Sequence[float], gains: Judgement) -> dict[str, float]:
    scores, values = _both(model, gains)
    if len(set(values)) < 2:
        return {}
    return {f"ndcg@{k}": float(ndcg_score([values], [scores], k=k)) for k in NDCG_KS}


def _kendall_w(judgements: Sequence[Judgement]) -> float | None:
    """Kendall's W: Friedman's statistic, corrected for ties, over its largest value."""
    experts, candidates = len(judgements), len(judgements[0])
    if experts < 2 or candidates < 3 or any(None in judgement for judgement in judgements):
        return None
    if not any(_orders(judgement) for judgement in judgements):
        return None
    statistic = stats.friedmanchisquare(*zip(*judgements, strict=True)).statistic
    return float(statistic) / (experts * (candidates - 1))
