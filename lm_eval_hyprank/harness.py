"""The one seam with lm-eval: what has to happen around an evaluation of our tasks.

lm-eval 0.4.13 has no plugin discovery and builds the model before it loads any task, so a task
loaded under ``--model hf`` meets a model that knows nothing of this package. `install` wraps
`lm_eval.evaluator.evaluate`, the function that has both the model and the tasks in hand; runs
without a task of ours pass through it untouched.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import lm_eval.evaluator
from lm_eval.api.model import CachingLM
from lm_eval.api.task import Task
from lm_eval.evaluator_utils import get_sample_size

import lm_eval_hyprank
from lm_eval_hyprank.filters import CandidateScore
from lm_eval_hyprank.models.hf import (
    EnergyHFLM,
    check_supported,
    model_fingerprint,
    score_requests,
)

logger = logging.getLogger(__name__)

CACHE_KEY = "hyprank:model"
"""Where a response cache keeps the fingerprint of the model that filled it."""


def install() -> None:
    """Wraps `lm_eval.evaluator.evaluate`; once for the process, whoever asks again."""
    if not hasattr(lm_eval.evaluator.evaluate, "without_hyprank"):
        lm_eval.evaluator.evaluate = _wrap(lm_eval.evaluator.evaluate)


def uninstall() -> None:
    """Puts lm-eval's own `evaluate` back."""
    lm_eval.evaluator.evaluate = getattr(
        lm_eval.evaluator.evaluate, "without_hyprank", lm_eval.evaluator.evaluate
    )


def _wrap(evaluate: Any) -> Any:
    @functools.wraps(evaluate)
    def evaluate_with_hyprank(lm: Any, task_dict: Any, *args: Any, **kwargs: Any) -> Any:
        tasks = {name: task for name, task in _leaf_tasks(task_dict) if reads_scores(task)}
        if not tasks:
            return evaluate(lm, task_dict, *args, **kwargs)
        model = lm.lm if isinstance(lm, CachingLM) else lm
        check_supported(model)
        check_items(model.world_size, tasks, kwargs.get("limit"), kwargs.get("samples"))
        if kwargs.get("cache_requests"):
            raise ValueError(
                "--cache_requests files prompts under the task's name alone, so a run with other "
                "data or another layout would be given the old ones; leave it out"
            )
        fingerprint = model_fingerprint(model)
        if isinstance(lm, CachingLM):
            check_cache(lm, fingerprint)
        with _hook(model, tasks.keys()):
            results = evaluate(lm, task_dict, *args, **kwargs)
        if results is not None:
            _annotate(results, tasks.keys(), model, fingerprint)
        return results

    evaluate_with_hyprank.without_hyprank = evaluate  # type: ignore[attr-defined]
    return evaluate_with_hyprank


def reads_scores(task: Any) -> bool:
    """Whether a task has a scorer of this package among its filters."""
    return any(
        isinstance(make.func, type) and issubclass(make.func, CandidateScore)
        for ensemble in getattr(task, "_filters", [])
        for make in ensemble.filters
        if isinstance(make, functools.partial)
    )


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


@contextmanager
def _hook(model: Any, tasks: Collection[str]) -> Iterator[None]:
    """Has the model answer requests of ``tasks`` with continuation scores, others as before."""
    if isinstance(model, EnergyHFLM):
        yield
        return
    stock = model.loglikelihood

    def loglikelihood(requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        ours = [i for i, request in enumerate(requests) if request.task_name in tasks]
        rest = [i for i, request in enumerate(requests) if request.task_name not in tasks]
        answers: dict[int, Any] = {}
        for indices, answer in ((ours, functools.partial(score_requests, model)), (rest, stock)):
            if indices:
                found = answer([requests[i] for i in indices], disable_tqdm=disable_tqdm)
                answers.update(zip(indices, found, strict=True))
        return [answers[i] for i in range(len(requests))]

    model.loglikelihood = loglikelihood
    try:
        yield
    finally:
        del model.loglikelihood


def check_cache(cache: CachingLM, fingerprint: str) -> None:
    """Refuses a response cache that another model, or stock lm-eval, has written to.

    lm-eval files responses under the prompt alone, so a second model on the same path would be
    given the first one's scores. The cache of a run of ours carries its model's fingerprint.

    Raises:
        ValueError: The cache holds responses that are not known to be this model's.
    """
    written_by = cache.dbdict.get(CACHE_KEY)
    if written_by is None and not len(cache.dbdict):
        cache.dbdict[CACHE_KEY] = fingerprint
        cache.dbdict.commit()
    elif written_by != fingerprint:
        who = (
            "a run that kept no record of its model"
            if written_by is None
            else f"another model, or the same with other weights or settings ({written_by}; this "
            f"one is {fingerprint})"
        )
        raise ValueError(
            f"the response cache {cache.cache_db} was written by {who}; its responses would be "
            "taken for this model's. Give --use_cache a path of its own for each model, or delete "
            "the file."
        )


def _annotate(results: dict[str, Any], tasks: Set[str], model: Any, fingerprint: str) -> None:
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
            logger.warning("%s: %d item(s) were scored on a context cut to fit", task, len(cut))
    engine = model.__dict__.get("_hyprank_engine")
    results["hyprank"] = {
        "version": lm_eval_hyprank.__version__,
        "model_fingerprint": fingerprint,
        "device": str(model.device),
        "prefix_reuse": engine.reuse.name if engine and engine.reuse else None,
    }
