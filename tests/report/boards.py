"""Small made-up leaderboards for the tests of the statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

LABELS = ("gold", *(f"fake_{i}" for i in range(1, 6)), *(f"model_{i}" for i in range(1, 11)))


def candidate_rows(
    scores: Mapping[str, npt.ArrayLike],
    *,
    tokens: npt.ArrayLike | None = None,
    doi: Sequence[str | None] | None = None,
    kind: str = "energy",
) -> pd.DataFrame:
    """Rows of systems named ``model|task|scorer``; scores (papers, candidates), gold first."""
    parts = []
    for system, values in scores.items():
        array = np.asarray(values, dtype=float)
        papers, size = array.shape
        model, task, scorer = system.split("|")
        lengths = np.full(array.shape, 10) if tokens is None else np.asarray(tokens)
        columns: dict[str, Any] = {
            "system": system,
            "model": model,
            "task": task,
            "scorer": scorer,
            "kind": kind,
            "paper_id": np.repeat([f"p{number:05d}" for number in range(papers)], size),
            "discipline": "Math",
            "doi": np.repeat(np.array(doi or [None] * papers, dtype=object), size),
            "candidate_id": list(LABELS[:size]) * papers,
            "is_gold": ([True] + [False] * (size - 1)) * papers,
            "score": array.ravel(),
            "num_tokens": lengths.ravel(),
            "num_bytes": 4 * lengths.ravel(),
        }
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def paper_rows(
    values: npt.ArrayLike, doi: Sequence[object] | None = None, metric: str = "hit@1"
) -> pd.DataFrame:
    """Rows of systems ``s0000``, … with one metric; values (systems, papers)."""
    array = np.asarray(values, dtype=float)
    systems, papers = array.shape
    dois = [f"10.1/{paper}" for paper in range(papers)] if doi is None else list(doi)
    return pd.DataFrame(
        {
            "system": np.repeat([f"s{number:04d}" for number in range(systems)], papers),
            "paper_id": [f"p{number:05d}" for number in range(papers)] * systems,
            "doi": dois * systems,
            metric: array.ravel(),
        }
    )


def repeated_dois(clusters: int) -> list[str]:
    """DOIs of papers in clusters of 1, 1, 2, 1, 1, 2, …: a third more rows than publications."""
    return [f"10.1/{cluster}" for cluster in range(clusters) for _ in range(1 + (cluster % 3 == 2))]
