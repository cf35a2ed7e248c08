"""The demo data that ships with the package, in the layout of ResearchBench."""

from __future__ import annotations

from pathlib import Path

import datasets

from lm_eval_hyprank.datasets import researchbench

FOLDER = Path(__file__).parent / "demo_data"


def load(layout: str = "inline", control: str | None = None) -> datasets.DatasetDict:
    """Loads the demo papers as documents.

    Args:
        layout: The prompt's layout, "inline" or "block".
        control: As of `lm_eval_hyprank.datasets.researchbench.load`. The demo has one paper a
            discipline, so "shuffled_context" takes one of another discipline.

    Returns:
        The split "test", as of `lm_eval_hyprank.datasets.researchbench.load`.

    Raises:
        DatasetError: The layout or the control is unknown.
    """
    return researchbench.load(
        dataset_path=FOLDER, layout=layout, control=control, other_disciplines=True
    )
