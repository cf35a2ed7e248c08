"""What the YAML tasks call by name; importing it makes lm-eval know the whole package."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import datasets

from lm_eval_hyprank import harness
from lm_eval_hyprank.datasets import demo as _demo
from lm_eval_hyprank.datasets import researchbench as _researchbench
from lm_eval_hyprank.datasets.validation import DatasetError
from lm_eval_hyprank.metrics import process_results

__all__ = ["continuations", "demo", "process_results", "researchbench"]

# The scorers, metrics and models register themselves where they are defined.
harness.install()


OPTIONS = ("dataset_path", "dataset_revision", "layout", "skip_invalid")
"""What ``--metadata`` may say about the data and the prompt."""


def _refuse_misspelt(names: Iterable[str]) -> None:
    """Stops on a name that is almost one of ours: ignored, it would change what is measured."""
    for name in names:
        for meant in difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.8):
            raise DatasetError(f"--metadata has {name!r}, which is no option; {meant!r} is")


def researchbench(
    dataset_path: str | None = None,
    dataset_revision: str | None = None,
    discipline: str | None = None,
    layout: str = "inline",
    skip_invalid: bool | str = False,
    **others: Any,
) -> datasets.DatasetDict:
    """Loads ResearchBench for a task; the arguments come from ``--metadata`` and the YAML.

    lm-eval hands over the model's arguments in the same breath, which are ignored. That is why
    the data set's revision is not called ``revision``: it would be the model's.

    Raises:
        DatasetError: The data cannot be used, or an option is misspelt.
    """
    _refuse_misspelt(others)
    return _researchbench.load(
        dataset_path=dataset_path,
        dataset_revision=dataset_revision,
        discipline=discipline,
        layout=layout,
        skip_invalid=skip_invalid,
    )


def demo(layout: str = "inline", **others: Any) -> datasets.DatasetDict:
    """Loads the embedded demo set for a task; see `researchbench`."""
    _refuse_misspelt(others.keys() - set(OPTIONS))
    return _demo.load(layout=layout)


def continuations(doc: dict[str, Any]) -> list[str]:
    """The texts to score after the item's context: separator and candidate."""
    return [doc["separator"] + candidate for candidate in doc["candidates"]]
