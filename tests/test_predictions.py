"""The output head: left out where it is plain, and read where its outputs are soft-capped."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutputWithPast

from lm_eval_hyprank.energy import TokenScores
from lm_eval_hyprank.extras import Extras
from lm_eval_hyprank.predictions import PROBE_TOKENS
from lm_eval_hyprank.prefix import Row, _CopiedPrefix, _SharedPrefix
from tests import families, tiny
from tests.test_prefix import (
    GROUP,
    TOLERANCE,
    VOCABULARY,
    checked,
    engine_of,
    off,
    plain,
    record,
    scored,
    tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# A plain head is left out


@pytest.fixture
def heads_run(monkeypatch) -> list[torch.nn.Linear]:
    """Plain linear layers that ran, as often as they did."""
    ran: list[torch.nn.Linear] = []
    forward = torch.nn.Linear.forward
    monkeypatch.setattr(
        torch.nn.Linear,
        "forward",
        lambda self, hidden: (ran.append(self), forward(self, hidden))[1],
    )
    return ran


@pytest.mark.parametrize(
    ("family", "changes", "tiled"),
    [
        ("llama", {}, True),
        ("llama", {"tie_word_embeddings": True}, True),
        ("gpt2", {}, True),
        ("phi", {}, True),  # whose head has a bias
        ("gemma3_text", {}, True),
        ("qwen3_next", {}, True),
        ("mamba", {}, True),  # whose prefix cannot be reused
        ("gemma2", {"final_logit_softcapping": 30.0}, False),
        ("cohere", {"logit_scale": 0.5}, False),
        ("granite", {"logits_scaling": 4.0}, False),
        ("falcon_h1", {"lm_head_multiplier": 0.5}, False),
    ],
)
def test_only_a_plain_head_is_left_out(family, changes, tiled, heads_run):
    model = families.build(family, **changes)
    head = model.get_output_embeddings()
    engine = checked(model)
    assert engine.predictor.plain_head is (head if tiled else None)
    rows = [Row(tokens(20), tokens(count, count)) for count in (12, 5, 1)]
    expected = [tiny.plain_scores(model, row) for row in rows]
    heads_run.clear()
    found = scored(engine, rows)
    assert (head not in heads_run) is tiled
    for scores, plain_scores in zip(found, expected, strict=True):
        assert off(scores, plain_scores) <= 1e-4
        assert torch.equal(scores.greedy, plain_scores.greedy)
    assert "forward" not in vars(head), "the head is whole again"


def hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)


def hooked_in_front(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))


def overridden(model: Any) -> None:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: forward(hidden) + hidden.sum(-1, keepdim=True)


class Packed(torch.Tensor):
    """Weights of another kind, as quantisers and tensor parallelism have them."""


def packed(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().as_subclass(Packed))


def on_logits(change: Any, *, beyond: int = 0) -> Any:
    """Makes a model do something to its logits if it is fed more tokens than a number."""

    def apply(model: Any) -> None:
        forward = model.forward

        @functools.wraps(forward)
        def changing(*ids: Any, **options: Any) -> Any:
            outputs = forward(*ids, **options)
            if (ids[0] if ids else options["input_ids"]).shape[1] > beyond:
                outputs.logits = change(outputs.logits)
            return outputs

        model.forward = changing

    return apply


def masked(logits: torch.Tensor) -> torch.Tensor:
    """As models do that have fewer tokens than rows in their head."""
    logits[..., 5] = -1e4
    return logits


def picky(logits: torch.Tensor) -> torch.Tensor:
    assert logits.shape[-1] == VOCABULARY
    return logits


def in_parts_if_long(
    model: Any, most: int = PROBE_TOKENS, change: Any = lambda logits: logits
) -> None:
    """A head that is called twice, each time for some positions."""
    forward = model.forward

    @functools.wraps(forward)
    def twice(input_ids: torch.Tensor, **options: Any) -> Any:
        options.pop("logits_to_keep", None)
        hidden = model.model(input_ids=input_ids, **options)
        states = hidden.last_hidden_state
        cut = states.shape[1] if states.shape[1] <= most else most
        parts = [part for part in (states[:, :cut], states[:, cut:]) if part.shape[1]]
        logits = change(torch.cat([model.lm_head(part) for part in parts], dim=1))
        return CausalLMOutputWithPast(logits=logits, past_key_values=hidden.past_key_values)

    model.forward = twice


@pytest.mark.parametrize(
    ("change", "found_at_once"),
    [
        (hooked, True),
        (hooked_in_front, True),
        (overridden, True),
        (packed, True),
        (on_logits(masked), True),
        (on_logits(picky), True),
        (on_logits(lambda logits: logits / 2), True),
        (on_logits(lambda logits: logits.mul_(2)), True),
        (on_logits(lambda logits: 30 * torch.tanh(logits / 30)), True),
        (on_logits(lambda logits: logits / 2, beyond=PROBE_TOKENS), False),
        (on_logits(lambda logits: logits.mul_(2), beyond=PROBE_TOKENS), False),
        (on_logits(lambda logits: logits.clamp(max=0.5), beyond=PROBE_TOKENS), False),
        (on_logits(lambda logits: logits + 1, beyond=PROBE_TOKENS), False),
        (on_logits(masked, beyond=PROBE_TOKENS), False),
        (on_logits(picky, beyond=PROBE_TOKENS), False),
        (in_parts_if_long, False),
    ],
)
def test_a_head_that_is_not_all_stays_in(change, found_at_once):
    """Found out with the first tokens, or on the first pass where it shows."""
    model = tiny.llama(VOCABULARY)
    change(model)
    rows = GROUP[:6]  # of one prefix, longer than those first tokens
    expected = [tiny.plain_scores(model, row) for row in rows]
    own = vars(model.lm_head).get("forward")
    engine = engine_of(model)
    engine.predictor.find_plain_head([*rows[0].prefix, *rows[0].continuation])
    assert (engine.predictor.plain_head is None) is found_at_once
    for scores, right in zip(scored(engine, rows), expected, strict=True):
        assert off(scores, right) <= 10 * TOLERANCE
    assert engine.predictor.plain_head is None
    assert vars(model.lm_head).get("forward") is own


@pytest.mark.parametrize("reuse", [_SharedPrefix, _CopiedPrefix])
def test_a_pass_on_a_prefix_is_made_again_with_the_head(reuse):
    """On the same prefix, whose cache the pass without the head may have used up."""
    model = tiny.llama(VOCABULARY)
    in_parts_if_long(model, 6)
    engine = engine_of(model)
    engine.reuse = reuse
    engine.predictor.plain_head = model.lm_head
    prefix, continuations = tokens(5), [tokens(count, count) for count in (12, 9, 2)]
    for scores, tail in zip(
        engine.score_on_prefix(prefix, continuations), continuations, strict=True
    ):
        assert off(scores, plain(Row(prefix, tail))) <= 10 * TOLERANCE
    assert engine.predictor.plain_head is None


@pytest.mark.parametrize("later", ["replaced", "hooked", "overridden"])
def test_a_head_that_changes_later_is_noticed(later):
    model = tiny.llama(VOCABULARY)
    engine = checked(model)
    assert engine.predictor.plain_head is not None
    if later == "replaced":
        model.lm_head = copy.deepcopy(model.lm_head)
        model.lm_head.weight.data *= 2
    else:
        {"hooked": hooked, "overridden": overridden}[later](model)
    own = vars(model.lm_head).get("forward")
    for row, scores in zip(GROUP, scored(engine, GROUP), strict=True):
        assert off(scores, tiny.plain_scores(model, row)) <= 10 * TOLERANCE
    assert engine.predictor.plain_head is None
    assert vars(model.lm_head).get("forward") is own


def test_what_is_before_the_cap_is_not_known_of_a_head_that_changes(caplog):
    model = tiny.llama(VOCABULARY)
    engine = checked(model)
    extras = Extras(precap=True)
    assert list(engine.score(GROUP, extras))
    assert engine.predictor.precap == "raw"
    on_logits(lambda logits: 3 * torch.tanh(logits / 3))(model)
    with caplog.at_level(logging.WARNING, logger="lm_eval_hyprank"):
        parts = list(engine.score(GROUP, extras))
    assert [r.getMessage().count("before soft-capping") for r in caplog.records] == [1]
    for index, scores in itertools.chain(*parts):
        assert scores.extra["precap"].isnan().all()
        assert off(scores, tiny.plain_scores(model, GROUP[index])) <= 10 * TOLERANCE


def test_a_head_that_falls_back_limits_the_batches_that_follow():
    model = tiny.llama(VOCABULARY)
    shapes = record(model)
    on_logits(lambda logits: logits / 2)(model)
    engine = engine_of(model, max_sequences=None)
    engine.batching.max_logits = 60
    engine.predictor.plain_head = model.lm_head
    scored(engine, [Row(tokens(20, seed), tokens(11, seed)) for seed in range(20)])
    assert shapes[0][0] > 2
    assert max(size for size, _ in shapes[2:]) == 2


def test_a_model_without_a_say_on_its_head():
    model = tiny.llama(VOCABULARY)
    model.get_output_embeddings = lambda: (_ for _ in ()).throw(NotImplementedError())
    engine = checked(model)
    assert engine.predictor.plain_head is None
    ((_, scores), *_), *_ = engine.score(GROUP[:1], Extras(precap=True))
    assert off(scores, plain(GROUP[0])) <= TOLERANCE
    assert torch.equal(scores.extra["precap"], scores.raw)


@pytest.mark.parametrize("tiled", [False, True])
def test_a_token_that_the_head_does_not_know_is_an_error(tiled):
    """The last token is never fed, so no embedding complains."""
    model = tiny.llama(VOCABULARY + 8)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:VOCABULARY].clone())
    engine = engine_of(model)
    engine.predictor.plain_head = model.lm_head if tiled else None
    with pytest.raises(IndexError, match=rf"token {VOCABULARY} .* has {VOCABULARY} rows"):
        scored(engine, [Row(tokens(30), (5, VOCABULARY))])


@pytest.mark.parametrize("row", [Row((5, VOCABULARY), (6,)), Row((5,), (6, VOCABULARY))])
def test_a_token_that_no_embedding_knows_is_an_error_at_once(row):
    shapes = record(model := tiny.llama(VOCABULARY))
    with pytest.raises(IndexError, match=rf"token {VOCABULARY} has no embedding: .* {VOCABULARY}"):
        scored(engine := engine_of(model), [*GROUP, row])
    assert not shapes
    engine.at_work = [3]  # of an earlier call
    with pytest.raises(IndexError, match="has no embedding"):
        scored(engine, [row])
    assert not engine.at_work


def test_threads_do_not_see_each_others_head():
    """Nor does a pass of somebody else's meanwhile."""
    model = tiny.llama(VOCABULARY)
    expected = [plain(row) for row in GROUP]
    ids = torch.tensor([tokens(9)])
    with torch.no_grad():
        own = model(ids).logits

    def work(_: int) -> bool:
        engine = checked(model)
        found = scored(engine, GROUP)
        kept = engine.predictor.plain_head is model.lm_head
        return kept and all(off(*each) <= TOLERANCE for each in zip(found, expected, strict=True))

    def other_pass(_: int) -> bool:
        with torch.no_grad():
            return torch.equal(model(ids).logits, own)

    with ThreadPoolExecutor(6) as pool:
        results = [pool.submit(work, n) for n in range(8)]
        results += [pool.submit(other_pass, n) for n in range(100)]
        assert all(result.result() for result in results)
    assert "forward" not in vars(model.lm_head)


def test_a_plain_head_is_left_out_for_extras_too(heads_run):
    model = tiny.llama(VOCABULARY)
    engine = checked(model)
    rows = list(GROUP)
    sums = scored(engine, rows)
    heads_run.clear()
    extras = Extras(precap=True, moments=True, temperatures=frozenset({0.5}))
    found = dict(pair for part in engine.score(rows, extras) for pair in part)
    assert model.lm_head not in heads_run
    for index, expected in enumerate(sums):
        assert off(found[index], expected) <= TOLERANCE
        assert torch.equal(found[index].extra["precap"], found[index].raw)


def test_a_failed_pass_leaves_the_head_whole():
    model = tiny.llama(VOCABULARY)
    engine = checked(model)
    assert engine.predictor.plain_head is not None
    model.model.norm.forward = lambda hidden: 1 / 0
    with pytest.raises(ZeroDivisionError):
        scored(engine, GROUP)
    assert "forward" not in vars(model.lm_head)
    assert engine.predictor.plain_head is model.lm_head, "it was not for want of logits"


def test_a_cache_that_cannot_be_used_does_not_cost_the_head():
    model = tiny.llama(VOCABULARY)
    forward = model.forward

    @functools.wraps(forward)
    def without_cache(**options: Any) -> Any:
        if options.get("past_key_values", options.get("cache")) is not None:
            raise ValueError("no cache here")
        return forward(**options)

    model.forward = without_cache
    engine = checked(model)
    assert engine.reuse is None
    assert engine.predictor.plain_head is model.lm_head
    for row, scores in zip(GROUP, scored(engine, GROUP), strict=True):
        assert off(scores, plain(row)) <= TOLERANCE


# Logits before final soft-capping: the head's own output, whichever way they are reached

CAP = 5.0
CAPPED = {
    "gemma2": {"final_logit_softcapping": CAP},
    "gemma3_text": {"final_logit_softcapping": CAP},
    "gemma4_text": {"final_logit_softcapping": CAP},
    "nanochat": {"final_logit_softcapping": CAP},
    "vaultgemma": {"final_logit_softcapping": CAP},
    "recurrent_gemma": {"logits_soft_cap": CAP},
}
UNCAPPED = ["llama", "gemma3_text", "gpt2", "gptj", "cohere", "cohere2", "granite", "falcon_h1"]
PRECAP = Extras(precap=True)

ROWS = [Row(tokens(20, 0), tokens(count, count)) for count in (9, 5, 2, 1)]
ROWS += [Row(tokens(3, 1), tokens(4, 7))]


def inflated(model: Any) -> Any:
    """The model with a head whose outputs go far beyond the cap."""
    with torch.no_grad():
        model.get_output_embeddings().weight *= 20
    return model


def nested_gemma4() -> Any:
    """A Gemma 4 whose cap stands in the nested configuration of its text model."""
    model = families.build("gemma4")
    model.config.get_text_config().final_logit_softcapping = CAP
    assert not hasattr(model.config, "final_logit_softcapping")
    return model


def with_precap(model: Any, reuse: bool = True, rows: list[Row] = ROWS) -> list[TokenScores]:
    engine = engine_of(model, 2)
    if reuse:
        engine.check(Row(tokens(60, 0), tokens(12, 1)))
    found = dict(pair for part in engine.score(rows, PRECAP) for pair in part)
    return [found[index] for index in range(len(rows))]


def head_by_hand(model: Any, row: Row) -> torch.Tensor:
    """Minus the target's product of the head with the hidden states of a pass of its own."""
    ids = torch.tensor([[*row.prefix, *row.continuation]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False)[0]
        head = model.get_output_embeddings()
        logits = functional.linear(hidden, head.weight, head.bias)[0, -len(row.continuation) :]
    return -logits.gather(1, ids[0, len(row.prefix) :, None])[:, 0].double()


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("family", [*CAPPED, "gemma4, nested"])
def test_precap_is_the_heads_own_output(family, reuse):
    model = nested_gemma4() if "nested" in family else families.build(family, **CAPPED[family])
    model = inflated(model)
    beyond = 0.0
    for row, found in zip(ROWS, with_precap(model, reuse), strict=True):
        expected = head_by_hand(model, row)
        torch.testing.assert_close(found.extra["precap"], expected, rtol=1e-4, atol=1e-3)
        capped = -CAP * torch.tanh(-expected / CAP)
        torch.testing.assert_close(found.raw, capped, rtol=1e-4, atol=1e-4)
        beyond = max(beyond, float(expected.abs().max()))
    # Beyond what the inverse of tanh can give back in float32.
    assert beyond > 10 * CAP


@pytest.mark.parametrize("family", UNCAPPED)
def test_without_a_cap_precap_is_raw_to_the_last_bit(family, caplog):
    """Scaled logits (Cohere, Granite, Falcon-H1) are the model's logits, so they are the raw."""
    with caplog.at_level(logging.WARNING, logger="lm_eval_hyprank"):
        for found in with_precap(families.build(family)):
            assert torch.equal(found.extra["precap"], found.raw)
    assert "soft-capping" not in caplog.text


def test_a_scale_is_part_of_the_logits():
    """In this model the head's output is not what is scored, and the cap is not what differs."""
    model = families.build("granite", logits_scaling=8.0)
    (found, *_), row = with_precap(model), ROWS[0]
    torch.testing.assert_close(
        found.extra["precap"], head_by_hand(model, row) / 8, rtol=1e-4, atol=1e-4
    )


def test_capping_in_place_does_not_touch_what_is_read():
    model = inflated(families.build("xlstm", output_logit_soft_cap=CAP, max_inference_chunksize=2))
    (found, *_), row = with_precap(model, reuse=False), ROWS[0]
    torch.testing.assert_close(
        found.extra["precap"], head_by_hand(model, row), rtol=1e-4, atol=1e-2
    )
    assert found.extra["precap"].abs().max() > 2 * CAP


def test_precap_in_half_precision_is_the_heads_output_there():
    model = inflated(families.build("gemma2", final_logit_softcapping=CAP)).to(torch.bfloat16)
    (found, *_), row = with_precap(model, reuse=False), ROWS[0]
    torch.testing.assert_close(
        found.extra["precap"], head_by_hand(model, row).double(), rtol=0.05, atol=1.0
    )


@pytest.mark.parametrize("cap", [None, CAP])
def test_an_unknown_change_of_the_logits_gives_no_number(cap, caplog, monkeypatch):
    model = families.build("gemma2", final_logit_softcapping=cap)
    honest = model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        outputs = honest(*args, **kwargs)
        outputs.logits = outputs.logits.clamp(max=0.1)
        return outputs

    changed.__signature__ = inspect.signature(honest)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "forward", changed)
    with caplog.at_level(logging.WARNING, logger="lm_eval_hyprank"):
        for found in with_precap(model):
            assert found.extra["precap"].isnan().all()
            assert found.raw.isfinite().all()
    (message,) = [r.getMessage() for r in caplog.records if "soft-capping" in r.getMessage()]
    assert ("no soft-capping" if cap is None else f"soft-capping at {CAP}") in message


def test_a_cap_that_is_named_and_not_applied_is_an_unknown_change(caplog):
    """Also where the head had been found to be plain, as it is."""
    model = tiny.llama(families.VOCABULARY)
    model.config.final_logit_softcapping = CAP
    engine = engine_of(model, 2)
    engine.check(ROWS[0])
    assert engine.predictor.plain_head is not None
    with caplog.at_level(logging.WARNING, logger="lm_eval_hyprank"):
        found = dict(pair for part in engine.score(ROWS, PRECAP) for pair in part)
    assert f"soft-capping at {CAP}" in caplog.text
    for index, row in enumerate(ROWS):
        assert found[index].extra["precap"].isnan().all()
        expected = tiny.plain_scores(model, row)
        torch.testing.assert_close(found[index].nll, expected.nll, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", [(20,), (20, 3)])
def test_a_capped_head_that_is_called_in_parts_gives_no_number(sizes, caplog):
    """Its outputs are then not those of the positions that they are taken for."""
    model = tiny.llama(VOCABULARY)
    model.config.final_logit_softcapping = CAP
    in_parts_if_long(model, change=lambda logits: CAP * torch.tanh(logits / CAP))
    engine = engine_of(model)
    engine.predictor.find_precap(tokens(10))
    assert engine.predictor.precap == "head"
    rows = [Row(tokens(2, size), tokens(size, size)) for size in sizes]
    with caplog.at_level(logging.WARNING, logger="lm_eval_hyprank"):
        found = dict(pair for part in engine.score(rows, PRECAP) for pair in part)
    assert "before soft-capping are not known" in caplog.text
    for index, row in enumerate(rows):
        assert found[index].extra["precap"].isnan().all()
        assert off(found[index], tiny.plain_scores(model, row)) <= 10 * TOLERANCE


def test_precap_is_known_whatever_is_asked_first():
    model = families.build("gemma2", final_logit_softcapping=CAP)
    row = Row(tokens(20), tokens(9, 9))
    (found,) = engine_of(model).score_whole([row], PRECAP)
    expected = head_by_hand(model, row)
    torch.testing.assert_close(found.extra["precap"], expected, rtol=1e-4, atol=1e-3)


def test_the_check_of_the_cap_is_small_whatever_the_row():
    model = families.build("gemma2", final_logit_softcapping=CAP)
    engine = engine_of(model, 2)
    widths = []
    model.get_output_embeddings().register_forward_hook(lambda *c: widths.append(c[-1].shape[1]))
    engine.predictor.find_precap(tokens(100))
    assert engine.predictor.precap == "head"
    assert widths == [16]


def test_rows_of_the_vocabulary_that_are_masked_do_not_matter(monkeypatch):
    model = families.build("llama")
    honest = model.forward

    def masked(*args: Any, **kwargs: Any) -> Any:
        outputs = honest(*args, **kwargs)
        outputs.logits[..., -1] = -math.inf
        return outputs

    masked.__signature__ = inspect.signature(honest)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "forward", masked)
    engine = engine_of(model, 2)
    engine.predictor.find_precap(tokens(20))
    assert engine.predictor.precap == "raw"


def test_no_hook_stays_behind_and_none_is_set_without_need():
    model = families.build("gemma2", final_logit_softcapping=CAP)
    head = model.get_output_embeddings()
    calls = []
    honest = head.register_forward_hook
    head.register_forward_hook = lambda hook: (calls.append(hook), honest(hook))[1]
    engine = engine_of(model, 2)
    list(engine.score(ROWS))
    list(engine.score(ROWS, Extras(moments=True)))
    assert not calls
    list(engine.score(ROWS, PRECAP))
    assert calls
    assert not head._forward_hooks


def test_the_rest_is_untouched_by_the_reading():
    model = families.build("gemma2", final_logit_softcapping=CAP)
    engine = engine_of(model, 2)
    plain = dict(pair for part in engine.score(ROWS) for pair in part)
    for index, found in enumerate(with_precap(model, reuse=False)):
        assert torch.equal(found.nll, plain[index].nll)
        assert math.isfinite(float(found.extra["precap"].sum()))
