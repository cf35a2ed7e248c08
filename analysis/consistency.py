"""What can be checked inside the published tables, without any run.

Usage: ``python analysis/consistency.py [-o FILE]`` (needs the ``report`` extra)

Reads ``published.json`` and prints a report in Markdown: what agrees, what does not, and what
follows from the numbers that the paper does not say. Every check is a function that returns
numbers; the sentences around them are written out below.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.stats import norm

PUBLISHED = Path(__file__).with_name("published.json")

SCORERS = {"nll": "NLL", "raw": "Raw"}
HIT_KS = (1, 2, 3, 5)
ROUNDING = 0.0005
"""Half a unit of the last place of the tables."""

PAPERS = {
    "Astronomy": 82,
    "Biology": 107,
    "Business": 108,
    "Cell Biology": 150,
    "Chemistry": 108,
    "Earth Science": 108,
    "Energy Science": 114,
    "Environmental Science": 111,
    "Law": 95,
    "Material Science": 113,
    "Math": 102,
    "Physics": 125,
}
"""Papers a discipline. The tables do not give them: these were derived from the published shares
and the total, so that GPT-5's shares fit them shows little; that the other columns' weighted
means give the overall rows is the independent check."""

DOIS = 962
"""About as many distinct DOIs are among the 1,323 rows of the data set."""


@dataclass(frozen=True)
class Bounds:
    """The least and the greatest value that other published numbers allow."""

    low: float
    high: float

    def holds(self, value: float, slack: float = ROUNDING) -> bool:
        """Whether a rounded value lies within."""
        return self.low - slack <= value <= self.high + slack


def load() -> dict[str, Any]:
    """The published numbers."""
    published: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return published


def cells(published: Mapping[str, Any]) -> Iterator[tuple[str, str, str, dict[str, float]]]:
    """Every cell of the overall table: scorer, model, metric, value with limits."""
    for scorer, rows in published["overall"].items():
        for model, row in rows.items():
            for metric, cell in row.items():
                yield scorer, model, metric, cell


def standard_error(cell: Mapping[str, float]) -> float:
    """The standard error that a 95 % interval stands for, were it a normal one."""
    return (cell["high"] - cell["low"]) / (2 * float(norm.ppf(0.975)))


def binomial_ratios(published: Mapping[str, Any]) -> dict[str, float]:
    """Widths of the models' Hit@k intervals over the width for independent papers."""
    ratios = {}
    for scorer, model, metric, cell in cells(published):
        if metric.startswith("hit@") and model != "All models":
            spread = math.sqrt(cell["value"] * (1 - cell["value"]) / published["papers"])
            ratios[f"{scorer} {model} {metric}"] = standard_error(cell) / spread
    return ratios


def pooled_deviations(published: Mapping[str, Any]) -> dict[str, float]:
    """The pooled rows minus the mean of the seven models' values."""
    deviations = {}
    for scorer in SCORERS:
        rows = dict(published["overall"][scorer])
        pooled = rows.pop("All models")
        for metric, cell in pooled.items():
            mean = math.fsum(row[metric]["value"] for row in rows.values()) / len(rows)
            deviations[f"{scorer} {metric}"] = cell["value"] - mean
    return deviations


def pooled_correlation(published: Mapping[str, Any], scorer: str, metric: str) -> float:
    """The mean correlation between models that the width of the pooled interval stands for.

    With papers drawn jointly, Var(mean of m models) = (Σ vᵢ + ρ Σ sᵢ sⱼ) / m², i ≠ j.
    """
    rows = dict(published["overall"][scorer])
    pooled = standard_error(rows.pop("All models")[metric])
    errors = [standard_error(row[metric]) for row in rows.values()]
    own = math.fsum(error**2 for error in errors)
    return (pooled**2 * len(rows) ** 2 - own) / (math.fsum(errors) ** 2 - own)


def win_rate_bounds(published: Mapping[str, Any], scorer: str, model: str) -> Bounds:
    """The win rates that any distribution of ranks with the published Hit@k and MRR can have.

    A linear programme over the 16 shares; published values may be off by their rounding.
    """
    row = published["overall"][scorer][model]
    size = published["candidates"]
    ranks = np.arange(1, size + 1)
    moments = {f"hit@{k}": (ranks <= k).astype(float) for k in HIT_KS} | {"mrr": 1 / ranks}
    upper: list[np.ndarray] = []
    limit: list[float] = []
    for metric, weights in moments.items():
        for sign in (1, -1):
            upper.append(sign * weights)
            limit.append(sign * row[metric]["value"] + ROUNDING)
    wins = (size - ranks) / (size - 1)
    found = [
        linprog(sign * wins, A_ub=upper, b_ub=limit, A_eq=[np.ones(size)], b_eq=[1], bounds=(0, 1))
        for sign in (1, -1)
    ]
    if not all(result.success for result in found):
        raise ValueError(f"{scorer} {model}: no distribution of ranks has these Hit@k and MRR")
    return Bounds(float(found[0].fun), float(-found[1].fun))


def judge_win_rates(published: Mapping[str, Any]) -> dict[str, float]:
    """GPT-5's win rate from its ranks, unranked golds beaten by all or tied with the rest."""
    size = published["candidates"]
    histogram = dict(published["gpt5_rank_histogram"])
    unranked = histogram.pop("not ranked")
    ranked = math.fsum(share * (size - int(rank)) / (size - 1) for rank, share in histogram.items())
    tied = (size - len(histogram) - 1) / 2 / (size - 1)
    return {"terminal": ranked, "half": ranked + unranked * tied}


def random_judge_win_rate(published: Mapping[str, Any]) -> float:
    """What a judge that names five candidates at random gets under the terminal rule."""
    size: int = published["candidates"]
    named = len(published["gpt5_rank_histogram"]) - 1
    return math.fsum((size - rank) / (size - 1) for rank in range(1, named + 1)) / size


@dataclass(frozen=True)
class Count:
    """A share as a count: the nearest one, and whether it gives the share as published."""

    hits: int
    papers: int
    fits: bool


def discipline_counts(published: Mapping[str, Any]) -> dict[tuple[str, str], Count]:
    """GPT-5's Hit@1 and Hit@5 of each discipline as counts of `PAPERS`."""
    counts = {}
    for discipline, row in published["by_discipline"].items():
        papers = PAPERS[discipline]
        for metric in ("hit@1", "hit@5"):
            hits = round(row[metric]["GPT-5"] * papers)
            fits = f"{hits / papers:.3f}" == f"{row[metric]['GPT-5']:.3f}"
            counts[discipline, metric] = Count(hits, papers, fits)
    return counts


def weighted_disciplines(published: Mapping[str, Any], column: str, metric: str) -> float:
    """The overall value that the disciplines' values and sizes give."""
    total = math.fsum(
        PAPERS[discipline] * row[metric][column]
        for discipline, row in published["by_discipline"].items()
    )
    return total / sum(PAPERS.values())


def difference_z(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """(one − other) / its standard error for independent estimates.

    Both were made on the same papers. Where their hits go together the true z is larger.
    """
    return (one["value"] - other["value"]) / math.hypot(standard_error(one), standard_error(other))


def cluster_factor(published: Mapping[str, Any]) -> float:
    """Least factor to the intervals' width, were the rows of a DOI all alike.

    The variance is then Σ n² / N times that of independent rows, n the rows of a DOI, and least
    where every DOI has N / `DOIS` rows.
    """
    return math.sqrt(published["papers"] / DOIS)


def win_rate_z(published: Mapping[str, Any], value: float) -> float:
    """The least |z| of a win rate against 1/2: no value in 0..1 varies more than p (1 − p)."""
    papers: int = published["papers"]
    return (value - 0.5) / math.sqrt(value * (1 - value) / papers)


def selection_bias(published: Mapping[str, Any], draws: int = 20_000, seed: int = 0) -> float:
    """By how much the best of the 14 Hit@1 cells is expected to exceed its own true value.

    Draws every cell anew about its published value, with its own standard error and independently
    (common luck would lessen the bias), and takes the best each time.
    """
    rows = [
        row["hit@1"]
        for scorer in SCORERS
        for model, row in published["overall"][scorer].items()
        if model != "All models"
    ]
    values = np.array([row["value"] for row in rows])
    errors = np.array([standard_error(row) for row in rows])
    luck = np.random.default_rng(seed).normal(size=(draws, len(rows))) * errors
    best = (values + luck).argmax(axis=1)
    return float(luck[np.arange(draws), best].mean())


def independent_agreement(published: Mapping[str, Any], scorer: str) -> tuple[float, float]:
    """Papers all models would rank first if they erred independently, and at most."""
    hits = [
        row["hit@1"]["value"]
        for model, row in published["overall"][scorer].items()
        if model != "All models"
    ]
    return math.prod(hits) * published["papers"], min(hits) * published["papers"]


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [header, ("---",) * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def _agrees(published: Mapping[str, Any]) -> list[str]:
    ratios = list(binomial_ratios(published).values())
    deviations = pooled_deviations(published)
    rates = judge_win_rates(published)
    counts = discipline_counts(published)
    sums = {
        metric: sum(count.hits for key, count in counts.items() if key[1] == metric)
        for metric in ("hit@1", "hit@5")
    }
    misfits = [
        f"{discipline} {metric} is not, {count.hits} of {count.papers} are "
        f"{count.hits / count.papers:.4f}"
        for (discipline, metric), count in counts.items()
        if not count.fits
    ]
    bounded = [
        (scorer, model, win_rate_bounds(published, scorer, model), value)
        for scorer in SCORERS
        for model, value in published["win_rate"][scorer].items()
    ]
    inside = sum(bounds.holds(value) for _, _, bounds, value in bounded)
    widest = max(bounds.high - bounds.low for _, _, bounds, _ in bounded)
    text = published["text"]
    lines = ["## What agrees", ""]
    lines += _table(
        ("check", "result"),
        [
            (
                "models' Hit@k intervals against independent papers (binomial)",
                f"width ratio {np.mean(ratios):.2f} on average, {min(ratios):.2f} to "
                f"{max(ratios):.2f}, {len(ratios)} cells",
            ),
            (
                "pooled rows against the mean of the seven models",
                f"off by at most {max(map(abs, deviations.values())):.4f}",
            ),
            (
                "win rates against the range that Hit@1, 2, 3, 5 and MRR leave",
                f"{inside} of {len(bounded)} inside; the ranges are at most {widest:.3f} wide",
            ),
            (
                "GPT-5's win rate from its rank histogram, unranked golds last",
                f"{rates['terminal']:.4f}; published {published['win_rate']['prompted']['GPT-5']}",
            ),
            (
                "GPT-5's shares by discipline as whole papers of "
                f"{min(PAPERS.values())} to {max(PAPERS.values())}",
                f"{len(counts) - len(misfits)} of {len(counts)} are ({'; '.join(misfits)}); they "
                f"sum to {sums['hit@1']} and {sums['hit@5']} hits (published "
                f"{round(text['gpt5_hit@1'] * published['papers'])} and "
                f"{text['gpt5_top5_papers']})",
            ),
            *(
                (
                    f"{name} {metric}, disciplines weighted by their papers",
                    f"{weighted_disciplines(published, scorer, metric):.4f}; overall row "
                    f"{published['overall'][scorer]['All models'][metric]['value']}",
                )
                for scorer, name in SCORERS.items()
                for metric in ("hit@1", "hit@5")
            ),
        ],
    )
    return lines


def _disagrees(published: Mapping[str, Any]) -> list[str]:
    overall = published["overall"]
    lost: list[tuple[str, ...]] = [
        (
            model,
            f"{overall['nll'][model]['hit@1']['value']:.3f}",
            f"{overall['raw'][model]['hit@1']['value']:.3f}",
            f"{difference_z(overall['raw'][model]['hit@1'], overall['nll'][model]['hit@1']):+.1f}",
        )
        for model in overall["nll"]
    ]
    capped = published["win_rate"]["raw"]["Gemma 2 2B"]
    first = overall["raw"]["Gemma 2 2B"]["hit@1"]
    quoted, listed = published["text"]["llama_3.2_1b_raw_hit@1"], overall["raw"]["Llama 3.2 1B"]
    sizes = published["text"]["papers_per_discipline_about"]
    outside = [name for name, papers in PAPERS.items() if not sizes[0] <= papers <= sizes[1]]
    pooled = {name: overall[name]["All models"]["hit@5"] for name in SCORERS}
    return [
        "## What does not",
        "",
        '- **"Roughly comparable" under Raw** is said of GPT OSS 20B, Gemma 4 12B and Phi-4. The '
        "tables say that the latter two lose a quarter of their Hit@1, far outside both intervals "
        "(z of Raw minus NLL for independent estimates; on the same papers it can be larger):",
        "",
        *_table(("model", "NLL Hit@1", "Raw Hit@1", "z"), lost),
        '- **"Indistinguishable from chance"** is said of Gemma 2 2B under Raw, win rate '
        f"{capped}. With the largest variance a win rate can have it is "
        f"{abs(win_rate_z(published, capped)):.1f} standard errors below one half "
        f"({abs(win_rate_z(published, capped)) / cluster_factor(published):.1f} if rows of a DOI "
        f"are alike), while its Hit@1 of {first['value']} [{first['low']}, {first['high']}] is "
        "twice the chance level of 0.0625: the gold is first too often, and low too often.",
        '- **"The two criteria are indistinguishable"** holds for the pooled Hit@1 and MRR. For '
        f"Hit@5 ({pooled['nll']['value']} and {pooled['raw']['value']}) z is "
        f"{difference_z(pooled['nll'], pooled['raw']):.1f} for independent estimates, the "
        "largest of the five metrics and not corrected for that: a hint, no finding. A margin of a "
        "single value is not the yardstick of a paired difference.",
        f"- **The best cell** is {quoted['value']} [{quoted['low']}, {quoted['high']}] in the text "
        f"and {listed['hit@1']['value']} [{listed['hit@1']['low']}, {listed['hit@1']['high']}] in "
        "the table: two bootstrap runs, or a limit cut instead of rounded.",
        f'- **"Roughly {sizes[0]} to {sizes[1]} papers per discipline"** is true of those spoken '
        f"of there; the sizes derived from GPT-5's shares are {min(PAPERS.values())} to "
        f"{max(PAPERS.values())}, with "
        f"{', '.join(outside)} outside.",
        "",
    ]


def _follows(published: Mapping[str, Any]) -> list[str]:
    rates = judge_win_rates(published)
    correlation = {name: pooled_correlation(published, name, "hit@1") for name in SCORERS}
    material = published["by_discipline"]["Material Science"]["hit@5"]
    papers = PAPERS["Material Science"]
    spread = math.hypot(
        *(math.sqrt(share * (1 - share) / papers) for share in (material["GPT-5"], material["raw"]))
    )
    ahead = sum(
        row["hit@1"]["nll"] > row["hit@1"]["raw"] for row in published["by_discipline"].values()
    )
    agreed = {name: independent_agreement(published, name) for name in SCORERS}
    observed = published["all_models_rank_gold_first"]
    return [
        "## What follows",
        "",
        f"- **The judge is not below chance.** {rates['terminal']:.3f} counts every gold outside "
        f"the top five as beaten by all. Under that rule a judge that names five at random gets "
        f"{random_judge_win_rate(published):.3f}, not 0.5; with half credit for the unranked ties, "
        f"where chance is 0.5, the same replies give {rates['half']:.3f}.",
        "- **Intervals are for independent papers**, yet about "
        f"{DOIS} DOIs are behind {published['papers']} rows. Were rows of a DOI alike, the "
        f"intervals would have to be at least {cluster_factor(published):.2f} times as wide.",
        "- **Pooled intervals were made by drawing papers**, not paper-model pairs: their widths "
        f"stand for a correlation of hits between models of {correlation['nll']:.2f} (NLL) and "
        f"{correlation['raw']:.2f} (Raw), in line with {observed['nll']} and {observed['raw']} "
        "papers that all seven rank first; seven independent models would give "
        f"{agreed['nll'][0]:.1f} and {agreed['raw'][0]:.1f}. Raw could not have more than "
        f"{agreed['raw'][1]:.0f}, for Gemma 2 2B alone has no more.",
        "- **The best of 14 is hardly flattered**: redrawing all cells about their values, the "
        f"winner exceeds its own true value by {selection_bias(published):.4f} on average, for the "
        "second is five standard errors behind. Choosing afterwards is not what is wrong with the "
        "53.1 %; whether length or the log-partition makes it is the open question.",
        f"- **By discipline** NLL is ahead of Raw on Hit@1 in {ahead} of {len(PAPERS)}. GPT-5's "
        f"lead in Material Science (Hit@5 {material['GPT-5']} against {material['raw']}) is "
        f"{(material['GPT-5'] - material['raw']) / spread:.1f} standard errors for independent "
        "estimates, one of 24 such comparisons: no finding, and not clearly noise.",
        "",
    ]


def report(published: Mapping[str, Any]) -> str:
    """The whole report in Markdown."""
    lines = [
        "# Consistency of the published tables",
        "",
        f"Of: {published['source']}. Made by `analysis/consistency.py`.",
        "",
        *_agrees(published),
        *_disagrees(published),
        *_follows(published),
    ]
    return "\n".join(lines)


def main() -> None:
    """Prints the report, or writes it to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="write the report to this file")
    options = parser.parse_args()
    text = report(load())
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
