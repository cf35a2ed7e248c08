"""Scorers: lm-eval filters that turn a candidate's response into one number, lower is better."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from lm_eval.api.filter import Filter
from lm_eval.api.registry import register_filter

from lm_eval_hyprank.extras import Extras
from lm_eval_hyprank.scores import TOKEN_SCORES, ContinuationScore, SimilarityScore

logger = logging.getLogger(__name__)


@register_filter("candidate_score")
class CandidateScore(Filter):
    """One row of results: the candidates' ``score``, taken from their `ContinuationScore`.

    A scorer is one entry in a task's YAML::

        filter_list:
          - name: nll
            filter:
              - {function: candidate_score, score: nll}

    Args:
        score: Name of a numeric attribute of `ContinuationScore` (`SCORES`), or of a score made
            of the tokens' own values (`lm_eval_hyprank.scores.TOKEN_SCORES`).
        higher_is_better: Whether a higher value is better; the value is then negated, for
            what this filter yields is lower-is-better without exception. The row ``logz`` of the
            tasks is such a one.
        parameters: Those of the score.

    Attributes:
        extras: What the score needs of every token; None where sums are enough.

    Raises:
        ValueError: ``score`` is none of these, or its parameters are not possible.
    """

    SCORES = (
        "nll",
        "raw",
        "logz",
        "nll_sum",
        "raw_sum",
        "logz_sum",
        "nll_byte",
        "nll_zlib",
        "zlib_ratio",
        "num_tokens",
        "num_bytes",
    )

    def __init__(self, score: str, higher_is_better: bool = False, **parameters: Any) -> None:
        super().__init__()
        if score not in self.SCORES and score not in TOKEN_SCORES:
            names = ", ".join([*self.SCORES, *TOKEN_SCORES])
            raise ValueError(f"candidate_score: unknown score {score!r}; choose one of {names}")
        if score in self.SCORES and parameters:
            raise ValueError(f"candidate_score: {score} has no parameter {', '.join(parameters)}")
        self.score = score
        self.sign = -1.0 if higher_is_better else 1.0
        self.parameters = parameters
        self.extras: Extras | None = None
        if score in TOKEN_SCORES:
            try:
                TOKEN_SCORES[score].check(parameters)
            except (TypeError, ValueError) as error:
                raise ValueError(f"candidate_score: {score}: {error}") from error
            self.extras = TOKEN_SCORES[score].extras(**parameters)

    def apply(
        self, resps: Iterable[Sequence[ContinuationScore]], docs: Sequence[dict[str, Any]]
    ) -> list[float]:
        """Maps every candidate's first response to its score.

        Raises:
            TypeError: A response is a plain ``(logprob, is_greedy)`` pair, or lacks the values
                of its tokens.
        """
        scores: list[float] = []
        for (response, *_), doc in zip(resps, docs, strict=True):
            if not isinstance(response, ContinuationScore):
                raise TypeError(
                    f"item {doc.get('paper_id', '?')}: the response {response!r} is a plain "
                    "(logprob, is_greedy) pair without the sums that this task's scorers read. "
                    "Run the task with --model hf or hf-energy, and with a --use_cache path that "
                    "no other run has written to; in Python, import lm_eval_hyprank.tasks before "
                    "lm_eval's evaluate, or use hf-energy."
                )
            # A control ranks the very items that the model's scores rank.
            value = self.value(response) if math.isfinite(response[0]) else math.nan
            scores.append(self.sign * float(value))
        _report_invalid(self.score, scores, docs)
        return scores

    def value(self, response: ContinuationScore) -> float:
        """The score of one response, its sign as the score has it.

        Raises:
            TypeError: The score is made of the tokens' values, and the response has none.
        """
        if self.score not in TOKEN_SCORES:
            return float(getattr(response, self.score))
        if response.tokens is None:
            raise TypeError(
                f"the score {self.score} is made of the values of single tokens, which the "
                "response lacks; in Python, import lm_eval_hyprank.tasks before lm_eval's evaluate"
            )
        return TOKEN_SCORES[self.score].compute(response.tokens, **self.parameters)


@register_filter("embedding_score")
class EmbeddingScore(Filter):
    """One row of results: the candidates' ``score``, taken from their `SimilarityScore`.

    Args:
        score: ``cosine``, ``num_tokens`` or ``num_bytes``.
        higher_is_better: As of `CandidateScore`.

    Raises:
        ValueError: ``score`` is none of these.
    """

    SCORES = ("cosine", "num_tokens", "num_bytes")

    def __init__(self, score: str, higher_is_better: bool = False) -> None:
        super().__init__()
        if score not in self.SCORES:
            names = ", ".join(self.SCORES)
            raise ValueError(f"embedding_score: unknown score {score!r}; choose one of {names}")
        self.score = score
        self.sign = -1.0 if higher_is_better else 1.0

    def apply(
        self, resps: Iterable[Sequence[SimilarityScore]], docs: Sequence[dict[str, Any]]
    ) -> list[float]:
        """Maps every candidate's first response to its score."""
        scores = [
            self.sign * float(getattr(response, self.score))
            if math.isfinite(response.cosine)
            else math.nan
            for response, *_ in resps
        ]
        _report_invalid(self.score, scores, docs)
        return scores


def _report_invalid(score: str, scores: Sequence[float], docs: Sequence[dict[str, Any]]) -> None:
    invalid = Counter(
        str(doc.get("paper_id", "?"))
        for value, doc in zip(scores, docs, strict=True)
        if not math.isfinite(value)
    )
    if invalid:
        logger.warning(
            "score %s: %d item(s) have candidates without a finite score; they are counted as "
            "invalid and not ranked: %s",
            score,
            len(invalid),
            ", ".join(f"{item} ({count} candidates)" for item, count in invalid.items()),
        )


def chance(
    resps: Iterable[Sequence[tuple[float, bool]]], docs: Sequence[dict[str, Any]]
) -> list[float]:
    """The same score for every candidate, for lm-eval's ``custom`` filter: the row ``chance``.

    Ties count by expectation, so its metrics are those of a random ranking, whatever the number of
    candidates and golds of each item. It ranks the very items that the model's scores rank.
    """
    return [0.0 if math.isfinite(response[0]) else math.nan for response, *_ in resps]
