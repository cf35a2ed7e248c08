"""Finds scorers that two tasks share, so that a report shows each once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from lm_eval_hyprank.report.found import SCORERS, Found
from lm_eval_hyprank.report.samples import Loaded

NO_MODEL_SCORES = ("num_bytes", "chance")
"""What scorers that look at no model read."""


def reads_of(found: Found) -> dict[str, str]:
    """Which attribute of a continuation's score each scorer of a task reads; ``chance`` none."""
    return {
        name: str(step.get("score", "chance"))
        for name, step in found.filter_steps()
        if step.get("function") in SCORERS or (name, step.get("function")) == ("chance", "custom")
    }


def homes_of(loaded: Sequence[Loaded]) -> dict[tuple[str, str], str]:
    """Finds scorers that two energy tasks share, so that each is one system.

    Two tasks that differ in their filters alone, such as ``researchbench_energy`` and
    ``researchbench_energy_scores``, have the same numbers under the same names. The one gives way
    where every model that ran it ran the other too, with the same numbers, so that a scorer of
    several models stays under one task.

    Returns:
        From a task that gives way and the scorer to the task under which the scorer stands.
    """
    measured: dict[str, dict[str, dict[str, Mapping[str, Mapping[str, float]]]]] = {}
    in_several_ways = set()
    for run in loaded:
        found = run.found
        if found.kind != "energy" or found.control:
            continue
        reads = reads_of(found)
        for scorer, scores in run.scores.items():
            if reads.get(scorer) in NO_MODEL_SCORES:
                continue
            models = measured.setdefault(scorer, {}).setdefault(found.task, {})
            if found.model in models:
                in_several_ways.add(found.task)
            models[found.model] = scores
    homes: dict[tuple[str, str], str] = {}
    for scorer, tasks in measured.items():
        kept: list[str] = []
        for task in sorted(tasks.keys() - in_several_ways, key=lambda t: (-len(tasks[t]), t)):
            for home in kept:
                if tasks[task].keys() <= tasks[home].keys() and all(
                    _alike(scores, tasks[home][model]) for model, scores in tasks[task].items()
                ):
                    homes[task, scorer] = home
                    break
            else:
                kept.append(task)
    return homes


def homes_notes(homes: Mapping[tuple[str, str], str]) -> list[str]:
    """A sentence for each two tasks that share scorers."""
    shared: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (task, scorer), home in homes.items():
        shared[task, home].append(scorer)
    return [
        f"{', '.join(scorers)}: the numbers of {task} are those of {home} and stand once."
        for (task, home), scorers in shared.items()
    ]


def _alike(
    one: Mapping[str, Mapping[str, float]], other: Mapping[str, Mapping[str, float]]
) -> bool:
    """Whether all scores are the same but for rounding; what is not finite is so in both."""
    return all(
        math.isclose(score, other[paper][candidate], rel_tol=1e-6)
        or not (math.isfinite(score) or math.isfinite(other[paper][candidate]))
        for paper, scores in one.items()
        for candidate, score in scores.items()
    )


def controls_homes(
    loaded: Sequence[Loaded], homes: Mapping[tuple[str, str], str]
) -> dict[tuple[int, str], str]:
    """The task that each control's scorer is a control of, once; the others have no entry.

    A scorer that stands under another task takes its controls there, unless that task has
    controls of its own.
    """
    own: list[tuple[int, str]] = []
    moved: list[tuple[int, str]] = []
    for place, run in enumerate(loaded):
        if run.found.control:
            for scorer in run.scores:
                away = (run.found.control_of, scorer) in homes
                (moved if away else own).append((place, scorer))
    kept: dict[tuple[int, str], str] = {}
    seen = set()
    for places in (own, moved):
        for place, scorer in places:
            found = loaded[place].found
            home = homes.get((found.control_of, scorer), found.control_of)
            key = (found.model, found.control, home, scorer)
            if key not in seen:
                kept[place, scorer] = home
            seen.add(key)
    return kept
