"""The values of every token in files, so that a new score needs no new run of the model.

A task's folder holds one parquet file for each process of the run; pandas, datasets and duckdb
read the folder as one table. One row is one candidate.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

import lm_eval_hyprank
from lm_eval_hyprank.scores import VALUES, ContinuationScore, TokenValues

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance


def folder_for(folder: str, task: str) -> Path:
    """Returns the folder of a task's files, below the one that the user named.

    Raises:
        ValueError: There are files in it already: of another model perhaps, so they are kept.
    """
    path = Path(folder).expanduser() / re.sub(r"[^A-Za-z0-9._-]", "_", task)
    if any(path.glob("*.parquet")):
        raise ValueError(
            f"{path} holds values of tokens already; name another folder as token_scores, or "
            "delete this one"
        )
    path.mkdir(parents=True, exist_ok=True)  # before the long run, not after it
    return path


def write(
    folder: Path,
    rank: int,
    world_size: int,
    instances: Sequence[Instance],
    made_by: Mapping[str, str | None],
) -> None:
    """Writes the candidates of one process: the whole file or, on a failure, none.

    Args:
        folder: From `folder_for`.
        rank: The process's number.
        world_size: The number of processes.
        instances: Requests that are answered by a `ContinuationScore` with token values.
        made_by: What else the file's metadata says of its origin.
    """
    rows = [_row(instance) for instance in instances]
    extra = sorted({name for row in rows for name in row.keys() - _SCHEMA.keys()})
    schema = pa.schema({**_SCHEMA, **{name: pa.list_(pa.float32()) for name in extra}})
    origin = {"version": lm_eval_hyprank.__version__, **made_by}
    table = pa.Table.from_pylist(rows, schema.with_metadata({"hyprank": json.dumps(origin)}))
    path = folder / f"{rank:05}-of-{world_size:05}.parquet"
    # What reads a folder passes over names with a dot in front.
    unfinished = folder / f".{path.name}.{os.getpid()}"
    try:
        pq.write_table(table, unfinished, compression="zstd")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def token_values(row: Mapping[str, Any] | pd.Series) -> TokenValues:
    """The values of one row of a file, as the scores of `lm_eval_hyprank.scores` take them."""
    values = {
        str(name): np.asarray(value, dtype=np.float32)
        for name, value in row.items()
        if name in VALUES or (name not in _SCHEMA and isinstance(value, np.ndarray | list))
    }
    return TokenValues(
        token_ids=np.asarray(row["token_ids"], dtype=np.int32),
        **{name: values.pop(name) for name in VALUES},
        extra=values,
    )


_SCHEMA = {
    "paper_id": pa.string(),
    "candidate_id": pa.string(),
    "candidate": pa.int32(),
    "gold": pa.bool_(),
    "num_tokens": pa.int32(),
    "num_bytes": pa.int32(),
    "num_zlib_bytes": pa.int32(),
    "truncated": pa.bool_(),
    "token_ids": pa.list_(pa.int32()),
    **{name: pa.list_(pa.float32()) for name in VALUES},
}


def _row(instance: Instance) -> dict[str, Any]:
    doc, score = instance.doc, instance.resps[0]
    assert isinstance(score, ContinuationScore)
    # A stock task's documents have no names for items and candidates.
    names, gold = doc.get("candidate_ids"), doc.get("gold")
    row: dict[str, Any] = {
        "paper_id": str(doc.get("paper_id", instance.doc_id)),
        "candidate_id": str(names[instance.idx] if names else instance.idx),
        "candidate": instance.idx,
        "gold": instance.idx in np.atleast_1d(gold) if isinstance(gold, int | list) else None,
        "num_tokens": score.num_tokens,
        "num_bytes": score.num_bytes,
        "num_zlib_bytes": score.num_zlib_bytes,
        "truncated": score.truncated,
    }
    if score.tokens is not None:  # a candidate too long for the model has no values
        row["token_ids"] = score.tokens.token_ids
        row |= {name: score.tokens[name] for name in (*VALUES, *score.tokens.extra)}
    return row
