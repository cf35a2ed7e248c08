"""Reads lm-eval's output folders: `results_*.json` and `samples_*.jsonl` to data frames.

Nothing is scored again. Every metric is recomputed from the samples with the package's own
ranking rule and must equal what lm-eval wrote; runs that do not answer the same question (other
papers, other candidates, another prompt) are refused, never averaged.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from lm_eval_hyprank.datasets.researchbench import REPOSITORY
from lm_eval_hyprank.judge.replies import Reading
from lm_eval_hyprank.judge.scoring import borda, list_metrics, pairwise_results
from lm_eval_hyprank.metrics import process_results

KINDS = ("energy", "judge", "judge_psc", "pairwise", "embedding")
"""The kinds of task a report can show; a task says its kind in its YAML's metadata."""

JUDGES = ("judge", "judge_psc", "pairwise")
"""The kinds whose samples hold a judge's replies."""

NO_MODEL = "no model"
"""The model name of a scorer that looks at no model, such as fewest bytes first."""

PARADIGMS = {
    "nll": "NLL",
    "raw": "Raw",
    "logz": "Log-partition",
    "nll_sum": "NLL sum",
    "raw_sum": "Raw sum",
    "shortest": "Shortest first",
    "pmi": "PMI per token",
    "dc_pmi": "DC-PMI",
}
_KIND_PARADIGMS = {
    "judge": "Judge",
    "judge_psc": "Judge, several orders",
    "pairwise": "Judge, pairwise",
    "embedding": "Embedding",
}

_SCORERS = ("candidate_score", "embedding_score")  # this package's filters that score candidates

_DATED = re.compile(r"_(\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}(?:\.\d+)?)\.json$")

# Arguments that change how a model is run, not what it answers, and those nobody should see.
_RUNNING_ARGS = {
    *("batch_size", "max_batch_size", "device", "device_map", "device_map_option", "parallelize"),
    *("gpus", "max_memory_per_gpu", "max_cpu_memory", "offload_folder", "low_cpu_mem_usage"),
    *("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization", "cache_dir"),
    *("trust_remote_code", "token_scores", "tokenized_requests", "seed"),
    *("num_concurrent", "max_retries", "timeout", "verify_certificate"),
    *("token", "auth_token", "api_key", "header"),
}
# Metadata that says what a task is or where its data lie; the data themselves are compared.
_TASK_METADATA = {
    *("version", "config_source", "kind", "control", "control_of"),
    *("dataset_path", "dataset_revision", "skip_invalid", "discipline"),
}
_NAME_ARGS = ("pretrained", "model", "path", "engine")


class ReportError(ValueError):
    """The folders cannot be made into a report; the text says which file, why, and what to do."""


@dataclass(frozen=True)
class Run:
    """One model on one task (or on a group of tasks that share out the papers).

    Attributes:
        model: Short name of the model, unique among the runs read.
        task: Name of the task, with the options in which repeats of it differ.
        name: Name of the task in lm-eval.
        kind: One of `KINDS`.
        control: What a control leaves out of the prompt; empty for a task that is none.
        control_of: The task that a control belongs to; empty for a task that is none.
        version: The task's version.
        date: When the run began, seconds since 1970.
        fingerprint: What decides the model's scores, as the run recorded it; None if it did not.
        source: lm-eval's name for the kind of model, such as ``hf``.
        pretrained: The model as lm-eval was given it; of a folder its name alone, which is all
            that means anything elsewhere.
        details: What else the run says of the model and the software.
        files: The run's results file and samples files.
        papers: Number of papers in the run.
        total: Number of papers in the task; more than ``papers`` in a run with ``--limit``.
        truncated: Papers whose context was cut to fit the model.
    """

    model: str
    task: str
    name: str
    kind: str
    control: str
    control_of: str
    version: str
    date: float
    fingerprint: str | None
    source: str
    pretrained: str
    details: dict[str, str]
    files: tuple[str, ...]
    papers: int
    total: int
    truncated: tuple[str, ...]


@dataclass(frozen=True)
class Runs:
    """Everything that was read, in tables with a fixed order of rows.

    Attributes:
        systems: One row a system (a model, a task and a scorer): ``system`` (its id), ``model``,
            ``task``, ``scorer``, ``kind``, ``paradigm`` (name for display), ``score`` (the
            attribute of `ContinuationScore` its filter reads, or empty), ``control`` and
            ``control_of`` (empty for a system that is no control), ``name`` (of the task in
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
        replies: One row a reply of a listwise judge: ``system``, ``paper_id``, ``order``,
            ``candidate_ids`` (as shown), ``ranking`` (best first; empty if invalid),
            ``invalid`` (the reason, or empty).
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
    found = list(_found_runs(folders, tasks, files))
    if not found:
        why = "".join(f"\n  {entry['file']}: {entry['why']}" for entry in files["left_out"])
        raise ReportError(
            f"no run of a hypothesis-ranking task below {', '.join(map(str, folders))}; give the "
            f"folder that lm_eval was given as --output_path{why}"
        )
    chosen = _newest(found, files)
    _label(chosen)
    loaded = [_load(run) for run in chosen]
    _refuse_mixtures(loaded)
    read = dict.fromkeys(name for entry in loaded for name in entry.found.names())
    files["read"] = [{"file": name} for name in read]
    return _tables(loaded, files)


# --- finding ---------------------------------------------------------------------------------


@dataclass
class _Found:
    """A run before its samples are read."""

    root: Path
    results_file: Path
    date_id: str
    results: dict[str, Any]
    task: str
    leaves: tuple[str, ...]
    model: str = ""
    task_label: str = ""

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.results["configs"][self.leaves[0]]
        return config

    @property
    def metadata(self) -> dict[str, Any]:
        return self.config.get("metadata") or {}

    @property
    def run_config(self) -> dict[str, Any]:
        return self.results.get("config") or {}

    @property
    def kind(self) -> str:
        return str(self.metadata.get("kind") or "energy")

    @property
    def control(self) -> str:
        return str(self.metadata.get("control") or "")

    @property
    def version(self) -> str:
        return str((self.results.get("versions") or {}).get(self.leaves[0], "unknown"))

    @property
    def fingerprint(self) -> str | None:
        ours: dict[str, Any] = self.results.get("hyprank") or {}
        return ours.get("model_fingerprint")

    @property
    def date(self) -> float:
        return float(self.results.get("date") or 0.0)

    @property
    def papers(self) -> tuple[int, int]:
        """Number of papers in the run and in the task, as lm-eval counted them."""
        counts = [self.results["n-samples"][leaf] for leaf in self.leaves]
        return sum(c["effective"] for c in counts), sum(c["original"] for c in counts)

    def model_args(self) -> dict[str, str]:
        """The model's arguments, all as text."""
        given = self.run_config.get("model_args") or {}
        if isinstance(given, str):
            from lm_eval.utils import simple_parse_args_string

            given = simple_parse_args_string(given)
        return {str(key): str(value) for key, value in given.items()}

    def model_options(self) -> dict[str, str]:
        """What tells this model from others, apart from its fingerprint."""
        options = {k: v for k, v in self.model_args().items() if k not in _RUNNING_ARGS}
        for name in ("chat_template_sha", "system_instruction_sha"):
            if self.results.get(name):
                options[name.removesuffix("_sha")] = str(self.results[name])[:8]
        return options

    def task_options(self) -> dict[str, str]:
        """What tells this run of the task from others, apart from the model and the data."""
        own = self.metadata.keys() - self.model_args().keys() - _TASK_METADATA
        options = {key: str(self.metadata[key]) for key in sorted(own)}
        generation = self.config.get("generation_kwargs") or {}
        options |= {key: str(value) for key, value in sorted(generation.items())}
        if shots := (self.results.get("n-shot") or {}).get(self.leaves[0]):
            options["num_fewshot"] = str(shots)
        return options

    def model_identity(self) -> tuple[Any, ...]:
        """Equal for the same weights asked in the same way, wherever the model lies."""
        prompt = [
            self.results.get(name) for name in ("chat_template_sha", "system_instruction_sha")
        ]
        known = self.fingerprint or tuple(sorted(self.model_options().items()))
        return (known, *prompt)

    def identity(self) -> tuple[Any, ...]:
        """Equal for repeats of a run."""
        return (self.task, self.model_identity(), tuple(self.task_options().items()))

    def samples_file(self, leaf: str) -> Path:
        return self.results_file.parent / f"samples_{leaf}_{self.date_id}.jsonl"

    def names(self) -> list[str]:
        paths = [self.results_file, *(self.samples_file(leaf) for leaf in self.leaves)]
        return [_name(self.root, path) for path in paths]


def _name(root: Path, path: Path) -> str:
    """A file's name in outputs: below the given folder, so that it is the same anywhere."""
    return (Path(root.resolve().name) / path.relative_to(root)).as_posix()


def _found_runs(
    folders: Sequence[Path], tasks: Collection[str], files: dict[str, list[dict[str, str]]]
) -> Iterator[_Found]:
    seen: set[Path] = set()
    unmet = set(tasks)
    for root in folders:
        if not root.is_dir():
            raise ReportError(
                f"{root} is not a folder; give the folder lm_eval wrote its output to"
            )
        for path in sorted(root.rglob("*.json")):
            dated = _DATED.search(path.name)
            if dated is None or path.resolve() in seen:
                continue
            seen.add(path.resolve())
            results = _read_results(path)
            if results is None:
                why = "not a results file of lm-eval"
                files["left_out"].append({"file": _name(root, path), "why": why})
                continue
            for task, leaves in _units(results):
                run = _Found(root, path, dated[1], results, task, leaves)
                why = _why_left_out(run, tasks)
                unmet -= {task}
                if why:
                    entry = {"file": _name(root, path), "why": f"{task}: {why}"}
                    files["left_out"].append(entry)
                else:
                    yield run
    if unmet:
        raise ReportError(f"no run of {', '.join(sorted(unmet))} below the folders")


def _read_results(path: Path) -> dict[str, Any] | None:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ReportError(
            f"{path}: not complete JSON ({error}); its writer was stopped, so run that evaluation "
            "again, or delete the file"
        ) from None
    if not isinstance(results, dict) or not {"results", "configs", "n-samples"} <= results.keys():
        return None
    return results


def _units(results: dict[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The tasks of a results file; a group that shares out the papers by discipline is one."""
    leaves = list(results["configs"])
    for group, members in sorted((results.get("group_subtasks") or {}).items()):
        if members and all(
            member in leaves
            and (results["configs"][member].get("dataset_kwargs") or {}).get("discipline")
            for member in members
        ):
            yield group, tuple(members)
            leaves = [leaf for leaf in leaves if leaf not in members]
    for leaf in leaves:
        yield leaf, (leaf,)


def _why_left_out(run: _Found, tasks: Collection[str]) -> str:
    """Why a run has no place in a report; empty if it has one."""
    if run.metadata.get("kind") == "expert":
        return "ranked against experts and not a gold; lm-eval's own table has its metrics"
    scored = any(
        step.get("function") in _SCORERS
        for entry in run.config.get("filter_list") or []
        for step in entry.get("filter") or []
    )
    if run.metadata.get("kind") not in KINDS and not scored:
        return "not a hypothesis-ranking task"
    if tasks and run.task not in tasks and run.metadata.get("control_of") not in tasks:
        return "not among the tasks asked for"
    return ""


def _newest(found: list[_Found], files: dict[str, list[dict[str, str]]]) -> list[_Found]:
    """Of each model on each task the newest run, a complete one first."""
    repeats: dict[tuple[Any, ...], list[_Found]] = defaultdict(list)
    for run in found:
        repeats[run.identity()].append(run)

    def merit(run: _Found) -> tuple[bool, float, str, str]:
        papers, total = run.papers
        return papers == total, run.date, run.date_id, str(run.results_file)

    chosen = []
    for runs in repeats.values():
        *older, best = sorted(runs, key=merit)
        chosen.append(best)
        for run in older:
            papers, total = run.papers
            why = f"has {papers} of {total} papers" if papers < total else "older"
            files["superseded"].append(
                {
                    "file": run.names()[0],
                    "why": f"{run.task}: {why}; {best.names()[0]} is taken",
                }
            )
    chosen.sort(key=lambda run: (run.task, _base_name(run), run.date, str(run.results_file)))
    return chosen


# --- naming ----------------------------------------------------------------------------------


def _base_name(run: _Found) -> str:
    """The last part of the model's path, with the adapter or file that makes it another model."""
    arguments = run.model_args()
    given = next((arguments[key] for key in _NAME_ARGS if arguments.get(key)), "")
    given = given or str(run.results.get("model_name") or run.run_config.get("model") or "model")
    name = _last_part(given) or given
    if gguf := arguments.get("gguf_file"):
        name += f" {Path(gguf).stem}" if Path(gguf).stem.casefold() != name.casefold() else ""
    for key in ("peft", "delta", "lora_local_path"):
        if arguments.get(key):
            name += f" + {Path(arguments[key]).name}"
    # The bar parts a system's id into model, task and scorer.
    return name.replace("|", "¦")


def _label(runs: list[_Found]) -> None:
    """Gives every model and task a short name, longer only where two would be the same."""
    by_name: dict[str, list[_Found]] = defaultdict(list)
    for run in runs:
        by_name[_base_name(run)].append(run)
    for name, group in by_name.items():
        bearers = {run.model_identity(): run for run in reversed(group)}
        pairs = {(run.task, run.model_identity()) for run in group}
        labels = dict.fromkeys(bearers, name)
        if len({task for task, _ in pairs}) < len(pairs):
            labels = _told_apart(name, {key: run.model_options() for key, run in bearers.items()})
            shared = Counter(labels.values())
            for key, run in bearers.items():
                if shared[labels[key]] > 1:  # told apart by the weights alone
                    labels[key] += f" [{(run.fingerprint or 'no fingerprint')[:8]}]"
        for run in group:
            run.model = labels[run.model_identity()]
    by_task: dict[tuple[str, str], list[_Found]] = defaultdict(list)
    for run in runs:
        by_task[run.model, run.task].append(run)
    for (_, task), group in by_task.items():
        labels = _told_apart(task, {run.identity(): run.task_options() for run in group})
        for run in group:
            run.task_label = labels[run.identity()]


def _told_apart(
    name: str, options: Mapping[tuple[Any, ...], Mapping[str, str]]
) -> dict[tuple[Any, ...], str]:
    """The name, and behind it those options in which the bearers of the name differ."""
    keys = sorted({key for one in options.values() for key in one})
    differing = [key for key in keys if len({one.get(key) for one in options.values()}) > 1]
    labels = {}
    for identity, one in options.items():
        words = [f"{key}={one[key]}" for key in differing if key in one]
        labels[identity] = f"{name} ({', '.join(words)})".replace("|", "¦") if words else name
    return labels


# --- reading samples -------------------------------------------------------------------------


@dataclass
class _Paper:
    discipline: str
    doi: str
    title: str
    context: str
    texts: dict[str, str]  # candidate id to text, in the run's order
    gold: str
    tokens: tuple[int, ...] | None
    order: str


@dataclass
class _Loaded:
    """A run with its samples."""

    found: _Found
    papers: dict[str, _Paper] = field(default_factory=dict)
    # Scorer (filter name) to paper to candidate to score.
    scores: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    judge: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    # Of pairwise judges: scorer to paper to metric to value.
    pairwise: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    truncated: list[str] = field(default_factory=list)

    def where(self) -> str:
        return f"{self.found.model} on {self.found.task_label} ({self.found.names()[0]})"


def _load(found: _Found) -> _Loaded:
    loaded = _Loaded(found)
    for leaf in found.leaves:
        _load_leaf(loaded, leaf)
    return loaded


def _load_leaf(loaded: _Loaded, leaf: str) -> None:
    found = loaded.found
    path = found.samples_file(leaf)
    if not path.is_file():
        raise ReportError(
            f"{found.results_file}: the run of {leaf} has no samples file ({path.name}); run it "
            "again with --log_samples, or delete the results file"
        )
    lines: dict[tuple[str, Any], int] = {}
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number, sample in _lines(path):
        where = f"{path}, line {number}"
        scorer = str(_get(sample, "filter", str, where))
        doc = _get(sample, "doc", dict, where)
        paper_id = str(_get(doc, "paper_id", str, f"{where}, doc"))
        key = (scorer, paper_id)
        if key in lines:
            raise ReportError(
                f"{where}: paper {paper_id} stands under filter {scorer!r} a second time (first on "
                f"line {lines[key]}); two runs wrote to one file, so run the evaluation again"
            )
        lines[key] = number
        paper = _paper(sample, doc, where)
        known = loaded.papers.get(paper_id)
        if known is None:
            loaded.papers[paper_id] = paper
            if sample.get("truncated"):
                loaded.truncated.append(paper_id)
        elif (known.texts, known.gold) != (paper.texts, paper.gold):
            raise ReportError(
                f"{where}: paper {paper_id} has other candidates than in a line above"
            )
        metrics: dict[str, float]
        if found.kind in JUDGES:
            reply = _get(sample, "judge", dict, where)
            loaded.judge.setdefault(scorer, {})[paper_id] = reply
        if found.kind == "pairwise":
            metrics = _pairwise_metrics(reply, doc, paper, where)
            loaded.pairwise.setdefault(scorer, {})[paper_id] = metrics
        elif found.kind in JUDGES:
            points = _points(reply, paper, where)
            metrics = _judge_metrics(points, paper)
            loaded.scores.setdefault(scorer, {})[paper_id] = {
                candidate: -points[candidate] if points else math.nan for candidate in paper.texts
            }
        else:
            scores = _scores(sample, paper, where)
            metrics = process_results(
                {"gold": list(scores).index(paper.gold)}, list(scores.values())
            )
            loaded.scores.setdefault(scorer, {})[paper_id] = scores
        for metric, value in metrics.items():
            values[metric, scorer].append(value)
    expected = {str(entry["name"]) for entry in found.config.get("filter_list") or []} or {"none"}
    effective = found.results["n-samples"][leaf]["effective"]
    counts = Counter(scorer for scorer, _ in lines)
    for scorer in sorted(expected | counts.keys()):
        if counts[scorer] != effective:
            raise ReportError(
                f"{path}: {counts[scorer]} papers under filter {scorer!r}, but lm-eval counted "
                f"{effective} in {found.results_file.name}; the writer was stopped or lines were "
                "lost, so run the evaluation again or delete both files"
            )
    _check_metrics(found, leaf, values)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                try:
                    sample = json.loads(line)
                except json.JSONDecodeError as error:
                    cut = "" if line.endswith("\n") else "; it is cut off: its writer was stopped"
                    raise ReportError(
                        f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})"
                        f"{cut}. Run the evaluation again, or delete the run's files"
                    ) from None
                if not isinstance(sample, dict):
                    raise ReportError(f"{path}, line {number}: not a JSON object")
                yield number, sample
        except UnicodeDecodeError as error:
            raise ReportError(f"{path}, after line {number}: not UTF-8 ({error.reason})") from None


def _get(holder: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = holder.get(key)
    if not isinstance(value, kind):
        state = "is missing" if value is None else f"is {type(value).__name__}"
        raise ReportError(
            f"{where}: {key!r} {state}, where {kind.__name__} is expected. The file was written by "
            "another program or an older version; run the evaluation again"
        )
    return value


def _paper(sample: Mapping[str, Any], doc: Mapping[str, Any], where: str) -> _Paper:
    ids = [str(one) for one in _get(doc, "candidate_ids", list, f"{where}, doc")]
    texts = [str(one) for one in _get(doc, "candidates", list, f"{where}, doc")]
    if isinstance(doc.get("gold"), list):
        raise ReportError(
            f"{where}: the item has several golds, and a report is of one; lm-eval's own table has "
            "the metrics. Name the tasks to report with --task"
        )
    gold = _get(doc, "gold", int, f"{where}, doc")
    if len(ids) != len(texts) or len(set(ids)) != len(ids) or not 0 <= gold < len(ids):
        raise ReportError(
            f"{where}: {len(texts)} candidates, {len(set(ids))} distinct candidate_ids and gold "
            f"{gold} do not fit together"
        )
    tokens = sample.get("num_tokens")
    if tokens is not None and len(tokens) != len(ids):
        raise ReportError(f"{where}: {len(tokens)} num_tokens for {len(ids)} candidates")
    return _Paper(
        discipline=str(doc.get("discipline") or ""),
        doi=str(doc.get("doi") or ""),
        title=str(doc.get("title") or ""),
        context=str(doc.get("context") or ""),
        texts=dict(zip(ids, texts, strict=True)),
        gold=ids[gold],
        tokens=None if tokens is None else tuple(int(one) for one in tokens),
        order=str(doc.get("order") or ""),
    )


def _scores(sample: Mapping[str, Any], paper: _Paper, where: str) -> dict[str, float]:
    """One score a candidate; lm-eval writes numbers as text."""
    given = _get(sample, "filtered_resps", list, where)
    try:
        scores = [float(one) for one in given]
    except (TypeError, ValueError):
        raise ReportError(
            f"{where}: filtered_resps holds {str(given)[:60]}…, which is not one number a candidate"
        ) from None
    if len(scores) != len(paper.texts):
        raise ReportError(f"{where}: {len(scores)} scores for {len(paper.texts)} candidates")
    return dict(zip(paper.texts, scores, strict=True))


def _points(reply: Mapping[str, Any], paper: _Paper, where: str) -> dict[str, int]:
    """Borda points of a listwise judge's rankings; empty if no reply has one."""
    ids = list(paper.texts)
    rankings = [one.get("ranking") for one in reply.get("orders", [reply])]
    places = []
    for ranking in rankings:
        if ranking is None:
            continue
        if set(ranking) - paper.texts.keys() or len(set(ranking)) != len(ranking):
            raise ReportError(f"{where}: the judge's ranking {ranking} is none of the candidates")
        places.append([ids.index(one) for one in ranking])
    return dict(zip(ids, borda(places, len(ids)), strict=True)) if places else {}


def _judge_metrics(points: Mapping[str, int], paper: _Paper) -> dict[str, float]:
    """A paper's metrics over all papers, and over valid ones where it is one."""
    if not points:
        return dict.fromkeys(list_metrics([1, 0], 0), 0.0)
    found = list_metrics(list(points.values()), list(points).index(paper.gold))
    return found | {f"{metric}_valid": value for metric, value in found.items()}


def _pairwise_metrics(
    reply: Mapping[str, Any], doc: Mapping[str, Any], paper: _Paper, where: str
) -> dict[str, float]:
    """A paper's metrics from its verdicts, each read again as the reply that gave it."""
    ids = list(paper.texts)
    gold = ids.index(paper.gold)
    orders, readings = [], []
    for verdict in _get(reply, "verdicts", list, f"{where}, judge"):
        if verdict["candidate_id"] not in paper.texts:
            raise ReportError(
                f"{where}: a verdict on {verdict['candidate_id']}, which is no candidate"
            )
        pair = [gold, ids.index(verdict["candidate_id"])]
        orders.append(pair if verdict["gold_first"] else pair[::-1])
        winner = verdict["winner"]
        first = None if winner is None else int((winner == "gold") != verdict["gold_first"])
        readings.append(Reading(first, verdict.get("invalid")))
    return pairwise_results({**doc, "gold": gold, "orders": orders}, readings)


def _check_metrics(
    found: _Found, leaf: str, values: Mapping[tuple[str, str], Sequence[float]]
) -> None:
    """Compares lm-eval's numbers with those the samples give.

    Raises:
        ReportError: A number differs by more than rounding.
    """
    written = found.results["results"].get(leaf) or {}
    for (metric, scorer), items in values.items():
        said = written.get(f"{metric},{scorer}")
        own = math.fsum(items) / len(items)
        if isinstance(said, int | float) and not math.isclose(said, own, abs_tol=1e-9):
            raise ReportError(
                f"{found.results_file}: {metric} of filter {scorer!r} in {leaf} is {said}, but "
                f"{found.samples_file(leaf).name} gives {own}; one of the two files was changed or "
                "belongs to another run"
            )


# --- comparing -------------------------------------------------------------------------------


def _refuse_mixtures(loaded: Sequence[_Loaded]) -> None:
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
    by_prompt: dict[tuple[str, str, str], _Loaded] = {}
    for run in prompts:
        other = by_prompt.setdefault((run.found.kind, run.found.control, run.found.task_label), run)
        _same_contexts(other, run)
    # Tasks of one kind that are no controls ask with one prompt, whatever their names.
    plain = [run for run in prompts if not run.found.control and run.found.kind == "energy"]
    for run in plain[1:]:
        _same_contexts(plain[0], run)
    versions: dict[str, _Loaded] = {}
    for run in loaded:
        other = versions.setdefault(run.found.task, run)
        if other.found.version != run.found.version:
            raise _mixture(
                other,
                run,
                f"the task {run.found.task} is of version {other.found.version} in the one and "
                f"{run.found.version} in the other",
            )


def _mixture(one: _Loaded, other: _Loaded, difference: str) -> ReportError:
    return ReportError(
        f"these runs do not belong in one report: {difference}.\n"
        f"  one:   {one.where()}\n  other: {other.where()}\n"
        "Make a report of each: put the runs in two folders and run `hyprank report` on either, "
        "name the task with --task, or run the model that is behind again"
    )


def _same_papers(one: _Loaded, other: _Loaded) -> None:
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


def _same_contexts(one: _Loaded, other: _Loaded) -> None:
    for paper_id, paper in one.papers.items():
        context = other.papers[paper_id].context
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


# --- tables ----------------------------------------------------------------------------------


def _tables(loaded: Sequence[_Loaded], files: dict[str, list[dict[str, str]]]) -> Runs:
    systems: list[dict[str, Any]] = []
    base: list[pd.DataFrame] = []
    controls: list[pd.DataFrame] = []
    pairwise: list[dict[str, Any]] = []
    replies: list[dict[str, Any]] = []
    trivial: dict[str, dict[str, Any]] = {}
    trivial_scores: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    papers, candidates = _paper_tables(loaded)
    frame = candidates.merge(
        papers[["paper_id", "discipline", "doi"]], on="paper_id", how="left", sort=False
    )
    for place, run in enumerate(loaded):
        found = run.found
        reads = _reads(found)
        for scorer in run.scores or run.pairwise:
            system = {
                "system": f"{found.model}|{found.task_label}|{scorer}",
                "model": found.model,
                "task": found.task_label,
                "scorer": scorer,
                "kind": found.kind,
                "paradigm": _KIND_PARADIGMS.get(found.kind) or PARADIGMS.get(scorer, scorer),
                "score": reads.get(scorer, ""),
                "control": found.control,
                "control_of": str(found.metadata.get("control_of") or ""),
                "name": found.task,
                "run": place,
            }
            if system["score"] == "num_bytes":
                if not found.control:
                    _merge_trivial(system, run, trivial, trivial_scores)
                continue
            systems.append(system)
            if found.kind == "pairwise":
                pairwise.extend(_pairwise_rows(system, run, run.pairwise[scorer]))
                continue
            if found.kind in JUDGES:
                replies.extend(_replies(str(system["system"]), run.judge[scorer], run.papers))
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
        replies=pd.DataFrame(
            replies,
            columns=["system", "paper_id", "order", "candidate_ids", "ranking", "invalid"],
        ),
        runs=runs,
        files=files,
        notes=_notes(loaded),
    )


_SCORE_COLUMNS = [
    *("system", "model", "task", "scorer", "kind", "paper_id", "discipline", "doi"),
    *("candidate_id", "is_gold", "score", "num_tokens", "num_bytes", "control"),
]


def _joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    if not tables:
        return pd.DataFrame(columns=_SCORE_COLUMNS)
    return pd.concat(tables, ignore_index=True)


def _paper_tables(loaded: Sequence[_Loaded]) -> tuple[pd.DataFrame, pd.DataFrame]:
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


def _reads(found: _Found) -> dict[str, str]:
    """Which attribute of a continuation's score each scorer of a task reads."""
    return {
        str(entry["name"]): str(step["score"])
        for entry in found.config.get("filter_list") or []
        for step in entry.get("filter") or []
        if step.get("function") in _SCORERS
    }


def _merge_trivial(
    system: dict[str, Any],
    run: _Loaded,
    trivial: dict[str, dict[str, Any]],
    scores: dict[str, dict[str, dict[str, float]]],
) -> None:
    """Keeps a scorer that looks at bytes alone once, as it is the same under every model.

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
    run: _Loaded | None,
    scores: Mapping[str, Mapping[str, float]],
) -> pd.DataFrame:
    """The scores of one system, in the order of papers and candidates that all systems have."""
    tokens: dict[tuple[str, str], int] = {}
    if run is not None:
        for paper_id, paper in run.papers.items():
            for candidate, count in zip(paper.texts, paper.tokens or (), strict=False):
                tokens[paper_id, candidate] = count
    keys = list(zip(frame["paper_id"], frame["candidate_id"], strict=True))
    own = {name: system[name] for name in ("system", "model", "task", "scorer", "kind", "control")}
    table = frame.assign(
        **own,
        score=[scores[paper][candidate] for paper, candidate in keys],
        num_tokens=[float(tokens.get(key, math.nan)) for key in keys],
    )
    return table[_SCORE_COLUMNS]


def _pairwise_rows(
    system: Mapping[str, Any], run: _Loaded, papers: Mapping[str, Mapping[str, float]]
) -> Iterator[dict[str, Any]]:
    own = {name: system[name] for name in ("system", "model", "task", "scorer", "kind")}
    for paper_id, metrics in papers.items():
        paper = run.papers[paper_id]
        facts = {"paper_id": paper_id, "discipline": paper.discipline, "doi": paper.doi}
        yield {**own, **facts, "valid": "win_rate" in metrics, **metrics}


def _replies(
    system: str, replies: Mapping[str, Mapping[str, Any]], papers: Mapping[str, _Paper]
) -> Iterator[dict[str, Any]]:
    """One row a reply; several orders of one paper are numbered."""
    for paper_id, reply in replies.items():
        paper = papers[paper_id]
        single = {**reply, "candidate_ids": list(paper.texts)}
        for number, one in enumerate(reply.get("orders", [single])):
            yield {
                "system": system,
                "paper_id": paper_id,
                "order": str(number) if "orders" in reply else paper.order,
                "candidate_ids": tuple(one["candidate_ids"]),
                "ranking": tuple(one["ranking"] or ()),
                "invalid": one.get("invalid") or "",
            }


def _run(loaded: _Loaded) -> Run:
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
    }
    papers, total = found.papers
    return Run(
        model=found.model,
        task=found.task_label,
        name=found.task,
        kind=found.kind,
        control=found.control,
        control_of=str(found.metadata.get("control_of") or ""),
        version=found.version,
        date=found.date,
        fingerprint=found.fingerprint,
        source=str(config.get("model") or ""),
        pretrained=_hub_name(next((arguments[k] for k in _NAME_ARGS if arguments.get(k)), "")),
        details={key: str(value) for key, value in details.items() if value},
        files=tuple(found.names()),
        papers=papers,
        total=total,
        truncated=tuple(loaded.truncated),
    )


def _on_hub(found: _Found) -> bool:
    """Whether the run's data were the hub's own copy."""
    return found.task.startswith("researchbench_") and not found.metadata.get("dataset_path")


def _hub_name(given: str) -> str:
    """A name ``owner/model`` as it is, of a path its last part."""
    return given if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", given) else _last_part(given)


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _notes(loaded: Sequence[_Loaded]) -> list[str]:
    notes = []
    for run in loaded:
        name = f"{run.found.model} on {run.found.task_label}"
        papers, total = run.found.papers
        if papers < total:
            notes.append(
                f"{name} covers {papers} of the task's {total} papers (--limit or --samples)."
            )
        if run.truncated:
            notes.append(
                f"{name}: the context of {_counted(run.truncated)} was cut to fit the model."
            )
        for scorer, by_paper in run.scores.items():
            invalid = [
                p for p, own in by_paper.items() if not all(map(math.isfinite, own.values()))
            ]
            if invalid:
                word = "reply that can be read" if scorer in run.judge else "finite score"
                notes.append(f"{name}, {scorer}: no {word} for {_counted(invalid)}.")
    return notes


def _counted(papers: Sequence[str]) -> str:
    names = ", ".join(papers[:5]) + (", …" if len(papers) > 5 else "")
    return f"{len(papers)} {'paper' if len(papers) == 1 else 'papers'} ({names})"
