"""What the loglikelihood hook returns for one request."""

from __future__ import annotations

from typing import Any


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
        nll_sum: Sum of negative log-likelihoods.
        raw_sum: Sum of negated target logits.
        logz_sum: Sum of log-partitions.
        truncated: Whether the context was cut on the left to fit the model. Where not even
            the continuation fits, nothing is scored and the sums are NaN.
    """

    num_tokens: int
    num_bytes: int
    nll_sum: float
    raw_sum: float
    logz_sum: float
    truncated: bool

    def __new__(
        cls,
        *,
        is_greedy: bool,
        num_tokens: int,
        num_bytes: int,
        nll_sum: float,
        raw_sum: float,
        logz_sum: float,
        truncated: bool = False,
    ) -> ContinuationScore:
        """Makes the pair from its parts; see the attributes."""
        self = super().__new__(cls, (-nll_sum, is_greedy))
        self.num_tokens = num_tokens
        self.num_bytes = num_bytes
        self.nll_sum = nll_sum
        self.raw_sum = raw_sum
        self.logz_sum = logz_sum
        self.truncated = truncated
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

    # A tuple subclass with keyword-only construction has to say how it is rebuilt.
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), {"is_greedy": self[1], **self.__dict__}

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"ContinuationScore(is_greedy={self[1]}, {fields})"
