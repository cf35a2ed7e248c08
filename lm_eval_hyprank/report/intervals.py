"""From scores a candidate to values a paper, and from those to tables with intervals.

Papers of one DOI are one publication entered several times, so they are not independent: every
interval here resamples whole DOIs (the cluster bootstrap: Davison & Hinkley 1997, "Bootstrap
Methods and their Application", §3.8; Field & Welsh 2007, JRSS B 69, 369-390). One function,
:func:`estimates`, makes every table of means; its groups see the same resamples wherever they
cover the same papers, so rows of a table can be pooled and compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import norm

from lm_eval_hyprank.metrics import HIT_KS, rank_metrics
from lm_eval_hyprank.ranking import GoldRank, gold_rank
from lm_eval_hyprank.report.found import LIST_JUDGES

Floats = npt.NDArray[np.float64]

HITS = tuple(f"hit@{k}" for k in HIT_KS)
"""Hit@k at every cut-off."""

METRICS = (*HITS, "mrr", "win_rate")
"""The columns of per-paper values that :func:`paper_metrics` makes and :func:`estimates` reads."""

LEVEL = 0.95
"""Coverage that every interval aims at."""


@dataclass(frozen=True)
class Settings:
    """How intervals are made; the defaults are the published study's choice.

    Attributes:
        resamples: Number of bootstrap resamples.
        seed: Seed of every random draw.
        interval: ``percentile``, or ``bca``: bias-corrected and accelerated (Efron 1987,
            JASA 82, 171-185), the acceleration by leaving out one cluster at a time.
    """

    resamples: int = 2000
    seed: int = 0
    interval: Literal["percentile", "bca"] = "percentile"


DEFAULTS = Settings()
"""Settings of every function here that is not given others."""


class Ratios(NamedTuple):
    """Means of K columns with interval limits, each an array of shape (K,)."""

    value: Floats
    low: Floats
    high: Floats


class Block(NamedTuple):
    """The papers of one system that have the same number of candidates, as arrays.

    Candidates stand in the order of their ids, papers in the order of theirs, so blocks of two
    systems over the same papers align.

    Attributes:
        first: The first row of each paper, with its paper and system columns (P rows).
        gold: Index of the gold in each paper, shape (P,).
        columns: The wanted columns as arrays of shape (P, candidates).
    """

    first: pd.DataFrame
    gold: npt.NDArray[np.intp]
    columns: dict[str, Floats]


def cluster_ids(doi: pd.Series, paper_id: pd.Series) -> pd.Series:
    """Names the resampling unit of each row: its DOI, or the paper itself where it has none.

    DOIs are compared as the DOI handbook says (§2.4: without regard to letter case), without
    a resolver's address or a ``doi:`` in front.

    Args:
        doi: The DOI of each row; missing or blank where there is none.
        paper_id: The paper of each row, same index.
    """
    plain = doi.fillna("").astype(str).str.strip().str.lower()
    plain = plain.str.replace(r"^(https?://)?(dx\.)?doi\.org/|^doi:\s*", "", regex=True)
    return plain.where(plain != "", "paper " + paper_id.astype(str))


def blocks(candidates: pd.DataFrame, columns: Sequence[str] = ("score",)) -> Iterator[Block]:
    """Cuts candidate rows into arrays, system by system in order of first appearance.

    Args:
        candidates: One row a (system, paper, candidate).
        columns: Numeric columns that the arrays are made of.

    Raises:
        ValueError: A paper of a system has no gold or several, fewer than two candidates, or a
            candidate twice.
    """
    system, systems = pd.factorize(candidates["system"])
    paper, papers = pd.factorize(candidates["paper_id"], sort=True)
    candidate, _ = pd.factorize(candidates["candidate_id"], sort=True)
    order = np.lexsort((candidate, paper, system))
    system, paper, candidate = system[order], paper[order], candidate[order]
    item = system * len(papers) + paper
    starts = np.flatnonzero(np.diff(item, prepend=-1))
    sizes = np.diff(starts, append=len(item))
    gold = candidates["is_gold"].to_numpy(dtype=bool)[order]
    golds = np.add.reduceat(gold, starts, dtype=int) if len(starts) else np.zeros(0, dtype=int)
    repeated = np.zeros(len(item), dtype=bool)
    repeated[1:] = (np.diff(item) == 0) & (np.diff(candidate) == 0)

    def where(row: np.intp) -> str:
        return f"system {systems[system[row]]!r}, paper {papers[paper[row]]!r}"

    for row in np.flatnonzero(repeated):
        again = candidates["candidate_id"].iloc[order[row]]
        raise ValueError(f"{where(row)}: candidate {again!r} occurs more than once")
    for at in np.flatnonzero((golds != 1) | (sizes < 2)):
        raise ValueError(
            f"{where(starts[at])}: {sizes[at]} candidates with {golds[at]} gold(s); ranking needs "
            "at least two candidates, exactly one of them the gold"
        )
    values = {name: candidates[name].to_numpy(dtype=float)[order] for name in columns}
    for code in range(len(systems)):
        mine = system[starts] == code
        for size in np.unique(sizes[mine]):
            rows = starts[mine & (sizes == size), None] + np.arange(size)
            yield Block(
                candidates.iloc[order[rows[:, 0]]],
                gold[rows].argmax(axis=1),
                {name: column[rows] for name, column in values.items()},
            )


def finite_rows(*arrays: Floats) -> npt.NDArray[np.bool_]:
    """Which rows are finite throughout, in every array of shape (rows, n); shape (rows,)."""
    finite: npt.NDArray[np.bool_] = np.isfinite(np.concatenate(arrays, axis=1)).min(axis=1)
    return finite


@cache
def _values(rank: GoldRank) -> dict[str, float]:
    return {**vars(rank), **rank_metrics(rank)}


def paper_metrics(candidates: pd.DataFrame) -> pd.DataFrame:
    """Ranks the gold of every paper under every system.

    Args:
        candidates: One row a (system, paper, candidate) with ``system``, ``paper_id``,
            ``candidate_id``, ``is_gold``, ``score`` (lower is better), and the columns to be
            kept: those of ``model``, ``task``, ``scorer``, ``kind``, ``discipline`` and ``doi``
            that there are. A judge's scores are minus points: below 0 for the candidates it
            ranked, 0 for all others.

    Returns:
        One row a (system, paper): the kept columns, the fields of `GoldRank`, the metrics,
        ``valid``. Where a score is NaN or infinite, ``valid`` is False and every number NaN. For
        judges (`LIST_JUDGES`) ``mrr`` is NaN, for their lists have no rank beyond the last
        place, and ``win_rate_terminal`` counts an unranked gold as beaten by all, as the
        published study does, where ``win_rate`` gives one half for each of its ties.

    Raises:
        ValueError: As :func:`blocks`.
    """
    kept = ["system", "model", "task", "scorer", "kind", "paper_id", "discipline", "doi"]
    kept = [name for name in kept if name in candidates]
    parts: list[pd.DataFrame] = []
    for block in blocks(candidates):
        scores = block.columns["score"]
        valid = finite_rows(scores)
        values = pd.DataFrame(
            [
                _values(gold_rank(row, gold)) if known else {}
                for row, gold, known in zip(
                    scores.tolist(), block.gold.tolist(), valid, strict=True
                )
            ]
        )
        values["valid"] = valid
        if "kind" in block.first and block.first["kind"].iloc[0] in LIST_JUDGES and valid.any():
            ranked = scores[np.arange(len(scores)), block.gold] < 0
            values["win_rate_terminal"] = values["win_rate"].where(ranked | ~valid, 0.0)
            values = values.drop(columns="mrr")
        parts.append(pd.concat([block.first[kept].reset_index(drop=True), values], axis=1))
    numbers = ["better", "tied", "candidates", *METRICS, "win_rate_terminal"]
    if not parts:
        return pd.DataFrame(columns=[*kept, *numbers, "valid"])
    return pd.concat(parts, ignore_index=True).reindex(columns=[*kept, *numbers, "valid"])


def with_misses(papers: pd.DataFrame) -> pd.DataFrame:
    """Counts a listwise judge's unreadable replies as misses: failures must not flatter it.

    Args:
        papers: As :func:`paper_metrics` returns them.

    Returns:
        The same rows; of `LIST_JUDGES`, hits and win rates that have no value are 0.
    """
    filled = papers.copy()
    rows, columns = papers["kind"].isin(LIST_JUDGES), [*HITS, "win_rate", "win_rate_terminal"]
    filled.loc[rows, columns] = papers.loc[rows, columns].fillna(0.0)
    return filled


@lru_cache(maxsize=16)
def resample_weights(clusters: int, resamples: int, seed: int) -> Floats:
    """How often each cluster is drawn in each resample, shape (resamples, clusters).

    The draw depends on nothing else, so that tables over the same papers share it.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, clusters, size=(resamples, clusters))
    drawn += clusters * np.arange(resamples)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=resamples * clusters)
    weights = counts.reshape(resamples, clusters).astype(float)
    weights.setflags(write=False)
    return weights


def ratio_intervals(sums: Floats, counts: Floats, settings: Settings) -> Ratios:
    """Means of K columns and their cluster bootstrap intervals, all from the same resamples.

    The mean of a resample is the sum over its clusters' sums by the sum over their counts.

    Args:
        sums: Sum of the values in each cluster, shape (clusters, K).
        counts: Number of values in each cluster, shape (clusters, K).
        settings: Resamples, seed and kind of interval.

    Returns:
        Means and limits. A mean is NaN without a value; limits are NaN where fewer than two
        clusters have values, and where BCa is not defined (no resample on one side of the mean).
    """
    total, size = sums.sum(axis=0), counts.sum(axis=0)
    with np.errstate(invalid="ignore"):
        value = total / size
    low, high = np.full((2, len(value)), np.nan)
    tails = np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    several = np.flatnonzero((counts > 0).sum(axis=0) >= 2)
    sums, counts = sums[:, several], counts[:, several]
    weights = resample_weights(len(sums), settings.resamples, settings.seed)
    with np.errstate(invalid="ignore"):  # a resample may draw no value of a column
        replicates = (weights @ sums) / (weights @ counts)
    if settings.interval == "percentile":
        levels = np.broadcast_to(tails[:, None], (2, len(several)))
    else:
        left_out = (total[several] - sums) / (size[several] - counts)
        levels = _bca_levels(value[several], replicates, left_out, tails)
    for at, column in enumerate(several):
        if np.isfinite(levels[:, at]).all():
            known = replicates[~np.isnan(replicates[:, at]), at]
            low[column], high[column] = np.quantile(known, levels[:, at])
    return Ratios(value, low, high)


def _bca_levels(value: Floats, replicates: Floats, left_out: Floats, tails: Floats) -> Floats:
    """Quantile levels of BCa limits (Efron 1987, eq. 6.5 and 6.6), shape (2, K)."""
    known = (~np.isnan(replicates)).sum(axis=0)  # a resample may draw no value of a column
    with np.errstate(invalid="ignore"):  # all of them, even
        below = ((replicates < value).sum(axis=0) + (replicates == value).sum(axis=0) / 2) / known
    bias = norm.ppf(below)
    deviation = left_out.mean(axis=0) - left_out
    with np.errstate(invalid="ignore"):  # nothing varies: there are no such levels
        skew = (deviation**3).sum(axis=0) / (deviation**2).sum(axis=0) ** 1.5
    acceleration = skew / 6
    shifted = bias + norm.ppf(tails)[:, None]
    levels: Floats = norm.cdf(bias + shifted / (1 - acceleration * shifted))
    return levels


def cluster_sums(values: Floats, cluster: npt.NDArray[np.intp]) -> tuple[Floats, Floats]:
    """Sums and counts of the values that are not NaN in each cluster.

    Args:
        values: Shape (rows, K).
        cluster: Cluster of each row, 0 .. clusters − 1, shape (rows,).

    Returns:
        Two arrays of shape (clusters, K).
    """
    order = np.argsort(cluster, kind="stable")
    starts = np.flatnonzero(np.diff(cluster[order], prepend=-1))
    known = ~np.isnan(values)
    sums = np.add.reduceat(np.where(known, values, 0.0)[order], starts, axis=0)
    return sums, np.add.reduceat(known[order], starts, axis=0, dtype=float)


def estimates(
    papers: pd.DataFrame,
    metrics: Sequence[str] = METRICS,
    by: Sequence[str] = ("system",),
    settings: Settings = DEFAULTS,
) -> pd.DataFrame:
    """Means of per-paper values with intervals, for every group of rows.

    ``by=("system",)`` makes the overall table, ``("system", "discipline")`` the one by
    discipline, ``("task", "scorer")`` the rows pooled over models: there a paper comes with one
    row a model, and all of them are drawn together.

    With few clusters percentile intervals are too narrow. Simulated (1,000 boards, a third of the
    DOIs with two papers, Hit@1 of 0.33), they cover the truth in 95 % of cases with 300 DOIs, 94 %
    with 48, 91 % with 12 and 69 % with 3; BCa does better on Hit@1 with 12 (96 %) and no
    better with 3.

    Args:
        papers: One row a (system, paper) with ``paper_id``, ``doi``, the columns of ``by`` and
            those of ``metrics`` that there are; a NaN is a value that could not be computed.
        metrics: Names of numeric columns.
        by: Columns whose combinations are the groups.
        settings: Resamples, seed and kind of interval.

    Returns:
        One row a group and metric, groups in order of first appearance: ``by``, ``metric``,
        ``value``, ``low``, ``high``, ``papers`` (distinct, with a value), ``rows``
        (values), ``invalid`` (rows without a value), ``clusters``, ``degenerate`` (all values
        are equal, so the interval has no width and says nothing). A metric without any value in
        a group has no row; limits are NaN with a single cluster.
    """
    wanted = [metric for metric in metrics if metric in papers]
    columns = [*by, "metric", "value", "low", "high", "papers", "rows", "invalid", "clusters"]
    columns.append("degenerate")
    if papers.empty or not wanted:
        return pd.DataFrame(columns=columns)
    paper, _ = pd.factorize(papers["paper_id"])
    first = papers.drop_duplicates("paper_id")
    cluster = pd.factorize(cluster_ids(first["doi"], first["paper_id"]), sort=True)[0][paper]
    values = papers[wanted].to_numpy(dtype=float)
    grouping = papers.groupby(list(by), sort=False, dropna=False)
    code = grouping.ngroup().to_numpy()
    keys = papers[list(by)].iloc[np.unique(code, return_index=True)[1]].to_numpy(dtype=object)
    order = np.argsort(code, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(code[order])) + 1)

    # Groups over the same clusters go through one matrix product.
    tables: dict[bytes, list[int]] = {}
    local: list[npt.NDArray[np.intp]] = []
    for group, rows in enumerate(members):
        present, numbered = np.unique(cluster[rows], return_inverse=True)
        local.append(numbered)
        tables.setdefault(present.tobytes(), []).append(group)

    records: dict[tuple[int, int], list[Any]] = {}
    for groups in tables.values():
        sums, counts = zip(
            *(cluster_sums(values[members[group]], local[group]) for group in groups), strict=True
        )
        stacked = np.concatenate(counts, axis=1)
        found = ratio_intervals(np.concatenate(sums, axis=1), stacked, settings)
        clusters = (stacked > 0).sum(axis=0)
        for place, group in enumerate(groups):
            rows = members[group]
            for number, metric in enumerate(wanted):
                mine = values[rows, number]
                known = ~np.isnan(mine)
                if not known.any():
                    continue
                at = place * len(wanted) + number
                value, low, high = (part[at] for part in found)
                constant = bool(mine[known].min() == mine[known].max())
                if constant:
                    value = mine[known][0]
                    if clusters[at] > 1:
                        low = high = value
                records[group, number] = [
                    *keys[group],
                    metric,
                    *(float(part) for part in (value, low, high)),
                    len(np.unique(paper[rows[known]])),
                    int(known.sum()),
                    int((~known).sum()),
                    int(clusters[at]),
                    constant,
                ]
    return pd.DataFrame([records[key] for key in sorted(records)], columns=columns)


def cell(row: Mapping[str, Any]) -> dict[str, float]:
    """The ``value``, ``low`` and ``high`` of a row that could be computed; others are absent."""
    return {
        name: float(row[name])
        for name in ("value", "low", "high")
        if name in row and math.isfinite(row[name])
    }


def rank_histogram(papers: pd.DataFrame) -> pd.DataFrame:
    """How often the gold has each rank.

    Args:
        papers: As :func:`paper_metrics` returns it.

    Returns:
        One row a system (its index), one column a rank from 1 on: the share of the valid papers
        with the gold at that rank, a tied gold being spread evenly over the ranks it may have.
    """
    valid = papers[papers["better"].notna()]
    last = int(valid["candidates"].max()) if len(valid) else 0
    ranks = range(1, last + 1)
    shares: dict[Any, list[float]] = {}
    for system, rows in valid.groupby("system", sort=False):
        triples = rows[["better", "tied", "candidates"]].astype(int).value_counts()
        total = [0.0] * last
        for (better, tied, candidates), count in triples.items():
            gold = GoldRank(better, tied, candidates)
            hits = [gold.hit(k) for k in range(last + 1)]
            for rank, (before, after) in enumerate(pairwise(hits)):
                total[rank] += count * (after - before)
        shares[system] = [value / len(rows) for value in total]
    frame = pd.DataFrame.from_dict(shares, orient="index", columns=list(ranks))
    return frame.rename_axis(index="system")


def gold_beats(
    candidates: pd.DataFrame,
    settings: Settings = DEFAULTS,
) -> pd.DataFrame:
    """Share of negatives that the gold beats, all together and by kind; a tie counts one half.

    Args:
        candidates: As :func:`paper_metrics`.
        settings: Resamples, seed and kind of interval.

    Returns:
        Rows of :func:`estimates` by ``system`` and ``against``: ``all``, or the kind of negative
        (its id up to the last ``_``), with ``rows`` the number of pairs.
    """
    scores = candidates["score"].where(np.isfinite(candidates["score"]))
    item = [candidates["system"], candidates["paper_id"]]
    gold = scores.where(candidates["is_gold"]).groupby(item).transform("max")
    beats = (scores > gold) + (scores == gold) / 2
    beats = beats.where(~scores.isna().groupby(item).transform("any"))
    pairs = candidates.assign(beats=beats)[~candidates["is_gold"]]
    kinds = pairs["candidate_id"].astype(str).str.replace(r"_[^_]*$", "", regex=True)
    both = pd.concat([pairs.assign(against="all"), pairs.assign(against=kinds)])
    return estimates(both, ("beats",), ("system", "against"), settings).drop(columns="metric")
