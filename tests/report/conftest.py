"""One folder of made-up runs of every kind, and the report of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lm_eval_hyprank.report.build import build_report
from lm_eval_hyprank.report.intervals import Settings
from lm_eval_hyprank.report.runs import read_runs
from tests.report.run_folder import (
    IDS,
    TASK,
    documents,
    nan_for,
    scores_of,
    write_energy,
    write_judge,
    write_pairwise,
    write_psc,
)

SCORERS = {"nll": "nll", "raw": "raw", "nll_sum": "nll_sum", "shortest": "num_bytes"}


def with_sums(seed: str, skill: float = 0.8) -> Any:
    """The three scorers and `nll_sum`."""

    def scores(doc: dict[str, Any]) -> dict[str, list[float]]:
        found = scores_of(seed, doc, skill)
        lengths = [len(text.split()) for text in doc["candidates"]]
        sums = [score * n for score, n in zip(found["nll"], lengths, strict=True)]
        return found | {"nll_sum": sums}

    return scores


def shuffled(doc: dict[str, Any], order: int = 0) -> list[str] | None:
    """A judge's five, by chance; None for some."""
    draw = random.Random(f"{doc['paper_id']} {order}")
    ids = draw.sample(IDS, 5)
    return None if doc["paper_id"] == "Law/10002" and order == 0 else ids


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models (one with an invalid paper), a control, and judges of all kinds."""
    folder = tmp_path_factory.mktemp("every") / "runs"
    write_energy(folder, scores=with_sums("one"), scorers=SCORERS)
    write_energy(folder, date="2025-01-01T00-00-00", scores=with_sums("old"), scorers=SCORERS)
    write_energy(
        folder,
        task=f"{TASK}_nocontext",
        scores=with_sums("none", 0.1),
        scorers=SCORERS,
        metadata={"control": "no_context", "control_of": TASK},
    )
    write_energy(folder, "acme/Lark-3B", scores=nan_for(documents()[1]["paper_id"]))
    write_judge(folder, shuffled)
    write_psc(folder, shuffled)
    write_pairwise(folder, lambda doc, other, first: None if other == "fake_1" else first)
    return folder


@pytest.fixture(scope="session")
def report(runs_folder: Path) -> dict[str, Any]:
    """The report of `runs_folder`."""
    return build_report(read_runs([runs_folder]), Settings(resamples=200))
