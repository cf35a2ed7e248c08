"""Teacher-forced scoring of many continuations of one prefix, the prefix computed once."""

from __future__ import annotations

import copy
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lm_eval_hyprank.batching import Batching
from lm_eval_hyprank.energy import TokenScores
from lm_eval_hyprank.extras import Extras
from lm_eval_hyprank.predictions import Predictions, Predictor, score_difference

logger = logging.getLogger(__name__)

POOL_ROWS = 256
"""Rows of many prefixes that are batched whole before their results are handed out."""

CHECK_TOKENS = 16
"""Tokens of the longest continuation in the self-check, and the least of its prefix."""

UNPROVEN_DEVICES = ("mps",)
"""Types of devices on which models have been seen to give quite other scores than on a CPU."""

DEVICE_TOLERANCE = 0.01
"""Share of its sum of log-likelihoods by which such a device may differ from the CPU."""


class Row(NamedTuple):
    """One sequence to feed: ``prefix + continuation``, of which the continuation is scored."""

    prefix: Sequence[int]
    continuation: Sequence[int]


def _read_only(layer: Any) -> None:
    """Makes a cache layer hand out prefix + new keys and values without storing the new."""
    keys, values = layer.keys, layer.values

    def update(
        key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = key_states.shape[0]
        return (
            torch.cat([keys.expand(batch, -1, -1, -1), key_states], dim=-2),
            torch.cat([values.expand(batch, -1, -1, -1), value_states], dim=-2),
        )

    layer.update = update


class _SharedPrefix:
    """The cache of one prefix, shared read-only by all batches: nothing copied, nothing stored."""

    name = "shared"

    def __init__(self, cache: Any) -> None:
        for layer in cache.layers:
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
                if layer.is_initialized:
                    _read_only(layer)
            # Layers that use the keys of another one have a placeholder, which holds nothing.
            elif type(layer).__name__ != "DummyLayer":
                raise TypeError(f"{type(layer).__name__} has more to share than keys and values")
        self.cache = cache

    def expanded(self, batch: int) -> Any:
        return self.cache


class _CopiedPrefix:
    """The cache of one prefix, copied for each batch: for layers that keep a state, not keys."""

    name = "copied"

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def expanded(self, batch: int) -> Any:
        copied = copy.deepcopy(self.cache)
        copied.reorder_cache(torch.zeros(batch, dtype=torch.long))
        return copied


_Strategy = type[_SharedPrefix] | type[_CopiedPrefix]


class Engine:
    """Scores rows on a loaded causal language model.

    Two paths give the same numbers. *Whole*: each distinct sequence in one plain forward pass,
    right-padded (a causal model never sees the padding). *On a prefix*: the prefix of a group
    once, keeping its cache, then the continuations on top of it. The second is used only if
    :meth:`check` found on this very model that it reproduces the first.

    Args:
        model: A causal language model of transformers, or a PEFT wrapper of one, in eval mode.
        device: Where input ids go.
        batching: Limits of one forward pass.
        autocast: Makes the context in which the model is called (mixed precision).

    Attributes:
        reuse: How a prefix is reused; None where it is not, or before :meth:`check`.
        untried: Ways of reuse that have not failed a check, the preferred one first.
        checked_tokens: Length of the longest row that was checked; 0 before :meth:`check`.
        rope_switch: The length beyond which rotary frequencies change, in tokens.
        rope_limit: That beyond which they depend on the texts seen before.
        device_difference: On a device of `UNPROVEN_DEVICES`, by what share of a row's NLL it
            differs from the CPU; None elsewhere.
        predictor: Calls the model, its output head left out where :meth:`check` found that it may.
        at_work: Indices of the rows that :meth:`score` is at.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        batching: Batching,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model = model
        self.device = device
        self.batching = batching
        self.predictor = Predictor(model, device, autocast)
        self.rope_switch = _rope_switch(model)
        self.reuse: _Strategy | None = None
        self.rope_limit = _rope_limit(model)
        self.untried: list[_Strategy] = [_SharedPrefix, _CopiedPrefix]
        adapters = getattr(model, "peft_config", {}).values()
        if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters):
            self.untried = []  # fed without the tokens that invoke it, an adapter does nothing
        self.checked_tokens = 0
        self.at_work: list[int] = []
        self.device_difference: float | None = None

    def score(
        self, rows: Sequence[Row], extras: Extras | None = None
    ) -> Iterator[list[tuple[int, TokenScores]]]:
        """Scores rows, longest prefix first; the order of the rows changes no digit.

        A prefix is computed anew for every ``POOL_ROWS`` of its rows, so that results are handed
        out along the way.

        Args:
            rows: What to score; prefix and continuation not empty. Duplicates cost nothing.
            extras: What else to compute of each token; None for nothing.

        Yields:
            Finished rows, each as its index in ``rows`` and the scores of its continuation's
            tokens, on the CPU.

        Raises:
            IndexError: The model has no embedding or no logit for a token.
        """
        self.at_work = []
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(tuple(row.prefix), []).append(index)
        self._refuse_unknown(itertools.chain(groups, (row.continuation for row in rows)))
        parts: list[tuple[tuple[int, ...], list[int]]] = []
        for prefix, all_members in sorted(groups.items(), key=lambda g: (-len(g[0]), g[0])):
            if len(all_members) > POOL_ROWS:
                all_members.sort(key=lambda index: (-len(rows[index].continuation), rows[index]))
            for start in range(0, len(all_members), POOL_ROWS):
                parts.append((prefix, all_members[start : start + POOL_ROWS]))
        pool: list[int] = []
        for prefix, members in parts:
            continuations = [rows[index].continuation for index in members]
            distinct = len({tuple(continuation[:-1]) for continuation in continuations})
            saves = len(prefix) * (distinct - 1) >= self.batching.min_saving
            if self.reuse and saves and not self._straddles(prefix, continuations):
                self.at_work = members
                scores = self.score_on_prefix(prefix, continuations, extras)
                yield list(zip(members, scores, strict=True))
                continue
            pool += members
            if len(pool) >= POOL_ROWS:
                yield self._score_pool(pool, rows, extras)
                pool = []
        if pool:
            yield self._score_pool(pool, rows, extras)

    def _score_pool(
        self, pool: list[int], rows: Sequence[Row], extras: Extras | None
    ) -> list[tuple[int, TokenScores]]:
        self.at_work = pool
        return list(zip(pool, self.score_whole([rows[i] for i in pool], extras), strict=True))

    def score_whole(self, rows: Sequence[Row], extras: Extras | None = None) -> list[TokenScores]:
        """Scores rows in forward passes without a cache, which is right for every causal model.

        Arguments as of :meth:`score`; scores in the order of the rows. As long as the predictor
        has no plain head, the logits are those that the model returns.
        """
        sequences: dict[tuple[int, ...], list[int]] = {}
        for index, (prefix, continuation) in enumerate(rows):
            sequences.setdefault((*prefix, *continuation[:-1]), []).append(index)
        scores: dict[int, TokenScores] = {}

        def run(batch: list[tuple[int, ...]]) -> None:
            ids = self._padded(batch)
            wanted = [
                (number, len(rows[index].prefix) - 1, index)
                for number, sequence in enumerate(batch)
                for index in sequences[sequence]
            ]
            keep = ids.shape[1] - min(first for _, first, _ in wanted)
            found = self._forward(ids, keep=keep, extras=extras)
            # What was kept is counted from the end; some models ignore the wish and keep all.
            dropped = ids.shape[1] - found.positions
            self._pick(found, [(n, f - dropped, i) for n, f, i in wanted], rows, scores, extras)

        for beyond in (True, False):
            self._in_batches([s for s in sequences if (len(s) > self.rope_switch) is beyond], run)
        return [scores[index] for index in range(len(rows))]

    def score_on_prefix(
        self,
        prefix: Sequence[int],
        continuations: Sequence[Sequence[int]],
        extras: Extras | None = None,
    ) -> list[TokenScores]:
        """Scores continuations of one prefix, which is computed once and its cache reused.

        Args:
            prefix: Its tokens, at least one.
            continuations: Their tokens, at least one each, in any order.
            extras: What else to compute of each token; None for nothing.

        Returns:
            Scores in the order of the continuations.
        """
        assert self.reuse is not None
        # The prefix's last position predicts every continuation's first token. Where only one
        # token of each is left to feed, that position is fed with it: a single token would take
        # the path for generation, which in some state-space models (Zamba 2, Nemotron-H) computes
        # something slightly different, and beside it the model may have no position for padding.
        held = prefix[: self._held(prefix, continuations)]
        lead = tuple(prefix[len(held) :])
        outputs, found = self.predictor(
            self._padded([held]), extras, use_cache=True, logits_to_keep=1
        )
        cached = self.reuse(getattr(outputs, "cache", None) or outputs.past_key_values)
        scores: dict[int, list[TokenScores]] = {index: [] for index in range(len(continuations))}
        rows = [Row(held, (*lead, *continuation)) for continuation in continuations]
        if not lead:
            firsts = [row.continuation[0] for row in rows]
            first = found.last(1).scores(firsts, [0] * len(firsts), extras)
            for index in scores:
                scores[index].append(first[index : index + 1])
        beyond_first = [Row(row.prefix, row.continuation[1:]) for row in rows]
        inputs: dict[tuple[int, ...], list[int]] = {}
        for index, row in enumerate(rows):
            if len(row.continuation) > 1:
                inputs.setdefault(tuple(row.continuation[:-1]), []).append(index)

        def run(batch: list[tuple[int, ...]]) -> None:
            ids = self._padded(batch, 2)
            found = self._forward(ids, cached, start=len(held), extras=extras)
            wanted = [(n, 0, i) for n, sequence in enumerate(batch) for i in inputs[sequence]]
            rest: dict[int, TokenScores] = {}
            self._pick(found, wanted, beyond_first, rest, extras)
            for index, more in rest.items():
                scores[index].append(more)

        self._in_batches(list(inputs), run)
        return [TokenScores.concatenate(parts) for parts in scores.values()]

    def _refuse_unknown(self, texts: Iterable[Sequence[int]]) -> None:
        try:
            known = getattr(self.model.get_input_embeddings(), "num_embeddings", sys.maxsize)
        except (AttributeError, NotImplementedError):  # of a model's own making
            return
        highest = max(map(max, texts), default=0)
        if highest >= known:
            raise IndexError(
                f"token {highest} has no embedding: the model has {known}. Is this the model's "
                "own tokenizer?"
            )

    def _held(self, prefix: Sequence[int], continuations: Sequence[Sequence[int]]) -> int:
        """How many tokens of a prefix are held in its cache: all, or all but the last."""
        return len(prefix) - (len(prefix) > 1 and max(map(len, continuations)) == 2)

    def check(self, row: Row) -> None:
        """Finds out how this model's prefix can be reused, if at all.

        Scores one small group both ways: the last tokens of ``row`` and others like them, after
        all that stands before. Each way of reuse is tried in turn; the first that reproduces the
        plain forward pass is kept for :meth:`score`. Where none does (recurrent layers that
        ignore the state handed to them, models that return no cache, virtual-token adapters), one
        warning says so and :meth:`score` makes whole passes only. Where a sequence in a batch has
        other scores than alone, a warning says so and sequences are scored one by one. Does
        nothing for a row no longer than one checked before, nor, where no way of reuse is left, for
        any but the first. The first time, it is also found out whether the output head may be left
        out of the passes.

        Args:
            row: The longest row that will be scored: what goes wrong may do so only beyond an
                attention window, a chunk or a number of attended tokens.

        Raises:
            TypeError: The model is not causal: what it predicts depends on what follows.
            ValueError: The row is longer than the model scores without regard to other rows.
        """
        length = len(row.prefix) + len(row.continuation)
        if length - 1 > self.rope_limit:
            raise ValueError(
                f"a text of {length - 1} tokens goes beyond the {self.rope_limit} from which "
                f"{type(self.model).__name__} takes its rotary frequencies from the longest text "
                "it has seen (rope_type dynamic), so a score would depend on what else is scored; "
                f"cut it to {self.rope_limit} (--model_args max_length={self.rope_limit})"
            )
        if length <= self.checked_tokens or (self.checked_tokens and not self.untried):
            return
        # Every token is a target here, and not every one that can be fed has a logit.
        vocabulary = self.model.config.get_text_config().vocab_size
        tokens = [token % vocabulary for token in (*row.prefix, *row.continuation)]
        if not self.checked_tokens:
            self.predictor.find_plain_head(tokens)
        if len(tokens) < 2 * CHECK_TOKENS:
            tokens = (tokens * CHECK_TOKENS)[: 2 * CHECK_TOKENS]
        prefix, tail = tokens[:-CHECK_TOKENS], tokens[-CHECK_TOKENS:]
        if self._straddles(prefix, [tail]):
            prefix = prefix[:-CHECK_TOKENS] or (prefix * 2)[: self.rope_switch + 1]
        if self.device.type in UNPROVEN_DEVICES and self.device_difference is None:
            self.device_difference = self._compare_with_cpu(Row(prefix, tail))
        # The second is fed padded, in a batch with the first; the third has a single token to feed
        # and finds the prefix used before.
        other = tail[::-1][: CHECK_TOKENS * 5 // 8]
        continuations = [tail, other, tail[:2]]
        # The last tokens of the prefix say whether it is seen what follows them.
        lead = prefix[1:][-CHECK_TOKENS:]
        rows = [Row(prefix[: -len(lead)], [*lead, *text]) for text in (tail, other)]
        batching = self.batching
        together = replace(
            batching, max_sequences=2, max_tokens=sys.maxsize, max_logits=sys.maxsize
        )
        alone = replace(batching, max_sequences=1)
        proven = None
        problems = [] if self.untried else ["its adapter acts only after certain tokens"]
        try:
            self.batching = together
            pair = self.score_whole(rows)
            tolerance = self.predictor.tolerance(pair)
            known = not any(scores.nll.isnan().any() for scores in pair)
            before = slice(len(lead))
            # An adapter that tokens invoke may find them whole in one text only.
            causal = score_difference(pair[0][before], pair[1][before]) <= tolerance
            if known and self.untried and not causal:
                raise TypeError(
                    f"what {type(self.model).__name__} predicts after a text depends on what "
                    "follows the text (attention in both directions, or padding that is seen), so "
                    "a continuation has no score of its own. Use a causal language model."
                )
            self.batching = alone
            one = self.score_whole(rows[:1])
            if known and _most_off(pair[:1], one) > tolerance and batching.max_sequences != 1:
                batching = alone
                logger.warning(
                    "%s scores a text in a batch otherwise than alone (off by %.2g nats a token), "
                    "so texts are scored one by one",
                    type(self.model).__name__,
                    _most_off(pair[:1], one),
                )
            if batching.max_sequences == 1:
                pair = one + self.score_whole(rows[1:])
            else:
                self.batching = together
            after = slice(len(lead), None)
            expected = [one[0][after], pair[1][after], one[0][after][:2]]
            while self.untried and proven is None:
                self.reuse = self.untried[0]
                try:
                    off = _most_off(self.score_on_prefix(prefix, continuations), expected)
                except Exception as error:  # a model may raise anything on a cache it cannot use
                    problems.append(f"{self.reuse.name}: {type(error).__name__}: {error}")
                else:
                    if off <= tolerance:
                        proven = self.reuse
                        continue
                    problems.append(f"{self.reuse.name}: off by {off:.2g} nats a token")
                del self.untried[0]
        finally:  # what breaks off proves nothing
            self.batching, self.reuse = batching, proven
        self.checked_tokens = length
        if proven is not None:
            return
        logger.warning(
            "%s: a prefix computed once cannot be reused exactly, so every candidate takes a full "
            "forward pass, which is slower and just as right (%s)",
            type(self.model).__name__,
            "; ".join(problems),
        )

    def _compare_with_cpu(self, row: Row) -> float:
        """Scores a row here and on the CPU, and warns if the two are far apart.

        Returns:
            The relative difference of the sums of log-likelihoods.
        """
        cpu = torch.device("cpu")
        model = copy.deepcopy(self.model).to(cpu)
        reference = Engine(model, cpu, self.batching, self.predictor.autocast)
        (here,), (there,) = self.score_whole([row]), reference.score_whole([row])
        relative = abs(float(here.nll.sum() / there.nll.sum()) - 1)
        if not relative <= DEVICE_TOLERANCE:  # NaN is far apart too
            logger.warning(
                "%s scores %d tokens on %s %.1f %% away from the CPU's scores of them; run on the "
                "CPU (--device cpu), or do not trust these results",
                type(self.model).__name__,
                len(row.continuation),
                self.device,
                100 * relative,
            )
        return relative

    def _straddles(self, prefix: Sequence[int], continuations: Sequence[Sequence[int]]) -> bool:
        """Whether what is held has other rotary frequencies than with a continuation."""
        fed = max(2, max(map(len, continuations)) - 1)
        return self._held(prefix, continuations) <= self.rope_switch < len(prefix) + fed

    def _in_batches(
        self, sequences: list[tuple[int, ...]], run: Callable[[list[tuple[int, ...]]], None]
    ) -> None:
        """Runs all sequences, longest first; out of memory, halves the batch and goes on."""
        pending = sorted(sequences, key=lambda sequence: (-len(sequence), sequence))
        sizes = self._plan(pending)
        while pending:
            count = sizes.pop(0)
            head = self.predictor.plain_head
            try:
                run(pending[:count])
            except Exception as error:
                if count == 1 or not should_reduce_batch_size(error):
                    raise
            else:
                pending = pending[count:]
                if self.predictor.plain_head is not head:
                    sizes = self._plan(pending)  # from now on logits are held
                continue
            # Out here the error is gone, and with it its hold on the tensors of the failed pass.
            self.batching.max_tokens = max(1, len(pending[0]) * count // 2)
            sizes = self._plan(pending)
            clear_device_cache(garbage_collection=True)
            logger.warning(
                "out of memory: batches now hold at most %d tokens", self.batching.max_tokens
            )

    def _plan(self, sequences: Sequence[Sequence[int]]) -> list[int]:
        batching = self.batching
        if self.predictor.plain_head is not None:
            batching = replace(batching, max_logits=sys.maxsize)  # none are held
        return batching.plan([len(sequence) for sequence in sequences])

    def _padded(self, sequences: Sequence[Sequence[int]], least: int = 1) -> torch.Tensor:
        """Right-pads to ``[len(sequences), longest]``; the padding is masked by causality."""
        width = max(least, *(len(sequence) for sequence in sequences))
        ids = [[*sequence, *[0] * (width - len(sequence))] for sequence in sequences]
        return torch.tensor(ids, dtype=torch.long, device=self.device)

    def _forward(
        self,
        ids: torch.Tensor,
        cached: _SharedPrefix | _CopiedPrefix | None = None,
        *,
        start: int = 0,
        keep: int = 0,
        extras: Extras | None = None,
    ) -> Predictions:
        """Predictions at the kept positions of ids that begin at ``start``."""
        batch, width = ids.shape
        options: dict[str, Any] = {"use_cache": False}
        if cached is not None:
            positions = torch.arange(start, start + width, device=ids.device)
            options = {
                "use_cache": True,
                # Some models (Bamba) start again at 0 unless told otherwise.
                "position_ids": positions.expand(batch, width),
            }
        elif keep:
            options["logits_to_keep"] = keep
        cache = (lambda: cached.expanded(batch)) if cached is not None else None
        # Virtual-token adapters return logits for their own tokens in front.
        return self.predictor(ids, extras, cache, **options)[1].last(width)

    def _pick(
        self,
        found: Predictions,
        wanted: Sequence[tuple[int, int, int]],
        rows: Sequence[Row],
        scores: dict[int, TokenScores],
        extras: Extras | None,
    ) -> None:
        """Scores rows from the predictions of a batch.

        Args:
            found: What one pass predicts.
            wanted: For each row: the number of its sequence in the batch, the position that
                predicts its continuation's first token, and its index in ``rows``.
            rows: Whose continuations are scored.
            scores: Takes the results, keyed by index.
            extras: What else to compute.
        """
        targets: list[int] = []
        positions: list[int] = []
        for number, first, index in wanted:
            continuation = rows[index].continuation
            targets += continuation
            begin = number * found.positions + first
            positions += range(begin, begin + len(continuation))
        batch_scores = found.scores(targets, positions, extras)
        start = 0
        for _, _, index in wanted:
            end = start + len(rows[index].continuation)
            scores[index] = batch_scores[start:end]
            start = end


def _rope_switch(model: Any) -> int:
    """The length beyond which rotary embeddings change for every position of a sequence.

    So they do in models with ``longrope`` (Phi-3 and Phi-4 mini with 128k tokens): the keys of a
    shorter prefix are of no use to a longer sequence, nor may padding make a sequence longer.
    """
    return min(
        (part["original_max_position_embeddings"] for part in _rope_sets(model, "longrope")),
        default=sys.maxsize,
    )


def _rope_limit(model: Any) -> int:
    """The length beyond which rotary embeddings depend on the longest text a model has seen.

    So they do with ``dynamic`` scaling, where transformers computes them anew for a longer text
    and keeps them for what follows.
    """
    # Hunyuan calls it dynamic too, and computes them once, from `alpha`.
    dynamic = any(not part.get("alpha") for part in _rope_sets(model, "dynamic"))
    return model.config.get_text_config().max_position_embeddings if dynamic else sys.maxsize


def _rope_sets(model: Any, kind: str) -> list[dict[str, Any]]:
    """The parameters of rotary embeddings of a kind, one for all layers or one for each type."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    sets = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return [part for part in sets if part.get("rope_type") == kind]


def _most_off(found: Sequence[TokenScores], expected: Sequence[TokenScores]) -> float:
    return max(score_difference(*each) for each in zip(found, expected, strict=True))
