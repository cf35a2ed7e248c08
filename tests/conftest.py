"""Fixtures for data in the layout of ResearchBench."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_eval_hyprank.datasets.validation import DISCIPLINES, PAPERS_FILE, RANKING_FILE

Rows = list[dict[str, Any]]

ROOT = Path(__file__).parents[1]
TASK_CONFIGS = ROOT / "task_configs"


@pytest.fixture(scope="session")
def researchbench_dir() -> Path:
    """The real data, which may not be redistributed and so is not part of the repository."""
    named = os.environ.get("HYPRANK_RESEARCHBENCH")
    folder = Path(named) if named else ROOT.parent / "shared" / "data" / "researchbench"
    if not (folder / RANKING_FILE).is_file():
        pytest.skip(f"no ResearchBench data in {folder}; set HYPRANK_RESEARCHBENCH to its folder")
    return folder


@pytest.fixture
def ranking_rows() -> Rows:
    """Twelve valid rows of the ranking file, one a discipline."""
    return [
        {
            "sample_id": f"{discipline}/10{number}",
            "discipline": discipline,
            "doi": f"10.0/{number}",
            "research_question": f"What is question {number}?",
            "gold_hypothesis": f"Gold {number} holds.",
            "fake_negative_hypotheses": [f"Fake {number}.{index} holds." for index in range(5)],
            "model_negative_hypotheses": [f"Model {number}.{index} holds." for index in range(10)],
            "source_variant": "synthetic",
        }
        for number, discipline in enumerate(DISCIPLINES)
    ]


@pytest.fixture
def paper_rows(ranking_rows: Rows) -> Rows:
    """The rows of the papers file that belong to `ranking_rows`."""
    return [
        {
            "sample_id": row["sample_id"],
            "discipline": row["discipline"],
            "title": f"Title {number}",
            "background_survey": f"Survey {number} says what was known.",
        }
        for number, row in enumerate(ranking_rows)
    ]


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[[Rows, Rows], Path]:
    """Writes rows as a folder in the data set's layout."""

    def write(ranking: Rows, papers: Rows) -> Path:
        folder = tmp_path / "data"
        for file, rows in ((RANKING_FILE, ranking), (PAPERS_FILE, papers)):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / file).write_text(text, encoding="utf-8")
        return folder

    return write


@pytest.fixture
def valid_folder(
    write_folder: Callable[[Rows, Rows], Path], ranking_rows: Rows, paper_rows: Rows
) -> Path:
    """A folder with twelve valid papers."""
    return write_folder(ranking_rows, paper_rows)


def _small_model(name: str) -> Path:
    folder = ROOT / ".models" / name
    if not folder.is_dir():
        pytest.skip(f"no {folder}; `make models` gets it")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A small real model of the Llama family."""
    return _small_model("SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """A small real model with a sliding window and a vocabulary of 262,144."""
    return _small_model("gemma-3-270m")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """More threads than one only wait for each other over models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
