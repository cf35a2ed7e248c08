"""What a judge's run will cost, in tokens, before anything is asked."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.api.task import Task
from lm_eval.models.utils import normalize_gen_kwargs

from lm_eval_hyprank.judge.prompts import render, views


class CostError(ValueError):
    """The tokens cannot be counted; the message says why and what to do."""


@dataclass(frozen=True)
class Cost:
    """What a run of one task asks for.

    Attributes:
        requests: Number of requests.
        prompt_tokens: Tokens of all prompts together, without what a chat template adds.
        longest_prompt: Tokens of the longest prompt.
        reply_tokens: Tokens that all replies may have at most, reasoning included.
    """

    requests: int
    prompt_tokens: int
    longest_prompt: int
    reply_tokens: int


def estimate(
    task: Task, count: Callable[[str], int], limit: int | None, budget: int | None
) -> Cost:
    """Counts the tokens of a judge task.

    Args:
        task: The task.
        count: The number of tokens of a text.
        limit: Counts the first so many papers only.
        budget: The tokens that a reply may have; None takes the task's own number.
    """
    docs: list[dict[str, Any]] = list(task.eval_docs)[:limit]
    sizes = [count(render(view)) for doc in docs for view in views(doc) or [doc]]
    if budget is None:
        budget = normalize_gen_kwargs(dict(task.config.generation_kwargs))["max_gen_toks"]
    return Cost(len(sizes), sum(sizes), max(sizes), len(sizes) * budget)


def token_counter(tokenizer: str) -> Callable[[str], int]:
    """Returns what counts a text's tokens.

    Args:
        tokenizer: The folder or the hub's ``owner/name`` of a Hugging Face tokenizer, or one of
            OpenAI's models or encodings as tiktoken names them.

    Raises:
        CostError: There is no such tokenizer, or it cannot be fetched.
    """
    try:
        if "/" in tokenizer or Path(tokenizer).is_dir():
            import transformers

            encode = transformers.AutoTokenizer.from_pretrained(tokenizer).encode
            return lambda text: len(encode(text))
        import tiktoken

        if tokenizer in tiktoken.list_encoding_names():
            encoding = tiktoken.get_encoding(tokenizer)
        else:
            encoding = tiktoken.encoding_for_model(tokenizer)
    except KeyError as error:
        raise CostError(
            f"tiktoken knows no model or encoding {tokenizer!r}; give o200k_base for a new OpenAI "
            "model, or the folder or owner/name of a Hugging Face tokenizer"
        ) from error
    except Exception as error:  # whatever the network and the two libraries raise
        reason = textwrap.shorten(str(error), 200, placeholder=" …")
        raise CostError(
            f"the tokenizer {tokenizer!r} cannot be loaded ({type(error).__name__}: {reason}); "
            "give the folder of a tokenizer on this machine: --tokenizer DIR"
        ) from error
    return lambda text: len(encoding.encode(text, disallowed_special=()))
