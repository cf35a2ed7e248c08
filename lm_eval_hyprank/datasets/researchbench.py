"""ResearchBench as documents for lm-eval: one paper, its prompt and its 16 candidates in a row.

The data comes from a local folder or from the gated hub data set. It is checked as a whole before
a document is made (`lm_eval_hyprank.datasets.validation`), so bad data stops a run at its start.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets

from lm_eval_hyprank.datasets import hub
from lm_eval_hyprank.datasets.documents import FEATURES, digest, flag, shuffled
from lm_eval_hyprank.datasets.findings import DatasetError, findings_error
from lm_eval_hyprank.datasets.validation import (
    PAPERS_FILE,
    RANKING_FILE,
    Paper,
    check_folder,
    layout_findings,
)

_logger = logging.getLogger(__name__)

REPOSITORY = "ankilok/ResearchBench"

_LOCAL_COPY = (
    """Or use a copy on this machine: --metadata '{"dataset_path": "DIR"}' for lm_eval, """
    f"`hyprank validate DIR` to check it; DIR holds {RANKING_FILE} and {PAPERS_FILE}."
)

# Prompt layout -> what stands between a label and its value, and before the candidate.
LAYOUTS = {"inline": " ", "block": "\n"}

# Label in the prompt -> field of `Paper`.
_PARTS = {"Background": "survey", "Research Question": "question"}

# Control -> the labels that its prompt keeps.
CONTROLS = {
    "no_context": (),
    "question_only": ("Research Question",),
    "background_only": ("Background",),
    "shuffled_context": tuple(_PARTS),
}


def load(
    dataset_path: str | os.PathLike[str] | None = None,
    dataset_revision: str | None = None,
    discipline: str | None = None,
    layout: str = "inline",
    skip_invalid: bool | str = False,
    control: str | None = None,
    other_disciplines: bool = False,
) -> datasets.DatasetDict:
    """Loads the papers as documents.

    Args:
        dataset_path: A local folder in the data set's layout; None takes the hub's copy.
        dataset_revision: The hub's branch, tag or commit; not looked at with `dataset_path`.
        discipline: Takes the papers of this discipline only.
        layout: The prompt's layout, "inline" or "block".
        skip_invalid: Leaves out the papers with findings instead of refusing the data.
        control: Replaces the context: "no_context" leaves nothing but "Hypothesis:",
            "question_only" and "background_only" leave one of the two parts, "shuffled_context"
            takes both from another paper (see `other_paper`). All else, the order of the
            candidates included, is as without it.
        other_disciplines: Lets "shuffled_context" take a paper of any discipline.

    Returns:
        The split "test" with the columns of `FEATURES`: `context` is the whole prompt up to and
        including "Hypothesis:", `separator` stands between it and each of the 16 `candidates`,
        `candidate_ids` names these, and `gold` is the index of the paper's own hypothesis.

    Raises:
        DatasetError: The data is missing or faulty, an argument is none of the possible ones, or
            some paper has no other one to take its context from.
    """
    if layout not in LAYOUTS:
        raise DatasetError(f"layout is {layout!r}; use one of: {', '.join(LAYOUTS)}")
    if control is not None and control not in CONTROLS:
        raise DatasetError(f"control is {control!r}; use one of: {', '.join(CONTROLS)}")
    skip = flag(skip_invalid)
    usable = _usable_papers(locate(dataset_path, dataset_revision), skip)
    papers = _of_discipline(usable, discipline)
    if control == "shuffled_context":
        sources = _shuffled_contexts(papers, usable, other_disciplines)
    else:
        sources = list(papers)
    documents = [
        document(paper, layout, prompt(source, layout, control))
        for paper, source in zip(papers, sources, strict=True)
    ]
    split = datasets.Dataset.from_list(documents, features=FEATURES)
    return datasets.DatasetDict({"test": split})


def load_papers(
    dataset_path: str | os.PathLike[str] | None = None,
    dataset_revision: str | None = None,
    discipline: str | None = None,
    skip_invalid: bool | str = False,
) -> tuple[Paper, ...]:
    """Loads the papers themselves; arguments and errors are as of `load`."""
    folder = locate(dataset_path, dataset_revision)
    return _of_discipline(_usable_papers(folder, flag(skip_invalid)), discipline)


def _of_discipline(papers: tuple[Paper, ...], discipline: str | None) -> tuple[Paper, ...]:
    chosen = tuple(paper for paper in papers if discipline in (None, paper.discipline))
    if not chosen:
        present = sorted({paper.discipline for paper in papers})
        tasks = ",".join(
            f"researchbench_energy_{name.lower().replace(' ', '_')}" for name in present
        )
        raise DatasetError(
            f"There is no paper of discipline {discipline!r}; present: {', '.join(present)}. Run "
            f"--tasks {tasks}, or researchbench_energy, whose report has a table by discipline"
        )
    return chosen


def locate(
    dataset_path: str | os.PathLike[str] | None, dataset_revision: str | None = None
) -> Path:
    """Returns the absolute path of the folder that holds the data.

    Args:
        dataset_path: A local folder, taken as it is; None fetches from the hub or its cache.
        dataset_revision: The hub's branch, tag or commit (its main branch by default).

    Raises:
        DatasetError: There is no such folder or it lacks a file; or the hub does not give the
            data and no copy is cached. The message says what to do.
    """
    if dataset_path is None:
        files = (RANKING_FILE, PAPERS_FILE)
        return hub.snapshot(REPOSITORY, files, dataset_revision, _LOCAL_COPY)
    if not isinstance(dataset_path, str | os.PathLike) or not str(dataset_path).strip():
        raise DatasetError(
            f"dataset_path is {dataset_path!r}, not the path of a folder; give it as JSON: "
            """--metadata '{"dataset_path": "DIR"}'"""
        )
    folder = Path(dataset_path).expanduser().resolve()
    if findings := layout_findings(folder):
        raise findings_error(folder, findings)
    return folder


def prompt(paper: Paper, layout: str, control: str | None = None) -> str:
    """Returns what stands before a candidate, up to and including "Hypothesis:"."""
    gap = LAYOUTS[layout]
    labels = _PARTS if control is None else CONTROLS[control]
    # No template engine: the texts hold braces of their own.
    lines = [f"{label}:{gap}{getattr(paper, _PARTS[label])}\n" for label in labels]
    return "".join(lines) + "Hypothesis:"


def other_paper(paper: Paper, papers: Iterable[Paper]) -> Paper | None:
    """Returns the paper whose context stands in for the paper's own.

    Every other one is as likely to be taken, by a hash of the two sample_ids: the choice is the
    same in every process and survives the removal of a paper that was not taken. One paper may
    stand in for several.

    Args:
        paper: Whose candidates are scored.
        papers: What may be taken, save papers that share the sample_id, DOI (letter case aside),
            background or question; nor is one taken whose gold is a candidate of the paper, for
            its context speaks for that candidate.

    Returns:
        The paper, or None where there is none to take.
    """
    others = (
        other
        for other in papers
        if other.sample_id != paper.sample_id
        and not (paper.doi and other.doi.lower() == paper.doi.lower())
        and other.survey != paper.survey
        and other.question != paper.question
        and other.gold not in (paper.gold, *paper.fakes, *paper.models)
    )
    return min(others, key=lambda other: digest(paper.sample_id, other.sample_id), default=None)


def document(paper: Paper, layout: str, context: str) -> dict[str, Any]:
    """Returns the paper as a document with the columns of `FEATURES`.

    Args:
        paper: The paper.
        layout: The prompt's layout.
        context: The prompt, of this paper or another one.
    """
    labels, texts = zip(*labelled_candidates(paper).items(), strict=True)
    order = shuffled(paper.sample_id, len(texts))
    return {
        "paper_id": paper.sample_id,
        "discipline": paper.discipline,
        "doi": paper.doi,
        "title": paper.title,
        "context": context,
        "separator": LAYOUTS[layout],
        "candidates": [texts[index] for index in order],
        "candidate_ids": [labels[index] for index in order],
        "gold": order.index(0),
    }


def labelled_candidates(paper: Paper) -> dict[str, str]:
    """Returns the 16 candidates by their labels: "gold", "fake_1", ..., "model_1", ..."""
    return {
        "gold": paper.gold,
        **{f"fake_{number}": text for number, text in enumerate(paper.fakes, start=1)},
        **{f"model_{number}": text for number, text in enumerate(paper.models, start=1)},
    }


def _shuffled_contexts(
    papers: Sequence[Paper], usable: Sequence[Paper], other_disciplines: bool
) -> list[Paper]:
    """Returns for each paper the one whose context it gets.

    Raises:
        DatasetError: There is none for some paper.
    """
    sources = []
    alone = []
    for paper in papers:
        pool = (p for p in usable if other_disciplines or p.discipline == paper.discipline)
        source = other_paper(paper, pool)
        if source is None:
            alone.append(paper)
        else:
            sources.append(source)
    if alone:
        named = "; ".join(f"{paper.sample_id} ({paper.discipline})" for paper in alone[:5])
        raise DatasetError(
            f"shuffled_context: {len(alone)} of {len(papers)} paper(s) have no other paper of "
            "their discipline, with another DOI, background and question and a gold that is not "
            f"among their candidates, to take a context from: {named}"
            f"{'; ...' if len(alone) > 5 else ''}. Use data with more papers of these disciplines, "
            "or leave this control out."
        )
    return sources


@lru_cache(maxsize=8)
def _usable_papers(folder: Path, skip_invalid: bool) -> tuple[Paper, ...]:
    """Returns the papers of a checked folder; read once for all tasks of a process.

    Raises:
        DatasetError: There are findings and they may not be skipped, or no paper is left. (An
            error is not remembered: data that was repaired is read anew.)
    """
    papers, findings = check_folder(folder)
    if findings and not (skip_invalid and papers):
        raise findings_error(folder, findings)
    if findings:
        named = sorted({finding.sample_id for finding in findings if finding.sample_id})
        unnamed = Counter((f.file, f.row) for f in findings if not f.sample_id)
        _logger.warning(
            "skip_invalid: %d paper(s) of %s left out (%s), and %d row(s) without a readable "
            "sample_id; %d papers are used",
            len(named),
            folder,
            ", ".join(named) or "none",
            len(unnamed),
            len(papers),
        )
    return tuple(papers)
