"""What the documents of all our tasks have in common."""

from __future__ import annotations

import hashlib
import random

import datasets

from lm_eval_hyprank.datasets.findings import DatasetError

FEATURES = datasets.Features(
    {
        "paper_id": datasets.Value("string"),
        "discipline": datasets.Value("string"),
        "doi": datasets.Value("string"),
        "title": datasets.Value("string"),
        "context": datasets.Value("string"),
        "separator": datasets.Value("string"),
        "candidates": datasets.Sequence(datasets.Value("string")),
        "candidate_ids": datasets.Sequence(datasets.Value("string")),
        "gold": datasets.Value("int64"),
    }
)


def shuffled(sample_id: str, size: int) -> list[int]:
    """Returns the numbers below `size` in an order that the sample_id alone decides.

    It is the same in every process, on every Python version and in every choice of papers.
    """
    seed = int.from_bytes(digest(sample_id), "big")
    # `random()` is the one method whose sequence Python promises to keep; `shuffle` is not.
    generator = random.Random(seed)
    keys = [generator.random() for _ in range(size)]
    return sorted(range(size), key=keys.__getitem__)


def digest(*parts: str) -> bytes:
    """What decides by its parts alone, the same in every process."""
    return hashlib.sha256("\n".join(parts).encode("utf-8")).digest()


def flag(value: bool | str, name: str = "skip_invalid") -> bool:
    """Returns the truth value of a flag given as JSON or as key=value."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise DatasetError(f"{name} is {value!r}; use true or false")
