"""What a score may owe to length, and what Raw owes to the log-partition.

Golds and negatives differ in length, so a scorer can find the gold without reading it. The length
audit says how far that goes: what sorting by length alone achieves, how scores follow length, what
is left among candidates of the gold's length, and what score and length explain of the gold
together. The energy audit splits Raw into its two parts (mean raw energy = mean NLL − mean
log-partition) and says which of them ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import linprog
from scipy.stats import norm, rankdata

from lm_eval_hyprank.metrics import rank_metrics
from lm_eval_hyprank.ranking import chance_rank, gold_rank
from lm_eval_hyprank.report.found import LIST_JUDGES
from lm_eval_hyprank.report.intervals import (
    DEFAULTS,
    LEVEL,
    METRICS,
    Block,
    Floats,
    Settings,
    blocks,
    cluster_ids,
    cluster_sums,
    estimates,
    finite_rows,
    paper_metrics,
    ratio_intervals,
)

Length = Literal["num_tokens", "num_bytes"]

MATCHED_METRICS = ("hit@1", "hit@5", "win_rate")
"""What is reported among length-matched candidates."""

WINDOW = (0.75, 1.33)
"""Least and greatest length of a length-matched negative, as multiples of the gold's, inclusive."""


def length_baselines(
    candidates: pd.DataFrame, length: Length = "num_tokens", settings: Settings = DEFAULTS
) -> pd.DataFrame:
    """Ranks by length alone, shortest first and longest first, ties by expectation.

    Args:
        candidates: One row a (system, paper, candidate), with ``model``, ``task`` and the length;
            one system of each model and task is enough, the first one is read.
        length: ``num_tokens`` (the model's own) or ``num_bytes``.
        settings: Resamples, seed and kind of interval.

    Returns:
        Rows of `estimates` by ``model``, ``task`` and ``order`` (``shortest``, ``longest``).
    """
    first = candidates.groupby(["model", "task"], sort=False)["system"].transform("first")
    one = candidates[candidates["system"] == first].drop(columns="kind", errors="ignore")
    parts = [
        paper_metrics(one.assign(score=sign * one[length])).assign(order=order)
        for order, sign in (("shortest", 1.0), ("longest", -1.0))
    ]
    return estimates(pd.concat(parts), METRICS, ("model", "task", "order"), settings)


def row_spearman(one: Floats, other: Floats) -> Floats:
    """Spearman's ρ of each row of two arrays, tied values at their mean rank.

    All rows at once, which scipy can do from 1.17 on (``spearmanrho``); the tests compare it with
    scipy's ``spearmanr``, pair by pair.

    Args:
        one: Shape (rows, n).
        other: Same shape.

    Returns:
        Shape (rows,); NaN where a row of either is constant or not finite.
    """
    finite = finite_rows(one, other)
    left, right = (rankdata(part, axis=1) for part in (one, other))
    left -= left.mean(axis=1, keepdims=True)
    right -= right.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        rho = (left * right).sum(axis=1) / np.sqrt((left**2).sum(axis=1) * (right**2).sum(axis=1))
    return np.where(finite, rho, np.nan)


def length_correlation(
    candidates: pd.DataFrame, length: Length = "num_tokens", settings: Settings = DEFAULTS
) -> pd.DataFrame:
    """Spearman's ρ of score and length within each paper, averaged over papers.

    A score is better when lower: a positive ρ says that short candidates are preferred.

    Args:
        candidates: One row a (system, paper, candidate), with the length.
        length: ``num_tokens`` or ``num_bytes``.
        settings: Resamples, seed and kind of interval.

    Returns:
        One row a system: ``system``, ``value``, ``low``, ``high``, ``papers``, ``left_out``
        (papers without a ρ: invalid, or all scores or lengths equal). Systems without
        any have no row.
    """
    parts = [
        block.first[["system", "paper_id", "doi"]].assign(
            rho=row_spearman(block.columns["score"], block.columns[length])
        )
        for block in blocks(candidates, ("score", length))
    ]
    if not parts:
        return pd.DataFrame(columns=["system", "value", "low", "high", "papers", "left_out"])
    table = estimates(pd.concat(parts), ("rho",), ("system",), settings)
    table = table.rename(columns={"invalid": "left_out"})
    return table[["system", "value", "low", "high", "papers", "left_out"]]


def length_matched(
    candidates: pd.DataFrame, length: Length = "num_tokens", settings: Settings = DEFAULTS
) -> pd.DataFrame:
    """Ranks the gold among the negatives of about its own length (`WINDOW`).

    Args:
        candidates: One row a (system, paper, candidate), with the length.
        length: ``num_tokens`` or ``num_bytes``.
        settings: Resamples, seed and kind of interval.

    Returns:
        One row a system and metric of `MATCHED_METRICS`: ``system``, ``metric``, ``value``,
        ``low``, ``high``, ``chance`` (what a random ranking of these candidates gets on average),
        ``papers``, ``left_out`` (valid papers without a negative in the window),
        ``invalid`` (papers whose scores or lengths are not all finite; an unreadable reply of a
        listwise judge is a miss instead). Systems without a matched paper have no row.
    """
    parts = [_matched(block, length) for block in blocks(candidates, ("score", length))]
    columns = ["system", "metric", "value", "low", "high", "chance", "papers", "left_out"]
    columns.append("invalid")
    if not parts:
        return pd.DataFrame(columns=columns)
    papers = pd.concat(parts)
    table = estimates(papers, MATCHED_METRICS, ("system",), settings)
    by_system = papers.groupby("system")
    chance = by_system[[f"chance {metric}" for metric in MATCHED_METRICS]].mean()
    table["chance"] = [
        chance.at[system, f"chance {metric}"]
        for system, metric in zip(table["system"], table["metric"], strict=True)
    ]
    table["left_out"] = table["system"].map(by_system["left_out"].sum()).astype(int)
    table["invalid"] -= table["left_out"]
    return table[columns]


def _matched(block: Block, length: str) -> pd.DataFrame:
    scores, lengths = block.columns["score"], block.columns[length]
    rows = np.arange(len(scores))
    ratio = lengths / lengths[rows, block.gold][:, None]
    inside: npt.NDArray[np.bool_] = (ratio >= WINDOW[0]) & (ratio <= WINDOW[1])
    inside[rows, block.gold] = True
    known, readable = finite_rows(lengths), finite_rows(scores)
    # A listwise judge's reply that cannot be read is no hit, as in `with_misses`.
    missed = "kind" in block.first and block.first["kind"].iloc[0] in LIST_JUDGES
    records: list[dict[str, float]] = []
    for row, gold in enumerate(block.gold):
        size = int(inside[row].sum())
        counts = known[row] and (readable[row] or missed)
        if not counts or size < 2:
            records.append({"left_out": float(counts)})
            continue
        chance = rank_metrics(chance_rank(size))
        found = dict.fromkeys(MATCHED_METRICS, 0.0)
        if readable[row]:
            place = int(inside[row, :gold].sum())
            found = rank_metrics(gold_rank(scores[row, inside[row]].tolist(), place))
        record = {"left_out": 0.0}
        for prefix, values in (("", found), ("chance ", chance)):
            record |= {f"{prefix}{metric}": values[metric] for metric in MATCHED_METRICS}
        records.append(record)
    names = ["left_out", *MATCHED_METRICS, *(f"chance {metric}" for metric in MATCHED_METRICS)]
    numbers = pd.DataFrame(records).reindex(columns=names)
    kept = block.first[["system", "paper_id", "doi"]].reset_index(drop=True)
    return pd.concat([kept, numbers], axis=1)


class Logit(NamedTuple):
    """A fitted conditional logit: coefficients and their standard errors, each of shape (K,)."""

    coefficients: Floats
    errors: Floats


def fit_logit(
    differences: Sequence[Floats], cluster: npt.NDArray[np.intp]
) -> tuple[Logit | None, str]:
    """Fits P(gold | its paper's candidates) = exp(x·β) / Σ exp(x·β) (McFadden 1974).

    Newton's method with standard errors that are robust to clusters of papers. It is written
    out because statsmodels' ``ConditionalLogit`` has no such errors and takes a hundred times
    as long; the tests compare the two.

    Args:
        differences: For each paper, the candidates' x minus the gold's, the gold's own row of
            zeros included, shape (candidates, K).
        cluster: The cluster of each paper.

    Returns:
        The fit and an empty text, or None and the reason why there is no finite fit.
    """
    width = differences[0].shape[1]
    size = max(len(part) for part in differences)
    x = np.zeros((len(differences), size, width))
    weight = np.zeros((len(differences), size))
    for row, part in enumerate(differences):
        x[row, : len(part)], weight[row, : len(part)] = part, 1.0
    # Some β ranks no gold below another candidate, and one above: the likelihood then grows along
    # it for ever (Albert & Anderson 1984, Biometrika 71, 1-10). A linear programme finds it.
    rows = x[weight > 0]
    program = linprog(rows.sum(axis=0), A_ub=rows, b_ub=np.zeros(len(rows)), bounds=(-1, 1))
    if program.fun is None or program.fun < -1e-9 * np.abs(rows).sum():
        return None, "separated: score and length together never put another candidate first"
    beta = np.zeros(width)
    for _ in range(50):
        odds = x @ beta
        share = np.exp(odds - odds.max(axis=1, keepdims=True)) * weight
        share /= share.sum(axis=1, keepdims=True)
        mean = np.einsum("pc,pck->pk", share, x)
        information = np.einsum("pc,pck,pcl->kl", share, x, x) - mean.T @ mean
        if np.linalg.cond(information) > 1e10:
            return None, "collinear: score and length order the candidates by the same numbers"
        step = np.linalg.solve(information, -mean.sum(axis=0))
        beta = beta + step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-10:
            break
    else:
        return None, "no convergence in 50 steps"
    scores, _ = cluster_sums(-mean, cluster)
    if len(scores) < 2:
        return None, "a single DOI: no standard error"
    bread = np.linalg.inv(information)
    covariance = bread @ (scores.T @ scores) @ bread * len(scores) / (len(scores) - 1)
    return Logit(beta, np.sqrt(np.diag(covariance))), ""


def conditional_logit(candidates: pd.DataFrame) -> pd.DataFrame:
    """How much of each score goes on telling the gold once log length is known.

    The gold of a paper is modelled as a choice among its candidates by score and log
    length, each divided by its standard deviation within papers, the score negated so that
    more is better. A coefficient is the log-odds of being the gold per standard deviation.

    Args:
        candidates: One row a (system, paper, candidate), with ``num_tokens``.

    Returns:
        One row a system: ``system``, ``papers`` (valid ones), ``score_alone`` (coefficient without
        length in the model), ``score``, ``score_low``, ``score_high``, ``log_length``,
        ``log_length_low``, ``log_length_high`` (both in the model; 95 % Wald intervals, robust to
        clusters), ``reason``: empty, or why the joint fit does not exist, whose numbers are NaN.
    """
    by_system: dict[str, list[Block]] = {}
    for block in blocks(candidates, ("score", "num_tokens")):
        by_system.setdefault(str(block.first["system"].iloc[0]), []).append(block)
    records = [{"system": name, **_logit(parts)} for name, parts in by_system.items()]
    columns = ["system", "papers", "score_alone", "score", "score_low", "score_high"]
    columns += ["log_length", "log_length_low", "log_length_high", "reason"]
    return pd.DataFrame(records, columns=columns)


def _logit(parts: Sequence[Block]) -> dict[str, float | str]:
    differences: list[Floats] = []
    deviations: list[Floats] = []
    papers: list[pd.DataFrame] = []
    for block in parts:
        with np.errstate(divide="ignore", invalid="ignore"):
            x = np.stack([-block.columns["score"], np.log(block.columns["num_tokens"])], axis=2)
        valid = np.isfinite(x).all(axis=(1, 2))
        x, gold = x[valid], block.gold[valid]
        differences += list(x - x[np.arange(len(x)), gold][:, None])
        deviations += list(x - x.mean(axis=1, keepdims=True))
        papers.append(block.first[valid])
    result: dict[str, float | str] = {"papers": len(differences)}
    if not differences:
        return {**result, "reason": "no paper with finite scores and lengths"}
    scale = np.concatenate(deviations).std(axis=0)
    if scale[1] == 0 or scale[0] == 0:
        return {**result, "reason": f"{'length' if scale[0] else 'score'} never differs in a paper"}
    first = pd.concat(papers)
    cluster, _ = pd.factorize(cluster_ids(first["doi"], first["paper_id"]))
    scaled = [part / scale for part in differences]
    alone, _ = fit_logit([part[:, :1] for part in scaled], cluster)
    if alone:
        result["score_alone"] = float(alone.coefficients[0])
    joint, reason = fit_logit(scaled, cluster)
    if joint:
        z = norm.ppf((1 + LEVEL) / 2)
        for at, name in enumerate(("score", "log_length")):
            value, error = float(joint.coefficients[at]), float(joint.errors[at])
            result |= {name: value, f"{name}_low": value - z * error}
            result[f"{name}_high"] = value + z * error
    return {**result, "reason": reason}


PARTS = ("nll", "logz")
"""The parts of Raw: the NLL, and the negated log-partition."""


def _raw_and_parts(candidates: pd.DataFrame) -> pd.DataFrame:
    """Rows of ``raw`` with the scores of both parts, for every model and task that has them."""
    keys = ["model", "task", "paper_id", "candidate_id"]
    nll = candidates.loc[candidates["scorer"] == "nll", [*keys, "score"]]
    raw = candidates[candidates["scorer"] == "raw"]
    both = raw.merge(nll, on=keys, suffixes=("", "_nll"), validate="one_to_one")
    both = both.rename(columns={"score_nll": "nll"})
    return both.assign(raw=both["score"], logz=both["score"] - both["nll"])


def energy_audit(candidates: pd.DataFrame, settings: Settings = DEFAULTS) -> pd.DataFrame:
    """How much of Raw's ranking within papers comes from NLL and how much from log-partition.

    Raw = NLL + (−log-partition), so Var(Raw) = Cov(Raw, NLL) + Cov(Raw, −log-partition): each
    covariance, summed over papers and divided by the summed variance, is the part's share.
    A share is negative where a part works against the whole. ``rank_…`` is Spearman's ρ of Raw
    and the part within papers, averaged.

    Args:
        candidates: One row a (system, paper, candidate), with ``model``, ``task``, ``scorer``;
            scorers ``nll`` and ``raw`` are read.
        settings: Resamples, seed and kind of interval.

    Returns:
        One row a model and task that has both: ``model``, ``task``, ``papers``, and for each of
        ``rank_nll``, ``rank_logz``, ``share_nll``, ``share_logz`` the value and its limits
        ``…_low``, ``…_high`` (NaN where they cannot be computed).
    """
    joined = _raw_and_parts(candidates)
    names = [f"{kind}_{part}" for kind in ("rank", "share") for part in PARTS]
    columns = ["model", "task", "papers"]
    columns += [f"{name}{limit}" for name in names for limit in ("", "_low", "_high")]
    records: list[dict[str, object]] = []
    for (model, task), rows in joined.groupby(["model", "task"], sort=False):
        found = _energy(rows, settings)
        if found:
            records.append({"model": model, "task": task, **found})
    return pd.DataFrame(records, columns=columns)


def _energy(rows: pd.DataFrame, settings: Settings) -> dict[str, float]:
    ratios: list[Floats] = []
    papers: list[pd.DataFrame] = []
    for block in blocks(rows, ("raw", *PARTS)):
        valid = finite_rows(*block.columns.values())
        raw, *parts = (part[valid] for part in block.columns.values())
        ranks = [row_spearman(raw, part) for part in parts]
        raw = raw - raw.mean(axis=1, keepdims=True)
        shares = [(raw * (part - part.mean(axis=1, keepdims=True))).sum(axis=1) for part in parts]
        ratios.append(np.stack([*ranks, *shares, (raw**2).sum(axis=1)], axis=1))
        papers.append(block.first[valid])
    values, first = np.concatenate(ratios), pd.concat(papers)
    if not len(values):
        return {}
    cluster, _ = pd.factorize(cluster_ids(first["doi"], first["paper_id"]), sort=True)
    sums, counts = cluster_sums(values, cluster)
    counts[:, 2:4] = sums[:, 4:]  # a share is a ratio of sums: covariance by variance
    found = ratio_intervals(sums[:, :4], counts[:, :4], settings)
    result: dict[str, float] = {"papers": len(values)}
    for at, name in enumerate(f"{kind}_{part}" for kind in ("rank", "share") for part in PARTS):
        limits = zip(("", "_low", "_high"), found, strict=True)
        result |= {f"{name}{limit}": float(part[at]) for limit, part in limits}
    return result


def energy_parts(candidates: pd.DataFrame, settings: Settings = DEFAULTS) -> pd.DataFrame:
    """Ranks by Raw, by NLL and by the negated mean log-partition alone.

    Args:
        candidates: As :func:`energy_audit`.
        settings: Resamples, seed and kind of interval.

    Returns:
        Rows of `estimates` by ``model``, ``task`` and ``part`` (``raw``, ``nll``, ``logz``).
    """
    joined = _raw_and_parts(candidates)
    parts = [
        paper_metrics(joined.assign(score=joined[part])).assign(part=part)
        for part in ("raw", *PARTS)
    ]
    return estimates(pd.concat(parts), METRICS, ("model", "task", "part"), settings)
