"""A report as `hyprank report` writes it, made up: any number of papers and systems, no model."""

from __future__ import annotations

import random
from statistics import fmean
from typing import Any

from lm_eval_hyprank.ranking import GoldRank, gold_rank

CANDIDATES = ["gold"] + [f"fake_{n}" for n in range(1, 6)] + [f"model_{n}" for n in range(1, 11)]
DISCIPLINES = ["Astronomy", "Biology", "Business", "Cell Biology", "Chemistry", "Earth Science"]
METRICS = ("hit@1", "hit@2", "hit@3", "hit@5", "mrr", "win_rate")

# What a page must show as text and never obey.
HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    '<img src="https://example.org/x.png" onerror="window.hacked = 1">',
    "{{ 7 * 7 }} {% raw %} ${window.hacked = 1}",
    r"$\frac{a}{b} < \sum_{i} x_i$ & <b>bold</b> <!-- \u2028 and '\" -->",
)

_SUBJECTS = ["Surface charge", "Soil moisture", "Gene dosage", "Stellar spin", "Queue length"]
_VERBS = ["limits", "predicts", "slows", "doubles", "stabilises"]
_OBJECTS = ["the uptake of ions", "crop yield", "cell fate", "planet counts", "waiting times"]
_CLAUSES = [
    "because the two share one energy barrier",
    "whenever the reservoir is far from equilibrium",
    "which an intervention on the first should show within days",
    "so that the usual linear model fails above a threshold",
    "and the effect vanishes once temperature is held fixed",
]
_MODELS = ["acme/Lark-1B", "acme/Lark-3B", "borealis/Tern-7B", "borealis/Tern-7B-Instruct"]
_SCORERS = [("nll", "NLL"), ("raw", "Raw"), ("nll_sum", "NLL"), ("raw_sum", "Raw")]


def report_example(papers: int = 24, systems: int = 12, *, text: bool = True) -> dict[str, Any]:
    """Makes a report; equal arguments give equal reports.

    Args:
        papers: Number of papers.
        systems: Number of systems, of which the last four are not models' scorers: shortest
            and longest first, a control and a judge. At least five.
        text: Whether titles, backgrounds and candidates' texts are in it.
    """
    draw = random.Random(f"{papers} {systems}")
    described = _systems(systems)
    all_papers = [_paper(number, draw, described, text) for number in range(papers)]
    names = sorted({paper["discipline"] for paper in all_papers})
    for position, system in enumerate(described):
        _measure(position, system, all_papers, names)
    best = max(described[: systems - 4], key=lambda system: system["metrics"]["hit@1"]["value"])
    return {
        "schema_version": "1.0",
        "version": "0.1.0",
        "settings": {
            "seed": 0,
            "resamples": 2000,
            "interval": "percentile",
            "text": text,
            "tier_metric": "hit@1",
        },
        "paper_set": {
            "papers": papers,
            "dois": len({paper["doi"] for paper in all_papers}),
            "candidates": len(CANDIDATES),
            "disciplines": {
                name: sum(paper["discipline"] == name for paper in all_papers) for name in names
            },
            "tasks": ["example_energy"],
        },
        "models": [],
        "systems": described,
        "pooled": [],
        "audit": {
            "length": {"baselines_bytes": [], "baselines_tokens": [], "conditional_logit": []},
            "energy": {"shares": [], "parts": []},
        },
        "comparisons": [],
        "agreement": [],
        "controls": {"shares": [], "pmi_absent": []},
        "best": {
            "metric": "hit@1",
            "system": best["id"],
            "of": systems - 3,
            "papers": papers,
            "naive": best["metrics"]["hit@1"],
            "chosen": {best["id"]: 1.0},
            "corrected": _interval(max(0.0, best["metrics"]["hit@1"]["value"] - 0.04), papers),
        },
        "files": {
            "read": [{"file": "lark/results_2026.json"}, {"file": "tern/results_2026.json"}],
            "superseded": [{"file": "lark/results_2025.json", "why": "older"}],
            "left_out": [{"file": "notes/results_old.json", "why": "holds no task of this kind"}],
        },
        "notes": ["Judge example_judge: 1 in 10 replies could not be read."],
        "papers": all_papers,
    }


def _systems(count: int) -> list[dict[str, Any]]:
    described = []
    for number in range(count - 4):
        scorer, paradigm = _SCORERS[number % len(_SCORERS)]
        model = _MODELS[number // len(_SCORERS) % len(_MODELS)]
        if number >= len(_SCORERS) * len(_MODELS):
            model = f"{model}-v{number}"
        described.append(("energy", model, "example_energy", scorer, paradigm, {}))
    described += [
        ("trivial", "no model", "example_energy", "shortest", "Shortest first", {}),
        ("trivial", "no model", "example_energy", "longest", "Longest first", {}),
        ("energy", _MODELS[0], "example_no_context", "nll", "NLL", {"control": "no_context"}),
        ("judge", HOSTILE[1], "example_judge", "judge", "judge", {}),
    ]
    return [
        {
            "id": f"{model}|{task}|{scorer}",
            "model": model,
            "task": task,
            "scorer": scorer,
            "kind": kind,
            "paradigm": paradigm,
            **extra,
        }
        for kind, model, task, scorer, paradigm, extra in described
    ]


def _paper(
    number: int, draw: random.Random, systems: list[dict[str, Any]], text: bool
) -> dict[str, Any]:
    candidates: list[dict[str, Any]] = []
    for label in CANDIDATES:
        clauses = draw.sample(_CLAUSES, 1 if label == "gold" else draw.randint(1, 4))
        first = f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {draw.choice(_OBJECTS)}"
        if label == f"fake_{number + 1}":
            first += " " + HOSTILE[number % len(HOSTILE)]
        words = " ".join([first, *clauses]) + "."
        candidates.append(
            {"id": label, "text": words, "tokens": len(words.split()), "bytes": len(words)}
        )
    draw.shuffle(candidates)
    for candidate in candidates:
        candidate["scores"] = [None] * len(systems)
        candidate["ranks"] = [None] * len(systems)
    for position, system in enumerate(systems):
        if system["kind"] == "judge":
            if number % 10 != 9:  # a reply that could not be read
                _judge(position, candidates, draw)
            continue
        for candidate in candidates:
            skill = (1.2 - 0.2 * (position % 5)) * (candidate["id"] == "gold")
            tokens = candidate["tokens"]
            score = {
                "shortest": lambda size=candidate["bytes"]: float(size),
                "longest": lambda size=candidate["bytes"]: -float(size),
                "nll_sum": lambda n=tokens, s=skill: n * draw.gauss(3.1 - s, 0.4),
                "raw_sum": lambda n=tokens, s=skill: -n * draw.gauss(14 + s, 1.0),
                "raw": lambda s=skill: -draw.gauss(14 + s, 0.8),
                "nll": lambda s=skill: draw.gauss(3.1 - s, 0.6),
            }[system["scorer"]]()
            candidate["scores"][position] = score
        _rank(position, candidates)
    if not text:
        for candidate in candidates:
            del candidate["text"]
    discipline = DISCIPLINES[number % len(DISCIPLINES)]
    paper = {
        "paper_id": f"{discipline}/100{number:04d}",
        "discipline": discipline,
        "doi": f"10.0000/example.{number - number % 12 // 11}",
    }
    if text:
        paper["title"] = (
            HOSTILE[0] if number == 3 else f"{draw.choice(_SUBJECTS)} and {draw.choice(_OBJECTS)}"
        )
        paper["context"] = (
            f"Background: Little is known of {draw.choice(_OBJECTS)}. {HOSTILE[number % 4]}\n"
            f"Research Question: What decides {draw.choice(_OBJECTS)}?\nHypothesis:"
        )
    return {**paper, "candidates": candidates}


def _rank(system: int, candidates: list[dict[str, Any]]) -> None:
    scores = [candidate["scores"][system] for candidate in candidates]
    for candidate, score in zip(candidates, scores, strict=True):
        better = sum(other < score for other in scores)
        tied = sum(other == score for other in scores) - 1
        candidate["ranks"][system] = better + 1 + tied / 2


def _judge(system: int, candidates: list[dict[str, Any]], draw: random.Random) -> None:
    """Five candidates ranked, the other eleven one tied group."""
    for place, candidate in enumerate(draw.sample(candidates, len(candidates))):
        candidate["ranks"][system] = place + 1.0 if place < 5 else 11.0


def _measure(
    position: int, system: dict[str, Any], papers: list[dict[str, Any]], names: list[str]
) -> None:
    ranks: dict[str, GoldRank] = {}
    for paper in papers:
        gold = next(each for each in paper["candidates"] if each["id"] == "gold")
        if gold["ranks"][position] is None:
            continue
        values = [candidate["ranks"][position] for candidate in paper["candidates"]]
        ranks[paper["paper_id"]] = gold_rank(values, paper["candidates"].index(gold))
    values = list(ranks.values())
    hit = fmean(rank.hit(1) for rank in values)
    system["papers"] = len(values)
    system["invalid"] = len(papers) - len(values)
    system["tier"] = 1 if hit > 0.5 else 2 if hit > 0.2 else 3
    system["metrics"] = _metrics(values, METRICS)
    if system["kind"] == "judge":
        system["metrics"]["win_rate_terminal"] = _interval(0.2, len(values))
    system["disciplines"] = {}
    for name in names:
        own = [
            ranks[paper["paper_id"]]
            for paper in papers
            if paper["discipline"] == name and paper["paper_id"] in ranks
        ]
        # A judge that did not answer on one discipline has no number there.
        if own and not (system["kind"] == "judge" and name == names[0]):
            system["disciplines"][name] = {"papers": len(own), **_metrics(own, ("hit@1", "hit@5"))}
    system["rank_histogram"] = [
        fmean(rank.hit(place) - rank.hit(place - 1) for rank in values)
        for place in range(1, len(CANDIDATES) + 1)
    ]
    if system["kind"] != "judge":
        system["length_correlation"] = {"value": 0.31, "low": 0.22, "high": 0.4}
        left = max(1, len(values) * 2 // 3)
        system["matched"] = {
            "papers": left,
            "left_out": len(values) - left,
            "hit@1": _interval(max(0.02, hit * 0.7), left),
            "chance": 0.23,
            "length": "bytes" if system["kind"] == "trivial" else "tokens",
        }


def _metrics(ranks: list[GoldRank], names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    value = {
        "mrr": lambda rank: rank.reciprocal_rank,
        "win_rate": lambda rank: rank.win_rate,
        **{f"hit@{k}": lambda rank, k=k: rank.hit(k) for k in (1, 2, 3, 5)},
    }
    return {name: _interval(fmean(map(value[name], ranks)), len(ranks)) for name in names}


def _interval(value: float, papers: int) -> dict[str, float]:
    """A value with an interval of a plausible width; how it is computed is the report's affair."""
    half = 1.96 * (max(value * (1 - value), 0.01) / papers) ** 0.5
    return {"value": value, "low": max(0.0, value - half), "high": min(1.0, value + half)}
