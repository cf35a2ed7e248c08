"""Joins control runs to the runs they belong to: what the context adds to a ranking.

A control asks for the same candidates under a prompt that lacks something. The difference in
Hit@k is what the missing part is worth. Subtracting what a candidate scores without any context
gives its pointwise mutual information with the context, a ranking of its own.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from lm_eval_hyprank.report.intervals import Settings, estimates
from lm_eval_hyprank.report.runs import Runs

SHARED_METRICS = ("hit@1", "hit@5", "mrr", "win_rate")
"""The metrics that controls are compared by."""

PMI = {"pmi": "nll", "dc_pmi": "nll_sum"}
"""Scorers made of two runs, and the scorer that is subtracted.

``pmi`` is the mean NLL of the candidate's tokens given the whole prompt minus that given
``Hypothesis:`` alone: minus the pointwise mutual information with the context, per token.
``dc_pmi`` is the same of the sums: minus the domain-conditional pointwise mutual information of
Holtzman et al. 2021 (arXiv 2104.08315), with ``Hypothesis:`` as the domain's premise. Lower is
better, as for every score.
"""


def context_shares(
    papers: pd.DataFrame, control_papers: pd.DataFrame, systems: pd.DataFrame, settings: Settings
) -> pd.DataFrame:
    """How much of each system's hits needs what a control leaves out of the prompt.

    Args:
        papers: Per-paper values of the systems, from `paper_metrics`.
        control_papers: The same of the controls' systems.
        systems: `Runs.systems`, which says what each control belongs to.
        settings: How intervals are made.

    Returns:
        One row a system, control and metric of `SHARED_METRICS`: ``system``, ``control``,
        ``metric``, ``papers`` (valid in both), ``full``, ``without`` and ``difference`` (full −
        without, paired), each also with ``_low``, ``_high`` and ``_degenerate`` of `estimates`.
    """
    columns = ["system", "control", "metric", "papers"]
    ends = ("", "_low", "_high", "_degenerate")
    columns += [f"{part}{end}" for part in ("full", "without", "difference") for end in ends]
    if control_papers.empty:
        return pd.DataFrame(columns=columns)
    facts = systems.set_index("system")
    own = control_papers["system"].map(facts["control"])
    belongs = control_papers["system"].map(facts["control_of"])
    keys = ["model", "task", "scorer", "paper_id"]
    controls = control_papers.assign(control=own, task=belongs)
    tasks = papers["system"].map(facts["name"])
    both = papers.assign(task=tasks).merge(controls, on=keys, suffixes=("", "_without"))
    wide = {}
    for metric in SHARED_METRICS:
        full, without = both[metric], both[f"{metric}_without"]
        known = full.notna() & without.notna()
        wide[f"{metric}|full"] = full.where(known)
        wide[f"{metric}|without"] = without.where(known)
        wide[f"{metric}|difference"] = full - without
    names = ["system", "control", "paper_id", "doi"]
    table = estimates(
        pd.concat([both[names], pd.DataFrame(wide)], axis=1),
        tuple(wide),
        ("system", "control"),
        settings,
    )
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one in table.itertuples(index=False):
        metric, part = str(one.metric).split("|")
        key = (str(one.system), str(one.control), metric)
        row = rows.setdefault(key, dict(zip(columns, (*key, one.papers), strict=False)))
        row |= {part: one.value, f"{part}_low": one.low, f"{part}_high": one.high}
        row[f"{part}_degenerate"] = one.degenerate
    return pd.DataFrame(list(rows.values()), columns=columns)


def pmi_scores(runs: Runs) -> tuple[pd.DataFrame, list[dict[str, str]]]:
    """Scores of the `PMI` scorers, from each run and its control without context.

    Both must be of the same model by its fingerprint; that they hold the same candidates is
    seen to when they are read.

    Args:
        runs: What was read.

    Returns:
        Rows as `Runs.scores` has them, and for each model and task without them: ``model``,
        ``task`` and ``why``.
    """
    systems = runs.systems
    base = systems[(systems["kind"] == "energy") & (systems["control"] == "")]
    controls = systems[systems["control"] == "no_context"]
    found: list[pd.DataFrame] = []
    absent: list[dict[str, str]] = []
    parts = base["scorer"].isin(PMI.values())
    for (model, task), mine in base[parts].groupby(["model", "task"], sort=False):
        theirs = controls[
            (controls["model"] == model) & (controls["control_of"] == mine["name"].iloc[0])
        ]
        run = runs.runs[mine["run"].iloc[0]]
        matching = [
            int(number)
            for number in dict.fromkeys(theirs["run"])
            if run.fingerprint and runs.runs[number].fingerprint == run.fingerprint
        ]
        if not matching:
            elsewhere = dict.fromkeys(controls.loc[controls["model"] == model, "control_of"])
            if theirs.empty and elsewhere:
                why = (
                    f"the control without context stands beside {', '.join(elsewhere)} itself, so "
                    "run that task too"
                )
            elif theirs.empty:
                why = "there is no run of this model on the control without context"
            else:
                other = runs.runs[theirs["run"].iloc[0]].fingerprint
                why = (
                    "the control was run with other weights or settings (fingerprints "
                    f"{run.fingerprint or 'none'} and {other or 'none'})"
                )
            absent.append({"model": str(model), "task": str(task), "why": why})
            continue
        theirs = theirs[theirs["run"].isin(matching)]
        made = []
        for scorer, part in PMI.items():
            given = mine.loc[mine["scorer"] == part, "system"]
            without = theirs.loc[theirs["scorer"] == part, "system"]
            if not (given.empty or without.empty):
                made.append(_difference(runs, scorer, given.iloc[0], without.iloc[-1]))
        if not made:
            why = f"its control without context has no row {' or '.join(mine['scorer'])}"
            absent.append({"model": str(model), "task": str(task), "why": why})
        found += made
    return (pd.concat(found, ignore_index=True) if found else runs.scores.iloc[:0]), absent


def _difference(runs: Runs, scorer: str, given: str, without: str) -> pd.DataFrame:
    """The scores of one system minus those of another, candidate by candidate."""
    keys = ["paper_id", "candidate_id"]
    table = runs.scores[runs.scores["system"] == given]
    other = runs.control_scores[runs.control_scores["system"] == without]
    subtracted = table[keys].merge(other[[*keys, "score"]], on=keys, how="left")["score"]
    model, task, _ = given.split("|")
    return table.assign(
        system=f"{model}|{task}|{scorer}",
        scorer=scorer,
        score=table["score"].to_numpy() - subtracted.to_numpy(),
    )
