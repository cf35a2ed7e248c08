"""Scorers: lm-eval filters that turn a candidate's response into one number, lower is better."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from lm_eval.api.filter import Filter
from lm_eval.api.registry import register_filter

from lm_eval_hyprank.scores import ContinuationScore

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
        score: Name of a numeric attribute of `ContinuationScore`: ``nll``, ``raw``, ``logz``,
            ``nll_sum``, ``raw_sum``, ``logz_sum``, ``num_tokens`` or ``num_bytes``.
        higher_is_better: Whether a higher value is better; the value is then negated, for
            what this filter yields is lower-is-better without exception. The row ``logz`` of the
            tasks is such a one.

    Raises:
        ValueError: ``score`` is none of these.
    """

    SCORES = ("nll", "raw", "logz", "nll_sum", "raw_sum", "logz_sum", "num_tokens", "num_bytes")

    def __init__(self, score: str, higher_is_better: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if score not in self.SCORES:
            raise ValueError(
                f"candidate_score: unknown score {score!r}; choose one of {', '.join(self.SCORES)}"
            )
        self.score = score
        self.sign = -1.0 if higher_is_better else 1.0

    def apply(
        self, resps: Iterable[Sequence[ContinuationScore]], docs: Sequence[dict[str, Any]]
    ) -> list[float]:
        """Maps every candidate's first response to its score.

        Raises:
            TypeError: A response is a plain ``(logprob, is_greedy)`` pair.
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
            value = getattr(response, self.score) if math.isfinite(response[0]) else math.nan
            scores.append(self.sign * float(value))
        self._report_invalid(scores, docs)
        return scores

    def _report_invalid(self, scores: Sequence[float], docs: Sequence[dict[str, Any]]) -> None:
        invalid = Counter(
            str(doc.get("paper_id", "?"))
            for score, doc in zip(scores, docs, strict=True)
            if not math.isfinite(score)
        )
        if invalid:
            logger.warning(
                "score %s: %d item(s) have candidates without a finite score; they are counted as "
                "invalid and not ranked: %s",
                self.score,
                len(invalid),
                ", ".join(f"{item} ({count} candidates)" for item, count in invalid.items()),
            )
