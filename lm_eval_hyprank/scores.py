"""What the loglikelihood hook returns for one request, and the scores made of it."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_eval_hyprank.extras import Extras, free_energy_name

Floats = npt.NDArray[np.float32]


VALUES = ("nll", "raw", "logz")
"""What is known of every token; anything further is in `TokenValues.extra`."""


@dataclass(frozen=True, eq=False)
class TokenValues:
    """The values of a continuation's N tokens, all in nats; every array of shape ``[N]``.

    In float32, as they are stored: a score made of them is the same number whether it is
    computed during the run or later from the file.

    Attributes:
        token_ids: int32, the tokens.
        nll: Negative log-likelihood ``logsumexp(z) - z[x]``.
        raw: Raw target-logit energy ``-z[x]``.
        logz: Log-partition ``logsumexp(z)``.
        extra: What else was asked for, see `lm_eval_hyprank.extras.Extras`.
    """

    token_ids: npt.NDArray[np.int32]
    nll: Floats
    raw: Floats
    logz: Floats
    extra: Mapping[str, Floats] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Floats:
        """The values of that name.

        Raises:
            ValueError: They were not computed.
        """
        if name in VALUES:
            values: Floats = getattr(self, name)
            return values
        if name not in self.extra:
            have = ", ".join([*VALUES, *self.extra])
            raise ValueError(f"the tokens have no values {name!r}; they have {have}")
        return self.extra[name]


class ContinuationScore(tuple[float, bool]):
    """The harness's ``(logprob, is_greedy)`` pair, carrying the sums it was made of.

    It *is* the two-element tuple that every lm-eval task expects, so any stock task can use
    it, and it survives pickling (the response cache, gathering over processes).

    Sums run over the tokens of the continuation; with ``z_t`` the logits that predict token
    ``x_t``, all values in nats (natural logarithm):

    * ``nll_sum``  = sum of ``logsumexp(z_t) - z_t[x_t]``, and ``logprob = -nll_sum``;
    * ``raw_sum``  = sum of ``-z_t[x_t]``, the raw target-logit energy;
    * ``logz_sum`` = sum of ``logsumexp(z_t)``, the log-partition,

    so that ``raw_sum = nll_sum - logz_sum`` up to rounding. (Rajwal, Das and Ghosal,
    arXiv 2608.17270, equations 1 to 3.)

    Attributes:
        num_tokens: Number of continuation tokens scored.
        num_bytes: UTF-8 length of the continuation's text without surrounding whitespace.
        num_zlib_bytes: Length of the same bytes compressed by zlib at its default level.
        nll_sum: Sum of negative log-likelihoods.
        raw_sum: Sum of negated target logits.
        logz_sum: Sum of log-partitions.
        truncated: Whether the context was cut on the left to fit the model. Where not even
            the continuation fits, nothing is scored and the sums are NaN.
        tokens: The tokens' own values, where a run asked for them.
    """

    num_tokens: int
    num_bytes: int
    num_zlib_bytes: int
    nll_sum: float
    raw_sum: float
    logz_sum: float
    truncated: bool
    tokens: TokenValues | None

    def __new__(
        cls,
        *,
        is_greedy: bool,
        num_tokens: int,
        num_bytes: int,
        num_zlib_bytes: int,
        nll_sum: float,
        raw_sum: float,
        logz_sum: float,
        truncated: bool = False,
        tokens: TokenValues | None = None,
    ) -> ContinuationScore:
        """Makes the pair from its parts; see the attributes."""
        self = super().__new__(cls, (-nll_sum, is_greedy))
        self.num_tokens = num_tokens
        self.num_bytes = num_bytes
        self.num_zlib_bytes = num_zlib_bytes
        self.nll_sum = nll_sum
        self.raw_sum = raw_sum
        self.logz_sum = logz_sum
        self.truncated = truncated
        self.tokens = tokens
        return self

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have produced the continuation."""
        return self[1]

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood over the continuation's tokens."""
        return self.nll_sum / self.num_tokens

    @property
    def raw(self) -> float:
        """Mean raw target-logit energy over the continuation's tokens."""
        return self.raw_sum / self.num_tokens

    @property
    def logz(self) -> float:
        """Mean log-partition over the continuation's tokens."""
        return self.logz_sum / self.num_tokens

    @property
    def nll_byte(self) -> float:
        """Negative log-likelihood per byte of text, which tokenizers cannot change.

        NaN for whitespace, which has no bytes.
        """
        return self.nll_sum / self.num_bytes if self.num_bytes else math.nan

    @property
    def nll_zlib(self) -> float:
        """Negative log-likelihood per byte of the text compressed by zlib."""
        return self.nll_sum / self.num_zlib_bytes

    @property
    def zlib_ratio(self) -> float:
        """Mean negative log-likelihood over the compressed length.

        (Carlini et al., arXiv 2012.07805: log-perplexity over zlib entropy.)
        """
        return self.nll / self.num_zlib_bytes

    # A tuple subclass with keyword-only construction has to say how it is rebuilt.
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), {"is_greedy": self[1], **self.__dict__}

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"ContinuationScore(is_greedy={self[1]}, {fields})"


TOKEN_SCORES: dict[str, TokenScore] = {}
"""Scores made of `TokenValues`, by name."""


@dataclass(frozen=True)
class TokenScore:
    """A score made of the values of a continuation's tokens, lower is better.

    Attributes:
        compute: Takes `TokenValues` and the score's own parameters; returns one number.
        extras: Takes the same parameters; says which values the score needs beside ``nll``,
            ``raw`` and ``logz``.
    """

    compute: Callable[..., float]
    extras: Callable[..., Extras]

    def check(self, parameters: Mapping[str, Any]) -> None:
        """Looks at parameters before anything is scored.

        Raises:
            TypeError: The score has no such parameter, or lacks one.
            ValueError: A value is not possible.
        """
        signature = inspect.signature(self.compute)
        signature.bind(None, **parameters)
        for name, value in parameters.items():
            whole = isinstance(signature.parameters[name].default, int)
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ValueError(f"{name} is {value!r}; give a {'whole ' if whole else ''}number")
            if not 0 < value <= (100 if name == "percent" else sys.float_info.max):
                raise ValueError(
                    f"{name} is {value}; give a number above 0"
                    + (" and at most 100" if name == "percent" else "")
                )


def token_score(
    extras: Callable[..., Extras] = lambda **_: Extras(),
) -> Callable[[Callable[..., float]], Callable[..., float]]:
    """Enters a function into `TOKEN_SCORES` under its own name.

    Args:
        extras: See `TokenScore`.
    """

    def register(compute: Callable[..., float]) -> Callable[..., float]:
        TOKEN_SCORES[compute.__name__] = TokenScore(compute, extras)
        return compute

    return register


def _mean(values: Floats) -> float:
    return float(values.mean(dtype=np.float64))


def _largest(values: Floats, percent: float) -> Floats:
    """The ``percent`` % largest values, rounded down to a whole number but at least one."""
    count = max(1, math.floor(len(values) * percent / 100))
    return np.sort(values)[-count:]


@token_score()
def nll_first(values: TokenValues, tokens: int = 10) -> float:
    """Mean negative log-likelihood of the first ``tokens`` tokens, of all where there are fewer."""
    return _mean(values.nll[:tokens])


@token_score()
def min_k(values: TokenValues, percent: float = 20.0) -> float:
    """Min-K%: mean negative log-likelihood of the ``percent`` % least likely tokens.

    Minus the Min-K% Prob of Shi et al. (arXiv 2310.16789).
    """
    return _mean(_largest(values.nll, percent))


@token_score(extras=lambda **_: Extras(moments=True))
def min_k_plus(values: TokenValues, percent: float = 20.0) -> float:
    """Min-K%++: the same, each token's log-probability standardised over the vocabulary.

    Of every token ``(log p(x) - mean) / sd``, with the mean and the standard deviation of
    ``log p`` under ``p``, the model's own prediction; minus the mean of the ``percent`` %
    smallest. Where the prediction is uniform, all of these are 0 and so is the token's score.
    (Zhang et al., arXiv 2404.02936.)
    """
    below_mean = values.nll.astype(np.float64) + values["logp_mean"]
    deviation = np.sqrt(values["logp_var"].astype(np.float64))
    with np.errstate(divide="ignore"):
        standardised = np.divide(
            below_mean, deviation, out=np.zeros_like(below_mean), where=below_mean != 0
        )
    return _mean(_largest(standardised, percent))


@token_score(extras=lambda **_: Extras(precap=True))
def raw_precap(values: TokenValues) -> float:
    """Mean raw target-logit energy before the model's final soft-capping."""
    return _mean(values["precap"])


@token_score(extras=lambda temperature: Extras(temperatures=frozenset({float(temperature)})))
def free_energy(values: TokenValues, temperature: float) -> float:
    """Mean free energy ``-T * logsumexp(z / T)`` at the ``temperature`` T.

    At 1 it is minus the mean log-partition. (Liu et al., arXiv 2010.03759.)
    """
    return _mean(values[free_energy_name(temperature)])


class SimilarityScore(tuple[float, bool]):
    """What an embedding model returns for one request: ``(cosine, False)`` and its lengths.

    Attributes:
        num_tokens: Number of the continuation's tokens, before any cut.
        num_bytes: UTF-8 length of the continuation's text without surrounding whitespace.
        truncated: Whether the context or the continuation was cut to fit the model.
    """

    num_tokens: int
    num_bytes: int
    truncated: bool

    def __new__(
        cls, *, cosine: float, num_tokens: int, num_bytes: int, truncated: bool
    ) -> SimilarityScore:
        """Makes the pair from its parts; see the attributes."""
        self = super().__new__(cls, (cosine, False))
        self.num_tokens = num_tokens
        self.num_bytes = num_bytes
        self.truncated = truncated
        return self

    @property
    def cosine(self) -> float:
        """Cosine between the embeddings of context and continuation."""
        return self[0]

    # A tuple subclass with keyword-only construction has to say how it is rebuilt.
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), {"cosine": self[0], **self.__dict__}
