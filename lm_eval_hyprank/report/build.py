"""Puts what was read and what was computed into one report, the content of `report.json`.

Every number comes from the statistics modules; one that cannot be computed is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

import lm_eval_hyprank
from lm_eval_hyprank.report.audit import (
    Length,
    conditional_logit,
    energy_audit,
    energy_parts,
    length_baselines,
    length_correlation,
    length_matched,
)
from lm_eval_hyprank.report.comparisons import (
    agreement,
    best_of,
    compare,
    tiers,
    with_all_papers,
)
from lm_eval_hyprank.report.controls import context_shares, pmi_scores
from lm_eval_hyprank.report.found import LIST_JUDGES
from lm_eval_hyprank.report.intervals import (
    METRICS,
    Settings,
    cell,
    cluster_ids,
    estimates,
    gold_beats,
    paper_metrics,
    rank_histogram,
    with_misses,
)
from lm_eval_hyprank.report.runs import NO_MODEL, PARADIGMS, Runs

SCHEMA_VERSION = "1.0"
"""Version of the shape of a report, which `report.schema.json` describes."""

TIER_METRIC = "hit@1"
"""The metric that systems are compared, tiered and chosen by."""

Report = dict[str, Any]


def build_report(runs: Runs, settings: Settings, text: bool = True) -> Report:
    """Makes a report.

    Args:
        runs: What was read; all runs cover the same papers.
        settings: How intervals are made.
        text: Whether the report holds titles, prompts and candidates. The licence of
            ResearchBench forbids to pass them on.

    Returns:
        The report: plain lists, mappings, text and finite numbers. The same runs and settings
        give the same report.
    """
    pmi, pmi_absent = pmi_scores(runs)
    scores = pd.concat([runs.scores, pmi], ignore_index=True) if len(pmi) else runs.scores
    papers = paper_metrics(scores)
    control_papers = paper_metrics(runs.control_scores)
    # That a system differs from chance says its interval.
    counted = with_misses(papers[papers["scorer"] != "chance"])
    rivals = with_all_papers(counted, TIER_METRIC)
    compared = compare(rivals, TIER_METRIC, settings)
    standings: dict[str, Report] = {
        name: {"tier": tier} for name, tier in tiers(rivals, compared, TIER_METRIC).items()
    }
    filled = rivals["system"].isin(counted.loc[counted[TIER_METRIC].isna(), "system"])
    for name, cells in _cells(estimates(rivals[filled], (TIER_METRIC,), settings=settings)).items():
        standings[name]["compared"] = cells[TIER_METRIC]
    systems = _systems(runs, scores, papers, control_papers, standings, settings)
    report: Report = {
        "schema_version": SCHEMA_VERSION,
        "version": lm_eval_hyprank.__version__,
        "settings": {
            "seed": settings.seed,
            "resamples": settings.resamples,
            "interval": settings.interval,
            "text": text,
            "tier_metric": TIER_METRIC,
        },
        "paper_set": _paper_set(runs),
        "models": _models(runs),
        "systems": systems,
        "pooled": _pooled(papers, settings),
        "audit": {
            "length": _length_audit(scores, settings),
            "energy": _energy_audit(scores, settings),
        },
        "comparisons": _records(compared),
        "agreement": _agreement(scores, settings),
        "controls": {
            "shares": _records(context_shares(papers, control_papers, runs.systems, settings)),
            "pmi_absent": pmi_absent,
        },
        "files": runs.files,
        "notes": [*runs.notes, *_control_notes(runs.systems, pmi_absent)],
        "papers": _papers(
            runs, pd.concat([scores, runs.control_scores], ignore_index=True), systems, text
        ),
    }
    if best := _best(rivals, runs.systems, settings):
        report["best"] = best
    return report


# --- parts -----------------------------------------------------------------------------------


def _paper_set(runs: Runs) -> Report:
    sizes = runs.candidates.groupby("paper_id", sort=False).size()
    disciplines = runs.papers["discipline"].value_counts().sort_index()
    clusters = cluster_ids(runs.papers["doi"], runs.papers["paper_id"])
    paper_set: Report = {
        "papers": len(runs.papers),
        "dois": int(clusters.nunique()) if runs.papers["doi"].str.strip().any() else 0,
        "disciplines": {str(name): int(count) for name, count in disciplines.items()},
        "tasks": list(dict.fromkeys(runs.systems["task"])),
    }
    if sizes.nunique() == 1:
        paper_set["candidates"] = int(sizes.iloc[0])
    else:
        paper_set["candidates_range"] = [int(sizes.min()), int(sizes.max())]
    return paper_set


def _models(runs: Runs) -> list[Report]:
    """What is known of each run: model, software, date in seconds since 1970."""
    return [
        _without_absent(
            {
                "model": run.model,
                "task": run.task,
                "name": run.name,
                "kind": run.kind,
                "control": run.control or None,
                "pretrained": run.pretrained,
                "source": run.source,
                "fingerprint": run.fingerprint,
                "task_version": run.version,
                "date": run.date or None,
                "papers": run.papers,
                "task_papers": run.total,
                "truncated": len(run.truncated),
                **run.details,
            }
        )
        for run in runs.runs
    ]


def _systems(
    runs: Runs,
    scores: pd.DataFrame,
    papers: pd.DataFrame,
    control_papers: pd.DataFrame,
    standings: Mapping[str, Report],
    settings: Settings,
) -> list[Report]:
    parts = [papers, control_papers, runs.pairwise]
    every = pd.concat([part for part in parts if len(part)], ignore_index=True)
    every = every.reindex(columns=list(dict.fromkeys([*papers, *every])))
    every = _with_first_choices(every, runs.replies)
    judged = every["kind"].isin(LIST_JUDGES)
    columns = (*METRICS, "win_rate_terminal", *PAIRWISE_METRICS, "chose_shown_first")
    valid = _cells(estimates(every, columns, settings=settings))
    counted = with_misses(every)
    whole = _cells(estimates(counted[judged], columns, settings=settings))
    fields = _discipline_cells(
        estimates(counted, ("hit@1", "hit@5"), ("system", "discipline"), settings)
    )
    histogram = rank_histogram(every)
    beats = gold_beats(scores, settings)
    lengths = _length_columns(scores, settings)
    known = {str(row.system): row._asdict() for row in runs.systems.itertuples(index=False)}
    systems = []
    for identifier, rows in every.groupby("system", sort=False):
        name = str(identifier)
        head = rows.iloc[0]
        kind = str(head["kind"])
        facts = known.get(name, {})
        scorer = str(head["scorer"])
        invalid = int((~rows["valid"].astype(bool)).sum())
        system: Report = {
            "id": name,
            "model": str(head["model"]),
            "task": str(head["task"]),
            "scorer": scorer,
            "kind": kind,
            "paradigm": str(facts.get("paradigm") or PARADIGMS.get(scorer, scorer)),
            "papers": len(rows) - (0 if kind in LIST_JUDGES else invalid),
            "invalid": invalid,
            "metrics": whole.get(name) or valid.get(name, {}),
            "disciplines": fields.get(name, {}),
        }
        if facts.get("control"):
            system |= {"control": facts["control"], "control_of": facts["control_of"]}
        if facts.get("diagnostic"):
            system["diagnostic"] = True
        system |= standings.get(name, {})
        if kind in LIST_JUDGES:
            system["metrics_valid"] = valid.get(name, {})
            replies = runs.replies[runs.replies["system"] == name]
            system["parse_rate"] = float((replies["invalid"] == "").mean())
            system["invalid_reasons"] = _reasons(replies)
            system["positions"] = _positions(replies)
        if kind == "pairwise":
            system["parse_rate"] = float(rows["parse_rate"].mean())
        # A judge's gold outside its list has no rank.
        if kind not in LIST_JUDGES and name in histogram.index:
            system["rank_histogram"] = [float(share) for share in histogram.loc[name].dropna()]
        system["gold_beats"] = {
            str(row.against): _cell(row)
            for row in beats[beats["system"] == name].itertuples(index=False)
        }
        system |= lengths.get(name, {})
        systems.append(_without_absent(system))
    return systems


PAIRWISE_METRICS = (
    *("accuracy", "accuracy_all", "accuracy_gold_first", "accuracy_gold_second"),
    *("both_correct", "contradiction", "both_wrong"),
    *("beats_majority_gold_first", "beats_majority_gold_second"),
)
"""What pairwise judges have beside the rank of the gold by verdicts won."""


def _with_first_choices(papers: pd.DataFrame, replies: pd.DataFrame) -> pd.DataFrame:
    """Adds ``chose_shown_first`` of listwise judges: the share of a paper's readable replies."""
    readable = replies[replies["invalid"] == ""]
    keys = ["system", "paper_id"]
    first = (readable["chosen"] == 1).groupby([readable[key] for key in keys]).mean()
    shares = pd.Series(first.reindex(pd.MultiIndex.from_frame(papers[keys])).to_numpy(float))
    known = papers.get("chose_shown_first", pd.Series(math.nan, index=papers.index))
    return papers.assign(chose_shown_first=known.fillna(shares))


def _positions(replies: pd.DataFrame) -> list[Report]:
    """What became of each place at which a listwise judge was shown a candidate."""
    readable = replies[replies["invalid"] == ""]
    positions = []
    for place in range(1, int(replies["candidates"].max()) + 1):
        ranks = readable.loc[readable["gold_shown"] == place, "gold_rank"]
        position: Report = {
            "first_choices": int((readable["chosen"] == place).sum()),
            "gold_shown": len(ranks),
        }
        if len(ranks):
            position |= {f"gold_hit@{k}": float((ranks <= k).mean()) for k in (1, 5)}
        positions.append(position)
    return positions


def _reasons(replies: pd.DataFrame) -> dict[str, int]:
    """How many replies could not be read for each reason, the details left out."""
    return dict(sorted(Counter(why.partition(":")[0] for why in replies["invalid"] if why).items()))


def _pooled(papers: pd.DataFrame, settings: Settings) -> list[Report]:
    """Each scorer over all models, as one row: overall and by discipline."""
    shared = papers[~papers["kind"].isin(["trivial", *LIST_JUDGES])]
    models = (
        shared[shared["valid"].astype(bool)]
        .groupby(["task", "scorer"], sort=False)["model"]
        .nunique()
    )
    several = models[models > 1].index
    keys = pd.MultiIndex.from_frame(shared[["task", "scorer"]])
    shared = shared[keys.isin(several)]
    overall = estimates(shared, METRICS, ("task", "scorer"), settings)
    fields = estimates(shared, ("hit@1", "hit@5"), ("task", "scorer", "discipline"), settings)
    pooled = []
    for task, scorer in several:
        mine = overall[(overall["task"] == task) & (overall["scorer"] == scorer)]
        theirs = fields[(fields["task"] == task) & (fields["scorer"] == scorer)]
        pooled.append(
            {
                "task": str(task),
                "scorer": str(scorer),
                "paradigm": PARADIGMS.get(str(scorer), str(scorer)),
                "models": int(models[task, scorer]),
                "metrics": {str(r.metric): _cell(r) for r in mine.itertuples(index=False)},
                "disciplines": _by_discipline(theirs),
            }
        )
    return pooled


def _has_tokens(rows: pd.DataFrame) -> pd.Series:
    """Whether the tokens of all candidates of a system are known, row by row."""
    return rows["num_tokens"].notna().groupby(rows["system"]).transform("all")


def _length_columns(scores: pd.DataFrame, settings: Settings) -> dict[str, Report]:
    """Each system's correlation with length and its hits among candidates of like length.

    Length is the model's own tokens where the run counted them, else bytes.
    """
    columns: dict[str, Report] = {}
    counted = _has_tokens(scores)
    parts: list[tuple[Length, pd.DataFrame]] = [
        ("num_tokens", scores[counted]),
        ("num_bytes", scores[~counted]),
    ]
    for length, rows in parts:
        for row in length_correlation(rows, length, settings).itertuples(index=False):
            columns.setdefault(str(row.system), {})["length_correlation"] = _cell(row)
        for row in length_matched(rows, length, settings).itertuples(index=False):
            matched = columns.setdefault(str(row.system), {}).setdefault("matched", {})
            matched |= {"papers": int(row.papers), "left_out": int(row.left_out)}
            matched["length"] = length.removeprefix("num_")
            if row.metric == "hit@1":
                matched |= {"chance": float(row.chance)}
            matched[str(row.metric)] = _cell(row)
    return columns


def _length_audit(scores: pd.DataFrame, settings: Settings) -> Report:
    tokens = scores[_has_tokens(scores)]
    # Bytes are the same under every model: one system's rows say it all.
    one = scores[scores["system"].isin(scores["system"].iloc[:1])].assign(model=NO_MODEL)
    return {
        "baselines_bytes": _records(length_baselines(one, "num_bytes", settings)),
        "baselines_tokens": _records(length_baselines(tokens, "num_tokens", settings)),
        "conditional_logit": _records(conditional_logit(tokens)),
    }


def _energy_audit(scores: pd.DataFrame, settings: Settings) -> Report:
    return {
        "shares": _records(energy_audit(scores, settings)),
        "parts": _records(energy_parts(scores, settings)),
    }


def _agreement(scores: pd.DataFrame, settings: Settings) -> list[Report]:
    shared = scores[~scores["kind"].isin(["trivial"])]
    return [
        {
            "task": one.task,
            "scorer": one.scorer,
            "models": list(one.models),
            "papers": one.papers,
            "all_first": one.all_first,
            "w": cell(one.w),
            "top1": _matrix(one.top1),
            "tau": _matrix(one.tau),
        }
        for one in agreement(shared, settings)
    ]


def _best(rivals: pd.DataFrame, systems: pd.DataFrame, settings: Settings) -> Report | None:
    """The best of all models' scorers and judges, and what is left of it after the choice is paid.

    Diagnostics, which rank without looking at the observed tokens, are not among them.
    """
    diagnostic = systems.loc[systems["diagnostic"], "system"]
    chosen = rivals[(rivals["kind"] != "trivial") & ~rivals["system"].isin(diagnostic)]
    try:
        best = best_of(chosen, TIER_METRIC, settings)
    except ValueError:  # no system, or one DOI
        return None
    return {
        "metric": TIER_METRIC,
        "system": best.system,
        "of": best.cells,
        "papers": best.papers,
        "naive": cell(best.naive),
        "corrected": cell(best.corrected),
        "chosen": best.chosen,
    }


def _control_notes(systems: pd.DataFrame, pmi_absent: Sequence[Mapping[str, str]]) -> list[str]:
    """Which controls are compared with nothing, and why there is no PMI; of runs with controls."""
    is_control = systems["control"] != ""
    if not is_control.any():
        return []
    whole, controls = systems[~is_control], systems[is_control]
    there = set(zip(whole["model"], whole["name"], strict=True))
    alone: dict[str, list[str]] = {}
    for model, task in dict.fromkeys(zip(controls["model"], controls["control_of"], strict=True)):
        if (model, task) not in there:
            alone.setdefault(task, []).append(model)
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in pmi_absent:
        reasons.setdefault((entry["task"], entry["why"]), []).append(entry["model"])
    return [
        *(
            f"The controls of {task} stand beside that task itself, of which there is no run of "
            f"{', '.join(models)}: they are compared with nothing."
            for task, models in alone.items()
        ),
        *(
            f"No PMI of {', '.join(models)} on {task}: {why}."
            for (task, why), models in reasons.items()
        ),
    ]


def _papers(
    runs: Runs, scores: pd.DataFrame, systems: Sequence[Report], text: bool
) -> list[Report]:
    """Every candidate of every paper, its scores and mean ranks in the order of the systems."""
    keys = ["paper_id", "candidate_id"]
    item = [scores["system"], scores["paper_id"]]
    valid = np.isfinite(scores["score"]).groupby(item).transform("all")
    own = scores["score"].where(valid)
    # A judge's points say no more than the ranks.
    judged = scores["kind"].isin(LIST_JUDGES)
    table = scores[[*keys, "system"]].assign(
        ranks=own.groupby(item).rank(method="average"), scores=own.mask(judged)
    )
    ids = [system["id"] for system in systems]
    rows = pd.MultiIndex.from_frame(runs.candidates[keys])
    numbers = {
        part: table.pivot(index=keys, columns="system", values=part)
        .reindex(index=rows, columns=ids)
        .to_numpy(dtype=float)
        .tolist()
        for part in ("scores", "ranks")
    }
    counted = scores[scores["num_tokens"].notna()].drop_duplicates(keys).set_index(keys)
    tokens = counted["num_tokens"].reindex(rows).tolist()
    candidates: dict[str, list[Report]] = {}
    for row, one in enumerate(runs.candidates.itertuples(index=False)):
        candidates.setdefault(one.paper_id, []).append(
            {
                "id": one.candidate_id,
                "bytes": int(one.num_bytes),
                **({"tokens": int(tokens[row])} if math.isfinite(tokens[row]) else {}),
                **({"text": one.text} if text else {}),
                "scores": [_short(value) for value in numbers["scores"][row]],
                "ranks": [_short(value) for value in numbers["ranks"][row]],
            }
        )
    return [
        {
            "paper_id": paper.paper_id,
            "discipline": paper.discipline,
            "doi": paper.doi,
            **({"title": paper.title, "context": paper.context} if text else {}),
            "candidates": candidates[paper.paper_id],
        }
        for paper in runs.papers.itertuples(index=False)
    ]


# --- shapes ----------------------------------------------------------------------------------


def _short(value: float) -> float | None:
    """Six digits: what a reader may want of a single candidate; null where there is no number."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() else short


def _without_absent(entry: Report) -> Report:
    # Whoever reads a system looks for its metrics, of which it may have none.
    return {
        key: value
        for key, value in entry.items()
        if value is not None and (value != {} or key == "metrics")
    }


def _cell(row: Any) -> Report:
    """A row's value and interval, marked where the interval has no width and says nothing."""
    values: dict[str, Any] = row._asdict()
    degenerate = {"degenerate": True} if values.get("degenerate") else {}
    return {**cell(values), **degenerate}


def _cells(table: pd.DataFrame) -> dict[str, Report]:
    cells: dict[str, Report] = {}
    for row in table.itertuples(index=False):
        cells.setdefault(str(row.system), {})[str(row.metric)] = _cell(row)
    return cells


def _discipline_cells(table: pd.DataFrame) -> dict[str, Report]:
    return {
        str(system): _by_discipline(rows) for system, rows in table.groupby("system", sort=False)
    }


def _by_discipline(table: pd.DataFrame) -> Report:
    fields: Report = {}
    for row in table.itertuples(index=False):
        entry = fields.setdefault(str(row.discipline), {"papers": int(row.papers)})
        entry[str(row.metric)] = _cell(row)
    return dict(sorted(fields.items()))


def _records(table: pd.DataFrame) -> list[Report]:
    """Rows of a table as mappings, without the values that could not be computed."""
    return [_plain(row) for row in table.to_dict(orient="records")]


def _plain(row: Mapping[Hashable, Any]) -> Report:
    plain: Report = {}
    for key, value in row.items():
        if hasattr(value, "item"):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            continue
        plain[str(key)] = value
    return plain


def _matrix(table: pd.DataFrame) -> list[list[float | None]]:
    """A square table of numbers; null where there is none."""
    return [[_finite(value) for value in row] for row in table.to_numpy(dtype=float).tolist()]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
