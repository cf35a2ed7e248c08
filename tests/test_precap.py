"""Logits before final soft-capping: the head's own output, whichever way they are reached."""

from __future__ import annotations

import inspect
import logging
import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from lm_eval_hyprank.energy import TokenScores
from lm_eval_hyprank.extras import Extras
from lm_eval_hyprank.prefix import Batching, Engine, Row
from tests import families, tiny
from tests.test_families import tokens

pytestmark = pytest.mark.usefixtures("one_thread")

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


def scored(model: Any, reuse: bool = True, rows: list[Row] = ROWS) -> list[TokenScores]:
    engine = Engine(model, torch.device("cpu"), Batching(2, 512, min_saving=1))
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
    for row, found in zip(ROWS, scored(model, reuse), strict=True):
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
        for found in scored(families.build(family)):
            assert torch.equal(found.extra["precap"], found.raw)
    assert "soft-capping" not in caplog.text


def test_a_scale_is_part_of_the_logits():
    """In this model the head's output is not what is scored, and the cap is not what differs."""
    model = families.build("granite", logits_scaling=8.0)
    (found, *_), row = scored(model), ROWS[0]
    torch.testing.assert_close(
        found.extra["precap"], head_by_hand(model, row) / 8, rtol=1e-4, atol=1e-4
    )


def test_capping_in_place_does_not_touch_what_is_read():
    model = inflated(families.build("xlstm", output_logit_soft_cap=CAP, max_inference_chunksize=2))
    (found, *_), row = scored(model, reuse=False), ROWS[0]
    torch.testing.assert_close(
        found.extra["precap"], head_by_hand(model, row), rtol=1e-4, atol=1e-2
    )
    assert found.extra["precap"].abs().max() > 2 * CAP


def test_precap_in_half_precision_is_the_heads_output_there():
    model = inflated(families.build("gemma2", final_logit_softcapping=CAP)).to(torch.bfloat16)
    (found, *_), row = scored(model, reuse=False), ROWS[0]
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
        for found in scored(model):
            assert found.extra["precap"].isnan().all()
            assert found.raw.isfinite().all()
    (message,) = [r.getMessage() for r in caplog.records if "soft-capping" in r.getMessage()]
    assert ("no soft-capping" if cap is None else f"soft-capping at {CAP}") in message


def test_a_cap_that_is_named_and_not_applied_is_an_unknown_change(caplog):
    """Also where the head had been found to be plain, as it is."""
    model = tiny.llama(families.VOCABULARY)
    model.config.final_logit_softcapping = CAP
    engine = Engine(model, torch.device("cpu"), Batching(2, 512, min_saving=1))
    engine.check(ROWS[0])
    assert engine.plain_head is not None
    with caplog.at_level(logging.WARNING, logger="lm_eval_hyprank"):
        found = dict(pair for part in engine.score(ROWS, PRECAP) for pair in part)
    assert f"soft-capping at {CAP}" in caplog.text
    for index, row in enumerate(ROWS):
        assert found[index].extra["precap"].isnan().all()
        expected = tiny.plain_scores(model, row)
        torch.testing.assert_close(found[index].nll, expected.nll, rtol=0, atol=1e-5)


def test_the_check_of_the_cap_is_small_whatever_the_row():
    model = families.build("gemma2", final_logit_softcapping=CAP)
    engine = Engine(model, torch.device("cpu"), Batching(2, 512, min_saving=1))
    widths = []
    model.get_output_embeddings().register_forward_hook(lambda *c: widths.append(c[-1].shape[1]))
    assert engine._find_precap(Row(tokens(60, 0), tokens(40, 1))) == "head"
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
    engine = Engine(model, torch.device("cpu"), Batching(2, 512, min_saving=1))
    assert engine._find_precap(ROWS[0]) == "raw"


def test_no_hook_stays_behind_and_none_is_set_without_need():
    model = families.build("gemma2", final_logit_softcapping=CAP)
    head = model.get_output_embeddings()
    calls = []
    honest = head.register_forward_hook
    head.register_forward_hook = lambda hook: (calls.append(hook), honest(hook))[1]
    engine = Engine(model, torch.device("cpu"), Batching(2, 512, min_saving=1))
    list(engine.score(ROWS))
    list(engine.score(ROWS, Extras(moments=True)))
    assert not calls
    list(engine.score(ROWS, PRECAP))
    assert calls
    assert not head._forward_hooks


def test_the_rest_is_untouched_by_the_reading():
    model = families.build("gemma2", final_logit_softcapping=CAP)
    engine = Engine(model, torch.device("cpu"), Batching(2, 512, min_saving=1))
    plain = dict(pair for part in engine.score(ROWS) for pair in part)
    for index, found in enumerate(scored(model, reuse=False)):
        assert torch.equal(found.nll, plain[index].nll)
        assert math.isfinite(float(found.extra["precap"].sum()))
