"""What a model predicts, its output head left out of the pass where that changes no score."""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate.utils.memory import should_reduce_batch_size

from lm_eval_hyprank.energy import TokenScores, head_token_scores, token_scores
from lm_eval_hyprank.extras import Extras

logger = logging.getLogger(__name__)

PROBE_TOKENS = 16
"""Tokens of the one short pass that looks at the output head, or at its soft-capping."""

CHECK_TOLERANCE = 1e-4
"""Nats a token by which two right ways of scoring a continuation may differ, on average.

Or, where the model's dtype is coarser than that, one unit in the last place of its largest logit.
"""

SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""What configurations call the bound of the logits in ``cap * tanh(z / cap)``."""


@dataclass(frozen=True)
class Predictions:
    """What a forward pass says of the token after each position.

    Attributes:
        logits_or_hidden: ``[batch, positions, vocabulary]`` logits as the model returned them; or,
            with ``head``, ``[batch, positions, width]`` hidden states, from which it makes them.
        uncapped: The logits before soft-capping, if they are others.
        head: The model's output head where it was left out of the pass.
    """

    logits_or_hidden: torch.Tensor
    uncapped: torch.Tensor | None = None
    head: torch.nn.Linear | None = None

    @property
    def positions(self) -> int:
        """Positions of each sequence that the pass predicts after."""
        return self.logits_or_hidden.shape[1]

    def last(self, count: int) -> Predictions:
        """Those of the last positions."""
        uncapped = None if self.uncapped is None else self.uncapped[:, -count:]
        return Predictions(self.logits_or_hidden[:, -count:], uncapped, self.head)

    def scores(
        self, targets: list[int], positions: list[int], extras: Extras | None = None
    ) -> TokenScores:
        """Scores tokens.

        Args:
            targets: ``N`` tokens.
            positions: For each target that which predicts it, counted through the batch:
                ``sequence * self.positions + position``.
            extras: What else to compute; None for nothing.

        Returns:
            Scores of the ``N`` tokens, on the CPU.

        Raises:
            IndexError: The model has no logit for a target.
        """
        values = self.logits_or_hidden.flatten(0, 1)
        vocabulary = values.shape[1] if self.head is None else len(self.head.weight)
        if max(targets) >= vocabulary:
            raise IndexError(
                f"token {max(targets)} of a continuation has no logit: the model's head has "
                f"{vocabulary} rows. Is this the model's own tokenizer?"
            )
        tokens = torch.tensor(targets, device=values.device)
        rows = torch.tensor(positions, device=values.device)
        if self.head is not None:
            # Not all positions are scored, and some for many targets.
            used, rows = torch.unique(rows, return_inverse=True)
            weight, bias = self.head.weight, self.head.bias
            return head_token_scores(values[used], tokens, rows, weight, bias, extras=extras)
        uncapped = None if self.uncapped is None else self.uncapped.flatten(0, 1)
        return token_scores(values, tokens, rows, extras=extras, uncapped=uncapped)


class Predictor:
    """Calls a model, and knows what is done to what its output head returns.

    Args:
        model: A causal language model of transformers, or a PEFT wrapper of one, in eval mode.
        device: Where input ids go.
        autocast: Makes the context in which the model is called (mixed precision).

    Attributes:
        plain_head: The model's output head, if its outputs are the model's logits and nothing is
            done to them: passes leave it out, and logits are made from its inputs in tiles of the
            vocabulary. None where it is none, or before :meth:`find_plain_head`.
        precap: Where the logits before soft-capping are; None as long as nobody asked.
    """

    def __init__(
        self, model: Any, device: torch.device, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.model = model
        self.device = device
        self.autocast = autocast
        # A PEFT wrapper takes *args and **kwargs; what it passes on is what its base accepts.
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._accepts = frozenset(inspect.signature(base.forward).parameters)
        self.plain_head: torch.nn.Linear | None = None
        self.precap: Literal["raw", "head", "unknown"] | None = None

    def __call__(
        self,
        ids: torch.Tensor,
        extras: Extras | None = None,
        cache: Callable[[], Any] | None = None,
        **options: Any,
    ) -> tuple[Any, Predictions]:
        """Makes one forward pass.

        Args:
            ids: ``[batch, positions]``, int64.
            extras: What will be computed beside the sums, of which ``precap`` matters here.
            cache: Makes the cache that the ids follow; called again for a pass made again.
            options: For the model, whose ``forward`` need not know them.

        Returns:
            The model's outputs, and what they predict.
        """
        if extras and extras.precap and self.precap is None:
            self.find_precap(ids[0].tolist())
        precap = self.precap if extras and extras.precap else "raw"
        cache_name = "cache" if "cache" in self._accepts else "past_key_values"

        def run() -> Any:
            given = options | {cache_name: cache()} if cache else options
            accepted = {name: value for name, value in given.items() if name in self._accepts}
            with torch.no_grad(), self.autocast():
                return self.model(input_ids=ids, **accepted)

        if self.plain_head is not None and precap == "raw":
            with _left_out(self.plain_head) as inputs:
                try:
                    outputs = run()
                except Exception as error:  # it may need the logits, and raise anything without
                    if should_reduce_batch_size(error):
                        raise
                    outputs = None
            if outputs is not None and len(inputs) == 1 and _is_placeholder(outputs.logits):
                return outputs, Predictions(inputs[0], head=self.plain_head)
            # Replaced meanwhile, called in parts, or something is done to the logits after all.
            known = self.plain_head, self.precap
            self.plain_head, self.precap = None, "unknown" if self.precap else None
            try:
                found = self(ids, extras, cache, **options)
            except BaseException:
                self.plain_head, self.precap = known  # logits were not what the model lacked
                raise
            logger.info("the output head cannot be left out: slower, and just as right")
            if self.precap is not None:
                self._warn_of_unknown_precap("something is done to what its head returns")
            return found
        reading: AbstractContextManager[list[torch.Tensor]] = nullcontext([])
        if precap == "head":
            reading = _head_outputs(self.model)
        with reading as heads:
            outputs = run()
        uncapped = None
        if precap == "head":
            if len(heads) == 1 and heads[0].shape[:-1] == outputs.logits.shape[:-1]:
                # A model split over devices hands its logits out on another one.
                uncapped = heads[0].to(outputs.logits.device)
            else:
                precap = self.precap = "unknown"
                self._warn_of_unknown_precap("its head is called in parts")
        if precap == "unknown":
            uncapped = outputs.logits.new_full((), math.nan).expand(outputs.logits.shape)
        return outputs, Predictions(outputs.logits, uncapped)

    def find_plain_head(self, tokens: Sequence[int]) -> None:
        """Finds out whether the model's logits are just what its output head makes.

        Such a head becomes `plain_head`: it is left out of the passes, and its logits are made in
        tiles of the vocabulary, which is faster and holds less. A head that is
        quantised, adapted or hooked into (split over devices), or whose outputs the model scales,
        caps or masks, stays in; so does every head in mixed precision, or behind virtual tokens
        that have logits of their own.

        Args:
            tokens: A text that the model may see; its first tokens are looked at.
        """
        with _HEADS:
            self._find_plain_head(tokens[:PROBE_TOKENS])

    def _find_plain_head(self, tokens: Sequence[int]) -> None:
        head = _output_head(self.model)
        if type(head) is not torch.nn.Linear or "forward" in vars(head):
            return
        # Quantised and distributed weights are tensors of another kind.
        if type(head.weight) is not torch.nn.Parameter:
            return
        if head._forward_hooks or head._forward_pre_hooks:
            return
        with self.autocast():
            if torch.is_autocast_enabled(self.device.type):
                return
        targets = [token % len(head.weight) for token in tokens]  # any will do
        positions = list(range(len(tokens)))
        with _head_outputs(self.model) as outputs:
            whole = self._probe(tokens)
        # The very same numbers: capping would change some, though little where logits are small.
        if len(outputs) != 1 or not torch.equal(
            outputs[0].to(whole.logits_or_hidden), whole.logits_or_hidden
        ):
            return
        expected = whole.scores(targets, positions)
        self.plain_head = head
        found = self._probe(tokens).scores(targets, positions)
        if score_difference(found, expected) > self.tolerance([expected]):
            self.plain_head = None

    def find_precap(self, tokens: Sequence[int]) -> None:
        """Finds out where this model's logits before soft-capping are.

        ``precap`` is then "raw" where it does not cap, so that they are its logits (which may be
        the head's output times a constant, as in Cohere and Granite); "head" where its
        configuration names a cap, and the output of its head, capped so, gives its logits;
        "unknown", with a warning, where neither holds.

        Args:
            tokens: A text that the model may see; its first tokens are looked at.
        """
        config = self.model.config.get_text_config()
        cap = next((c for name in SOFT_CAPS if (c := getattr(config, name, None))), None)
        if self.plain_head is None:
            self.precap = self._try_cap(tokens[:PROBE_TOKENS], cap)
        else:  # nothing is done to what the head returns
            self.precap = "raw" if cap is None else "unknown"
        if self.precap == "unknown":
            named = "no soft-capping" if cap is None else f"soft-capping at {cap}"
            self._warn_of_unknown_precap(
                f"its logits are not what its configuration ({named}) makes of its head's output"
            )

    def tolerance(self, expected: Sequence[TokenScores]) -> float:
        """By how many nats two right ways may differ on these scores, see `CHECK_TOLERANCE`."""
        values = torch.cat([torch.cat([scores.raw, scores.logz]) for scores in expected])
        scale = values[values.isfinite()].abs().max() if values.isfinite().any() else 0.0
        return max(CHECK_TOLERANCE, torch.finfo(self.dtype).eps * float(scale))

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        with self.autocast():
            if torch.is_autocast_enabled(self.device.type):
                return torch.get_autocast_dtype(self.device.type)
        return parameter_dtype(self.model)

    def _warn_of_unknown_precap(self, why: str) -> None:
        logger.warning(
            "%s: %s, so the logits before soft-capping are not known and have no score",
            type(self.model).__name__,
            why,
        )

    def _probe(self, tokens: Sequence[int]) -> Predictions:
        """What a pass over a few tokens predicts after each of them."""
        ids = torch.tensor([[*tokens]], device=self.device)
        # Virtual-token adapters return logits for their own tokens in front.
        return self(ids, use_cache=False)[1].last(len(tokens))

    def _try_cap(
        self, tokens: Sequence[int], cap: float | None
    ) -> Literal["raw", "head", "unknown"]:
        """What `find_precap` finds, by one short pass."""
        with _head_outputs(self.model) as heads:
            outputs, _ = self(torch.tensor([[*tokens]], device=self.device), use_cache=False)
        logits = outputs.logits.float()  # not every device has float64
        finite = logits.isfinite()  # some models mask rows of the vocabulary that are no token
        if len(heads) == 1 and heads[0].shape[:-1] == logits.shape[:-1] and finite.any():
            head = heads[0][..., : logits.shape[-1]].to(logits.device).float()[finite]
            logits = logits[finite]
            if cap is None:
                expected = head * ((head * logits).sum() / (head * head).sum())
            else:
                expected = cap * torch.tanh(head / cap)
            # A handful of roundings in the model's own dtype.
            tolerance = 4 * torch.finfo(self.dtype).eps * float(logits.abs().max())
            if float((logits - expected).abs().max()) <= tolerance:
                return "raw" if cap is None else "head"
        elif cap is None and not heads:
            return "raw"
        return "unknown"


def score_difference(found: TokenScores, expected: TokenScores) -> float:
    """Mean absolute difference of two ways' scores of the same tokens, in nats.

    Of NLL and raw energy the larger. Equal infinities do not differ; NaN differs infinitely.
    """
    pairs = [(found.nll, expected.nll), (found.raw, expected.raw)]
    off = [torch.where(a == b, 0.0, (a - b).abs()).mean() for a, b in pairs]
    return max(float(mean.nan_to_num(nan=math.inf)) for mean in off)


def parameter_dtype(model: Any) -> torch.dtype:
    """The coarsest dtype of the weights that is one to compute in (8-bit ones are not)."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point() and p.itemsize > 1}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _output_head(model: Any) -> torch.nn.Module | None:
    try:
        head: torch.nn.Module | None = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head


_HEADS = threading.RLock()
"""Held by the one thread that looks at an output head, or leaves it out."""


@contextmanager
def _head_outputs(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collects what the model's output head returns; nothing where it has none to show."""
    found: list[torch.Tensor] = []
    own_thread = threading.get_ident()
    head = _output_head(model)
    if head is None:
        yield found
        return

    def collect(*call: Any) -> None:
        if threading.get_ident() == own_thread:
            found.append(call[-1].clone())  # a copy: some models (xLSTM) cap in place

    with _HEADS:
        handle = head.register_forward_hook(collect)
        try:
            yield found
        finally:
            handle.remove()


_PLACEHOLDER = (-8192.0, 1.0, 8192.0)
"""What stands for the logits of a position: scaled, shifted, capped or cut it would be another.

Every dtype of 16 bits or more holds these numbers exactly.
"""


@contextmanager
def _left_out(head: torch.nn.Linear) -> Iterator[list[torch.Tensor]]:
    """Collects what an output head is given; what it returns is a placeholder, at no cost.

    Only in this thread: others get logits, and wait where they would leave out a head themselves.
    A head whose ``forward`` is somebody else's already is left as it is.
    """
    found: list[torch.Tensor] = []
    own_thread = threading.get_ident()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() != own_thread:
            return torch.nn.Linear.forward(head, hidden)
        found.append(hidden)
        return hidden.new_tensor(_PLACEHOLDER).repeat(*hidden.shape[:-1], 1)

    with _HEADS:
        if "forward" in vars(head):
            yield found
            return
        head.forward = forward  # type: ignore[method-assign, assignment]
        try:
            yield found
        finally:
            del head.forward


def _is_placeholder(logits: torch.Tensor) -> bool:
    """Whether nothing was done to the placeholders of all positions."""
    expected = logits.new_tensor(_PLACEHOLDER)
    return logits.shape[-1] == len(expected) and bool((logits == expected).all())
