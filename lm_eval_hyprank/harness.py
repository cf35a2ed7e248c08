"""The one seam with lm-eval: what has to happen around an evaluation of our tasks.

lm-eval 0.4.13 has no plugin discovery and builds the model before it loads any task, so a task
loaded under ``--model hf`` meets a model that knows nothing of this package. `install` wraps
`lm_eval.evaluator.evaluate`, the function that has both the model and the tasks in hand; runs
without a task of ours pass through it untouched.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lm_eval.evaluator
from lm_eval.api.model import CachingLM
from lm_eval.api.task import Task
from lm_eval.evaluator_utils import get_sample_size

import lm_eval_hyprank
from lm_eval_hyprank import token_file
from lm_eval_hyprank.extras import Extras, union
from lm_eval_hyprank.filters import CandidateScore, EmbeddingScore
from lm_eval_hyprank.judge.asking import ask, check_judge, judge_fingerprint
from lm_eval_hyprank.judge.replies import JudgeRanking, JudgeVerdict, remedies
from lm_eval_hyprank.judge.scoring import figures, note
from lm_eval_hyprank.models.embedding import check_embeds
from lm_eval_hyprank.models.fingerprint import model_fingerprint
from lm_eval_hyprank.models.hf import EnergyHFLM, check_supported, score_requests
from lm_eval_hyprank.response_cache import cached_extras, check_cache, keep_answers_only

logger = logging.getLogger(__name__)


def install() -> None:
    """Wraps `lm_eval.evaluator.evaluate`; once for the process, whoever asks again."""
    if not hasattr(lm_eval.evaluator.evaluate, "without_hyprank"):
        lm_eval.evaluator.evaluate = _wrap(lm_eval.evaluator.evaluate)


def _wrap(evaluate: Any) -> Any:
    @functools.wraps(evaluate)
    def evaluate_with_hyprank(lm: Any, task_dict: Any, *args: Any, **kwargs: Any) -> Any:
        tasks = dict(_leaf_tasks(task_dict))
        scored = {n: task for n, task in tasks.items() if _has_filter(task, CandidateScore)}
        embedded = {n: task for n, task in tasks.items() if _has_filter(task, EmbeddingScore)}
        readers = (JudgeRanking, JudgeVerdict)
        judged = {n: task for n, task in tasks.items() if _has_filter(task, readers)}
        ours = scored | judged | embedded
        if not ours:
            return evaluate(lm, task_dict, *args, **kwargs)
        model = lm.lm if isinstance(lm, CachingLM) else lm
        if scored:
            check_supported(model)
        if embedded:
            check_embeds(model)
        if judged:
            check_judge(model, kwargs.get("apply_chat_template", False))
        check_items(model.world_size, ours, kwargs.get("limit"), kwargs.get("samples"))
        check_prompts(ours)
        if kwargs.get("cache_requests"):
            raise ValueError(
                "--cache_requests files prompts under the task's name alone, so a run with other "
                "data or another layout would be given the old ones; leave it out"
            )
        folders = token_folders(scored)
        fingerprint = (
            model.fingerprint()
            if embedded
            else model_fingerprint(model)
            if scored
            else judge_fingerprint(model)
        )
        answer: Callable[..., list[Any]]
        with ExitStack() as stack:
            extras = wanted_extras(scored, stored=bool(folders))
            if isinstance(lm, CachingLM):
                check_cache(lm, fingerprint)
                if scored:
                    extras = cached_extras(lm, extras)
                stack.enter_context(keep_answers_only(lm))
            # With gen_prefix the context ends with that text, and the separator has its place.
            headed = {
                name
                for name, task in scored.items()
                if kwargs.get("apply_chat_template") and not task.config.gen_prefix
            }
            if scored and not (isinstance(model, EnergyHFLM) and extras is None and not headed):
                answer = functools.partial(
                    score_requests, model, extras=extras, after_header=headed
                )
                stack.enter_context(_hook(model, "loglikelihood", scored.keys(), answer))
            if judged:
                answer = functools.partial(ask, model, model.generate_until)
                stack.enter_context(_hook(model, "generate_until", judged.keys(), answer))
            if model.world_size > 1:
                stack.enter_context(_metrics_of_all_ranks(model))
            # What is told of a judge is told from its samples, logged or not.
            options = kwargs | {"log_samples": True} if judged else kwargs
            results = evaluate(lm, task_dict, *args, **options)
        for name, folder in folders.items():
            made_by = {"task": name, "model_fingerprint": fingerprint}
            instances = scored[name].instances
            try:
                token_file.write(folder, model.rank, model.world_size, instances, made_by)
            except Exception as error:  # a full disk, say, shall not cost the results too
                logger.error("the values of %s's tokens are lost: %s", name, error)
        if results is not None:
            results["hyprank"] = {"version": lm_eval_hyprank.__version__}
            if fingerprint is not None:
                results["hyprank"]["model_fingerprint"] = fingerprint
            if scored or embedded:
                _annotate(results, (scored | embedded).keys(), model)
            if judged:
                _annotate_judged(results, judged.keys())
            if not kwargs.get("log_samples", True):
                results.pop("samples", None)
        return results

    evaluate_with_hyprank.without_hyprank = evaluate  # type: ignore[attr-defined]
    return evaluate_with_hyprank


def _has_filter(task: Any, kinds: type | tuple[type, ...]) -> bool:
    return any(
        _makes(make, kinds)
        for ensemble in getattr(task, "_filters", [])
        for make in ensemble.filters
    )


def _makes(make: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether what lm-eval keeps in place of a filter makes one of these kinds."""
    made = make.func if isinstance(make, functools.partial) else None
    return isinstance(made, type) and issubclass(made, kinds)


def _leaf_tasks(tasks: Any) -> Iterator[tuple[str, Task]]:
    """All tasks in what `evaluate` is given: lm-eval's `TaskDict` or its older nested form."""
    for name, value in tasks.get("tasks", tasks).items():
        if isinstance(value, dict):
            yield from _leaf_tasks(value)
        else:
            yield name, value


def check_items(
    world_size: int,
    tasks: Mapping[str, Task],
    limit: float | None,
    samples: Mapping[str, list[int]] | None,
) -> None:
    """Refuses a choice of items that lm-eval would take another way than it was meant.

    It skips negative indices of ``--samples`` and takes repeated ones once, without a word; and
    it gives each process its share of the items and fails on one that gets none, which leaves
    the others waiting for it.

    Raises:
        ValueError: An index is negative or repeated, or some process would have no item.
    """
    for name, task in tasks.items():
        chosen = (samples or {}).get(name)
        if chosen and (min(chosen) < 0 or len(set(chosen)) < len(chosen)):
            raise ValueError(
                f"--samples of {name} is {chosen}; give indices from 0, each of them once"
            )
        size = len(chosen) if chosen else len(task.eval_docs)
        if limit is not None:
            size = min(size, get_sample_size(task, limit))
        if size < world_size:
            raise ValueError(
                f"{name}: {size} item(s) for {world_size} processes; launch at most {size}, or "
                "evaluate more items"
            )


def check_prompts(tasks: Mapping[str, Task]) -> None:
    """Refuses what would change nothing, or what the tasks measure.

    Raises:
        ValueError: Few-shot examples or repeated requests are asked for.
    """
    for name, task in tasks.items():
        if task.config.num_fewshot:
            raise ValueError(
                f"{name} has no few-shot examples, and num_fewshot is {task.config.num_fewshot}. "
                "Take it out of the command (or the YAML), or run the other tasks apart"
            )
        if task.config.repeats > 1:
            raise ValueError(
                f"{name} has repeats: {task.config.repeats} in its YAML, of which the first alone "
                "would be read; take it out (a judge is asked several times by the tasks that end "
                "in _psc)"
            )


def wanted_extras(tasks: Mapping[str, Task], stored: bool) -> Extras | None:
    """What the tasks' scorers, or files to be stored, need of every token; None for sums."""
    scorers = [
        make()
        for task in tasks.values()
        for ensemble in task._filters
        for make in ensemble.filters
        if _makes(make, CandidateScore)
    ]
    return union([Extras() if stored else None, *(scorer.extras for scorer in scorers)])


def token_folders(tasks: Mapping[str, Task]) -> dict[str, Path]:
    """Where the values of the tasks' tokens are to be stored, by ``--metadata``'s `token_scores`.

    Raises:
        ValueError: It is no folder's name, some task's values are there already, or two tasks'
            would go to the same one.
    """
    folders: dict[str, Path] = {}
    for name, task in tasks.items():
        asked = (task.config.metadata or {}).get("token_scores")
        if asked is None:
            continue
        if not isinstance(asked, str) or not asked.strip():
            raise ValueError(
                f"token_scores is {asked!r}; name the folder that takes the values of the tokens: "
                """--metadata '{"token_scores": "DIR"}'"""
            )
        folder = token_file.folder_for(asked, name)
        for other, taken in folders.items():
            if folder == taken:
                raise ValueError(
                    f"the values of the tokens of {other} and {name} would both go to {folder}; "
                    "name another folder as token_scores of one of them"
                )
        folders[name] = folder
    return folders


@contextmanager
def _hook(
    model: Any, method: str, tasks: Collection[str], answer: Callable[..., list[Any]]
) -> Iterator[None]:
    """Has ``answer`` take a method's requests of ``tasks``, and the model the others."""
    stock = getattr(model, method)

    def split(requests: list[Any], **options: Any) -> list[Any]:
        ours = [i for i, request in enumerate(requests) if request.task_name in tasks]
        rest = [i for i, request in enumerate(requests) if request.task_name not in tasks]
        answers: dict[int, Any] = {}
        for indices, call in ((ours, answer), (rest, stock)):
            if indices:
                found = call([requests[i] for i in indices], **options)
                answers.update(zip(indices, found, strict=True))
        return [answers[i] for i in range(len(requests))]

    setattr(model, method, split)
    try:
        yield
    finally:
        delattr(model, method)


@contextmanager
def _metrics_of_all_ranks(model: Any) -> Iterator[None]:
    """Has the processes' metrics put together whichever of them has which.

    An invalid item has no Hit@k, so a process all of whose items are invalid has not even the
    name. lm-eval joins what the first process has names for: names of others are lost, and
    a name that another one lacks is an error, after all the work.
    """
    gather, process = model.gather_object, lm_eval.evaluator._process_results
    merged: dict[str, dict[Any, list[Any]]] = {}

    def gather_all(found: Any, dst: int = 0) -> Any:
        ranks = gather(found, dst)
        # Of what is gathered, the samples are lists by task and the metrics dictionaries.
        if ranks and all(isinstance(metrics, dict) for metrics in found.values()):
            for task in found:
                chained = itertools.chain.from_iterable
                names = dict.fromkeys(chained(rank[task] for rank in ranks))
                for rank in ranks:
                    rank[task] = {name: rank[task].get(name, []) for name in names}
                merged[task] = {n: list(chained(rank[task][n] for rank in ranks)) for n in names}
        return ranks

    def process_all(accumulated: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        for task, metrics in merged.items():
            accumulated[task]["raw_metrics"] = metrics
        return process(accumulated, *args, **kwargs)

    model.gather_object = gather_all
    lm_eval.evaluator._process_results = process_all
    try:
        yield
    finally:
        del model.gather_object
        lm_eval.evaluator._process_results = process


def _annotate(results: dict[str, Any], tasks: Set[str], model: Any) -> None:
    """Adds what the harness does not keep: token counts, cuts, and what produced the scores."""
    samples = results.get("samples") or {}
    for task in tasks & samples.keys():
        cut = set()
        for sample in samples[task]:
            scores = [resps[0] for resps in sample["resps"]]
            sample["num_tokens"] = [score.num_tokens for score in scores]
            sample["truncated"] = any(score.truncated for score in scores)
            if sample["truncated"]:
                cut.add(sample["doc_id"])
        if cut:
            logger.warning("%s: %d item(s) were scored on a text cut to fit", task, len(cut))
    engine = model.__dict__.get("_hyprank_engine")
    results["hyprank"] |= {
        "device": str(model.device),
        "prefix_reuse": engine.reuse.name if engine and engine.reuse else None,
    }


def _annotate_judged(results: dict[str, Any], tasks: Set[str]) -> None:
    """Adds to each sample what its replies say, and to the results how they came out."""
    results["hyprank"]["judge"] = {}
    for name in tasks:
        samples = results["samples"][name]
        for sample in samples:
            sample["judge"] = note(sample["doc"], sample["filtered_resps"])
        found = figures((sample["doc"], sample["filtered_resps"]) for sample in samples)
        results["hyprank"]["judge"][name] = found
        if found["invalid"]:
            reasons = ", ".join(f"{reason} ({n})" for reason, n in found["invalid"].items())
            logger.warning(
                "%s: %d of %d replies say nothing that can be scored: %s",
                name,
                found["replies"] - found["valid"],
                found["replies"],
                "; ".join([reasons, *remedies(found["invalid"])]),
            )
