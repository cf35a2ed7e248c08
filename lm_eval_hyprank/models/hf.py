"""The hook: lm-eval's Hugging Face model with a loglikelihood that keeps its sums."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import re
import string
import threading
import zlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import has_bos_prefix
from tqdm import tqdm

from lm_eval_hyprank.batching import Batching
from lm_eval_hyprank.energy import TokenScores
from lm_eval_hyprank.extras import Extras
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
    length of the tokenised context in the tokenised whole (see :func:`encode`). A context that
    does not fit beside the longest of its continuations is cut on the left, the same for all of
    them, the special tokens at its start kept. Finished contexts go to lm-eval's response cache
    at once.

    Args:
        lm: A supported model, see :func:`check_supported`.
        requests: Instances whose ``args`` are ``(context, continuation)``.
        disable_tqdm: Whether to hide the progress bar.
        extras: Asks for the values of every token, and for these beside; None for sums alone.
        after_header: Names of tasks whose contexts end with a chat template's header. Their
            continuations are scored without the whitespace at their start, see :func:`encode`.

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
    rows, truncated = _fit(lm, encoded)
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
    with tqdm(
        total=len(scored),
        desc="Scoring candidates",
        unit="candidate",
        disable=disable_tqdm or lm.rank != 0,
    ) as bar:
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


_SURROGATE = re.compile("[\ud800-\udfff]")


def _refused(request: Instance, why: str) -> ValueError:
    item = (request.doc or {}).get("paper_id", request.doc_id)
    where = f"task {request.task_name}, item {item}: " if request.task_name else ""
    return ValueError(f"{where}candidate {request.idx} {why}; remove or mend it")


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


def model_fingerprint(lm: HFLM) -> str:
    """Identifies what decides a model's scores: weights, config, tokenizer and their settings.

    Weights enter by up to 256 values spread evenly over each tensor, so a file replaced under the
    same name is noticed and a large model costs no full pass.
    """
    digest = hashlib.sha256()

    def add(*values: object) -> None:
        digest.update(repr(values).encode())

    config = lm.model.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):  # the same model, wherever it lies
        config.pop(name, None)
    add(type(lm.model).__name__, json.dumps(config, sort_keys=True, default=str))
    add(lm.max_length, lm.add_bos_token, lm.mixed_precision_dtype, lm.prefix_token_id)
    probe = "Hypothesis: 3.14 \u03b1\n<x>"
    add(type(lm.tokenizer).__name__, len(lm.tokenizer), lm.tokenizer.encode(probe))
    add_weights(digest, lm.model)
    for name, adapter in getattr(lm.model, "peft_config", {}).items():
        settings = adapter.to_dict()
        for key in ("base_model_name_or_path", "peft_version"):
            settings.pop(key, None)
        add(name, json.dumps(settings, sort_keys=True, default=_in_order))
    for module in lm.model.modules():  # an adapter's layers may be scaled or switched off
        if isinstance(getattr(type(module), "disable_adapters", None), property):
            add(module.disable_adapters, module.active_adapters, getattr(module, "scaling", None))
    return digest.hexdigest()[:16]


def _in_order(value: object) -> object:
    """What JSON has no name for; the order of a set is another in every process."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def add_weights(digest: Any, module: torch.nn.Module) -> None:
    """Adds a module's weights to a hash: up to 256 values spread evenly over each tensor."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        digest.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode())
        step = max(1, math.ceil(tensor.numel() / 256))
        try:
            sample = tensor.detach().flatten()[::step].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
        except (NotImplementedError, RuntimeError):
            continue  # on the meta device, or packed by a quantiser: the shape has to do


def encode(
    lm: HFLM,
    pairs: Sequence[tuple[str, str]],
    after_header: Collection[tuple[str, str]] = (),
) -> list[Row]:
    """Tokenises (context, continuation) pairs by the method's boundary rule.

    The whole text is tokenised at once, and so is the context alone; the continuation is the
    tokens of the whole from the context's token count on. Where one token spans the join so
    that nothing is left beyond it, the continuation begins with the first token in which
    whole and context differ. Further:

    * special tokens that the tokenizer puts in front (BOS) stand there once; what it would put
      at the end (EOS) is neither fed nor scored;
    * an empty context is lm-eval's ``prefix_token_id``, and whitespace at the end of a context
      belongs to the continuation, both as in lm-eval;
    * a chat template's header, its line breaks included, is all context, and stands in place of
      the separator: whitespace at the start of a continuation after it is left out;
    * text in a continuation that spells a special token is read as text, unless the context
      holds special tokens of its own (a chat template).

    Args:
        lm: The model whose tokenizer is used.
        pairs: Distinct pairs, continuations not empty. One that the tokenizer drops (whitespace
            after a header, characters it normalises away) makes a row without continuation.
        after_header: Those pairs whose context ends with a chat template's header.
    """
    front = _front_tokens(lm)
    bos = lm.tokenizer.decode(lm.prefix_token_id)
    stripped = [
        (pair[0], pair[1].lstrip()) if pair in after_header else _move_spaces(*pair)
        for pair in pairs
    ]
    has_special = _special_pattern(lm).search
    spelt = {pair for pair in stripped if has_special(pair[1]) and not has_special(pair[0])}
    texts = {context for context, _ in stripped}
    texts |= {context + tail for context, tail in stripped if (context, tail) not in spelt}
    ids = _batch_encode(lm, texts)
    # Apart: another pair's context may read the same, and hold special tokens.
    spelt_texts = {context + tail for context, tail in spelt}
    spelt_ids = _batch_encode(lm, spelt_texts, split_special_tokens=True)
    rows = []
    spanned = 0
    for context, tail in stripped:
        whole = (spelt_ids if (context, tail) in spelt else ids)[context + tail]
        if not context:
            rows.append(Row((lm.prefix_token_id,), tuple(whole)))
            continue
        head = [] if has_bos_prefix(context, bos) else front
        whole, before = [*head, *whole], [*head, *ids[context]]
        start = len(before)
        if len(whole) <= start and whole != before:
            spanned += 1
            same = (a == b for a, b in zip(whole, before, strict=False))
            start = sum(itertools.takewhile(bool, same))
        if start == 0:
            whole, start = [lm.prefix_token_id, *whole], 1
        rows.append(Row(tuple(whole[:start]), tuple(whole[start:])))
    if spanned:
        logger.warning(
            "%d of %d continuations share a token with the end of their context; scored from that "
            "token on",
            spanned,
            len(rows),
        )
    if spelt:
        logger.warning(
            "%d of %d continuations spell a special token of the tokenizer; read as plain text",
            len(spelt),
            len(rows),
        )
    return rows


def _special_pattern(lm: HFLM) -> re.Pattern[str]:
    """Finds the text of any token that the tokenizer would not take for text."""
    added = getattr(lm.tokenizer, "added_tokens_decoder", {}).values()
    tokens = {str(token) for token in added if token.special} | {*lm.tokenizer.all_special_tokens}
    return re.compile("|".join(map(re.escape, sorted(filter(None, tokens), key=len))) or r"(?!)")


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _front_tokens(lm: HFLM) -> list[int]:
    """The special tokens that the tokenizer puts before a text, under lm-eval's settings."""
    options = {} if lm.add_bos_token is None else {"add_special_tokens": lm.add_bos_token}
    for text in ("x", *string.ascii_letters, *string.digits):
        # Vocabularies of nucleotides, amino acids or digits have no token for some.
        if plain := lm.tokenizer.encode(text, add_special_tokens=False):
            break
    full = lm.tokenizer.encode(text, **options)
    for start in range(len(full) - len(plain) + 1):
        if plain and full[start : start + len(plain)] == plain:
            return list(full[:start])
    raise ValueError(
        f"{type(lm.tokenizer).__name__} does not keep a text's tokens together when it adds "
        "special tokens; pass --model_args add_bos_token=False"
    )


_ENVIRONMENT = threading.Lock()


def _batch_encode(lm: HFLM, texts: set[str], **options: Any) -> dict[str, list[int]]:
    """Tokenises distinct texts without special tokens, on all cores."""
    ordered = sorted(texts)
    if not ordered:
        return {}
    # lm-eval's command line switches this off for fear of forks; none happens in here.
    with _ENVIRONMENT:
        before = os.environ.get("TOKENIZERS_PARALLELISM")
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        try:
            encoded = lm.tokenizer(ordered, add_special_tokens=False, verbose=False, **options)
        finally:
            if before is None:
                del os.environ["TOKENIZERS_PARALLELISM"]
            else:
                os.environ["TOKENIZERS_PARALLELISM"] = before
    return dict(zip(ordered, encoded["input_ids"], strict=True))


def _fit(lm: HFLM, rows: Sequence[Row]) -> tuple[list[Row | None], list[bool]]:
    """Cuts contexts on the left to fit the model, alike for all continuations of a context.

    Returns:
        The rows, None where not even the continuation fits, and which of them were cut.
    """
    adapter = getattr(lm.model, "active_peft_config", None)
    virtual = getattr(adapter, "num_virtual_tokens", None) or 0  # they take positions too
    limit = lm.max_length - virtual + 1  # the last token is predicted, never fed
    front = tuple(_front_tokens(lm))
    groups: dict[Sequence[int], list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.prefix, []).append(index)
    fitted: list[Row | None] = list(rows)
    cut = [False] * len(rows)
    for prefix, members in groups.items():
        head = len(front) if prefix[: len(front)] == front else 0
        # A BOS that the text itself brings (a chat template) is kept just so.
        head = head or int(prefix[0] == lm.tokenizer.bos_token_id)
        # One token of context is the least that a continuation can be predicted from.
        least = max(head, 1)
        fitting = {i for i in members if len(rows[i].continuation) <= limit - least}
        longest = max((len(rows[i].continuation) for i in fitting), default=0)
        if len(prefix) + longest <= limit and len(fitting) == len(members):
            continue
        room = limit - longest
        tail = room - head
        short = prefix if len(prefix) <= room else (*prefix[:head], *prefix[len(prefix) - tail :])
        for index in members:
            cut[index] = index not in fitting or short != prefix
            fitted[index] = Row(short, rows[index].continuation) if index in fitting else None
    if any(cut):
        contexts = {
            row.prefix
            for row, short_row in zip(rows, fitted, strict=True)
            if short_row is not None and short_row.prefix != row.prefix
        }
        logger.warning(
            "%d context(s) do not fit the model's %d tokens beside their continuations and were "
            "cut on the left; %d continuation(s) do not fit at all and have no score",
            len(contexts),
            lm.max_length,
            fitted.count(None),
        )
    return fitted, cut


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
