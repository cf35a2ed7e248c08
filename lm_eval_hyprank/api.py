"""Ranking candidates in Python, with a model that is loaded already."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from lm_eval.api.instance import Instance
from transformers import PreTrainedTokenizerBase

from lm_eval_hyprank.extras import union
from lm_eval_hyprank.filters import CandidateScore
from lm_eval_hyprank.models.hf import EnergyHFLM, check_supported, score_requests


def rank_candidates(
    model: Any,
    tokenizer: Any,
    context: str,
    candidates: Sequence[str] | npt.NDArray[Any] | pd.Series[str],
    scores: Iterable[str | Mapping[str, Any]] = ("nll", "raw"),
    *,
    separator: str = " ",
) -> pd.DataFrame:
    r"""Ranks texts by how well a causal language model takes them to continue a context.

    Args:
        model: A loaded decoder-only model of transformers, PEFT adapters included.
        tokenizer: Its tokenizer.
        context: What stands before each candidate, for instance ``"Background: ...\n
            Research Question: ...\nHypothesis:"``.
        candidates: At least two texts: a list, a NumPy array or a pandas Series.
        scores: Names of scores, lower is better (docs/scores.md); or, where one takes
            parameters, what a task's YAML says of it: ``{"score": "min_k", "percent": 10}``.
        separator: Stands between context and candidate; must not meet whitespace there.

    Returns:
        One row a candidate, best by the first score on top, its index the candidate's place in
        the input: the column ``candidate``, then for every score the score and ``rank_`` and its
        name, 1 being best. Candidates of the same score share the mean of their ranks.

    Raises:
        TypeError: The model or an argument is of the wrong kind, or the model cannot be scored.
        ValueError: A candidate is empty or too long for the model, there are fewer than two, the
            separator would double whitespace, a score is unknown, or a candidate's score is no
            finite number.
    """
    if isinstance(candidates, np.ndarray | pd.Series):
        candidates = candidates.tolist()
    _check_texts(context, candidates, separator)
    filters = _filters(scores)
    _check_model(model, tokenizer)
    requests = [
        Instance("loglikelihood", {}, (context, separator + candidate), index)
        for index, candidate in enumerate(candidates)
    ]
    training = {module: module.training for module in model.modules()}
    lm = _wrapped(model, tokenizer)
    try:
        check_supported(lm)
        extras = union(scorer.extras for scorer in filters.values())
        found = score_requests(lm, requests, disable_tqdm=True, extras=extras)
    finally:
        for module, mode in training.items():
            module.training = mode
    for index, response in enumerate(found):
        if not math.isfinite(response[0]):
            reason = (
                f"has {response.num_tokens} tokens, too many for the model's {lm.max_length}"
                if response.truncated
                else "has no finite score: the model's logits are NaN or infinite"
            )
            raise ValueError(f"candidate {index} {reason}")
    table = pd.DataFrame({"candidate": list(candidates)})
    for name, scorer in filters.items():
        values = [scorer.sign * scorer.value(response) for response in found]
        for index, value in enumerate(values):
            if not math.isfinite(value):
                raise ValueError(f"candidate {index} has no finite {name} ({value})")
        table[name] = values
        table[f"rank_{name}"] = table[name].rank()
    return table.sort_values(f"rank_{next(iter(filters))}", kind="stable")


def _check_texts(context: str, candidates: Sequence[str], separator: str) -> None:
    for name, text in (("context", context), ("separator", separator)):
        if not isinstance(text, str):
            raise TypeError(f"{name} is {type(text).__name__}, not text")
    if isinstance(candidates, str) or not isinstance(candidates, Sequence):
        raise TypeError(
            f"candidates is {type(candidates).__name__}; give a list of texts: "
            "['one candidate', 'another one']"
        )
    for index, candidate in enumerate(candidates):
        if not isinstance(candidate, str):
            raise TypeError(f"candidate {index} is {type(candidate).__name__}, not text")
        if not candidate.strip():
            raise ValueError(f"candidate {index} is empty, so it has no tokens to score")
        if separator[-1:].isspace() and candidate[0].isspace():
            raise ValueError(
                f"candidate {index} starts with whitespace and the separator {separator!r} ends "
                'with it, which would be doubled; strip the candidate, or pass separator=""'
            )
    if separator[:1].isspace() and context[-1:].isspace():
        raise ValueError(
            f"the context ends with whitespace and the separator {separator!r} starts with it, "
            'which would be doubled; strip the end of the context, or pass separator=""'
        )
    if len(candidates) < 2:
        raise ValueError(f"ranking needs at least two candidates, got {len(candidates)}")


def _filters(scores: Iterable[str | Mapping[str, Any]]) -> dict[str, CandidateScore]:
    """The scorers by the names of their columns."""
    filters: dict[str, CandidateScore] = {}
    for given in [scores] if isinstance(scores, str) else scores:
        options = {"score": given} if isinstance(given, str) else dict(given)
        if "score" not in options:
            raise ValueError(f"{options} does not name a 'score'")
        parameters = ", ".join(f"{k}={v}" for k, v in options.items() if k != "score")
        name = f"{options['score']}({parameters})" if parameters else str(options["score"])
        filters[name] = CandidateScore(**options)
    if not filters:
        raise ValueError("scores is empty; name at least one, such as 'nll'")
    return filters


def _check_model(model: Any, tokenizer: Any) -> None:
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(
            f"model is {type(model).__name__}; pass a loaded model: "
            "AutoModelForCausalLM.from_pretrained(NAME)"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"tokenizer is {type(tokenizer).__name__}; pass the model's own: "
            "AutoTokenizer.from_pretrained(NAME)"
        )


def _wrapped(model: Any, tokenizer: Any) -> EnergyHFLM:
    """The model as lm-eval's, which gives its copy of the tokenizer a padding token."""
    logger = logging.getLogger("lm_eval.models.huggingface")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of arguments that nobody gave
    try:
        return EnergyHFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size="auto")
    finally:
        logger.setLevel(level)
