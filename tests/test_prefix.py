from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import (
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, cache_utils

from lm_eval_hyprank import energy
from lm_eval_hyprank.batching import Batching
from lm_eval_hyprank.energy import TokenScores
from lm_eval_hyprank.extras import Extras
from lm_eval_hyprank.prefix import (
    CHECK_TOKENS,
    Engine,
    Row,
    _CopiedPrefix,
    _rope_limit,
    _SharedPrefix,
)
from tests import families, tiny

VOCABULARY = 320
TOLERANCE = 5e-6
"""Nats a token by which two ways through a tiny model may differ in float32."""
COPIED = _CopiedPrefix if hasattr(cache_utils, "LinearAttentionLayer") else None
"""How the prefix of linear attention is reused; its states cannot be in early versions."""


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def llama() -> Any:
    return tiny.llama(VOCABULARY)


@functools.cache
def plain(row: Row) -> TokenScores:
    """The scores of a row from a plain pass of that model over the row alone."""
    return tiny.plain_scores(llama(), row)


def engine_of(
    model: Any, max_sequences: int | None = 3, max_tokens: int = 512, min_saving: int = 1
) -> Engine:
    return Engine(model, torch.device("cpu"), Batching(max_sequences, max_tokens, min_saving))


def checked(model: Any, **options: Any) -> Engine:
    engine = engine_of(model, **options)
    engine.check(Row(tokens(60), tokens(20, 1)))
    return engine


def tokens(count: int, seed: int = 0, vocabulary: int = families.VOCABULARY) -> tuple[int, ...]:
    """Random tokens that are no special ones."""
    return tuple(random.Random(seed).choices(range(3, vocabulary), k=count))


def scored(engine: Engine, rows: list[Row]) -> list[TokenScores]:
    """Scores in the order of the rows, each of which has to come exactly once."""
    found = [pair for part in engine.score(rows) for pair in part]
    assert sorted(index for index, _ in found) == list(range(len(rows)))
    return [scores for _, scores in sorted(found, key=lambda pair: pair[0])]


def off(found: TokenScores, expected: TokenScores) -> float:
    assert len(found.nll) == len(expected.nll)
    return max(
        float((getattr(found, name) - getattr(expected, name)).abs().max())
        for name in ("nll", "raw", "logz")
    )


def identical(found: list[TokenScores], expected: list[TokenScores]) -> bool:
    return all(
        torch.equal(a.raw, b.raw) and torch.equal(a.logz, b.logz)
        for a, b in zip(found, expected, strict=True)
    )


def small_tiles(patch: pytest.MonkeyPatch, columns: int = 16) -> None:
    """An output head makes its logits so many at a time, however few rows there are."""
    patch.setattr(energy, "LEAST_TILE", columns)
    patch.setitem(energy.BLOCK_BYTES, "cpu", 1)


# Groups


@st.composite
def groups(draw: Any) -> list[Row]:
    """Rows of a few prefixes in any order, candidates related in all the ways they may be."""
    dice = random.Random(draw(st.integers(0, 2**32)))
    some = functools.partial(dice.choices, range(3, VOCABULARY))
    rows: list[Row] = []
    prefix: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        # Some prefixes begin like the one before.
        shared = prefix[: draw(st.integers(0, 20))]
        prefix = [*shared, *some(k=draw(st.integers(1, 150)))]
        candidates: list[list[int]] = []
        for _ in range(draw(st.one_of(st.integers(1, 6), st.integers(1, 64)))):
            kind = dice.choice(["new", "short", "one", "same", "start", "longer", "like"])
            earlier = dice.choice(candidates) if candidates else some(k=5)
            candidates.append(
                {
                    "new": lambda: some(k=dice.randint(1, 200)),
                    "short": lambda: some(k=dice.randint(1, 10)),
                    "one": lambda: some(k=1),
                    "same": lambda earlier=earlier: list(earlier),
                    "start": lambda earlier=earlier: earlier[: dice.randint(1, len(earlier))],
                    "longer": lambda earlier=earlier: [*earlier, *some(k=3)][:200],
                    "like": lambda earlier=earlier: [earlier[0], *some(k=4)],
                }[kind]()
            )
        rows += [Row(tuple(prefix), tuple(candidate)) for candidate in candidates]
    dice.shuffle(rows)
    return rows


@settings(deadline=None, max_examples=60)
@given(
    rows=groups(),
    max_sequences=st.sampled_from([1, 2, 3, 16, 64, None]),
    max_tokens=st.sampled_from([1, 50, 512, 4096]),
    min_saving=st.sampled_from([0, 256, 10**9]),
    reuse=st.sampled_from([None, _SharedPrefix, _CopiedPrefix]),
    tiled=st.booleans(),
    tile=st.sampled_from([16, 100, VOCABULARY]),
)
def test_any_group_equals_plain_passes(
    rows, max_sequences, max_tokens, min_saving, reuse, tiled, tile
):
    engine = engine_of(llama(), max_sequences, max_tokens, min_saving)
    engine.reuse = reuse
    engine.predictor.plain_head = llama().lm_head if tiled else None
    with pytest.MonkeyPatch.context() as patch:
        small_tiles(patch, tile)
        parts = list(engine.score(rows))
    prefixes = [{rows[index].prefix for index, _ in part} for part in parts]
    assert sum(map(len, prefixes)) == len({row.prefix for row in rows})
    found = [pair for part in parts for pair in part]
    assert sorted(index for index, _ in found) == list(range(len(rows)))
    for index, scores in found:
        expected = plain(rows[index])
        assert off(scores, expected) <= TOLERANCE
        assert torch.equal(scores.greedy, expected.greedy)
    assert (engine.predictor.plain_head is not None) is tiled


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("reuse", [None, _SharedPrefix, _CopiedPrefix])
def test_the_order_of_rows_changes_no_digit(reuse, tiled, monkeypatch):
    """Nor does scoring a second time: what is cached for a prefix is read and left alone."""
    small_tiles(monkeypatch)
    rows = [
        Row(tokens(length, length), tokens(count, 10 * length + count))
        for length in (50, 40, 3)
        for count in (12, 12, 9, 5, 5, 2, 1)
    ]
    engine = engine_of(llama(), max_sequences=4)
    engine.reuse = reuse
    engine.predictor.plain_head = llama().lm_head if tiled else None
    first = scored(engine, rows)
    assert identical(scored(engine, rows), first)
    order = random.Random(0).sample(range(len(rows)), len(rows))
    again = scored(engine, [rows[index] for index in order])
    assert identical(again, [first[index] for index in order])
    assert (engine.predictor.plain_head is not None) is tiled


@pytest.mark.parametrize("reuse", [None, _SharedPrefix])
def test_a_prefix_with_very_many_rows_is_scored_in_parts(reuse, monkeypatch):
    """Results come along the way, and the order of the rows changes no digit here either."""
    monkeypatch.setattr("lm_eval_hyprank.prefix.POOL_ROWS", 4)
    rows = [Row(tokens(10), tokens(count, seed)) for count in (7, 2, 5) for seed in range(3)]
    engine = engine_of(llama())
    engine.reuse = reuse
    assert [len(part) for part in engine.score(rows)] == [4, 4, 1]
    first = scored(engine, rows)
    for found, row in zip(first, rows, strict=True):
        assert off(found, plain(row)) <= TOLERANCE
    again = scored(engine, rows[::-1])
    assert identical(again, first[::-1])


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("reuse", [None, _SharedPrefix, _CopiedPrefix])
def test_extras_come_with_every_way_of_scoring(reuse, tiled, monkeypatch):
    small_tiles(monkeypatch)
    extras = Extras(precap=True, moments=True, temperatures=frozenset({2.0}))
    rows = [Row(tokens(30), tokens(count, count)) for count in (9, 5, 5, 1)]
    engine = engine_of(llama(), max_sequences=2)
    engine.reuse = reuse
    engine.predictor.plain_head = llama().lm_head if tiled else None
    found = dict(pair for part in engine.score(rows, extras) for pair in part)
    for index, row in enumerate(rows):
        ids = torch.tensor([[*row.prefix, *row.continuation]])
        with torch.no_grad():
            logits = llama()(ids).logits[0, len(row.prefix) - 1 : -1].double()
        logp = logits.log_softmax(1)
        mean = (logp.exp() * logp).sum(1)
        expected = {
            "precap": found[index].raw,
            "logp_mean": mean,
            "logp_var": (logp.exp() * (logp - mean[:, None]) ** 2).sum(1),
            "free_energy_t2.0": -2 * (logits / 2).logsumexp(1),
        }
        assert found[index].extra.keys() == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(found[index].extra[name], values, rtol=1e-4, atol=1e-5)
        assert off(found[index], plain(row)) <= TOLERANCE


def test_a_shared_prefix_is_read_and_not_written(monkeypatch):
    made: list[Any] = []
    build = _SharedPrefix.__init__
    monkeypatch.setattr(
        _SharedPrefix,
        "__init__",
        lambda self, cache: (build(self, cache), made.append((cache, copy.deepcopy(cache))))[0],
    )
    engine = engine_of(llama())
    engine.reuse = _SharedPrefix
    engine.score_on_prefix(tokens(30), [tokens(count, count) for count in range(2, 12)])
    ((cache, before),) = made
    assert cache.get_seq_length() == 30
    for layer, untouched in zip(cache.layers, before.layers, strict=True):
        assert torch.equal(layer.keys, untouched.keys)
        assert torch.equal(layer.values, untouched.values)


def test_nothing_is_computed_twice():
    """Duplicates and candidates that feed the same tokens share a pass, on either path."""
    rows = [Row(tokens(30), (5, 6, last)) for last in (7, 8, 9)] * 2 + [Row(tokens(30), (5,))]
    for reuse, passes in ((None, [(1, 32), (1, 30)]), (_SharedPrefix, [(1, 30), (1, 2)])):
        model = tiny.llama(VOCABULARY)
        shapes = record(model)
        engine = engine_of(model, max_sequences=1, min_saving=0)
        engine.reuse = reuse
        scored(engine, rows)
        assert shapes == passes


def record(model: Any, limit: float = float("inf"), error: Any = None) -> list[tuple[int, int]]:
    """Shapes of the passes that a model makes from now on; larger ones than a limit raise."""
    forward = model.forward
    shapes: list[tuple[int, int]] = []

    @functools.wraps(forward)
    def limited(**options: Any) -> Any:
        ids = options["input_ids"]
        if ids.numel() > limit:
            raise error
        shapes.append(tuple(ids.shape))
        return forward(**options)

    model.forward = limited
    return shapes


def test_saving_decides_between_the_paths():
    """A group gets a pass of its own where enough prefix tokens are saved by it."""
    model = tiny.llama(VOCABULARY)
    shapes = record(model)
    engine = engine_of(model, max_sequences=None, min_saving=100)
    engine.reuse = _SharedPrefix
    group = [Row(tokens(50), tokens(4, seed)) for seed in (1, 2)]
    scored(engine, group)
    assert shapes == [(2, 53)]
    shapes.clear()
    scored(engine, [*group, Row(tokens(50), tokens(4, 3))])
    assert shapes == [(1, 50), (3, 3)]


def test_no_rows_no_passes():
    assert list(engine_of(llama()).score([])) == []


# What limits a batch


@pytest.mark.parametrize(("cap", "limited"), [(None, False), (30.0, True)])
def test_logits_in_tiles_limit_no_batch(cap, limited):
    engine = engine_of(families.build("gemma2", final_logit_softcapping=cap))
    engine.batching.max_logits = 100
    engine.check(Row(tokens(60), tokens(20, 1)))
    assert max(engine._plan([tokens(50)] * 3)) == (2 if limited else 3)
    assert engine.batching.max_logits == 100, "for whatever needs the logits later"


# Out of memory


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("reuse", [None, _SharedPrefix, _CopiedPrefix])
def test_out_of_memory_halves_and_loses_nothing(reuse, tiled, caplog):
    model = tiny.llama(VOCABULARY)
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    shapes = record(model, limit=64, error=memory)
    engine = engine_of(model, max_sequences=None, max_tokens=4096, min_saving=1)
    engine.reuse = reuse
    engine.predictor.plain_head = model.lm_head if tiled else None
    rows = [Row(tokens(30), tokens(count, count)) for count in range(2, 22)]
    with caplog.at_level(logging.WARNING, logger="lm_eval_hyprank"):
        found = scored(engine, rows)
    for row, scores in zip(rows, found, strict=True):
        assert off(scores, plain(row)) <= TOLERANCE
    assert engine.batching.max_tokens <= 64
    assert sum(batch for batch, _ in shapes) == len(rows) + (reuse is not None)
    assert "out of memory" in caplog.text
    assert (engine.predictor.plain_head is not None) is tiled, "it has no part in that"
    caplog.clear()
    scored(engine, rows)
    assert not caplog.records, "what was learnt is kept"


def test_out_of_memory_on_a_single_sequence_is_raised():
    model = tiny.llama(VOCABULARY)
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    tries: list[int] = []
    forward = model.forward

    @functools.wraps(forward)
    def full(**options: Any) -> Any:
        tries.append(len(options["input_ids"]))
        raise memory

    model.forward = full
    engine = engine_of(model, max_sequences=None)
    engine.predictor.plain_head = model.lm_head
    with pytest.raises(torch.OutOfMemoryError):
        scored(engine, [Row(tokens(30), (1, 2)), Row(tokens(29), (1, 2))])
    assert tries == [2, 1], "each size once, not a second time with the head"


def test_other_errors_are_not_tried_again():
    model = tiny.llama(VOCABULARY)
    calls: list[int] = []

    @functools.wraps(model.forward)
    def broken(**options: Any) -> Any:
        calls.append(1)
        raise RuntimeError("the size of tensor a must match the size of tensor b")

    model.forward = broken
    with pytest.raises(RuntimeError, match="size of tensor"):
        scored(engine_of(model), [Row(tokens(30), (1, 2)), Row(tokens(29), (1, 2))])
    assert calls == [1]


# The self-check


@pytest.mark.parametrize(("prefix", "continuation"), [(1, 1), (1, 2), (2, 1), (3, 40), (1, 100)])
def test_the_check_needs_no_long_row(prefix, continuation):
    """A row too short to tell right from wrong is repeated until it is not."""
    row = Row(tokens(prefix), tokens(continuation, 1))
    for family, reuse in (("llama", _SharedPrefix), ("mamba2", COPIED), ("mamba", None)):
        engine = engine_of(families.build(family))
        engine.check(row)
        assert engine.reuse is reuse


@pytest.mark.parametrize("continuation", [1, 5, 16, 40])
def test_the_check_feeds_no_more_tokens_than_the_row_has(continuation):
    """A model with 64 learned positions has no 65th, and one prediction needs no position."""
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    engine = engine_of(GPT2LMHeadModel(config).eval())
    row = Row(tokens(65 - continuation), tokens(continuation, 1))
    engine.check(row)
    assert engine.reuse is _SharedPrefix
    assert off(scored(engine, [row])[0], tiny.plain_scores(engine.model, row)) <= TOLERANCE


@pytest.mark.parametrize("reuse", [_SharedPrefix, _CopiedPrefix])
def test_two_tokens_up_to_the_last_position_need_no_more(reuse):
    """The last is predicted, not fed; and what is fed after the prefix is not padded."""
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    engine = engine_of(GPT2LMHeadModel(config).eval())
    engine.reuse = reuse
    rows = [Row(tokens(63), pair) for pair in ((5, 6), (7, 8), (9,))]
    for row, scores in zip(rows, scored(engine, rows), strict=True):
        assert off(scores, tiny.plain_scores(engine.model, row)) <= TOLERANCE


def forgetful(model: Any, length: int) -> Any:
    """A model that is wrong on caches of more tokens than a length."""
    forward = model.model.forward

    @functools.wraps(forward)
    def wrong(**options: Any) -> Any:
        cache = options.get("cache", options.get("past_key_values"))
        outputs = forward(**options)
        if cache is not None and cache.get_seq_length() > length:
            outputs.last_hidden_state += torch.arange(outputs.last_hidden_state.shape[-1]) % 7
        return outputs

    model.model.forward = wrong
    return model


def test_a_longer_row_is_checked_again_and_what_failed_once_is_out(caplog):
    engine = engine_of(forgetful(tiny.llama(VOCABULARY), 100))
    with caplog.at_level(logging.WARNING, logger="lm_eval_hyprank"):
        engine.check(Row(tokens(50), tokens(20, 1)))
        assert engine.reuse is _SharedPrefix
        assert not caplog.records
        engine.check(Row(tokens(200), tokens(20, 1)))
        assert engine.reuse is None
        engine.check(Row(tokens(60), tokens(20, 1)))
        engine.check(Row(tokens(300), tokens(20, 1)))
    assert engine.reuse is None
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "LlamaForCausalLM" in warning
    assert "shared: off by" in warning
    assert "copied: off by" in warning


def test_the_check_is_made_once_for_rows_of_a_length():
    model = tiny.llama(VOCABULARY)
    shapes = record(model)
    engine = engine_of(model)
    engine.check(Row(tokens(60), tokens(20, 1)))
    assert shapes
    shapes.clear()
    engine.check(Row(tokens(60, 5), tokens(20, 6)))
    engine.check(Row(tokens(30, 5), tokens(20, 6)))
    assert shapes == []


def test_a_check_that_breaks_off_proves_nothing():
    model = tiny.llama(VOCABULARY)
    forward = model.forward

    @functools.wraps(forward)
    def stopped(**options: Any) -> Any:
        if options.get("use_cache"):
            raise KeyboardInterrupt
        return forward(**options)

    model.forward = stopped
    engine = engine_of(model)
    row = Row(tokens(60), tokens(20, 1))
    with pytest.raises(KeyboardInterrupt):
        engine.check(row)
    assert engine.reuse is None
    model.forward = forward
    engine.check(row)
    assert engine.reuse is _SharedPrefix


def worse_together(model: Any) -> Any:
    """Makes a model give other logits to a text in a batch than to the text alone."""
    forward = model.forward

    @functools.wraps(forward)
    def changed(**options: Any) -> Any:
        outputs = forward(**options)
        outputs.logits = outputs.logits * (1 + 0.01 * (len(options["input_ids"]) - 1))
        return outputs

    model.forward = changed
    return model


def test_a_batch_that_changes_scores_is_avoided(caplog):
    """As activations do that are quantised by the batch, or padding that is seen."""
    model = tiny.llama(VOCABULARY)
    expected = [tiny.plain_scores(model, row) for row in GROUP]
    worse_together(model)
    with caplog.at_level(logging.WARNING, logger="lm_eval_hyprank"):
        engine = checked(model, max_sequences=8)
    assert "so texts are scored one by one" in caplog.text
    assert engine.reuse is _SharedPrefix
    for scores, right in zip(scored(engine, GROUP), expected, strict=True):
        assert off(scores, right) <= TOLERANCE


def test_a_batch_of_one_is_not_compared_with_itself(caplog):
    """Where the user asks for it, there is nothing to warn of."""
    model = worse_together(tiny.llama(VOCABULARY))
    with caplog.at_level(logging.WARNING, logger="lm_eval_hyprank"):
        engine = checked(model, max_sequences=1)
    assert not caplog.records
    assert engine.reuse is _SharedPrefix


def test_the_check_pairs_sequences_of_its_own_accord():
    """So that padding is seen both in whole passes and on a prefix, however long the row."""
    model = tiny.llama(VOCABULARY)
    shapes = record(model)
    engine = engine_of(model, max_sequences=16)
    engine.batching.max_logits = 8
    engine.predictor.find_plain_head = lambda tokens: None
    engine.check(Row(tokens(300), tokens(20, 1)))
    prefix = 320 - CHECK_TOKENS
    assert (2, prefix + CHECK_TOKENS - 1) in shapes
    assert (1, prefix + CHECK_TOKENS - 1) in shapes
    assert shapes[-3:] == [(1, prefix), (2, CHECK_TOKENS - 1), (1, 2)]


def test_a_context_may_hold_tokens_without_a_logit():
    """Images' and others', which a model is fed and never predicts."""
    model = tiny.llama(VOCABULARY + 8)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:VOCABULARY].clone())
    model.config.vocab_size = VOCABULARY
    rows = [Row((*tokens(30), VOCABULARY + 1), tokens(count, 1)) for count in (2, 1)]
    engine = engine_of(model)
    engine.check(rows[0])
    assert engine.reuse is _SharedPrefix
    for row, scores in zip(rows, scored(engine, rows), strict=True):
        assert off(scores, tiny.plain_scores(model, row)) <= TOLERANCE


def test_a_masked_token_does_not_spoil_the_check(caplog):
    """Its logit of minus infinity, and so its NLL, is the same both ways."""
    model = tiny.llama(VOCABULARY)
    row = Row(tokens(60), tokens(20, 1))
    forward = model.forward

    @functools.wraps(forward)
    def masking(**options: Any) -> Any:
        outputs = forward(**options)
        outputs.logits[..., row.continuation[-1]] = -math.inf
        return outputs

    model.forward = masking
    engine = engine_of(model)
    engine.check(row)
    assert engine.reuse is _SharedPrefix
    assert not caplog.records
    assert scored(engine, [row])[0].nll[-1] == math.inf


def test_the_check_leaves_the_batching_as_it_was():
    engine = engine_of(llama(), 16, 333, 44)
    engine.check(Row(tokens(60), tokens(20, 1)))
    assert engine.batching == Batching(16, 333, 44)


class ElsewhereOff(LlamaForCausalLM):
    """A model that is right on the CPU only, as far as it knows where it is."""

    scale = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * self.scale
        return outputs

    def to(self, device: Any) -> Any:
        self.scale = 1.0
        return self


@pytest.mark.parametrize(
    ("scale", "warns"),
    [(1.0, False), (1.001, False), (1.05, True), (1.5, True), (float("nan"), True)],
)
def test_a_device_of_ill_repute_is_compared_with_the_cpu(monkeypatch, caplog, scale, warns):
    monkeypatch.setattr("lm_eval_hyprank.prefix.UNPROVEN_DEVICES", ("cpu",))
    model = ElsewhereOff(tiny.llama(VOCABULARY).config).eval()
    torch.nn.init.normal_(model.lm_head.weight)
    model.scale = scale
    engine = engine_of(model)
    engine.check(Row(tokens(60), tokens(20, 1)))
    assert ("away from the CPU" in caplog.text) is warns
    if scale in (1.001, 1.05):
        assert (engine.device_difference > 0.01) is warns
        assert 1e-4 < engine.device_difference < 0.1, "on either side of the bound, near it"
    assert model.scale is scale, "the model itself stays where it is"


def test_other_devices_are_not_compared():
    engine = engine_of(tiny.llama(VOCABULARY))
    engine.check(Row(tokens(60), tokens(20, 1)))
    assert engine.device_difference is None


@pytest.mark.parametrize("drop", ["cache", "signature"])
def test_a_model_without_a_cache_makes_whole_passes(drop):
    model = tiny.llama(VOCABULARY)
    forward = model.forward
    if drop == "cache":

        @functools.wraps(forward)
        def without(**options: Any) -> Any:
            return SimpleNamespace(logits=forward(**options).logits)

        model.forward = without
    else:

        def only_ids(input_ids: torch.Tensor) -> Any:
            return forward(input_ids=input_ids, use_cache=False)

        model.forward = only_ids
    engine = checked(model)
    assert engine.reuse is None
    rows = [Row(tokens(30), tokens(count, count)) for count in (9, 4, 1)]
    for row, scores in zip(rows, scored(engine, rows), strict=True):
        assert off(scores, plain(row)) <= TOLERANCE


def test_a_model_that_gives_nan_is_not_taken_for_right(caplog):
    model = tiny.llama(VOCABULARY)
    forward = model.model.forward

    @functools.wraps(forward)
    def broken(**options: Any) -> Any:
        outputs = forward(**options)
        if options.get("use_cache"):
            outputs.last_hidden_state[:] = torch.nan
        return outputs

    model.model.forward = broken
    with caplog.at_level(logging.WARNING, logger="lm_eval_hyprank"):
        assert checked(model).reuse is None
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "cannot be reused exactly" in warning
    assert "off by inf" in warning


def test_mixed_precision_is_checked_at_its_own_precision():
    engine = Engine(
        tiny.llama(VOCABULARY),
        torch.device("cpu"),
        Batching(3, 512, 1),
        lambda: torch.autocast("cpu", torch.bfloat16),
    )
    engine.check(Row(tokens(60), tokens(20, 1)))
    assert engine.reuse is _SharedPrefix
    assert engine.predictor.dtype is torch.bfloat16
    assert engine.predictor.plain_head is None, "it would not be in mixed precision"
    for part in engine.score(GROUP, Extras(precap=True)):
        for _, scores in part:
            assert torch.equal(scores.extra["precap"], scores.raw)


def test_the_coarsest_weights_set_the_precision():
    """Some models keep a part of themselves in float32, adapters often all of theirs."""
    model = tiny.llama(VOCABULARY).to(torch.bfloat16)
    model.model.embed_tokens.float()
    assert engine_of(model).predictor.dtype is torch.bfloat16
    assert engine_of(tiny.llama(VOCABULARY)).predictor.dtype is torch.float32


# Rotary frequencies that change with the length (longrope)


def around_the_switch() -> list[Row]:
    """Sequences that stay below 16 fed tokens, pass them, or begin beyond."""
    return [
        Row(tokens(length, length), tokens(count, length + count))
        for length in (2, 13, 14, 15, 16, 17, 30)
        for count in (1, 2, 3, 4, 12)
    ]


@pytest.mark.parametrize("reuse", [None, _SharedPrefix])
@pytest.mark.parametrize("max_sequences", [1, 64])
def test_longrope(reuse, max_sequences):
    model = families.build("phi3, longrope", sliding_window=None)
    engine = engine_of(model, max_sequences)
    engine.reuse = reuse
    assert engine.rope_switch == 16
    for row, scores in zip(around_the_switch(), scored(engine, around_the_switch()), strict=True):
        assert off(scores, tiny.plain_scores(model, row)) <= 2 * TOLERANCE


@pytest.mark.parametrize("length", [15, 16, 17, 18])
@pytest.mark.parametrize("longest", [1, 2, 3])
def test_longrope_with_short_answers_only(length, longest):
    """Of which the prefix's last token may be fed with the answers."""
    model = families.build("phi3, longrope", sliding_window=None)
    engine = engine_of(model, max_sequences=None)
    engine.reuse = _SharedPrefix
    rows = [Row(tokens(length), tokens(longest, seed)) for seed in range(4)]
    rows.append(Row(tokens(length), tokens(1)))
    for row, scores in zip(rows, scored(engine, rows), strict=True):
        assert off(scores, tiny.plain_scores(model, row)) <= 2 * TOLERANCE


def test_what_depends_on_the_longest_text_seen_is_refused():
    """Frequencies of dynamic scaling, which transformers keeps for what follows."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny.llama(VOCABULARY, max_position_embeddings=40, rope_parameters=rope)
    engine = engine_of(model)
    with pytest.raises(ValueError, match=r"goes beyond the 40 .* max_length=40"):
        engine.check(Row(tokens(30), tokens(12, 1)))
    rows = [Row(tokens(30), tokens(count, count)) for count in (11, 5, 2)]
    engine.check(rows[0])
    for row, scores in zip(rows, scored(engine, rows), strict=True):
        assert off(scores, tiny.plain_scores(model, row)) <= TOLERANCE


def test_what_is_called_dynamic_and_is_not_has_no_limit():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0}
    config = SimpleNamespace(max_position_embeddings=40, rope_parameters=rope)
    config.get_text_config = lambda: config
    assert _rope_limit(SimpleNamespace(config=config)) > 10**6
    del rope["alpha"]
    assert _rope_limit(SimpleNamespace(config=config)) == 40


@pytest.mark.parametrize("reuse", [None, _SharedPrefix])
def test_longrope_needs_care(reuse):
    """Without it, padding or a prefix of the other side does change scores."""
    model = families.build("phi3, longrope", sliding_window=None)
    engine = engine_of(model, max_sequences=64)
    engine.reuse = reuse
    engine.rope_switch = 10**9
    errors = [
        off(scores, tiny.plain_scores(model, row))
        for row, scores in zip(
            around_the_switch(), scored(engine, around_the_switch()), strict=True
        )
    ]
    assert max(errors) > 1e-2


@pytest.mark.parametrize("length", [1, 8, 24, 30])
def test_longrope_that_changes_within_the_check(length):
    engine = engine_of(families.build("phi3, longrope"))
    assert engine.rope_switch == 16
    engine.check(Row(tokens(length), tokens(2, 1)))
    assert engine.reuse is _SharedPrefix


@pytest.mark.parametrize("length", [20, 24, 25, 40, 41, 47, 48, 49, 56, 57, 64, 90])
def test_longrope_does_not_confuse_the_check(length):
    engine = engine_of(families.build("phi3, longrope", original_max_position_embeddings=48))
    assert engine.rope_switch == 48
    engine.check(Row(tokens(length), tokens(8, 1)))
    assert engine.reuse is _SharedPrefix


# Adapters


def adapted(model: Any, config: Any) -> Any:
    torch.manual_seed(1)
    adapter = get_peft_model(model, config).eval()
    for name, weight in adapter.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    return adapter


GROUP = [Row(tokens(40), tokens(count, count)) for count in (12, 7, 7, 3, 2, 1)] + [
    Row(tokens(5, 9), tokens(count, count)) for count in (4, 2)
]


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=5),
        PromptEncoderConfig(
            task_type=TaskType.CAUSAL_LM, num_virtual_tokens=5, encoder_hidden_size=16
        ),
        PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=5),
    ],
    ids=["prompt tuning", "p-tuning", "prefix tuning"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_virtual_tokens_stand_in_front_once(config):
    """Adapters put them in front of whatever is fed, so on a cached prefix a second time."""
    adapter = adapted(tiny.llama(VOCABULARY), config)
    engine = checked(adapter)
    for row, scores in zip(GROUP, scored(engine, GROUP), strict=True):
        assert off(scores, tiny.plain_scores(adapter, row)) <= TOLERANCE
        assert off(scores, plain(row)) > 0.01, "the adapter matters"
    if isinstance(config, PrefixTuningConfig):
        assert engine.reuse is not None, "its keys stand in the cache, before the prefix's own"
    else:
        assert engine.reuse is None
        assert engine.predictor.plain_head is None, "virtual tokens have logits too"
    for part in engine.score(GROUP, Extras(precap=True)):
        for _, scores in part:
            assert torch.equal(scores.extra["precap"], scores.raw)


def test_an_adapter_that_tokens_invoke_is_never_parted_from_them(caplog):
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=4,
        target_modules=["q_proj", "v_proj"],
        alora_invocation_tokens=[7, 8],
    )
    adapter = adapted(tiny.llama(VOCABULARY), config)
    engine = engine_of(adapter)
    longest = Row(tokens(60), (9,) * 12)
    with caplog.at_level(logging.WARNING, logger="lm_eval_hyprank"):
        engine.check(longest)
    assert "acts only after certain tokens" in caplog.text
    assert engine.reuse is None
    rows = [longest, *(Row((*tokens(30), 7, 8), tokens(3, seed)) for seed in range(4))]
    for row, scores in zip(rows, scored(engine, rows), strict=True):
        assert off(scores, tiny.plain_scores(adapter, row)) <= TOLERANCE
    assert engine.predictor.plain_head is not None, "the rest of the check is made"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "modules", [["q_proj", "v_proj"], ["lm_head"], ["embed_tokens", "lm_head", "down_proj"]]
)
def test_lora_reuses_the_prefix(modules, tied):
    plain = tiny.llama(VOCABULARY, tie_word_embeddings=tied)
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules=modules)
    adapter = adapted(tiny.llama(VOCABULARY, tie_word_embeddings=tied), config)
    engine = checked(adapter)
    assert engine.reuse is _SharedPrefix
    assert (engine.predictor.plain_head is None) is ("lm_head" in modules)
    for row, scores in zip(GROUP, scored(engine, GROUP), strict=True):
        assert off(scores, tiny.plain_scores(adapter, row)) <= TOLERANCE
        assert off(scores, tiny.plain_scores(plain, row)) > 0.01, "the adapter matters"


# Single faults that users of neighbouring tools met


@pytest.mark.parametrize("reuse", [None, _SharedPrefix, _CopiedPrefix])
def test_the_first_token_counts(reuse):
    rows = [Row(tokens(30), (first, 8, 9)) for first in (5, 6)]
    engine = engine_of(llama())
    engine.reuse = reuse
    left, right = scored(engine, rows)
    assert abs(left.nll[0] - right.nll[0]) > 0.01
    for row, scores in zip(rows, (left, right), strict=True):
        assert off(scores, plain(row)) <= TOLERANCE


@pytest.mark.parametrize("reuse", [None, _SharedPrefix])
def test_the_highest_token_id_in_a_batch_of_one(reuse):
    row = Row(tokens(30), (VOCABULARY - 1, 4, VOCABULARY - 1))
    engine = engine_of(llama(), max_sequences=1, min_saving=0)
    engine.reuse = reuse
    (found,) = scored(engine, [row])
    with torch.no_grad():
        logits = llama()(torch.tensor([[*row.prefix, *row.continuation]])).logits[0]
    expected = -logits[[29, 31], VOCABULARY - 1].double()
    assert torch.allclose(found.raw[[0, 2]], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma2", "qwen3_next", "mamba"])
def test_batch_size_changes_no_score(family):
    """Shorter rows are padded, by more or by less; nothing of it may be seen."""
    model = families.build(family)
    rows = [
        Row(tokens(length, length), tokens(count, count))
        for length in (5, 20)
        for count in (20, 11, 6, 5, 2, 1)
    ]
    alone = [tiny.plain_scores(model, row) for row in rows]
    for max_sequences, min_saving in itertools.product((1, 3, 16, None), (1, 10**9)):
        engine = checked(model, max_sequences=max_sequences, min_saving=min_saving)
        for found, expected in zip(scored(engine, rows), alone, strict=True):
            assert off(found, expected) <= TOLERANCE
            assert abs(found.nll.mean() - expected.nll.mean()) <= 2e-6
            assert abs(found.raw.mean() - expected.raw.mean()) <= 2e-6


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "bamba"])
def test_a_single_row_of_linear_attention(family):
    model = families.build(family)
    row = Row(tokens(20), tokens(2, 1))
    engine = checked(model, min_saving=0)
    assert engine.reuse is COPIED
    assert off(scored(engine, [row])[0], tiny.plain_scores(model, row)) <= 1e-4


def test_a_final_soft_cap_is_applied_once():
    model = families.build("gemma2", final_logit_softcapping=30.0)
    with torch.no_grad():
        model.lm_head.weight *= 40
    rows = [Row(tokens(20), tokens(count, count)) for count in (12, 5, 1)]
    engine = checked(model)
    assert engine.reuse is _SharedPrefix
    for row, scores in zip(rows, scored(engine, rows), strict=True):
        expected = tiny.plain_scores(model, row)
        assert (scores.raw.abs() <= 30).all()
        assert expected.raw.abs().max() > 25, "the cap is felt"
        assert off(scores, expected) <= 10 * TOLERANCE


def test_a_head_wider_than_the_tokenizer_keeps_its_mass():
    """Rows of the head that no token uses take part in the softmax, as in the model's own."""
    model = tiny.llama(VOCABULARY + 16)
    with torch.no_grad():
        model.lm_head.weight[VOCABULARY:] *= 20
    rows = [Row(tokens(20), tokens(count, count)) for count in (12, 5, 1)]
    engine = checked(model)
    for row, scores in zip(rows, scored(engine, rows), strict=True):
        ids = torch.tensor([[*row.prefix, *row.continuation]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, 19:-1].log_softmax(-1)
        expected = -logprobs.gather(1, ids[0, 20:, None])[:, 0]
        assert torch.allclose(scores.nll.float(), expected, rtol=0, atol=1e-4)
        assert (scores.nll > 3).all(), "the unused rows hold most of the mass"


NOISE = 0.03
"""Nats by which the mean score of two right bfloat16 implementations may differ."""


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("reuse", [None, _SharedPrefix])
@pytest.mark.parametrize("score", ["nll", "raw"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bfloat16_ranks_as_float32_does(reuse, score, seed, tiled):
    """Sixteen candidates of one prefix, by the same bfloat16 weights."""
    half = tiny.llama(VOCABULARY, seed=seed).to(torch.bfloat16)
    rows = [Row(tokens(60), tokens(20 + index % 7, index, VOCABULARY)) for index in range(16)]
    engine = engine_of(half)
    engine.reuse = reuse
    engine.predictor.plain_head = half.lm_head if tiled else None
    found = [float(getattr(scores, score).mean()) for scores in scored(engine, rows)]
    assert (engine.predictor.plain_head is not None) is tiled
    single = copy.deepcopy(half).float()
    exact = [float(getattr(tiny.plain_scores(single, row), score).mean()) for row in rows]
    assert len(set(found)) == len(set(exact)) == 16, "no ties that float32 has not"
    pairs = itertools.combinations(range(16), 2)
    apart = [(left, right) for left, right in pairs if abs(exact[left] - exact[right]) > NOISE]
    assert len(apart) > 60, "of 120"
    for left, right in apart:
        assert (found[left] < found[right]) == (exact[left] < exact[right])


@pytest.mark.parametrize("tiled", [False, True])
def test_near_equal_candidates_do_not_tie_in_bfloat16(tiled):
    """Sixteen candidates that differ in one late token; a bfloat16 softmax ties some."""
    half = tiny.llama(VOCABULARY).to(torch.bfloat16)
    shared = tokens(20, 1)
    rows = [Row(tokens(60), (*shared, last)) for last in range(3, 19)]
    engine = engine_of(half)
    engine.reuse = _SharedPrefix
    engine.predictor.plain_head = half.lm_head if tiled else None
    means = {float(scores.nll.mean()) for scores in scored(engine, rows)}
    assert (engine.predictor.plain_head is not None) is tiled
    with torch.no_grad():
        logits = half(torch.tensor([[*tokens(60), *shared]])).logits[0, -1]
    distinct = len({float(logits[last]) for last in range(3, 19)})
    assert len(means) == distinct
