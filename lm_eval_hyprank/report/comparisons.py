"""Which systems differ, by how much, and how far they agree with one another.

Differences are paired: every system ranks the same papers, so what is tested is the mean
difference within papers, with papers of one DOI kept together. A paper that a system could not
rank is a miss in tests, tiers and the best of many (:func:`with_all_papers`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import norm, rankdata
from statsmodels.stats.multitest import multipletests

from lm_eval_hyprank.report.intervals import (
    DEFAULTS,
    LEVEL,
    Block,
    Floats,
    Settings,
    blocks,
    cell,
    cluster_ids,
    cluster_sums,
    estimates,
    ratio_intervals,
    resample_weights,
)

ALPHA = 0.05
"""Level of the tests, and of the two-sided test whose detectable effect is given."""

POWER = 0.8
"""Power at which the minimum detectable effect is given."""

FOLDS = 10
"""Folds of the cross-fitted best, where there are as many clusters."""


@dataclass(frozen=True)
class BestOf:
    """The best of several systems, and what to expect of it on other papers.

    Attributes:
        system: The system with the highest mean (the first one of equals).
        cells: Number of systems it was chosen from.
        naive: Its mean with interval: too high, for chance helped to choose it.
        corrected: The cross-fitted mean with interval (see :func:`best_of`).
        chosen: How often each system won on the papers of the other folds, those that ever did.
        papers: Number of papers.
    """

    system: str
    cells: int
    naive: dict[str, float]
    corrected: dict[str, float]
    chosen: dict[str, float]
    papers: int


@dataclass(frozen=True)
class Agreement:
    """How far the models of one scorer rank the same candidates alike.

    Attributes:
        task: Task of the systems compared.
        scorer: Scorer of the systems compared.
        models: Their models, in order of first appearance, those with too few papers left out.
        papers: Number of papers that every one of these models ranks.
        all_first: Number of those whose gold every model ranks first, alone.
        w: Kendall's coefficient of concordance W, mean over papers, with interval; empty if no
            paper has one.
        top1: Share of papers where two models put the same candidate first, model × model.
        tau: Kendall's τ-b between two models' rankings, mean over papers, model × model; NaN
            where no paper has one.
    """

    task: str
    scorer: str
    models: tuple[str, ...]
    papers: int
    all_first: int
    w: dict[str, float]
    top1: pd.DataFrame
    tau: pd.DataFrame


def with_all_papers(papers: pd.DataFrame, metric: str = "hit@1") -> pd.DataFrame:
    """Counts a paper that a system could not rank as a miss, so that all systems have all papers.

    On the papers that it could rank alone, a system with a few easy ones would be the best of all.

    Args:
        papers: One row a (system, paper) with ``system`` and the metric, NaN where it has none.
        metric: A per-paper value, higher is better, 0 for a miss.

    Returns:
        The rows of the systems that have the metric for any paper.
    """
    ranked = papers[papers.groupby("system")[metric].transform("count") > 0]
    return ranked.assign(**{metric: ranked[metric].astype(float).fillna(0.0)})


def _matrix(papers: pd.DataFrame, metric: str) -> tuple[pd.DataFrame, npt.NDArray[np.intp]]:
    """Papers × systems that have the metric (order of appearance), and each paper's cluster."""
    known = with_all_papers(papers, metric)
    matrix = known.pivot(index="paper_id", columns="system", values=metric)
    matrix = matrix[list(dict.fromkeys(known["system"]))]
    doi = papers.drop_duplicates("paper_id").set_index("paper_id")["doi"].reindex(matrix.index)
    ids = cluster_ids(doi, pd.Series(matrix.index, index=matrix.index))
    return matrix, pd.factorize(ids, sort=True)[0]


def compare(
    papers: pd.DataFrame,
    metric: str = "hit@1",
    settings: Settings = DEFAULTS,
) -> pd.DataFrame:
    """Tests every pair of systems on all papers, a paper without a value being a miss.

    The test flips the sign of each cluster's difference at random (a paired permutation test,
    Fisher 1935; p = (1 + as extreme) / (1 + flips), Phipson & Smyth 2010). The flips are as
    many as Holm's first threshold needs. p values of all pairs are corrected by Holm (1979). The
    interval of the difference is the cluster bootstrap's. The minimum detectable effect is
    the true difference that a two-sided test at 5 % finds in 80 % of studies of this size: (1.96 +
    0.84) × the cluster-robust standard error of the difference (Bloom 1995, Evaluation Review
    19; Miller 2024, arXiv 2411.00640).

    Args:
        papers: One row a (system, paper) with ``system``, ``paper_id``, ``doi`` and the metric.
        metric: A per-paper value, higher is better.
        settings: Resamples, seed and kind of interval.

    Returns:
        One row a pair, ``a`` the one with the higher mean difference: ``a``, ``b``,
        ``difference`` (a − b), ``low``, ``high``, ``p``, ``p_holm``, ``mde``, ``papers``,
        ``clusters``. There are no rows with fewer than two clusters; ``mde`` is NaN where all
        differences are equal. Systems without the metric are not compared.
    """
    matrix, cluster = _matrix(papers, metric)
    values = matrix.to_numpy()
    pairs = list(combinations(range(values.shape[1]), 2))
    clusters = len(np.unique(cluster))
    columns = ["a", "b", "difference", "low", "high", "p", "p_holm", "mde", "papers", "clusters"]
    if not pairs or clusters < 2:
        return pd.DataFrame(columns=columns)

    left, right = np.array(pairs).T
    sums, counts = cluster_sums(values[:, left] - values[:, right], cluster)
    found = ratio_intervals(sums, counts, settings)
    residual = ((sums - counts * found.value) ** 2).sum(axis=0)
    error = np.sqrt(residual * clusters / (clusters - 1)) / len(values)
    effect = (norm.ppf(1 - ALPHA / 2) + norm.ppf(POWER)) * error

    flips = max(10_000, math.ceil(2 * len(left) / ALPHA))
    p = sign_flip_p(cluster_sums(values, cluster)[0], left, right, flips, settings.seed)
    holm = multipletests(p, alpha=ALPHA, method="holm")[1]

    swap = found.value < 0
    names = matrix.columns.to_numpy()
    table = pd.DataFrame(
        {
            "a": names[np.where(swap, right, left)],
            "b": names[np.where(swap, left, right)],
            "difference": np.abs(found.value),
            "low": np.where(swap, 0.0 - found.high, found.low),
            "high": np.where(swap, 0.0 - found.low, found.high),
            "p": p,
            "p_holm": holm,
            "mde": np.where(error > 0, effect, np.nan),
            "papers": len(values),
            "clusters": clusters,
        }
    )
    return table[columns]


def sign_flip_p(
    sums: Floats,
    left: npt.NDArray[np.intp],
    right: npt.NDArray[np.intp],
    flips: int,
    seed: int,
) -> Floats:
    """Two-sided p values of sign-flip tests, all from the same flips.

    A flipped sum of differences is the difference of two flipped sums, so that flips need be
    applied once a system instead of once a pair.

    Args:
        sums: Each system's sum in each cluster, shape (clusters, systems).
        left: For each test the system that is compared, shape (K,).
        right: For each test the system it is compared with.
        flips: Number of random flips.
        seed: Seed of the flips.

    Returns:
        Shape (K,).
    """
    rng = np.random.default_rng(seed)
    total = sums.sum(axis=0)
    # Sums in another order differ in the last bits; equal is as extreme.
    bound = np.abs(total[left] - total[right]) - 1e-9 * np.abs(sums).sum(axis=0).max(initial=1.0)
    extreme = np.zeros(len(left))
    chunk = 2000
    for start in range(0, flips, chunk):
        size = (min(chunk, flips - start), len(sums))
        signs = rng.integers(0, 2, size=size, dtype=np.int8) * 2.0 - 1.0
        flipped = signs @ sums
        extreme += (np.abs(flipped[:, left] - flipped[:, right]) >= bound).sum(axis=0)
    p: Floats = (1 + extreme) / (1 + flips)
    return p


def tiers(papers: pd.DataFrame, comparisons: pd.DataFrame, metric: str = "hit@1") -> dict[str, int]:
    """Groups systems that cannot be told apart from the best of their group.

    Systems are sorted by their mean over all papers (equal means by name). The first opens tier 1,
    and each that differs from the opener of the current tier at a corrected level of 5 % opens the
    next one. So no system is told apart from the best of its tier, and the best of a tier is from
    the best of the tier above. (Groups all of whose members are told apart from all of the others,
    as in the WMT rankings, would be one group as soon as every neighbour is close to the next.)

    Args:
        papers: As :func:`compare`.
        comparisons: What it returned for the same papers and metric.
        metric: The metric.

    Returns:
        The tier of each system that has the metric, 1 the best.
    """
    mean = _matrix(papers, metric)[0].mean()
    order = sorted(mean.index, key=lambda system: (-mean[system], system))
    apart = {
        frozenset((a, b))
        for a, b, p in zip(comparisons["a"], comparisons["b"], comparisons["p_holm"], strict=True)
        if p < ALPHA
    }
    tier, opener, result = 0, "", {}
    for system in order:
        if not tier or frozenset((opener, system)) in apart:
            tier, opener = tier + 1, system
        result[system] = tier
    return result


def best_of(
    papers: pd.DataFrame,
    metric: str = "hit@1",
    settings: Settings = DEFAULTS,
    repeats: int = 20,
) -> BestOf:
    """The best system's mean, and the same with the choice and the measurement kept apart.

    The highest of several means is biased upwards, for it was chosen on the papers it is measured
    on. The corrected mean is cross-fitted: clusters are dealt into `FOLDS` folds, the winner on
    the other folds is measured on each fold, and that is averaged over folds and repeated
    deals (nested cross-validation: Varma & Simon 2006, BMC Bioinformatics 7:91). It is the
    expected value of choosing so. Its interval is ± 1.96 standard deviations of the whole
    procedure, choice included, over cluster bootstrap resamples, and is on the wide side: in
    simulations with close rivals it covers the truth in 99 % of cases (with the choices kept
    fixed it would be in 75 %).

    Args:
        papers: As :func:`compare`.
        metric: The metric, higher is better.
        settings: Resamples, seed and kind of interval.
        repeats: Number of deals.

    Raises:
        ValueError: No system has the metric, or there are fewer than two clusters to choose and
            measure on.
    """
    matrix, cluster = _matrix(papers, metric)
    if len(np.unique(cluster)) < 2:
        raise ValueError(
            f"best of several: a system with {metric} and two DOIs are needed to choose and measure"
        )
    sums, counts = cluster_sums(matrix.to_numpy(), cluster)
    means = ratio_intervals(sums, counts, settings)
    winner = int(np.argmax(means.value))
    resamples = resample_weights(len(sums), settings.resamples, settings.seed)
    weights = np.concatenate([np.ones((1, len(sums))), resamples])
    fitted, choices = cross_fit(sums, counts, weights, FOLDS, repeats, settings.seed)
    half = norm.ppf((1 + LEVEL) / 2) * fitted[1:].std()
    names = [str(name) for name in matrix.columns]
    return BestOf(
        system=names[winner],
        cells=len(names),
        naive=cell({name: part[winner] for name, part in means._asdict().items()}),
        corrected={
            "value": float(fitted[0]),
            "low": max(float(fitted[0] - half), float(matrix.min(axis=None))),
            "high": min(float(fitted[0] + half), float(matrix.max(axis=None))),
        },
        chosen={name: float(share) for name, share in zip(names, choices, strict=True) if share},
        papers=len(matrix),
    )


def cross_fit(
    sums: Floats, counts: Floats, weights: Floats, folds: int, repeats: int, seed: int
) -> tuple[Floats, Floats]:
    """Means of the column that is best on the clusters of the other folds, fold by fold.

    Args:
        sums: Sum of the values in each cluster, shape (clusters, columns).
        counts: Number of values, same shape, every column the same.
        weights: How often each cluster counts, shape (samples, clusters).
        folds: Number of folds, at most the clusters.
        repeats: Number of random deals of clusters to folds.
        seed: Seed of the deals.

    Returns:
        The mean of each sample, averaged over the deals, shape (samples,); and how often the
        first sample chose each column, shape (columns,).
    """
    rng = np.random.default_rng(seed)
    clusters, columns = sums.shape
    folds = min(folds, clusters)
    dealt = np.arange(clusters) % folds
    size = weights @ counts[:, 0]
    fitted, choices = np.zeros(len(weights)), np.zeros(columns)
    for _ in range(repeats):
        fold = rng.permutation(dealt)
        inside = np.stack(
            [weights[:, fold == one] @ sums[fold == one] for one in range(folds)], axis=1
        )
        # All columns have the same counts, so the highest sum is the highest mean.
        chosen = (inside.sum(axis=1, keepdims=True) - inside).argmax(axis=2)
        held_out = np.take_along_axis(inside, chosen[..., None], axis=2)
        fitted += held_out.sum(axis=(1, 2)) / size / repeats
        choices += np.bincount(chosen[0], minlength=columns) / (folds * repeats)
    return fitted, choices


def agreement(
    candidates: pd.DataFrame,
    settings: Settings = DEFAULTS,
) -> list[Agreement]:
    """Compares the rankings of the models that share a task and a scorer.

    Args:
        candidates: One row a (system, paper, candidate), with ``model``, ``task``, ``scorer``,
            ``doi``, and as `paper_metrics` wants them.
        settings: Resamples, seed and kind of interval (of W).

    Returns:
        One `Agreement` for each task and scorer with two models or more that rank papers in
        common, in order of first appearance.

    Raises:
        ValueError: A model occurs twice for a task and scorer, or models have different
            candidates for a paper.
    """
    results: list[Agreement] = []
    for (task, scorer), rows in candidates.groupby(["task", "scorer"], sort=False):
        if rows["system"].nunique() != rows["model"].nunique():
            raise ValueError(f"task {task}, scorer {scorer}: a model has more than one system")
        models, common = _common(rows)
        if len(models) > 1:
            results.append(_agreement(str(task), str(scorer), models, common, settings))
    return results


def _common(rows: pd.DataFrame) -> tuple[tuple[str, ...], pd.DataFrame]:
    """The models that are compared, and their rows of the papers that every one of them ranks.

    Those with the most papers come first, and a model is left out if with it half of the papers
    of the first, or more, were lost: one with few valid papers must not empty the others' figures.

    Raises:
        ValueError: The models have different candidates for a paper.
    """
    models = list(dict.fromkeys(rows["model"]))
    finite = np.isfinite(rows["score"]).groupby([rows["paper_id"], rows["model"]]).all()
    ranks = finite.unstack("model", fill_value=False)
    most = ranks.sum().max()
    papers = pd.Series(True, index=ranks.index)
    kept: set[str] = set()
    for model in sorted(models, key=lambda model: -ranks[model].sum()):
        left = papers & ranks[model]
        if left.sum() > most / 2:
            papers = left
            kept.add(model)
    common = rows[rows["model"].isin(kept) & rows["paper_id"].isin(papers.index[papers])]
    seen = common.groupby(["paper_id", "candidate_id"]).size()
    for paper, candidate in seen[seen != len(kept)].index:
        raise ValueError(
            f"paper {paper!r}: candidate {candidate!r} is not one of every model's; rankings of "
            "different candidates cannot be compared"
        )
    return tuple(model for model in models if model in kept), common


def _agreement(
    task: str, scorer: str, models: tuple[str, ...], common: pd.DataFrame, settings: Settings
) -> Agreement:
    by_size: dict[int, list[Block]] = {}
    for block in blocks(common):
        by_size.setdefault(block.columns["score"].shape[1], []).append(block)
    top1, tau, tau_papers = (np.zeros((len(models), len(models))) for _ in range(3))
    papers, all_first = 0, 0
    concordance: list[pd.DataFrame] = []
    for members in by_size.values():
        scores = np.stack([block.columns["score"] for block in members])
        first, gold = members[0].first, members[0].gold
        papers += len(first)
        best = scores == scores.min(axis=2, keepdims=True)
        alone = best[:, np.arange(len(first)), gold] & (best.sum(axis=2) == 1)
        all_first += int(alone.all(axis=0).sum())
        # Of tied first candidates each is the first with equal chance.
        share = best / best.sum(axis=2, keepdims=True)
        top1 += np.einsum("apc,bpc->ab", share, share)
        pair_tau = kendall_tau(scores)
        tau += np.nansum(pair_tau, axis=2)
        tau_papers += (~np.isnan(pair_tau)).sum(axis=2)
        concordance.append(first[["paper_id", "doi"]].assign(w=kendall_w(scores)))
    top1 /= papers
    with np.errstate(invalid="ignore"):  # a scorer may tie all candidates of every paper
        tau /= tau_papers
    np.fill_diagonal(top1, 1.0)
    np.fill_diagonal(tau, 1.0)
    means = estimates(pd.concat(concordance).assign(scorer=scorer), ("w",), ("scorer",), settings)
    return Agreement(
        task,
        scorer,
        models,
        papers,
        all_first,
        cell(means.iloc[0]) if len(means) else {},
        pd.DataFrame(top1, models, models),
        pd.DataFrame(tau, models, models),
    )


def kendall_tau(scores: Floats) -> Floats:
    """Kendall's τ-b between raters, item by item (Kendall 1945, Biometrika 33, 239-251).

    All pairs and items in one product, where scipy's ``kendalltau`` takes them one by one, each
    with a p value; the tests compare the two.

    Args:
        scores: Shape (raters, items, candidates).

    Returns:
        Shape (raters, raters, items); NaN where a rater ties all candidates.
    """
    one, other = np.triu_indices(scores.shape[2], k=1)
    order = np.sign(scores[:, :, one] - scores[:, :, other])
    concordant = np.einsum("apc,bpc->abp", order, order)
    untied = np.abs(order).sum(axis=2)
    with np.errstate(invalid="ignore"):
        tau: Floats = concordant / np.sqrt(untied[:, None] * untied[None, :])
    return tau


def kendall_w(scores: Floats) -> Floats:
    """Kendall's coefficient of concordance with the correction for ties, item by item.

    W = (12 S) / (m² (n³ − n) − m Σ T), S the squared deviations of the candidates' rank sums, T
    the sum of t³ − t over a rater's tied groups (Kendall & Gibbons 1990, "Rank Correlation
    Methods", §6). 1 is full agreement, 1 / m is expected of m random rankings. scipy has no W; the
    tests take it from its ``friedmanchisquare``.

    Args:
        scores: Shape (raters, items, candidates).

    Returns:
        Shape (items,); NaN where every rater ties all candidates.
    """
    raters, _, size = scores.shape
    ranks = rankdata(scores, axis=2)
    rank_sums = ranks.sum(axis=0)
    spread = ((rank_sums - rank_sums.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    # Σ (t³ − t) over tied groups is Σ (t² − 1) over the candidates in them.
    tied = (scores[..., None] == scores[..., None, :]).sum(axis=3)
    ties = (tied**2 - 1).sum(axis=(0, 2))
    with np.errstate(invalid="ignore"):
        w: Floats = 12 * spread / (raters**2 * (size**3 - size) - raters * ties)
    return w
