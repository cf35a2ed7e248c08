"""A judge's reply: the text with what the API said of it, and how it is read.

Nothing is ever guessed. A reply that does not answer in the form that was asked for has no
ranking (no verdict), and the reason why goes into the sample.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import json_repair
from lm_eval.api.filter import Filter
from lm_eval.api.registry import register_filter

LIST_LENGTH = 5
"""How many candidates a ranking names."""

T = TypeVar("T")


class Reply(str):
    """What a judge answered: its text, and the two things that a text cannot say.

    It is a plain string to lm-eval. It survives pickling, and with it the response cache and the
    gathering of several processes.

    Attributes:
        finish: Why the model stopped, as the API puts it ("stop", "length", ...), if it says so.
        failure: Why there is no answer at all, such as an HTTP error after the last try.
    """

    finish: str | None
    failure: str | None

    def __new__(cls, text: str, finish: str | None = None, failure: str | None = None) -> Reply:
        """Makes a reply; the arguments are the attributes."""
        reply = super().__new__(cls, text)
        reply.finish = finish
        reply.failure = failure
        return reply

    def __reduce__(self) -> tuple[type[Reply], tuple[str, str | None, str | None]]:
        return Reply, (str(self), self.finish, self.failure)

    @property
    def is_answer(self) -> bool:
        """Whether there is any text to read."""
        return self.failure is None and bool(self.strip())


@dataclass(frozen=True)
class Reading(Generic[T]):
    """What was read from a reply.

    Attributes:
        value: The ranking or the verdict; None if the reply has none.
        invalid: Why it has none, a word or two, after a colon perhaps the details; None if it
            has one.
    """

    value: T | None
    invalid: str | None = None


class _Unfit(ValueError):
    """The reply's answer breaks the contract; the message is the reason."""


def read_ranking(reply: str, candidates: int) -> Reading[list[int]]:
    """Reads the best candidates from a reply to the listwise prompt.

    The answer is the last JSON object whose ``ranking`` is a list that fits the contract: five
    different whole numbers from 0 to ``candidates - 1``, the best first; of a longer list the
    first five count. In place of such an object the reply may be nothing but the list, or hold
    the chain ``[15] > [1] > ...``. A number may be a string, ``7.0`` or ``Candidate 7``.

    Args:
        reply: The text, at best a `Reply`.
        candidates: How many candidates were shown.

    Returns:
        The indices as shown, or the reason why there are none: "no answer", "empty", "cut off",
        "content filter", "refusal", "no ranking", "too few", "duplicate", "out of range",
        "counts from 1" or "not a number".
    """
    return _read(reply, "ranking", lambda value: _ranking(value, candidates))


def read_verdict(reply: str) -> Reading[int]:
    """Reads which of two hypotheses a reply to the pairwise prompt prefers.

    The answer is the last JSON object whose ``better`` is 1 or 2.

    Args:
        reply: The text, at best a `Reply`.

    Returns:
        0 for the hypothesis shown first and 1 for the other, or the reason why there is none;
        the reasons are those of `read_ranking`, with "no verdict".
    """
    return _read(reply, "better", _verdict)


def _ranking(value: Any, candidates: int) -> list[int]:
    if not isinstance(value, list):
        raise _Unfit("no ranking: it is not a list")
    numbers = [_number(entry) for entry in value]
    known = [number for number in numbers if number is not None]
    if candidates in known and 0 not in known and min(known) > 0:
        raise _Unfit(f"counts from 1: it has {candidates} and no 0")
    if len(value) < LIST_LENGTH:
        raise _Unfit(f"too few: {len(value)} of {LIST_LENGTH}")
    ranking: list[int] = []
    for entry, number in zip(value[:LIST_LENGTH], numbers, strict=False):
        if number is None:
            raise _Unfit(f"not a number: {_shown(entry)}")
        if not 0 <= number < candidates:
            raise _Unfit(f"out of range: {number}")
        if number in ranking:
            raise _Unfit(f"duplicate: {number}")
        ranking.append(number)
    return ranking


def _verdict(value: Any) -> int:
    number = _number(value)
    if number is None:
        raise _Unfit(f"not a number: {_shown(value)}")
    if number not in (1, 2):
        raise _Unfit(f"out of range: {number}")
    return number - 1


_LABELLED = re.compile(
    r"(?:(?:candidate|hypothesis|option|index|number|no\.?)[\s_#:]*)?\[?\s*(-?[0-9]{1,9})(?:\.0+)?\s*\]?",
    re.IGNORECASE,
)


def _number(entry: Any) -> int | None:
    """Returns the whole number that an entry is, or that its text says; else None."""
    if isinstance(entry, bool):
        return None
    if isinstance(entry, int):
        return entry
    if isinstance(entry, float):
        return int(entry) if math.isfinite(entry) and entry.is_integer() else None
    if isinstance(entry, str) and (match := _LABELLED.fullmatch(entry.strip())):
        return int(match[1])
    return None


def _shown(entry: Any) -> str:
    text = repr(entry)
    return text if len(text) <= 40 else f"{text[:40]}..."


# --- from the text to the values that may be the answer -----------------------------------


def _read(reply: str, key: str, contract: Callable[[Any], T]) -> Reading[T]:
    if isinstance(reply, Reply) and reply.failure is not None:
        return Reading(None, f"no answer: {reply.failure}")
    finish = reply.finish if isinstance(reply, Reply) else None
    stopped = _STOPPED.get(finish or "")
    if not reply.strip():
        return Reading(None, "empty" if stopped is None else stopped.replace("cut off", "empty"))
    text = without_reasoning(reply)
    unfit = None
    for value in _answers(text, key):
        try:
            return Reading(contract(value))
        except _Unfit as error:
            # The reason of the last answer is the one that tells most.
            unfit = unfit or str(error)
    if unfit is not None:
        return Reading(None, unfit)
    if stopped is not None:
        return Reading(None, stopped)
    if not text.strip():
        return Reading(None, "cut off: it ends within its reasoning")
    if _OPEN_OBJECT.search(text):
        return Reading(None, "cut off: its JSON does not end")
    if _REFUSAL.match(text.strip()):
        return Reading(None, "refusal")
    return Reading(None, "no ranking" if key == "ranking" else "no verdict")


# What APIs say -> the reason for an invalid reply.
_STOPPED = {
    "length": "cut off: the token budget was spent",
    "max_tokens": "cut off: the token budget was spent",
    "content_filter": "content filter",
    "refusal": "refusal",
}

_ROOM = "give replies more room: --gen_kwargs max_gen_toks=N"
_FORM = "hold the server to the form: docs/judge.md, structured output"
_REMEDIES = {
    "cut off": _ROOM,
    "empty": _ROOM,
    "no ranking": _FORM,
    "no verdict": _FORM,
    "too few": _FORM,
    "not a number": _FORM,
    "out of range": _FORM,
    "counts from 1": _FORM,
}


def remedies(reasons: Iterable[str]) -> list[str]:
    """Returns what can be done about invalid replies, given their reasons without details."""
    return list(dict.fromkeys(_REMEDIES[reason] for reason in reasons if reason in _REMEDIES))


_REFUSAL = re.compile(
    r"(?:i['\u2019]?m sorry|i am sorry|sorry|i apologi[sz]e|as an ai"
    r"|i (?:can['\u2019]?t|cannot|can not|won['\u2019]?t|am unable|am not able"
    r"|must decline|decline)"
    r"|i['\u2019]m (?:unable|not able))\b",
    re.IGNORECASE,
)

_OPEN_OBJECT = re.compile(r"\{[^{}]*(?:ranking|better)[^{}]*\Z")

_TAGS = "think|thinking|thought|reasoning|analysis|reflection"
_REASONING = re.compile(rf"<({_TAGS})>.*?</\1>|\[THINK\].*?\[/THINK\]", re.DOTALL | re.IGNORECASE)
_REASONING_ENDS = re.compile(rf"\A.*(?:</(?:{_TAGS})>|\[/THINK\])", re.DOTALL | re.IGNORECASE)
_REASONING_STARTS = re.compile(rf"(?:<(?:{_TAGS})>|\[THINK\]).*", re.DOTALL | re.IGNORECASE)
OPENS_REASONING = re.compile(rf"(?:<(?:{_TAGS})>|\[THINK\])\s*\Z", re.IGNORECASE)
"""The end of a prompt whose chat template opens the block of reasoning for the model."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)[^<]*<\|message\|>")


def without_reasoning(text: str) -> str:
    """Returns what a model says after, or outside, its thinking aloud.

    Blocks of reasoning go, as does all before an end mark without a start (a chat template that
    opens the block for the model) and all after a start mark without an end (a model that was
    cut off while it thought). Of a reply in channels the final one is kept.
    """
    if channels := list(_CHANNEL.finditer(text)):
        last = channels[-1]
        text = text[last.end() :] if last[1] == "final" else ""
    text = _REASONING.sub(" ", text)
    text = _REASONING_ENDS.sub("", text)
    return _REASONING_STARTS.sub("", text)


_FENCE = re.compile(r"\s*(?:```|~~~)\w*\s*(.*?)\s*(?:```|~~~)\s*", re.DOTALL)
_CHAIN = re.compile(r"\[[0-9]{1,9}\](?:\s*>\s*\[[0-9]{1,9}\])+")


def _answers(text: str, key: str) -> Iterator[Any]:
    """Yields what the reply gives under the key, the last first."""
    found = False
    for value in reversed([value for values in _objects(text, key) for value in values]):
        found = True
        yield value
    if found or key != "ranking":
        return
    for chain in reversed(_CHAIN.findall(text)):
        yield [int(number) for number in re.findall(r"[0-9]+", chain)]
    # A list alone is an answer; a list within prose may be anything.
    fenced = _FENCE.fullmatch(text)
    alone = _json(fenced[1] if fenced else text.strip())
    if isinstance(alone, list):
        yield alone


def _objects(text: str, key: str) -> list[list[Any]]:
    """Returns for each complete object of the text that has the key the values under it.

    An object that is no strict JSON counts where it holds none that is: prose in braces is not
    the answer, but may hold it.
    """
    before_key = text[: max(text.lower().rfind(key), 0)]
    starts = [match.start() for match in re.finditer(r"\{", before_key)]
    if len(starts) > _MANY:  # a model caught in a loop; each start costs a pass over the text
        starts = starts[: _MANY // 2] + starts[-_MANY // 2 :]

    strict: list[tuple[int, int, list[Any]]] = []
    position = 0
    for start in starts:
        if start >= position:
            try:
                value, position = json.JSONDecoder().raw_decode(text, start)
            except (ValueError, RecursionError):
                continue
            strict.append((start, position, list(_values(value, key))))

    sloppy: list[tuple[int, int, list[Any]]] = []
    position = 0
    for start in starts:
        if start < position or any(first <= start < end for first, end, _ in strict):
            continue
        end = _end(text, start)
        if end is None or any(start < first < end and values for first, _, values in strict):
            continue
        if values := _repaired(text[start:end], key):
            sloppy.append((start, end, values))
            position = end
    return [values for *_, values in sorted(strict + sloppy, key=lambda found: found[0])]


_MANY = 100


def _end(text: str, start: int) -> int | None:
    """Returns where an object that is no strict JSON ends; None if it does not.

    Braces are counted: without those in double quotes, and with them if that comes to nothing.
    """
    for token in (_QUOTED_OR_BRACE, _BRACE):
        depth = 0
        for match in token.finditer(text, start):
            depth += {"{": 1, "}": -1}.get(match[0], 0)
            if depth == 0:
                return match.end()
    return None


_BRACE = re.compile(r"[{}]")
_QUOTED_OR_BRACE = re.compile(r'"(?:[^"\\]|\\.)*"|[{}]', re.DOTALL)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _repaired(text: str, key: str) -> list[Any]:
    """Returns what a complete but sloppy object has under the key, unless it would be a guess.

    Single quotes, trailing commas, comments or a stray backslash leave no doubt what is meant. A
    list that does not end or numbers without a comma between them do, and the library that
    repairs would make something of them all the same.
    """
    if key == "ranking":
        lists = _LIST.findall(text)
        if not lists or any(re.search(r"[0-9]\s+[0-9]", entries) for entries in lists):
            return []
    try:
        return list(_values(json_repair.loads(text, skip_json_loads=True), key))
    except (ValueError, RecursionError):
        return []


_LIST = re.compile(r"ranking\W{0,4}\[((?:[^\[\]]|\[[0-9\s]*\])*)\]", re.IGNORECASE)


def _values(value: Any, key: str, depth: int = 10) -> Iterator[Any]:
    """Yields what stands under the key, in any letter case, at most so deep."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if str(name).strip().lower() == key:
                yield inner
            elif depth:
                yield from _values(inner, key, depth - 1)
    elif isinstance(value, list) and depth:
        for inner in value:
            yield from _values(inner, key, depth - 1)


# --- as filters of lm-eval ----------------------------------------------------------------


@register_filter("judge_ranking")
class JudgeRanking(Filter):
    """Reads each reply of a listwise judge by `read_ranking`."""

    def apply(
        self, resps: Iterable[Sequence[str]], docs: Sequence[dict[str, Any]]
    ) -> list[Reading[list[int]]]:
        """Maps the first reply to every request to what it says."""
        return [
            read_ranking(reply, len(doc["candidates"]))
            for (reply, *_), doc in zip(resps, docs, strict=True)
        ]


@register_filter("judge_verdict")
class JudgeVerdict(Filter):
    """Reads each reply of a pairwise judge by `read_verdict`."""

    def apply(
        self, resps: Iterable[Sequence[str]], docs: Sequence[dict[str, Any]]
    ) -> list[Reading[int]]:
        """Maps the first reply to every request to what it says."""
        return [read_verdict(reply) for reply, *_ in resps]
