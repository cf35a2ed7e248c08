"""Reads lm-eval's output folders: `results_*.json` and `samples_*.jsonl` to data frames.

Nothing is scored again. Every metric is recomputed from the samples with the package's own
ranking rule and must equal what lm-eval wrote; runs that do not answer the same question (other
papers, other candidates, another prompt) are refused, never averaged.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lm_eval_hyprank.datasets.researchbench import REPOSITORY
from lm_eval_hyprank.report.found import (
    JUDGES,
    NAME_ARGS,
    Found,
    ReportError,
    found_runs,
    label,
    last_part,
    newest,
)
from lm_eval_hyprank.report.samples import Loaded, NoSingleGold, load
from lm_eval_hyprank.report.sharing import (
    NO_MODEL_SCORES,
    controls_homes,
    homes_notes,
    homes_of,
    reads_of,
)

NO_MODEL = "no model"
"""The model name of a scorer that looks at no model, such as fewest bytes first."""

_DIAGNOSTIC_SCORES = ("logz", "logz_sum")

PARADIGMS = {
    "nll": "NLL",
    "raw": "Raw",
    "logz": "Log-partition",
    "nll_sum": "NLL sum",
    "raw_sum": "Raw sum",
    "shortest": "Shortest first",
    "chance": "Chance",
    "pmi": "PMI per token",
    "dc_pmi": "DC-PMI",
}
_KIND_PARADIGMS = {
    "judge": "Judge",
    "judge_psc": "Judge, several orders",
    "pairwise": "Judge, pairwise",
    "embedding": "Embedding",
}


@dataclass(frozen=True)
class Run:
    """One model on one task (or on a group of tasks that share out the papers).

    Attributes:
        model: Short name of the model, unique among the runs read.
        task: Name of the task, with the options with which it was asked or in which its runs
            differ.
        name: Name of the task in lm-eval.
        kind: One of `KINDS`.
        control: What a control leaves out of the prompt; empty for a task that is none.
        version: The task's version.
        date: When the run began, seconds since 1970.
        fingerprint: What decides the model's scores, as the run recorded it; None if it did not.
        source: lm-eval's name for the kind of model, such as ``hf``.
        pretrained: The model as lm-eval was given it; of a folder its name alone, which is all
            that means anything elsewhere.
        details: What else the run says of the model, the software and how it asked: ``options``
            and ``generation`` are there only if the task was asked otherwise than it is by itself.
        papers: Number of papers in the run.
        total: Number of papers in the task; more than ``papers`` in a run with ``--limit``.
        truncated: Papers whose context was cut to fit the model.
    """

    model: str
    task: str
    name: str
    kind: str
    control: str
    version: str
    date: float
    fingerprint: str | None
    source: str
    pretrained: str
    details: dict[str, str]
    papers: int
    total: int
    truncated: tuple[str, ...]


@dataclass(frozen=True)
class Runs:
    """Everything that was read, in tables with a fixed order of rows.

    Attributes:
        systems: One row a system (a model, a task and a scorer): ``system`` (its id), ``model``,
            ``task``, ``scorer``, ``kind``, ``paradigm`` (name for display), ``control`` and
            ``control_of`` (empty for a system that is no control), ``diagnostic`` (whether it
            never looks at the observed tokens, as the log-partition), ``name`` (of the task in
            lm-eval), ``run`` (place in ``runs``).
        scores: One row a system, paper and candidate, controls and pairwise judges left out:
            ``system``, ``model``, ``task``, ``scorer``, ``kind``, ``paper_id``, ``discipline``,
            ``doi``, ``candidate_id``, ``is_gold``, ``score`` (lower is better; not finite where
            the run has none, which makes the paper invalid), ``num_tokens`` (NaN if unknown),
            ``num_bytes``. A listwise judge's score is minus the candidate's Borda points, which
            are 0 for all it did not rank.
        control_scores: The same of the controls, and ``control``.
        papers: One row a paper: ``paper_id``, ``discipline``, ``doi``, ``title``, ``context``.
        candidates: One row a candidate: ``paper_id``, ``candidate_id``, ``is_gold``, ``text``,
            ``num_bytes``.
        pairwise: One row a system and paper of pairwise judges: ``system``, ``model``,
            ``task``, ``scorer``, ``kind``, ``paper_id``, ``discipline``, ``doi``, ``valid``
            (whether the gold has a rank) and the metrics of `pairwise_results`.
        replies: One row a reply of a listwise judge: ``system``, ``paper_id``, ``invalid``
            (why it cannot be read; empty if it can), ``candidates`` (how many it was shown),
            ``chosen`` and ``gold_shown`` (the places, from 1, at which its first choice and the
            gold were shown), ``gold_rank`` (from 1 to 5; NaN for a gold it did not name).
        runs: The runs.
        files: Under ``read``, ``superseded`` and ``left_out``: files, and why they are not read.
        notes: What a reader should know, in sentences.
    """

    systems: pd.DataFrame
    scores: pd.DataFrame
    control_scores: pd.DataFrame
    papers: pd.DataFrame
    candidates: pd.DataFrame
    pairwise: pd.DataFrame
    replies: pd.DataFrame
    runs: tuple[Run, ...]
    files: dict[str, list[dict[str, str]]]
    notes: list[str]


def read_runs(folders: Sequence[Path], tasks: Collection[str] = ()) -> Runs:
    """Reads every run below the folders.

    Of several runs of one model on one task the newest is taken, a run of all papers before one
    with ``--limit``.

    Args:
        folders: Folders that lm-eval wrote to; searched at any depth.
        tasks: Only these tasks and their controls; all of them if empty.

    Raises:
        ReportError: A file is damaged or does not agree with lm-eval's own numbers, there are no
            samples, or the runs do not belong in one report.
    """
    files: dict[str, list[dict[str, str]]] = {"read": [], "superseded": [], "left_out": []}
    chosen = newest(list(found_runs(folders, tasks, files)), files)
    label(chosen)
    loaded = []
    for run in chosen:
        try:
            loaded.append(load(run))
        except NoSingleGold as error:
            files["left_out"].append({"file": run.names()[0], "why": f"{run.task}: {error}"})
        else:
            _refuse_other_data(loaded[-1])
    if not loaded:
        why = "".join(f"\n  {entry['file']}: {entry['why']}" for entry in files["left_out"])
        raise ReportError(
            f"no run of a hypothesis-ranking task below {', '.join(map(str, folders))}; give the "
            f"folder that lm_eval was given as --output_path{why}"
        )
    _refuse_mixtures(loaded)
    read = dict.fromkeys(name for entry in loaded for name in entry.found.names())
    files["read"] = [{"file": name} for name in read]
    return _tables(loaded, files)


# --- comparing -------------------------------------------------------------------------------


def _refuse_other_data(loaded: Loaded) -> None:
    """Stops where a run would be taken in place of one on other papers.

    Equal hashes are equal papers. Others may be too, from another number of processes, say, or with
    a scorer more: the papers themselves are compared.
    """
    found = loaded.found
    for older in found.replaces:
        alike = older.hashes == found.hashes and None not in older.hashes
        if alike or older.version != found.version:
            continue
        older.model, older.task_label = found.model, found.task_label
        try:
            replaced = load(older)
        except ReportError:
            continue  # what is broken does no harm where a newer run takes its place
        _same_papers(loaded, replaced)
        _same_contexts(loaded, replaced)


def _refuse_mixtures(loaded: Sequence[Loaded]) -> None:
    """Stops where two runs do not answer the same question.

    Candidates are compared by their ids, so the order in which a run holds them, which differs
    between a judge's orders by design, is no difference.
    """
    base = [run for run in loaded if not run.found.control] or list(loaded)
    first = base[0]
    for run in loaded:
        if run is first:
            continue
        _same_papers(first, run)
    prompts = [run for run in loaded if run.found.kind in ("energy", "embedding")]
    by_prompt: dict[tuple[str, str, str], Loaded] = {}
    for run in prompts:
        other = by_prompt.setdefault((run.found.kind, run.found.control, run.found.task_label), run)
        _same_contexts(other, run)
    # Tasks of one kind that are no controls ask with one prompt, whatever their names.
    plain = [run for run in prompts if not run.found.control and run.found.kind == "energy"]
    for run in plain[1:]:
        _same_contexts(plain[0], run)
    for run in loaded:
        for other in loaded:
            belongs = run.found.control and run.found.control_of == other.found.task
            if belongs and run.found.model == other.found.model:
                _same_question(other, run)
    versions: dict[str, Loaded] = {}
    for run in loaded:
        other = versions.setdefault(run.found.task, run)
        if other.found.version != run.found.version:
            raise _mixture(
                other,
                run,
                f"the task {run.found.task} is of version {other.found.version} in the one and "
                f"{run.found.version} in the other",
            )


def _mixture(one: Loaded, other: Loaded, difference: str, behind: bool = True) -> ReportError:
    """The error; `behind` says whether a new run of one of the two can make up the difference."""
    remedy = "put the runs in two folders and run `hyprank report` on either"
    if one.found.task != other.found.task:
        remedy += ", or name the task with --task"
    if behind and one.found.identity() != other.found.identity():
        remedy += "; or run the model that is behind again"
    return ReportError(
        f"these runs do not belong in one report: {difference}.\n"
        f"  one:   {one.where()}\n  other: {other.where()}\n"
        f"Make a report of each: {remedy}"
    )


def _same_papers(one: Loaded, other: Loaded) -> None:
    only_one = [paper for paper in one.papers if paper not in other.papers]
    only_other = [paper for paper in other.papers if paper not in one.papers]
    if only_one or only_other:
        counts = f"they cover {len(one.papers)} and {len(other.papers)} papers"
        examples = ", ".join([*only_one[:2], *only_other[:2]])
        raise _mixture(
            one,
            other,
            f"{counts}, of which {len(only_one)} and {len(only_other)} are not in the other "
            f"({examples}{', …' if len(only_one) + len(only_other) > 4 else ''})",
            behind=one.found.task == other.found.task and not (only_one and only_other),
        )
    for paper_id, paper in one.papers.items():
        theirs = other.papers[paper_id]
        if paper.texts.keys() != theirs.texts.keys():
            raise _mixture(one, other, f"paper {paper_id} has candidates of other names")
        for candidate, text in paper.texts.items():
            if text != theirs.texts[candidate]:
                raise _mixture(
                    one, other, f"candidate {candidate} of paper {paper_id} has another text"
                )
        if paper.gold != theirs.gold:
            raise _mixture(one, other, f"paper {paper_id} has another gold")
        for name in ("discipline", "doi"):
            if getattr(paper, name) != getattr(theirs, name):
                raise _mixture(
                    one,
                    other,
                    f"the {name} of paper {paper_id} is {getattr(paper, name)!r} and "
                    f"{getattr(theirs, name)!r}",
                )


def _same_contexts(one: Loaded, other: Loaded) -> None:
    for paper_id, paper in one.papers.items():
        context, separator = other.papers[paper_id].context, other.papers[paper_id].separator
        if paper.context != context:
            at = next(
                (i for i, (a, b) in enumerate(zip(paper.context, context, strict=False)) if a != b),
                min(len(paper.context), len(context)),
            )
            raise _mixture(
                one,
                other,
                f"the prompt of paper {paper_id} differs from character {at} on "
                f"({paper.context[at : at + 24]!r} and {context[at : at + 24]!r}); see the option "
                "layout",
            )
        if paper.separator != separator:
            raise _mixture(
                one,
                other,
                f"between prompt and candidates of paper {paper_id} stands {paper.separator!r} and "
                f"{separator!r}; see the option separator",
            )


def _same_question(one: Loaded, other: Loaded) -> None:
    """Whether a control is put to the same model as its task is, but for what it leaves out."""
    asked = [
        {"layout": "inline"} | run.found.asked_options() | run.found.model_options()
        for run in (one, other)
    ]
    prints = [run.found.fingerprint for run in (one, other)]
    if None not in prints:
        for options, fingerprint in zip(asked, prints, strict=True):
            options["the model's fingerprint"] = str(fingerprint)
    for option in (
        *("layout", "num_fewshot", "chat_template", "system_instruction"),
        "the model's fingerprint",
    ):
        values = [options.get(option, "none") for options in asked]
        if values[0] != values[1]:
            raise ReportError(
                f"{other.found.task} is a control of {one.found.task}, and {option} is {values[0]} "
                f"in the task and {values[1]} in the control.\n"
                f"  task:    {one.where()}\n  control: {other.where()}\n"
                "Run the control again as the task was run, or put it in another folder"
            )


# --- tables ----------------------------------------------------------------------------------


def _tables(loaded: Sequence[Loaded], files: dict[str, list[dict[str, str]]]) -> Runs:
    systems: list[dict[str, Any]] = []
    base: list[pd.DataFrame] = []
    controls: list[pd.DataFrame] = []
    pairwise: list[dict[str, Any]] = []
    replies: list[dict[str, Any]] = []
    trivial: dict[str, dict[str, Any]] = {}
    trivial_scores: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    homes = homes_of(loaded)
    control_of = controls_homes(loaded, homes)
    papers, candidates = _paper_tables(loaded)
    frame = candidates.merge(
        papers[["paper_id", "discipline", "doi"]], on="paper_id", how="left", sort=False
    )
    for place, run in enumerate(loaded):
        found = run.found
        reads = reads_of(found)
        for scorer in run.scores or run.pairwise:
            if found.control and (place, scorer) not in control_of:
                continue
            if not found.control and (found.task, scorer) in homes:
                continue
            system = {
                "system": f"{found.model}|{found.task_label}|{scorer}",
                "model": found.model,
                "task": found.task_label,
                "scorer": scorer,
                "kind": found.kind,
                "paradigm": _KIND_PARADIGMS.get(found.kind) or PARADIGMS.get(scorer, scorer),
                "control": found.control,
                "control_of": control_of.get((place, scorer), ""),
                "diagnostic": reads.get(scorer) in _DIAGNOSTIC_SCORES,
                "name": found.task,
                "run": place,
            }
            if reads.get(scorer) in NO_MODEL_SCORES:
                if not found.control:
                    _merge_trivial(system, run, trivial, trivial_scores)
                continue
            systems.append(system)
            if found.kind == "pairwise":
                pairwise.extend(_pairwise_rows(system, run, run.pairwise[scorer]))
                continue
            if found.kind in JUDGES:
                replies.extend(_replies(str(system["system"]), run, run.judge[scorer]))
            table = _system_frame(system, frame, run, run.scores[scorer])
            (controls if found.control else base).append(table)
    for scorer, system in trivial.items():
        systems.append(system)
        base.append(_system_frame(system, frame, None, trivial_scores[scorer]))
    runs = tuple(_run(run) for run in loaded)
    return Runs(
        systems=pd.DataFrame(systems),
        scores=_joined(base),
        control_scores=_joined(controls),
        papers=papers,
        candidates=candidates,
        pairwise=pd.DataFrame(pairwise),
        replies=pd.DataFrame(replies, columns=_REPLY_COLUMNS),
        runs=runs,
        files=files,
        notes=_notes(loaded) + homes_notes(homes),
    )


_SCORE_COLUMNS = [
    *("system", "model", "task", "scorer", "kind", "paper_id", "discipline", "doi"),
    *("candidate_id", "is_gold", "score", "num_tokens", "num_bytes", "control"),
]


def _joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    if not tables:
        types = {"is_gold": bool, "score": float, "num_tokens": float, "num_bytes": int}
        return pd.DataFrame(columns=_SCORE_COLUMNS).astype(types)
    return pd.concat(tables, ignore_index=True)


def _paper_tables(loaded: Sequence[Loaded]) -> tuple[pd.DataFrame, pd.DataFrame]:
    first = next((run for run in loaded if not run.found.control), loaded[0])
    prompts = [
        run for run in loaded if run.found.kind in ("energy", "embedding") and not run.found.control
    ]
    papers, candidates = [], []
    for paper_id, paper in first.papers.items():
        papers.append(
            {
                "paper_id": paper_id,
                "discipline": paper.discipline,
                "doi": paper.doi,
                "title": paper.title,
                "context": prompts[0].papers[paper_id].context if prompts else "",
            }
        )
        for candidate, text in paper.texts.items():
            candidates.append(
                {
                    "paper_id": paper_id,
                    "candidate_id": candidate,
                    "is_gold": candidate == paper.gold,
                    "text": text,
                    "num_bytes": len(text.strip().encode("utf-8")),
                }
            )
    return pd.DataFrame(papers), pd.DataFrame(candidates)


def _merge_trivial(
    system: dict[str, Any],
    run: Loaded,
    trivial: dict[str, dict[str, Any]],
    scores: dict[str, dict[str, dict[str, float]]],
) -> None:
    """Keeps a scorer that looks at no model once, as it is the same under every model.

    A paper counts as invalid there only if it is so in every run.
    """
    scorer = str(system["scorer"])
    identifier = f"{NO_MODEL}|{system['task']}|{scorer}"
    changes = {"system": identifier, "model": NO_MODEL, "kind": "trivial"}
    trivial.setdefault(scorer, system | changes)
    for paper_id, own in run.scores[scorer].items():
        kept = scores[scorer].get(paper_id)
        if kept is None or not all(map(math.isfinite, kept.values())):
            scores[scorer][paper_id] = own


def _system_frame(
    system: Mapping[str, Any],
    frame: pd.DataFrame,
    run: Loaded | None,
    scores: Mapping[str, Mapping[str, float]],
) -> pd.DataFrame:
    """The scores of one system, in the order of papers and candidates that all systems have."""
    keys = list(zip(frame["paper_id"], frame["candidate_id"], strict=True))
    own = {name: system[name] for name in ("system", "model", "task", "scorer", "kind", "control")}
    table = frame.assign(
        **own,
        score=[scores[paper][candidate] for paper, candidate in keys],
        num_tokens=[
            run.papers[paper].tokens.get(candidate, math.nan) if run else math.nan
            for paper, candidate in keys
        ],
    )
    return table[_SCORE_COLUMNS]


def _pairwise_rows(
    system: Mapping[str, Any], run: Loaded, papers: Mapping[str, Mapping[str, float]]
) -> Iterator[dict[str, Any]]:
    own = {name: system[name] for name in ("system", "model", "task", "scorer", "kind")}
    for paper_id, metrics in papers.items():
        paper = run.papers[paper_id]
        facts = {"paper_id": paper_id, "discipline": paper.discipline, "doi": paper.doi}
        yield {**own, **facts, "valid": "win_rate" in metrics, **metrics}


_REPLY_COLUMNS = [
    *("system", "paper_id", "invalid", "candidates", "chosen", "gold_shown", "gold_rank"),
]


def _replies(
    system: str, run: Loaded, replies: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """One row a reply; a judge asked in several orders has several of a paper."""
    for paper_id, reply in replies.items():
        paper = run.papers[paper_id]
        for one in reply.get("orders", [reply]):
            shown = one.get("candidate_ids") or list(paper.texts)
            ranking = one.get("ranking") or []
            yield {
                "system": system,
                "paper_id": paper_id,
                "invalid": one.get("invalid") or "",
                "candidates": len(shown),
                "chosen": shown.index(ranking[0]) + 1 if ranking else math.nan,
                "gold_shown": shown.index(paper.gold) + 1,
                "gold_rank": ranking.index(paper.gold) + 1 if paper.gold in ranking else math.nan,
            }


def _run(loaded: Loaded) -> Run:
    found = loaded.found
    arguments = found.model_args()
    config = found.run_config
    results = found.results
    details = {
        "num_parameters": config.get("model_num_parameters"),
        "dtype": config.get("model_dtype"),
        "revision": config.get("model_revision"),
        "sha": config.get("model_sha"),
        "lm_eval_version": results.get("lm_eval_version"),
        "transformers_version": results.get("transformers_version"),
        "plugin_version": (results.get("hyprank") or {}).get("version"),
        "dataset": REPOSITORY if _on_hub(found) else None,
        "dataset_revision": found.metadata.get("dataset_revision"),
        "options": _listed(found.asked_options()),
        "generation": _listed(found.generation_options()),
        **{
            name: found.model_options().get(name)
            for name in ("chat_template", "system_instruction")
        },
    }
    papers, total = found.papers
    return Run(
        model=found.model,
        task=found.task_label,
        name=found.task,
        kind=found.kind,
        control=found.control,
        version=found.version,
        date=found.date,
        fingerprint=found.fingerprint,
        source=str(config.get("model") or ""),
        pretrained=_hub_name(next((arguments[k] for k in NAME_ARGS if arguments.get(k)), "")),
        details={key: str(value) for key, value in details.items() if value},
        papers=papers,
        total=total,
        truncated=tuple(loaded.truncated),
    )


def _on_hub(found: Found) -> bool:
    """Whether the run's data were the hub's own copy."""
    return found.task.startswith("researchbench_") and not found.metadata.get("dataset_path")


def _listed(options: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _hub_name(given: str) -> str:
    """A name ``owner/model`` as it is, of a path its last part."""
    return given if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", given) else last_part(given)


def _notes(loaded: Sequence[Loaded]) -> list[str]:
    notes = _prompt_notes([run.found for run in loaded if not run.found.control])
    unit = "paper" if any(p.doi.strip() for p in loaded[0].papers.values()) else "item"
    for run in loaded:
        name = f"{run.found.model} on {run.found.task_label}"
        papers, total = run.found.papers
        if papers < total:
            notes.append(
                f"{name} covers {papers} of the task's {total} {unit}s (--limit or --samples)."
            )
        if run.truncated:
            notes.append(
                f"{name}: the context of {_counted(run.truncated, unit)} was cut to fit the model."
            )
        for scorer, by_paper in run.scores.items():
            invalid = [
                p for p, own in by_paper.items() if not all(map(math.isfinite, own.values()))
            ]
            if invalid:
                word = "reply that can be read" if scorer in run.judge else "finite score"
                notes.append(f"{name}, {scorer}: no {word} for {_counted(invalid, unit)}.")
    return notes


def _prompt_notes(runs: Sequence[Found]) -> list[str]:
    """Says of a task's models if some were asked under a chat template or instruction alone."""
    asked: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        options = run.model_options()
        if run.kind == "energy":  # chat APIs have templates of their own, of which nothing is known
            known = "a chat template" if "chat_template" in options else "no chat template"
            asked[run.task_label, "template"][known].append(run.model)
        known = options.get("system_instruction", "none")
        asked[run.task_label, "instruction"][f"system instruction {known}"].append(run.model)
    notes = []
    for (task, _), groups in asked.items():
        if len(groups) > 1:
            parts = [f"{how} ({', '.join(models)})" for how, models in groups.items()]
            notes.append(f"{task} was run with {' and with '.join(parts)}.")
    return notes


def _counted(papers: Sequence[str], unit: str) -> str:
    names = ", ".join(papers[:5]) + (", …" if len(papers) > 5 else "")
    return f"{len(papers)} {unit}{'' if len(papers) == 1 else 's'} ({names})"
