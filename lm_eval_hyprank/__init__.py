"""Does a language model know a good scientific hypothesis when it sees one?

A plugin to EleutherAI's lm-evaluation-harness that ranks candidate hypotheses by a model's own
likelihood and raw target logits.
"""

from importlib.metadata import version

from lm_eval_hyprank.scores import ContinuationScore

__version__ = version("lm_eval_hyprank")

__all__ = ["ContinuationScore", "__version__"]
