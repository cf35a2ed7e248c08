"""Finds lm-eval's runs below folders, chooses among repeats, and names models and tasks."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("energy", "judge", "judge_psc", "pairwise", "embedding")
"""The kinds of task a report can show."""

LIST_JUDGES = ("judge", "judge_psc")
"""Judges that rank only some candidates; the others are one tied group behind them."""

JUDGES = (*LIST_JUDGES, "pairwise")
"""The kinds whose samples hold a judge's replies."""

EXPERTS = "ranked against experts and not a gold; lm-eval's own table has its metrics"
"""Why such a run is left out."""

SCORERS = ("candidate_score", "embedding_score")
"""This package's filters that score candidates."""

# What a task's filters say of its kind. Its metadata would not do: a YAML that includes one of ours
# and has metadata of its own loses ours.
_KIND_OF = {
    "candidate_score": "energy",
    "embedding_score": "embedding",
    "judge_ranking": "judge",
    "judge_verdict": "pairwise",
}

# How --metadata may have a task ask: what holds without it, and the kinds that read it. lm-eval
# hands all of it to every task of a call.
_ASKING: dict[str, tuple[str, tuple[str, ...]]] = {
    "background": ("true", JUDGES),
    "discipline": ("none", KINDS),
    "layout": ("inline", ("energy", "embedding")),
    "num_orders": ("5", ("judge_psc",)),
    "order": ("seed", ("judge",)),
    "order_seed": ("0", LIST_JUDGES),
    "template": ("none", JUDGES),
}
_SHOTS = "num_fewshot"

_DATED = re.compile(r"_(\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}(?:\.\d+)?)\.json$")

RUNNING_ARGS = {
    *("batch_size", "max_batch_size", "device", "device_map", "device_map_option", "parallelize"),
    *("gpus", "max_memory_per_gpu", "max_cpu_memory", "offload_folder", "low_cpu_mem_usage"),
    *("tensor_parallel_size", "data_parallel_size", "tp_plan", "gpu_memory_utilization"),
    "cache_dir",
    *("trust_remote_code", "token_scores", "tokenized_requests", "seed"),
    *("num_concurrent", "max_retries", "timeout", "verify_certificate"),
    *("token", "auth_token", "api_key", "header"),
}
"""Arguments that change how a model is run, not what it answers, and those nobody should see."""

# Metadata that says what a task is, where its data lie (which are compared themselves) or what
# else is written.
_TASK_METADATA = {
    *("version", "config_source", "kind", "control", "control_of", "only"),
    *("dataset_path", "dataset_revision", "skip_invalid", "token_scores"),
}
_NOT_ASKED_FOR = "not among the tasks asked for"
NAME_ARGS = ("pretrained", "model", "path", "engine")
"""The arguments that may name a model, the first one given counts."""


class ReportError(ValueError):
    """The folders cannot be made into a report; the text says which file, why, and what to do."""


@dataclass
class Found:
    """A run before its samples are read: one model on one task.

    Attributes:
        root: The folder that was given.
        results_file: The results file.
        date_id: The date in its name, which its samples files share.
        results: Its content.
        task: The task, or the group that is read as one.
        leaves: The tasks with samples: the task, or the group's members.
        model: Short name of the model; empty until `label` gives it.
        task_label: Name of the task for display; empty until `label` gives it.
        replaces: Older runs of all papers that this one is taken in place of.
    """

    root: Path
    results_file: Path
    date_id: str
    results: dict[str, Any]
    task: str
    leaves: tuple[str, ...]
    model: str = ""
    task_label: str = ""
    replaces: list[Found] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        """The task's configuration."""
        config: dict[str, Any] = self.results["configs"][self.leaves[0]]
        return config

    def filter_steps(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every step of the task's filters, each with its filter's name."""
        for entry in self.config.get("filter_list") or []:
            for step in entry.get("filter") or []:
                yield str(entry["name"]), step

    @property
    def metadata(self) -> dict[str, Any]:
        """The task's metadata, with the model's arguments among them."""
        return self.config.get("metadata") or {}

    @property
    def run_config(self) -> dict[str, Any]:
        """The configuration of the whole run: model, arguments, seeds."""
        return self.results.get("config") or {}

    @property
    def kind(self) -> str:
        """One of `KINDS`; empty for a task of others."""
        functions = [step.get("function") for _, step in self.filter_steps()]
        kind = next((_KIND_OF[name] for name in functions if name in _KIND_OF), "")
        if kind == "judge":
            # lm-eval writes the function's source, which begins with its name.
            results = str(self.config.get("process_results")).partition("(")[0]
            return "judge_psc" if "psc_results" in results else kind
        return kind

    @property
    def control(self) -> str:
        """What the prompt lacks, for a control; else empty."""
        return str(self.metadata.get("control") or "")

    @property
    def control_of(self) -> str:
        """The task that a control belongs to; else empty."""
        return str(self.metadata.get("control_of") or "")

    @property
    def version(self) -> str:
        """The task's version."""
        return str((self.results.get("versions") or {}).get(self.leaves[0], "unknown"))

    @property
    def fingerprint(self) -> str | None:
        """What decides the model's scores, if the run recorded it."""
        ours: dict[str, Any] = self.results.get("hyprank") or {}
        return ours.get("model_fingerprint")

    @property
    def hashes(self) -> list[str | None]:
        """lm-eval's hash of all papers, prompts and targets of each of the leaves."""
        hashes = self.results.get("task_hashes") or {}
        return [hashes.get(leaf) for leaf in self.leaves]

    @property
    def date(self) -> float:
        """When the run began, seconds since 1970; 0 if it does not say."""
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
        options = {k: v for k, v in self.model_args().items() if k not in RUNNING_ARGS}
        for name in ("chat_template_sha", "system_instruction_sha"):
            if self.results.get(name):
                options[name.removesuffix("_sha")] = str(self.results[name])[:8]
        return options

    def asked_options(self) -> dict[str, str]:
        """In what the task was asked otherwise than it is by itself."""
        own = self._own_metadata()
        options = {
            name: str(own[name])
            for name, (default, kinds) in _ASKING.items()
            if name in own and self.kind in kinds and str(own[name]).lower() != default
        }
        if shots := (self.results.get("n-shot") or {}).get(self.leaves[0]):
            options[_SHOTS] = str(shots)
        return options

    def generation_options(self) -> dict[str, str]:
        """What ``--gen_kwargs`` said, of a task that generates."""
        settings = self.config.get("generation_kwargs") or {}
        given = self.run_config.get("gen_kwargs") or {}
        return {key: str(settings[key]) for key in sorted(given) if key in settings}

    def task_options(self) -> dict[str, str]:
        """What tells this run of the task from others, apart from the model and the data."""
        own = self._own_metadata()
        others = sorted(own.keys() - _TASK_METADATA - _ASKING.keys())
        options = {key: str(own[key]) for key in others}
        generation = self.config.get("generation_kwargs") or {}
        options |= {key: str(value) for key, value in sorted(generation.items())}
        return options | self.asked_options()

    def _own_metadata(self) -> dict[str, Any]:
        """The task's metadata without the model's arguments."""
        arguments = self.model_args()
        return {key: value for key, value in self.metadata.items() if key not in arguments}

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
        """Where lm-eval writes the samples of a task of this run."""
        return self.results_file.parent / f"samples_{leaf}_{self.date_id}.jsonl"

    def names(self) -> list[str]:
        """The run's files, named from the folder that was given."""
        paths = [self.results_file, *(self.samples_file(leaf) for leaf in self.leaves)]
        return [_name(self.root, path) for path in paths]


def _name(root: Path, path: Path) -> str:
    """A file's name in outputs: below the given folder, so that it is the same anywhere."""
    return (Path(root.resolve().name) / path.relative_to(root)).as_posix()


def found_runs(
    folders: Sequence[Path], tasks: Collection[str], files: dict[str, list[dict[str, str]]]
) -> Iterator[Found]:
    """Finds the runs below folders that a report can show.

    Args:
        folders: Searched at any depth.
        tasks: Only these tasks and their controls; all of them if empty.
        files: What is left out is added to its ``left_out``.

    Raises:
        ReportError: A folder is none, a results file is damaged, or one of the tasks is not there.
    """
    seen: set[Path] = set()
    unmet = set(tasks)
    there: set[str] = set()
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
                run = Found(root, path, dated[1], results, task, leaves)
                why = _why_left_out(run, tasks)
                unmet -= {task}
                if why in ("", _NOT_ASKED_FOR):
                    there.add(task)
                if why:
                    entry = {"file": _name(root, path), "why": f"{task}: {why}"}
                    files["left_out"].append(entry)
                else:
                    yield run
    if unmet:
        names = ", ".join(sorted(there)) or "none that a report can show"
        raise ReportError(
            f"no run of {', '.join(sorted(unmet))} below the folders; the tasks there: {names}"
        )


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
    """The tasks of a results file; a group whose members share out the papers is one."""
    leaves = list(results["configs"])
    for group, members in sorted((results.get("group_subtasks") or {}).items()):
        if members and all(
            member in leaves and _is_a_part(results["configs"][member]) for member in members
        ):
            yield group, tuple(members)
            leaves = [leaf for leaf in leaves if leaf not in members]
    for leaf in leaves:
        yield leaf, (leaf,)


def _is_a_part(config: Mapping[str, Any]) -> bool:
    """Whether a task has the papers of one discipline, or the items of one group, alone."""
    discipline = (config.get("dataset_kwargs") or {}).get("discipline")
    return bool(discipline or "only" in (config.get("metadata") or {}))


def _why_left_out(run: Found, tasks: Collection[str]) -> str:
    """Why a run has no place in a report; empty if it has one."""
    if not run.kind:
        return "not a hypothesis-ranking task"
    if run.config.get("doc_to_target") == "best":  # of templates/experts.yaml
        return EXPERTS
    if tasks and run.task not in tasks and run.control_of not in tasks:
        return _NOT_ASKED_FOR
    return ""


def newest(found: list[Found], files: dict[str, list[dict[str, str]]]) -> list[Found]:
    """Of each model on each task the newest run, a complete one first."""
    repeats: dict[tuple[Any, ...], list[Found]] = defaultdict(list)
    for run in found:
        repeats[run.identity()].append(run)

    def merit(run: Found) -> tuple[bool, float, str, str]:
        papers, total = run.papers
        return papers == total, run.date, run.date_id, str(run.results_file)

    chosen = []
    for runs in repeats.values():
        *older, best = sorted(runs, key=merit)
        chosen.append(best)
        for run in older:
            papers, total = run.papers
            why = f"has {papers} of {total} papers" if papers < total else "older"
            if papers == total:
                best.replaces.append(run)
            files["superseded"].append(
                {
                    "file": run.names()[0],
                    "why": f"{run.task}: {why}; {best.names()[0]} is taken",
                }
            )
    chosen.sort(key=lambda run: (run.task, _base_name(run), run.date, str(run.results_file)))
    return chosen


# --- naming ----------------------------------------------------------------------------------


def _base_name(run: Found) -> str:
    """The last part of the model's path, with the adapter or file that makes it another model."""
    arguments = run.model_args()
    given = next((arguments[key] for key in NAME_ARGS if arguments.get(key)), "")
    given = given or str(run.results.get("model_name") or run.run_config.get("model") or "model")
    name = last_part(given) or given
    if gguf := arguments.get("gguf_file"):
        name += f" {Path(gguf).stem}" if Path(gguf).stem.casefold() != name.casefold() else ""
    for key in ("peft", "delta", "lora_local_path"):
        if arguments.get(key):
            name += f" + {Path(arguments[key]).name}"
    # The bar parts a system's id into model, task and scorer.
    return name.replace("|", "¦")


def label(runs: list[Found]) -> None:
    """Gives every model and task a short name.

    A model's is longer only where two would be the same. A task's has the options with which it was
    asked, and those in which its runs differ, whichever model's they are.
    """
    by_name: dict[str, list[Found]] = defaultdict(list)
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
    by_task: dict[str, list[Found]] = defaultdict(list)
    for run in runs:
        by_task[run.task].append(run)
    for task, group in by_task.items():
        options = {run.identity(): run.task_options() for run in group}
        labels = _told_apart(task, options, shown=(*_ASKING, _SHOTS))
        for run in group:
            run.task_label = labels[run.identity()]


def _told_apart(
    name: str,
    options: Mapping[tuple[Any, ...], Mapping[str, str]],
    shown: Collection[str] = (),
) -> dict[tuple[Any, ...], str]:
    """The name, and behind it the options in which its bearers differ, and those always shown."""
    keys = sorted({key for one in options.values() for key in one})
    told = [
        key for key in keys if key in shown or len({one.get(key) for one in options.values()}) > 1
    ]
    labels = {}
    for identity, one in options.items():
        words = [f"{key}={one[key]}" for key in told if key in one]
        labels[identity] = f"{name} ({', '.join(words)})".replace("|", "¦") if words else name
    return labels


def last_part(path: str) -> str:
    """The last name in a path of any system."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]
