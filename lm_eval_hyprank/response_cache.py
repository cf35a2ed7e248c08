"""What lm-eval's response cache (``--use_cache``) may hand out and keep.

lm-eval files responses under the prompt alone: whose they are, and what they hold, it does not ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lm_eval.api.model import CachingLM

from lm_eval_hyprank.extras import Extras, union
from lm_eval_hyprank.judge.replies import Reply

CACHE_KEY = "hyprank:model"
"""Where a response cache keeps the fingerprint of the model that filled it."""

EXTRAS_KEY = "hyprank:tokens"
"""Where a response cache keeps what its responses hold of every token."""


def check_cache(cache: CachingLM, fingerprint: str | None) -> None:
    """Refuses a response cache that another model, or stock lm-eval, has written to.

    lm-eval files responses under the prompt alone, so a second model on the same path would be
    given the first one's scores. The cache of a run of ours carries its model's fingerprint.

    Raises:
        ValueError: The cache holds responses that are not known to be this model's, or what
            model this is cannot be told.
    """
    if fingerprint is None:
        raise ValueError(
            f"--use_cache files responses under the prompt alone, and {type(cache.lm).__name__} "
            "does not tell which model it runs, so another one's could be taken for its; leave "
            "--use_cache out"
        )
    written_by = cache.dbdict.get(CACHE_KEY)
    if written_by is None and not len(cache.dbdict):
        cache.dbdict[CACHE_KEY] = fingerprint
        cache.dbdict.commit()
    elif written_by != fingerprint:
        who = (
            "a run that kept no record of its model"
            if written_by is None
            else f"another model, or the same with other weights or settings ({written_by}; this "
            f"one is {fingerprint})"
        )
        raise ValueError(
            f"the response cache {cache.cache_db} was written by {who}; its responses would be "
            "taken for this model's. Give --use_cache a path of its own for each model, or delete "
            "the file."
        )


def cached_extras(cache: CachingLM, extras: Extras | None) -> Extras | None:
    """What a run computes of every token, given what the responses in its cache hold.

    A cache holds the same of all its responses: what the first run on it asked for.

    Raises:
        ValueError: The run needs more than that.
    """
    if EXTRAS_KEY not in cache.dbdict:  # no scores yet: every run that has some writes it
        cache.dbdict[EXTRAS_KEY] = extras
        cache.dbdict.commit()
    held: Extras | None = cache.dbdict.get(EXTRAS_KEY)
    if extras is not None and (held is None or union([held, extras]) != held):
        raise ValueError(
            f"the response cache {cache.cache_db} lacks {_lacking(held, extras)}, which a scorer "
            "or file of this run needs. Such scores need a cache path of their own: give "
            "--use_cache another path, or delete the file"
        )
    return held


def _lacking(held: Extras | None, extras: Extras) -> str:
    had = held or Extras()
    heats = sorted(extras.temperatures - had.temperatures)
    lacks = {
        "the values of every token": held is None,
        "logits before soft-capping": extras.precap and not had.precap,
        "the mean and variance of log-probabilities": extras.moments and not had.moments,
        f"free energies at temperature {', '.join(map(str, heats))}": bool(heats),
    }
    return ", ".join(name for name, missing in lacks.items() if missing)


@contextmanager
def keep_answers_only(cache: CachingLM) -> Iterator[None]:
    """Keeps replies without an answer out of a response cache, so that a rerun asks again."""
    hook = cache.lm.cache_hook
    stock = cache.dbdict
    cache.dbdict = hook.dbdict = _Answers(stock)
    try:
        yield
    finally:
        cache.dbdict = hook.dbdict = stock


class _Answers:
    """What lm-eval asks of its response cache, save that some replies are not written."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __contains__(self, key: str) -> bool:
        return key in self._cache

    def __getitem__(self, key: str) -> Any:
        return self._cache[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, Reply) or value.is_answer:
            self._cache[key] = value

    def commit(self) -> None:
        self._cache.commit()
