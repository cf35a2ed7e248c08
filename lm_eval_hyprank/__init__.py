"""Does a language model know a good scientific hypothesis when it sees one?

A plugin to EleutherAI's lm-evaluation-harness that ranks candidate hypotheses by a model's own
likelihood and raw target logits.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lm_eval_hyprank.scores import ContinuationScore

if TYPE_CHECKING:
    from lm_eval_hyprank.api import rank_candidates

__version__ = version("lm_eval_hyprank")

__all__ = ["ContinuationScore", "__version__", "rank_candidates"]


def __getattr__(name: str) -> Any:
    # Only when it is asked for: it brings torch and lm-eval, which take seconds to import.
    if name == "rank_candidates":
        from lm_eval_hyprank.api import rank_candidates

        return rank_candidates
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
