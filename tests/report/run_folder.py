"""Output folders as lm-eval leaves them, made up: any scores, any judge, no model."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from lm_eval_hyprank.judge.replies import Reading
from lm_eval_hyprank.judge.scoring import (
    listwise_results,
    note,
    pairwise_results,
    psc_results,
)
from lm_eval_hyprank.metrics import process_results

IDS = ["gold"] + [f"fake_{n}" for n in range(1, 6)] + [f"model_{n}" for n in range(1, 11)]
DISCIPLINES = ("Math", "Physics", "Law", "Biology")
TASK = "researchbench_energy"
SCORERS = {"nll": "nll", "raw": "raw", "shortest": "num_bytes"}
"""Filter names, and what each reads; of `write_energy` nothing makes it a filter of one's own."""

Doc = dict[str, Any]
Metrics = Callable[[str, Doc, Any], dict[str, float]]


def documents(papers: int = 8, layout: str = "inline", shown: int = 0) -> list[Doc]:
    """Documents of one paper set; `shown` shuffles the candidates another way."""
    docs = []
    join = {"inline": " ", "block": "\n"}[layout]
    for number in range(papers):
        texts = {
            name: f"{name} of {number} <b>& $x_{{{place}}}$</b>{' holds' * (1 + place % 5)}"
            for place, name in enumerate(IDS)
        }
        ids = IDS.copy()
        random.Random(1000 * shown + number).shuffle(ids)
        discipline = DISCIPLINES[number % len(DISCIPLINES)]
        docs.append(
            {
                "paper_id": f"{discipline}/10{number:03d}",
                "discipline": discipline,
                # Two rows of one publication, as the data set has.
                "doi": f"10.0/{number - (number == 5)}",
                "title": f"Title {number} | of `one`",
                "context": f"Background:{join}Survey {number}.\nHypothesis:",
                "separator": " ",
                "candidates": [texts[name] for name in ids],
                "candidate_ids": ids,
                "gold": ids.index("gold"),
            }
        )
    return docs


def scores_of(seed: str, doc: Doc, skill: float = 0.8) -> dict[str, list[float]]:
    """Scores of the three scorers; the gold's are better by `skill`."""
    draw = random.Random(f"{seed} {doc['paper_id']}")
    ids = doc["candidate_ids"]
    by_id = {name: draw.gauss(3.0 - skill * (name == "gold"), 0.5) for name in sorted(ids)}
    logz = {name: draw.gauss(20.0, 1.0) for name in sorted(ids)}
    return {
        "nll": [by_id[name] for name in ids],
        "raw": [by_id[name] - logz[name] for name in ids],
        "shortest": [float(len(text.encode())) for text in doc["candidates"]],
    }


def write_energy(
    folder: Path,
    model: str = "acme/Lark-1B",
    *,
    docs: Sequence[Doc] | None = None,
    scores: Callable[[Doc], Mapping[str, Sequence[float]]] | None = None,
    scorers: Mapping[str, str] = SCORERS,
    task: str = TASK,
    **options: Any,
) -> Path:
    """Writes a run of an energy task; see `write` for the options."""
    docs = documents() if docs is None else docs
    lines = []
    for name in scorers:
        for number, doc in enumerate(docs):
            own = (scores or (lambda doc: scores_of(model, doc)))(doc)[name]
            metrics = process_results(doc, own)
            lines.append(
                {
                    "doc_id": number,
                    "doc": doc,
                    "target": str(doc["gold"]),
                    "arguments": {},
                    "resps": [[["-1.0", "False"]] for _ in doc["candidates"]],
                    "filtered_resps": [str(score) for score in own],
                    "filter": name,
                    "metrics": list(metrics),
                    **metrics,
                    "num_tokens": [len(text.split()) for text in doc["candidates"]],
                    "truncated": False,
                }
            )
    custom = {"function": "custom", "filter_fn": "<function chance at 0x7f00>"}
    filters = [
        {
            "name": name,
            "filter": [custom if reads == "" else {"function": "candidate_score", "score": reads}],
        }
        for name, reads in scorers.items()
    ]
    return write(folder, model, task, lines, {"filter_list": filters}, **options)


def write_judge(
    folder: Path,
    rank: Callable[[Doc], list[str] | None],
    model: str = "gpt-x",
    *,
    docs: Sequence[Doc] | None = None,
    task: str = "researchbench_judge",
    **options: Any,
) -> Path:
    """Writes a run of a listwise judge; `rank` names its five, or gives None for no answer."""
    lines = []
    for number, doc in enumerate(documents(shown=1) if docs is None else docs):
        named = rank(doc)
        ids = doc["candidate_ids"]
        reading = (
            Reading(None, "refusal: no")
            if named is None
            else Reading([ids.index(n) for n in named])
        )
        metrics = listwise_results(doc, [reading])
        told = note(doc | {"orders": []}, [reading])
        lines.append(_judge_line(number, doc | {"order": "seed:0"}, metrics, told))
    config = _judge_config(listwise_results)
    return write(folder, model, task, lines, config, source="openai", **options)


def write_psc(
    folder: Path,
    rank: Callable[[Doc, int], list[str] | None],
    model: str = "gpt-x",
    *,
    orders: int = 3,
    **options: Any,
) -> Path:
    """Writes a run of a judge asked in several orders."""
    lines = []
    for number, plain in enumerate(documents()):
        views = [
            random.Random(f"{number} {order}").sample(range(16), 16) for order in range(orders)
        ]
        doc = plain | {"orders": views}
        ids = doc["candidate_ids"]
        readings = []
        for order, view in enumerate(views):
            named = rank(doc, order)
            shown = [ids[index] for index in view]
            readings.append(
                Reading(None, "refusal: no")
                if named is None
                else Reading([shown.index(name) for name in named])
            )
        metrics = psc_results(doc, readings)
        lines.append(_judge_line(number, doc, metrics, note(doc, readings)))
    config = _judge_config(psc_results)
    return write(
        folder, model, "researchbench_judge_psc", lines, config, source="openai", **options
    )


def write_pairwise(
    folder: Path,
    prefers_first: Callable[[Doc, str, bool], bool | None],
    model: str = "gpt-x",
    **options: Any,
) -> Path:
    """Writes a run of a pairwise judge, asked of a negative with the gold first and second."""
    lines = []
    for number, plain in enumerate(documents()):
        gold, ids = plain["gold"], plain["candidate_ids"]
        others = [index for index in range(16) if index != gold]
        doc = plain | {"orders": [p for i in others for p in ([gold, i], [i, gold])]}
        readings = []
        for left, right in doc["orders"]:
            first = prefers_first(doc, ids[right if left == gold else left], left == gold)
            readings.append(Reading(None, "empty") if first is None else Reading(int(not first)))
        metrics = pairwise_results(doc, readings)
        lines.append(_judge_line(number, doc, metrics, note(doc, readings)))
    config = _judge_config(pairwise_results, "judge_verdict")
    return write(folder, model, "researchbench_pairwise", lines, config, source="openai", **options)


def _judge_line(number: int, doc: Doc, metrics: dict[str, float], note: Any) -> dict[str, Any]:
    return {
        "doc_id": number,
        "doc": doc,
        "filter": "judge",
        "resps": [["a reply"]],
        "filtered_resps": ["a reply"],
        "metrics": list(metrics),
        **metrics,
        "judge": note,
    }


def _judge_config(results: Callable[..., Any], reader: str = "judge_ranking") -> dict[str, Any]:
    filters = [{"name": "judge", "filter": [{"function": reader}]}]
    return {"filter_list": filters, "process_results": inspect.getsource(results)}


def write(
    folder: Path,
    model: str,
    task: str,
    lines: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    *,
    date: str = "2026-01-02T03-04-05.000006",
    total: int | None = None,
    version: float = 1.0,
    fingerprint: str | None = "",
    source: str = "hf",
    model_args: Mapping[str, str] | str | None = None,
    metadata: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a results file and its samples file.

    Args:
        folder: The ``--output_path``.
        model: What lm-eval was given as ``pretrained`` or ``model``.
        task: The task.
        lines: The samples.
        config: The task's configuration beside its name.
        date: As in the files' names.
        total: Number of papers in the task, more than in the run after ``--limit``.
        version: The task's version.
        fingerprint: The model's; of its name by default, None for a run that recorded none.
        source: lm-eval's name for the kind of model.
        model_args: More arguments of the model, or all of them as one text.
        metadata: More of the task's metadata.
        more: Further keys of the results file.

    Returns:
        The results file.
    """
    place = folder / model.replace("/", "__")
    place.mkdir(parents=True, exist_ok=True)
    papers = len({line["doc_id"] for line in lines})
    values: dict[str, list[float]] = {}
    for line in lines:
        for metric in line["metrics"]:
            values.setdefault(f"{metric},{line['filter']}", []).append(line[metric])
    row: dict[str, Any] = {"alias": task}
    for key, items in values.items():
        metric, scorer = key.split(",")
        row[key] = fmean(items)
        row[f"{metric}_stderr,{scorer}"] = 0.1 if len(items) > 1 else "N/A"
    name = "pretrained" if source in ("hf", "vllm") else "model"
    arguments = model_args if isinstance(model_args, str) else {name: model, **(model_args or {})}
    if fingerprint == "":
        known = f"{model} {model_args}".encode()
        fingerprint = hashlib.sha256(known).hexdigest()[:16] if source == "hf" else None
    results = {
        "results": {task: row},
        "group_subtasks": {},
        "configs": {
            task: {
                "task": task,
                **config,
                "metadata": {
                    "version": version,
                    **(arguments if isinstance(arguments, dict) else {}),
                    **config.get("metadata", {}),
                    **(metadata or {}),
                },
            }
        },
        "versions": {task: version},
        "n-shot": {task: 0},
        "n-samples": {task: {"original": total or papers, "effective": papers}},
        "config": {
            "model": source,
            "model_args": arguments,
            "model_num_parameters": 1000,
            "model_dtype": "torch.float32",
        },
        "date": datetime.strptime(date[:19], "%Y-%m-%dT%H-%M-%S").timestamp(),
        "lm_eval_version": "0.4.13",
        "transformers_version": "5.24.0",
        "model_source": source,
        "model_name": model,
        "chat_template_sha": None,
        "system_instruction_sha": None,
        **(
            {"hyprank": {"version": "0.1.0", "model_fingerprint": fingerprint}}
            if fingerprint
            else {}
        ),
        **(more or {}),
    }
    file = place / f"results_{date}.json"
    if file.exists():  # several tasks of one run
        former = json.loads(file.read_text(encoding="utf-8"))
        for key in ("results", "configs", "versions", "n-shot", "n-samples"):
            results[key] = former[key] | results[key]
    file.write_text(json.dumps(results, indent=2), encoding="utf-8")
    samples = place / f"samples_{task}_{date}.jsonl"
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    samples.write_text(text, encoding="utf-8")
    return file


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Changes a JSON file in place."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def samples_of(results: Path, task: str = TASK) -> Path:
    """The samples file that belongs to a results file."""
    return results.with_name(f"samples_{task}_{results.stem.removeprefix('results_')}.jsonl")


def nan_for(paper_id: str, seed: str = "acme/Lark-1B") -> Callable[[Doc], dict[str, list[float]]]:
    """Scores without a number for one candidate of a paper."""

    def scores(doc: Doc) -> dict[str, list[float]]:
        found = scores_of(seed, doc)
        if doc["paper_id"] == paper_id:
            found = {name: [math.nan, *own[1:]] for name, own in found.items()}
        return found

    return scores
