"""From texts to rows of tokens: where a continuation begins, and what fits the model."""

from __future__ import annotations

import itertools
import logging
import os
import re
import string
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.models.utils import has_bos_prefix

from lm_eval_hyprank.prefix import Row

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM

logger = logging.getLogger(__name__)


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


def fit(lm: HFLM, rows: Sequence[Row]) -> tuple[list[Row | None], list[bool]]:
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
