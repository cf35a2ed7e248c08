"""What the YAML tasks call by name; importing it makes lm-eval know the whole package."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import datasets

from lm_eval_hyprank import harness
from lm_eval_hyprank.datasets import demo as _demo
from lm_eval_hyprank.datasets import generic as _generic
from lm_eval_hyprank.datasets import researchbench as _researchbench
from lm_eval_hyprank.datasets.documents import flag
from lm_eval_hyprank.datasets.findings import DatasetError
from lm_eval_hyprank.experts import process_results as process_expert_results
from lm_eval_hyprank.filters import chance
from lm_eval_hyprank.judge import prompts as _prompts
from lm_eval_hyprank.judge.prompts import render as judge_prompt
from lm_eval_hyprank.judge.scoring import listwise_results, pairwise_results, psc_results
from lm_eval_hyprank.judge.task import SeveralPrompts
from lm_eval_hyprank.metrics import process_results

__all__ = [
    "SeveralPrompts",
    "background_and_question",
    "chance",
    "continuations",
    "demo",
    "judge",
    "judge_pairwise",
    "judge_prompt",
    "judge_psc",
    "listwise_results",
    "pairwise_results",
    "process_expert_results",
    "process_results",
    "psc_results",
    "ranking_dataset",
    "researchbench",
]

_logger = logging.getLogger(__name__)

# The scorers, metrics and models register themselves where they are defined.
harness.install()


OPTIONS = ("dataset_path", "dataset_revision", "layout", "skip_invalid", "token_scores")
"""What ``--metadata`` may say about the data, the prompt and what is stored."""

# What --metadata may say about a judge's prompt, and what holds where it does not.
_JUDGE_OPTIONS: dict[str, Any] = {
    "template": None,
    "background": True,
    "order": "seed",
    "order_seed": 0,
    "num_orders": 5,
}

_RANKING_OPTIONS = frozenset(inspect.signature(_generic.load).parameters)


def _refuse_misspelt(names: Iterable[str], options: Sequence[str] = OPTIONS) -> None:
    """Stops on a name that is almost one of ours: ignored, it would change what is measured."""
    for name in (name for name in names if name not in options):
        for meant in difflib.get_close_matches(name, options, n=1, cutoff=0.8):
            raise DatasetError(
                f"--metadata (or the YAML's dataset_kwargs) has {name!r}, which is no option; "
                f"{meant!r} is"
            )


def _say_unused(options: Mapping[str, Any], names: Sequence[str], why: str) -> None:
    for name in (name for name in names if options.get(name)):
        _logger.warning("%s is not used: %s", name, why)


def _refuse_unused(options: Mapping[str, Any], names: Sequence[str], remedy: str) -> None:
    """Stops on what would seem to change what is measured: a report tells runs apart by it."""
    for name in (name for name in names if options.get(name)):
        raise DatasetError(f"--metadata has {name}, which does nothing here: {remedy}")


def _check_demos_own(options: Mapping[str, Any]) -> None:
    of_data = ("dataset_path", "dataset_revision", "skip_invalid")
    _say_unused(options, of_data, "the demo tasks have papers of their own")
    _refuse_unused(options, ("discipline",), "the demo has one paper of each; leave it out")


def researchbench(
    dataset_path: str | None = None,
    dataset_revision: str | None = None,
    discipline: str | None = None,
    layout: str = "inline",
    skip_invalid: bool | str = False,
    control: str | None = None,
    control_of: str | None = None,
    **others: Any,
) -> datasets.DatasetDict:
    """Loads ResearchBench for a task; the arguments come from ``--metadata`` and the YAML.

    lm-eval hands over the model's arguments in the same breath, which are ignored. That is why
    the data set's revision is not called ``revision``: it would be the model's.

    Raises:
        DatasetError: The data cannot be used, or an option is misspelt.
    """
    _refuse_misspelt(others)
    _refuse_lone_control(control, control_of)
    return _researchbench.load(
        dataset_path=dataset_path,
        dataset_revision=dataset_revision,
        discipline=discipline,
        layout=layout,
        skip_invalid=skip_invalid,
        control=control,
    )


def _refuse_lone_control(control: str | None, control_of: str | None) -> None:
    if control and not control_of:
        raise DatasetError(
            f"--metadata has control {control!r}, which would put a control's scores under the "
            "name of the task itself; run the tasks of a group such as researchbench_controls"
        )


def demo(
    layout: str = "inline",
    control: str | None = None,
    control_of: str | None = None,
    **others: Any,
) -> datasets.DatasetDict:
    """Loads the embedded demo set for a task; see `researchbench`."""
    _refuse_misspelt(others)
    _refuse_lone_control(control, control_of)
    _check_demos_own(others)
    return _demo.load(layout=layout, control=control)


def ranking_dataset(**arguments: Any) -> datasets.DatasetDict:
    """Loads any ranking data for a task; see `lm_eval_hyprank.datasets.generic.load`.

    Its arguments come from the YAML's ``dataset_kwargs``, and ``skip_invalid`` and
    ``dataset_revision`` from ``--metadata`` too; what else lm-eval hands over is ignored.

    Raises:
        DatasetError: The data cannot be used, or an argument is missing or misspelt.
    """
    _refuse_misspelt(arguments, sorted({*_RANKING_OPTIONS, *OPTIONS}))
    missing = [name for name in ("data", "prompt") if name not in arguments]
    if missing:
        raise DatasetError(f"the task's YAML lacks {missing[0]!r} in dataset_kwargs")
    _say_unused(arguments, ("dataset_path",), "the YAML's dataset_kwargs say where the data is")
    _refuse_unused(arguments, ("layout",), "write the prompt in the YAML's dataset_kwargs")
    _refuse_unused(arguments, ("discipline",), "write only: GROUP in the YAML's metadata")
    known = {name: value for name, value in arguments.items() if name in _RANKING_OPTIONS}
    return _generic.load(**known)


def judge(**options: Any) -> datasets.DatasetDict:
    """Loads the documents of a listwise judge; see `lm_eval_hyprank.judge.prompts.listwise`.

    From ``--metadata`` come the options of the data (``dataset_path``, ``dataset_revision``,
    ``skip_invalid``) and ``template``, ``background``, ``order`` and ``order_seed``.

    Raises:
        DatasetError: The data or the template cannot be used, or an option is none or misspelt,
            or another judge's.
    """
    return _judged("listwise", _prompts.listwise, options)


def judge_psc(**options: Any) -> datasets.DatasetDict:
    """Loads the documents of a judge asked in several orders; see `judge`.

    In place of ``order`` it takes ``num_orders``.
    """
    return _judged("several-orders", _prompts.several_orders, options)


def judge_pairwise(**options: Any) -> datasets.DatasetDict:
    """Loads the documents of a pairwise judge; see `judge`. It takes no order and no seed."""
    return _judged("pairwise", _prompts.pairwise, options)


def _judged(
    kind: str, make: Callable[..., datasets.DatasetDict], options: dict[str, Any]
) -> datasets.DatasetDict:
    _refuse_misspelt(options, [*_JUDGE_OPTIONS, *OPTIONS])
    taken = [name for name in _JUDGE_OPTIONS if name in inspect.signature(make).parameters]
    if others := [name for name in _JUDGE_OPTIONS if name in options and name not in taken]:
        raise DatasetError(
            f"--metadata (or the YAML's dataset_kwargs) has {', '.join(others)}, which a {kind} "
            f"judge does not take; it takes: {', '.join(taken)}. Leave it out, or run the tasks "
            "that take it in a command of their own"
        )
    _say_unused(options, ("layout",), "a judge's prompt is its template")
    data = ("dataset_path", "dataset_revision", "discipline", "skip_invalid")
    wanted = {name: options[name] for name in data if name in options}
    if options.get("demo"):  # said in the YAML
        wanted = {"dataset_path": _demo.FOLDER}
        _check_demos_own(options)
    prompt = {name: options.get(name, _JUDGE_OPTIONS[name]) for name in taken}
    prompt["background"] = flag(prompt["background"], "background")
    return make(_researchbench.load_papers(**wanted), **prompt)


def background_and_question(doc: dict[str, Any]) -> str:
    """The item's context without the label that asks a language model to go on."""
    context: str = doc["context"]
    return context.removesuffix("Hypothesis:").rstrip()


def continuations(doc: dict[str, Any]) -> list[str]:
    """The texts to score after the item's context: separator and candidate."""
    return [doc["separator"] + candidate for candidate in doc["candidates"]]
