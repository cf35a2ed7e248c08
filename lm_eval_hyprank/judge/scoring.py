"""What a judge's readings are worth: metrics of a paper, position bias over all papers.

A ranking of five says nothing of the other eleven. Hit@k with k up to 5 needs no more; MRR does
and is not given. The win rate is given under both conventions that are in use for a gold outside
the five: ``terminal`` puts it at the last rank, so that it beats nobody; ``half`` takes the
unranked for tied, so that it beats half of the others among them.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lm_eval_hyprank.judge.prompts import views
from lm_eval_hyprank.judge.replies import LIST_LENGTH, Reading
from lm_eval_hyprank.metrics import HIT_KS, rank_metrics
from lm_eval_hyprank.ranking import gold_rank


def borda(rankings: Iterable[Sequence[int]], size: int) -> list[int]:
    """Returns each candidate's Borda points: 5 for a first place to 1 for a fifth, 0 for none.

    Of the rules that aggregate rankings this one needs no convention on how two unranked
    candidates compare, which the Kendall-optimal (Kemeny) order of top-5 lists does, and it
    shows ties as ties in place of one of many optimal orders.

    Args:
        rankings: Indices of candidates, the best first, five in each.
        size: The number of candidates.
    """
    points = [0] * size
    for ranking in rankings:
        for place, index in enumerate(ranking):
            points[index] += LIST_LENGTH - place
    return points


def list_metrics(points: Sequence[int], gold: int) -> dict[str, float]:
    """Hit@k and both win rates of one paper from points, higher is better, 0 is unranked."""
    rank = gold_rank([-value for value in points], gold)
    return {
        **{f"hit@{k}": rank.hit(k) for k in HIT_KS},
        "win_rate_terminal": rank.win_rate if points[gold] else 0.0,
        "win_rate_half": rank.win_rate,
    }


LIST_METRICS = tuple(list_metrics([1, 0], 0))


def with_valid(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """The metrics of a paper twice: over all papers, where an invalid one has missed, and valid."""
    if metrics is None:
        return dict.fromkeys(LIST_METRICS, 0.0)
    return {**metrics, **{f"{name}_valid": value for name, value in metrics.items()}}


def listwise_results(
    doc: Mapping[str, Any], readings: Sequence[Reading[list[int]]]
) -> dict[str, float]:
    """Metrics of a paper ranked once.

    Args:
        doc: The document, its candidates in the order shown.
        readings: The one reading.

    Returns:
        ``hit@1``, ``hit@2``, ``hit@3``, ``hit@5``, ``win_rate_terminal`` and ``win_rate_half``,
        all 0 for an invalid reply; the same with ``_valid``, absent for an invalid reply;
        ``parse_rate``, whether the reply has a ranking; ``chose_shown_first``, whether it puts
        first what was shown first (1/16 for a judge without position bias), absent if invalid.
    """
    (reading,) = readings
    ranking = reading.value
    if ranking is None:
        return {**with_valid(None), "parse_rate": 0.0}
    points = borda([ranking], len(doc["candidates"]))
    return {
        **with_valid(list_metrics(points, doc["gold"])),
        "parse_rate": 1.0,
        "chose_shown_first": float(ranking[0] == 0),
    }


def psc_rankings(
    doc: Mapping[str, Any], readings: Sequence[Reading[list[int]]]
) -> list[list[int] | None]:
    """Returns each order's ranking as indices into the document's candidates."""
    return [
        None if reading.value is None else [shown[index] for index in reading.value]
        for shown, reading in zip(doc["orders"], readings, strict=True)
    ]


def aggregate(rankings: Sequence[Sequence[int] | None], size: int) -> list[int]:
    """Returns the candidates that any ranking names, by Borda points; ties by the index."""
    points = borda([ranking for ranking in rankings if ranking is not None], size)
    named = [index for index in range(size) if points[index]]
    return sorted(named, key=lambda index: -points[index])


def psc_results(doc: Mapping[str, Any], readings: Sequence[Reading[list[int]]]) -> dict[str, float]:
    """Metrics of a paper ranked in several orders.

    Returns:
        The metrics of `listwise_results` for the aggregate of the valid orders, a paper without
        any being invalid; ``hit@k_single``, the mean over all orders taken alone; and, where two
        orders are valid, ``agreement@1`` and ``agreement@5``: the shares of pairs of orders with
        the same first choice, and of the five that two of them have in common (by chance 1/16
        and 5/16). ``parse_rate`` and ``chose_shown_first`` are means over orders.
    """
    size, gold = len(doc["candidates"]), doc["gold"]
    rankings = psc_rankings(doc, readings)
    valid = [ranking for ranking in rankings if ranking is not None]
    results = with_valid(list_metrics(borda(valid, size), gold) if valid else None)
    for k in HIT_KS:
        results[f"hit@{k}_single"] = sum(gold in ranking[:k] for ranking in valid) / len(rankings)
    results["parse_rate"] = len(valid) / len(rankings)
    if valid:
        first = [reading.value[0] == 0 for reading in readings if reading.value is not None]
        results["chose_shown_first"] = statistics.fmean(first)
    pairs = list(itertools.combinations(valid, 2))
    if pairs:
        results["agreement@1"] = statistics.fmean(a[0] == b[0] for a, b in pairs)
        shared = [len(set(a) & set(b)) / LIST_LENGTH for a, b in pairs]
        results["agreement@5"] = statistics.fmean(shared)
    return results


def pairwise_results(doc: Mapping[str, Any], readings: Sequence[Reading[int]]) -> dict[str, float]:
    """Metrics of a paper whose gold was set against each negative in both orders.

    An unreadable verdict is no vote: rates are over the verdicts (or pairs) that can be read,
    and a figure that these do not settle is absent.

    Args:
        doc: The document, with its pairs in ``orders``.
        readings: One reading a pair: 0 if the hypothesis shown first is preferred.

    Returns:
        ``accuracy``, the share of verdicts for the gold, also with ``_gold_first`` and
        ``_gold_second``, and ``accuracy_all``, in which an unreadable verdict is a wrong one;
        ``both_correct``, ``contradiction`` and ``both_wrong``, shares of the pairs with two
        verdicts; ``beats_majority_gold_first`` and ``_gold_second``, whether the gold beats at
        least 8 of 15 in that order; ``hit@k``, ``mrr`` and ``win_rate`` of the gold's rank by
        verdicts won against each negative; ``chose_shown_first``, by chance 0.5; and
        ``parse_rate``.
    """
    gold = doc["gold"]
    # Negative -> whether the gold won when shown first and when shown second; None is unreadable.
    won: dict[int, dict[bool, bool | None]] = {}
    first = []
    for (left, right), reading in zip(doc["orders"], readings, strict=True):
        gold_first = left == gold
        if reading.value is not None:
            first.append(reading.value == 0)
        outcome = None if reading.value is None else (reading.value == 0) == gold_first
        won.setdefault(right if gold_first else left, {})[gold_first] = outcome
    results = {"parse_rate": len(first) / len(readings)}

    read = [o for outcomes in won.values() for o in outcomes.values() if o is not None]
    results["accuracy_all"] = sum(read) / len(readings)
    if read:
        results["accuracy"] = statistics.fmean(read)
        results["chose_shown_first"] = statistics.fmean(first)
    for gold_first, name in ((True, "gold_first"), (False, "gold_second")):
        one_way = [outcomes[gold_first] for outcomes in won.values()]
        known = [outcome for outcome in one_way if outcome is not None]
        if known:
            results[f"accuracy_{name}"] = statistics.fmean(known)
        needed = len(one_way) // 2 + 1  # 8 of 15, as the benchmark counts
        if sum(known) >= needed or sum(known) + len(one_way) - len(known) < needed:
            results[f"beats_majority_{name}"] = float(sum(known) >= needed)

    readable = [[o for o in outcomes.values() if o is not None] for outcomes in won.values()]
    both = [sum(verdicts) for verdicts in readable if len(verdicts) == 2]
    if both:
        for wins, name in ((2, "both_correct"), (1, "contradiction"), (0, "both_wrong")):
            results[name] = both.count(wins) / len(both)

    shares = [statistics.fmean(verdicts) for verdicts in readable if verdicts]
    if len(shares) == len(won):
        # The gold's own score is one half: a negative it always loses to ranks above it.
        rank = gold_rank([0.5, *shares], 0)
        results |= rank_metrics(rank)
    return results


# --- what goes into the sample and beside the results --------------------------------------


def note(doc: Mapping[str, Any], readings: Sequence[Reading[Any]]) -> dict[str, Any]:
    """Returns what a sample is given beside its replies.

    Args:
        doc: The document.
        readings: Its readings.

    Returns:
        Of a document shown once, its ``ranking`` by candidate ids, or why it has none
        (``invalid``); of one shown in several orders, the same of each (``orders``) and the
        ``ranking`` that they give together; of one shown in pairs, its ``verdicts``.
    """
    if not doc["orders"]:
        (reading,) = readings
        return _named(doc["candidate_ids"], reading)
    if len(doc["orders"][0]) == 2:
        return _verdicts(doc, readings)
    ids = doc["candidate_ids"]
    orders = [
        {"candidate_ids": view["candidate_ids"], **_named(view["candidate_ids"], reading)}
        for view, reading in zip(views(doc), readings, strict=True)
    ]
    rankings = psc_rankings(doc, readings)
    return {"orders": orders, "ranking": [ids[i] for i in aggregate(rankings, len(ids))] or None}


def _verdicts(doc: Mapping[str, Any], readings: Sequence[Reading[int]]) -> dict[str, Any]:
    verdicts = []
    for (left, right), reading in zip(doc["orders"], readings, strict=True):
        gold_first = left == doc["gold"]
        winner = None
        if reading.value is not None:
            winner = "gold" if (reading.value == 0) == gold_first else "other"
        verdicts.append(
            {
                "candidate_id": doc["candidate_ids"][right if gold_first else left],
                "gold_first": gold_first,
                "winner": winner,
                "invalid": reading.invalid,
            }
        )
    return {"verdicts": verdicts}


def _named(ids: Sequence[str], reading: Reading[list[int]]) -> dict[str, Any]:
    ranking = None if reading.value is None else [ids[index] for index in reading.value]
    return {"ranking": ranking, "invalid": reading.invalid}


def figures(
    samples: Iterable[tuple[Mapping[str, Any], Sequence[Reading[Any]]]],
) -> dict[str, Any]:
    """Counts replies and reasons over all papers, and shows a listwise judge's position bias.

    Args:
        samples: The documents with their readings.

    Returns:
        ``replies``, ``valid`` and ``invalid`` (reason, without its details, to count). Where
        all candidates were shown at once also, a value for each place in the list:
        ``first_choices`` (how often the candidate shown there was put first), ``gold_shown`` (in
        how many valid replies the gold stood there) and ``gold_hit@1``, ``gold_hit@5`` (the
        share of these that rank it so; None where there are none).
    """
    replies, reasons = 0, Counter[str]()
    shown: list[tuple[int, list[int], int]] = []  # the gold's place, the ranking, candidates
    for doc, readings in samples:
        for view, reading in zip(views(doc) or [dict(doc)], readings, strict=True):
            replies += 1
            if reading.invalid is not None:
                reasons[reading.invalid.partition(":")[0]] += 1
            elif isinstance(reading.value, list):
                shown.append((view["gold"], reading.value, len(view["candidates"])))
    found: dict[str, Any] = {
        "replies": replies,
        "valid": replies - reasons.total(),
        "invalid": dict(reasons.most_common()),
    }
    if shown:
        places = range(max(size for *_, size in shown))
        found["first_choices"] = [sum(r[0] == place for _, r, _ in shown) for place in places]
        at = [[r for gold, r, _ in shown if gold == place] for place in places]
        found["gold_shown"] = [len(rankings) for rankings in at]
        for k in (1, LIST_LENGTH):
            found[f"gold_hit@{k}"] = [
                sum(place in r[:k] for r in rankings) / len(rankings) if rankings else None
                for place, rankings in zip(places, at, strict=True)
            ]
    return found
