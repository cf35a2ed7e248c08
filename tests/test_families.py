"""Every family that transformers loads as a causal language model against its plain forward.

The outcome is `docs/model_families.md`; `HYPRANK_WRITE_FAMILIES=1` writes it anew.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lm_eval_hyprank.batching import Batching
from lm_eval_hyprank.prefix import Engine, Row, _CopiedPrefix, _SharedPrefix
from tests import families, tiny

PAGE = Path(__file__).parents[1] / "docs" / "model_families.md"
WRITE = os.environ.get("HYPRANK_WRITE_FAMILIES") == "1"

PREFIXES = (
    1,
    2,
    *range(families.WINDOW - 2, families.WINDOW + 2),
    *range(2 * families.WINDOW - 1, 2 * families.WINDOW + 2),
    20,
)
CONTINUATIONS = (12, 7, 3, 2, 1, 1)
WINDOW_NAMES = (
    "attention_chunk_size",
    "attention_window_size",
    "sliding_window",
    "sliding_window_size",
    "window_size",
)
WITHOUT_WINDOW = {"moshi", "nemotron_h", "smollm3"}
"""Families whose configuration names a window that the small model has no use for."""


class Outcome(NamedTuple):
    model: str
    prefix: str
    error: float
    note: str


def committed() -> tuple[str, dict[str, str]]:
    """The transformers version of the committed page, and how each family's prefix is used."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.is_file() else []
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
    measured = next((line.split()[-1].strip(".") for line in lines if "Measured" in line), "")
    return measured, {row[0]: row[2] for row in cells if len(row) == 5}


MEASURED, KNOWN = committed()
KNOWN_VERSION = WRITE or version("transformers") == MEASURED


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="session")
def outcomes() -> Iterator[dict[str, Outcome]]:
    """What the session finds, written to the page at its end where that was asked for."""
    found: dict[str, Outcome] = {}
    yield found
    if WRITE and found.keys() == set(families.FAMILIES):
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(found), encoding="utf-8")


def page(outcomes: dict[str, Outcome]) -> str:
    rows = "\n".join(
        f"| `{family}` | {found.model} | {found.prefix} | {found.error:.0e} | {found.note} |"
        for family, found in sorted(outcomes.items())
    )
    count = {mode: sum(o.prefix == mode for o in outcomes.values()) for mode in _MODES}
    unscored = "\n".join(
        f"| `{family}` | {reason} |"
        for family, reason in sorted({**families.REFUSED, **families.UNTESTED}.items())
    )
    lengths = ", ".join(map(str, PREFIXES))
    return f"""# Model families

Written by `HYPRANK_WRITE_FAMILIES=1 pytest tests/test_families.py`; do not edit by hand.
Measured on a CPU in float32 with transformers {version("transformers")}.

A small model with random weights of every family that transformers loads as a causal language
model is scored by the engine, and by the model's plain forward pass, one sequence at a time and
without padding. Prefixes have {lengths} tokens, continuations 1 to {max(CONTINUATIONS)},
batches three sequences; local attention sees {families.WINDOW} tokens. *Largest error* is the
largest difference of a continuation's mean NLL or mean raw energy, in nats.

How the prefix of a group of candidates is used is found out on the loaded model, by its
self-check; nothing here is a list that the program reads:

- **shared** ({count["shared"]}): computed once, its keys and values read by every batch;
- **copied** ({count["copied"]}): computed once, its state copied for every batch;
- **whole** ({count["whole"]}): no reuse reproduces the plain forward pass, so every candidate
  takes a full one: slower, and just as right.

| Family | Model class | Prefix | Largest error | Note |
|---|---|---|---|---|
{rows}

## Not scored

| Family | Why |
|---|---|
{unscored}
"""


_MODES = {"shared": 1e-5, "copied": 1e-4, "whole": 1e-4}
"""How a prefix is used, and the largest error of a mean score that is allowed."""


def tokens(count: int, seed: int) -> list[int]:
    """Random tokens that are no special ones."""
    return random.Random(seed).choices(range(3, families.VOCABULARY), k=count)


def small(family: str, **changes: Any) -> Any:
    """The family's small model; where another version of transformers has none, a skip."""
    if KNOWN_VERSION:
        return families.build(family, **changes)
    try:
        model = families.build(family, **changes)
        long, short = (
            tiny.plain_scores(model, Row(tokens(2, 0), tokens(count, 1))) for count in (80, 3)
        )
    except Exception as error:
        pytest.skip(f"no small model with this version of transformers: {error}")
    if not torch.allclose(long.logz[:3], short.logz, rtol=0, atol=1e-4):
        pytest.skip("not causal in this version of transformers")
    return model


def engine_of(model: Any) -> Engine:
    """An engine that shares every prefix it can, in batches of three."""
    return Engine(model, torch.device("cpu"), Batching(3, 512, min_saving=1))


def groups(*lengths: int) -> list[Row]:
    """For each prefix length a group of continuations of several lengths."""
    return [
        Row(tokens(length, length), tokens(count, 100 * length + place))
        for length in lengths
        for place, count in enumerate(CONTINUATIONS)
    ]


def largest_error(model: Any, engine: Engine, rows: list[Row]) -> float:
    found = dict(pair for part in engine.score(rows) for pair in part)
    assert sorted(found) == list(range(len(rows)))
    worst = 0.0
    for index, row in enumerate(rows):
        expected = tiny.plain_scores(model, row)
        for name in ("nll", "raw"):
            off = getattr(found[index], name).mean() - getattr(expected, name).mean()
            worst = max(worst, float(off.abs().nan_to_num(nan=math.inf)))
    return worst


@pytest.mark.parametrize("family", families.FAMILIES)
def test_scores_equal_the_plain_forward(family, outcomes, caplog):
    model = small(family)
    assert Batching.for_model(model, torch.device("cpu"), None).max_tokens > 0
    engine = engine_of(model)
    with caplog.at_level(logging.WARNING, logger="lm_eval_hyprank"):
        engine.check(Row(tokens(60, 0), tokens(12, 1)))
    prefix = engine.reuse.name if engine.reuse else "whole"
    warnings = [record.getMessage() for record in caplog.records if "reused" in record.message]
    assert len(warnings) == (prefix == "whole")
    error = largest_error(model, engine, groups(*PREFIXES))
    assert error <= (_MODES[prefix] if KNOWN_VERSION else 1e-4)
    outcomes[family] = Outcome(type(model).__name__, prefix, error, note(family, model, warnings))
    if KNOWN_VERSION and not WRITE:
        assert KNOWN[family] == prefix, "docs/model_families.md is out of date"


def note(family: str, model: Any, warnings: list[str]) -> str:
    notes = []
    if getattr(model.config, "is_decoder", False):
        notes.append("configured as a decoder")
    if family not in WITHOUT_WINDOW and window(model.config.get_text_config()):
        notes.append("local attention")
    if warnings:
        reason = warnings[0].split("copied: ")[-1].rstrip(")")
        notes.append("reuse " + ("is wrong" if reason.startswith("off by") else "fails"))
    if family == "reformer":
        notes.append("hashes at random once a text is long, and is then refused")
    return ", ".join(notes)


def window(config: Any) -> dict[str, int]:
    """The fields that set the width of local attention, with a width that means everything."""
    return {name: 4096 for name in WINDOW_NAMES if getattr(config, name, None) == families.WINDOW}


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_prefix_or_window_ignored_would_show(family):
    """The models' attention matters: these tests would notice a part of the prefix missing."""
    model = small(family)
    prefix, continuation = tokens(20, 0), tokens(12, 1)
    scores = tiny.plain_scores(model, Row(prefix, continuation)).nll
    other = tiny.plain_scores(model, Row([*tokens(16, 2), *prefix[16:]], continuation)).nll
    # Ten times what the tests allow, at one token at least.
    assert (scores - other).abs().max() > 1e-3
    wide = window(families.configuration(family))
    if wide and family not in WITHOUT_WINDOW and KNOWN_VERSION:
        unlimited = tiny.plain_scores(small(family, **wide), Row(prefix, continuation)).nll
        assert (scores - unlimited).abs().max() > 1e-3


@pytest.mark.parametrize("way", [_SharedPrefix, _CopiedPrefix])
@pytest.mark.parametrize(
    "family", ["mamba", "falcon_mamba", "jamba", "recurrent_gemma", "rwkv", "openai-gpt"]
)
def test_the_self_check_is_what_protects(family, way):
    """Families that a cache makes wrong, silently or loudly, where nobody checks."""
    model = small(family)
    engine = engine_of(model)
    engine.reuse = way
    try:
        error = largest_error(model, engine, groups(20))
    except (AttributeError, TypeError):
        return  # no cache, or one that cannot be reused
    assert error > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba", "zamba", "roberta", "moshi"])
def test_wrong_reuse_is_found_in_half_precision_too(family, dtype):
    engine = engine_of(small(family).to(dtype))
    engine.check(Row(tokens(60, 0), tokens(12, 1)))
    assert engine.reuse is None


@pytest.mark.skipif(not KNOWN_VERSION, reason="others may not be able to copy some states")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "qwen3_next", "mamba2"])
def test_right_reuse_is_found_in_half_precision_too(family):
    engine = engine_of(small(family).to(torch.bfloat16))
    engine.check(Row(tokens(60, 0), tokens(12, 1)))
    assert engine.reuse is not None


@pytest.mark.parametrize(
    ("family", "changes"),
    [("cpmant", {}), ("xlnet", {}), ("bert", {"is_decoder": False}), ("xlm", {"causal": False})],
    ids=["cpmant", "xlnet", "bert", "xlm"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_models_that_are_not_causal_are_refused(family, changes, dtype, seed):
    engine = engine_of(families.build(family, **changes).to(dtype))
    for _ in range(2):  # nor does it get numbers by asking again
        with pytest.raises(TypeError, match="depends on what follows"):
            engine.check(Row(tokens(60, seed), tokens(12, 100 + seed)))


@pytest.mark.skipif(not KNOWN_VERSION, reason=f"the page is of transformers {MEASURED}")
@pytest.mark.skipif(WRITE, reason="the page is being written")
def test_the_page_lists_every_family():
    unscored = families.REFUSED.keys() | families.UNTESTED.keys()
    assert KNOWN.keys() - {"Family", "---"} == set(families.FAMILIES)
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"| `{family}` | " in text for family in unscored)
