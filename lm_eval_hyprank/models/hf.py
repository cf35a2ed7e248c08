"""The hook: lm-eval's Hugging Face model with a loglikelihood that keeps its sums."""

from __future__ import annotations

import logging
import math
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from lm_eval_hyprank.batching import Batching
from lm_eval_hyprank.energy import TokenScores
from lm_eval_hyprank.extras import Extras
from lm_eval_hyprank.models.tokens import encode, fit
from lm_eval_hyprank.prefix import Engine, Row
from lm_eval_hyprank.scores import ContinuationScore, Floats, TokenValues

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

logger = logging.getLogger(__name__)


@register_model("hf-energy")
class EnergyHFLM(HFLM):
    """`HFLM` whose `loglikelihood` returns a `ContinuationScore` for every request.

    Takes the same arguments as lm-eval's ``hf`` and serves the same tasks. Decoder-only models
    only. ``batch_size`` stays an upper limit of sequences; ``auto`` leaves the limit to the
    device's memory.
    """

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[ContinuationScore]:
        """Scores each request's continuation given its context.

        Args:
            requests: Instances whose ``args`` are ``(context, continuation)``.
            disable_tqdm: Whether to hide the progress bar.

        Returns:
            One `ContinuationScore` a request, in the order of the requests.
        """
        return score_requests(self, requests, disable_tqdm=disable_tqdm)


def check_supported(lm: Any) -> None:
    """Stops a run on a model that cannot give continuation scores, before anything is scored.

    Raises:
        TypeError: The model is not lm-eval's ``hf``, a subclass that replaces how it is called,
            or not decoder-only.
        ValueError: The model is in train mode.
    """
    remedy = (
        "Use --model hf (or hf-energy), which reads the logits of a local Hugging Face model; for "
        "a model behind an API, whose logits are not to be had, a task that prompts it, such as "
        "researchbench_judge."
    )
    if not isinstance(lm, HFLM):
        raise TypeError(
            f"the task ranks candidates by a model's own logits, which {type(lm).__name__} does "
            f"not return. {remedy}"
        )
    if type(lm)._model_call is not HFLM._model_call:
        raise TypeError(
            f"{type(lm).__name__} replaces how lm-eval's hf calls its model, so continuation "
            f"scores would not be its own. {remedy}"
        )
    if lm.backend != "causal":
        raise TypeError(
            "encoder-decoder models are not supported: the scores are defined on the tokens that "
            f"follow the context in one decoder. {remedy}"
        )
    if lm.model.training:
        raise ValueError("the model is in train mode, where dropout changes scores: model.eval()")


def score_requests(
    lm: HFLM,
    requests: Sequence[Instance],
    *,
    disable_tqdm: bool = False,
    extras: Extras | None = None,
    after_header: Collection[str] = (),
) -> list[ContinuationScore]:
    """Scores requests on a loaded `HFLM`; what `EnergyHFLM.loglikelihood` does.

    Tokens follow the method's boundary rule: the continuation is what stands at or beyond the
    length of the tokenised context in the tokenised whole (see `tokens.encode`). A context that
    does not fit beside the longest of its continuations is cut on the left, the same for all of
    them, the special tokens at its start kept. Finished contexts go to lm-eval's response cache
    at once.

    Args:
        lm: A supported model, see :func:`check_supported`.
        requests: Instances whose ``args`` are ``(context, continuation)``.
        disable_tqdm: Whether to hide the progress bar.
        extras: Asks for the values of every token, and for these beside; None for sums alone.
        after_header: Names of tasks whose contexts end with a chat template's header. Their
            continuations are scored without the whitespace at their start, see `tokens.encode`.

    Returns:
        Scores in the order of the requests. What does not fit the model has scores of NaN.

    Raises:
        ValueError: A continuation is empty or has no tokens, or thinking is enabled.
        TypeError: The model is not causal, or not one of those that are supported.
        IndexError: The model has no logit for a token of a continuation.
    """
    if lm.enable_thinking:
        raise ValueError("enable_thinking=True does not go with tasks that score a continuation")
    pairs: dict[tuple[str, str], list[int]] = {}
    for index, request in enumerate(requests):
        context, continuation = request.args
        if not continuation:
            raise _refused(request, "is empty, so it has no tokens and there is nothing to score")
        if _SURROGATE.search(context + continuation):
            raise _refused(request, "or its context has half of a surrogate pair, which is no text")
        pairs.setdefault((context, continuation), []).append(index)

    keys = list(pairs)
    headed = {request.args for request in requests if request.task_name in after_header}
    encoded = encode(lm, keys, headed)
    for key, whole in zip(keys, encoded, strict=True):
        if not whole.continuation:
            why = (
                f"({key[1]!r}) has no tokens after its context under this model's tokenizer, so "
                "there is nothing to score"
            )
            raise _refused(requests[pairs[key][0]], why)
    rows, truncated = fit(lm, encoded)
    engine = engine_of(lm, [row for row in rows if row is not None])
    found: list[ContinuationScore | None] = [None] * len(requests)

    def finish(key: tuple[str, str], score: ContinuationScore) -> None:
        for index in pairs[key]:
            found[index] = score
        lm.cache_hook.add_partial("loglikelihood", key, score)

    for key, row, whole in zip(keys, rows, encoded, strict=True):
        if row is None:
            # Sums that are no numbers: the item will be counted as invalid, not ranked.
            nothing = torch.full((len(whole.continuation),), math.nan, dtype=torch.float64)
            unscored = TokenScores(nothing, nothing, torch.zeros_like(nothing, dtype=torch.bool))
            finish(key, _score(key[1], unscored, truncated=True, tokens=None))
    scored = [(index, row) for index, row in enumerate(rows) if row is not None]
    with (
        tqdm(
            total=len(scored),
            desc="Scoring candidates",
            unit="candidate",
            disable=disable_tqdm or lm.rank != 0,
        ) as bar,
        _items_named(engine, [requests[pairs[keys[index]][0]] for index, _ in scored]),
    ):
        tokens = contexts = 0
        for part in engine.score([row for _, row in scored], extras):
            for place, scores in part:
                index, row = scored[place]
                tokens_of = None if extras is None else _token_values(row.continuation, scores)
                finish(keys[index], _score(keys[index][1], scores, truncated[index], tokens_of))
            done = {scored[place][1].prefix for place, _ in part}
            contexts += len(done)
            tokens += sum(map(len, done)) + sum(len(scores.raw) for _, scores in part)
            rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
            bar.set_postfix_str(f"{contexts} contexts, {rate:.0f} tokens/s", refresh=False)
            bar.update(len(part))
    return [score for score in found if score is not None]


@contextmanager
def _items_named(engine: Engine, requests: Sequence[Instance]) -> Iterator[None]:
    """Says what was being scored when an error came: of several processes, one alone has it."""
    try:
        yield
    except Exception:
        # Of another thread's call, if one has begun meanwhile: then it is only a hint.
        at_work = [requests[place] for place in engine.at_work if place < len(requests)]
        if items := dict.fromkeys(_item(request) for request in at_work):
            logger.error("failed while scoring %s", "; ".join(items))
        raise


_SURROGATE = re.compile("[\ud800-\udfff]")


def _refused(request: Instance, why: str) -> ValueError:
    where = f"{_item(request)}: " if request.task_name else ""
    return ValueError(f"{where}candidate {request.idx} {why}; remove or mend it")


def _item(request: Instance) -> str:
    item = (request.doc or {}).get("paper_id", request.doc_id)
    return f"task {request.task_name}, item {item}"


def _score(
    continuation: str, scores: TokenScores, truncated: bool, tokens: TokenValues | None
) -> ContinuationScore:
    text = continuation.strip().encode()
    return ContinuationScore(
        is_greedy=bool(scores.greedy.all()),
        num_tokens=len(scores.raw),
        num_bytes=len(text),
        num_zlib_bytes=len(zlib.compress(text)),
        nll_sum=float(scores.nll.sum()),
        raw_sum=float(scores.raw.sum()),
        logz_sum=float(scores.logz.sum()),
        truncated=truncated,
        tokens=tokens,
    )


def _token_values(token_ids: Sequence[int], scores: TokenScores) -> TokenValues:
    def stored(values: torch.Tensor) -> Floats:
        return values.numpy().astype(np.float32)

    return TokenValues(
        np.array(token_ids, dtype=np.int32),
        stored(scores.nll),
        stored(scores.raw),
        stored(scores.logz),
        {name: stored(values) for name, values in scores.extra.items()},
    )


def engine_of(lm: HFLM, rows: Sequence[Row]) -> Engine:
    """The model's engine, made and checked on first use, and anew for another model."""
    check_supported(lm)
    engine: Engine | None = lm.__dict__.get("_hyprank_engine")
    if engine is None or engine.model is not lm.model or engine.device != lm.device:

        def autocast() -> torch.autocast:
            return torch.autocast(
                device_type=lm.device.type,
                dtype=lm.mixed_precision_dtype,
                enabled=lm.mixed_precision_dtype is not None,
            )

        limit = None if lm.batch_size == "auto" else int(lm.batch_size)
        batching = Batching.for_model(lm.model, lm.device, limit)
        engine = lm._hyprank_engine = Engine(lm.model, lm.device, batching, autocast)
    if rows:
        engine.check(max(rows, key=lambda row: len(row.prefix) + len(row.continuation)))
    return engine
