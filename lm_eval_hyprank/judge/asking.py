"""How a judge is asked: one reply a request, whatever the API does.

lm-eval sends the requests, in parallel where it is told to. Left alone, it takes a reply of no
choices for no request at all and shifts those that follow, files an empty reply in the response
cache as an answer, asks again after errors that will not go away, and ends the run at the first
request that fails for good. `ask` sees to these for the requests of our judges and leaves all
others to lm-eval.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import requests
import tenacity
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.anthropic_llms import AnthropicChat
from lm_eval.models.api_models import TemplateAPI
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalChatCompletion
from lm_eval.models.utils import normalize_gen_kwargs

from lm_eval_hyprank.judge.replies import OPENS_REASONING, Reply
from lm_eval_hyprank.models.fingerprint import folder_state, model_fingerprint

logger = logging.getLogger(__name__)

STOP_AFTER = 10
"""So many requests in a row without an answer, and the run stops: the next will have none."""

WAIT = tenacity.wait_exponential(multiplier=0.5, min=1, max=10)
"""lm-eval's own waiting times between tries."""

# Client errors that another try may cure: time-out, conflict, too early, too many requests.
_PASSING = (408, 409, 425, 429)


class JudgeError(RuntimeError):
    """The judge cannot be asked, or answers no more; the message says why and what to do."""


class _HTTPError(Exception):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {' '.join(body.split())[:300]}")
        self.status = status


def check_judge(model: Any, apply_chat_template: bool | str) -> None:
    """Stops a run whose requests would all fail, before the first is sent.

    Raises:
        JudgeError: The API key is missing, a chat API would get bare text, or several prompts
            would go into one request.
    """
    name = type(model).__name__
    if isinstance(model, LocalChatCompletion | AnthropicChat) and not apply_chat_template:
        raise JudgeError(
            f"{name} takes chat messages, and the prompts are bare text: add --apply_chat_template"
        )
    if not isinstance(model, TemplateAPI):
        tokenizer = getattr(model, "tokenizer", None)
        if not apply_chat_template and getattr(tokenizer, "chat_template", None):
            logger.warning(
                "the model has a chat template, and the judge's prompts are sent without it: "
                "an instruction-tuned model answers better with --apply_chat_template"
            )
        return
    if model._batch_size > 1:
        raise JudgeError(
            f"--batch_size {model._batch_size} puts several prompts into one request, whose "
            "replies cannot be told apart for certain; use 1, and num_concurrent=N in "
            "--model_args to send N requests at a time"
        )
    try:
        _ = model.header  # what lm-eval sends with every request; it needs the key
    except ValueError as error:
        raise JudgeError(f"{name}: {error}") from error


def judge_fingerprint(model: Any) -> str | None:
    """Identifies the model whose replies a response cache holds; None if it cannot be told."""
    if isinstance(model, HFLM):
        return model_fingerprint(model)
    if isinstance(model, TemplateAPI):
        parts: tuple[Any, ...] = (type(model).__name__, model.base_url, model.model, model._seed)
    elif arguments := getattr(model, "model_args", None):  # lm-eval's vllm and sglang
        given = sorted((name, str(value)) for name, value in dict(arguments).items())
        # The weights lie in another process: that those of a local folder changed, its files say.
        states = [folder_state(value) for _, value in given]
        parts = (type(model).__name__, given, *(state for state in states if state))
    else:
        return None
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def ask(
    model: Any, generate: Callable[..., list[str]], asked: Sequence[Instance], **options: Any
) -> list[Reply]:
    """Has the model answer the requests, by its own `generate_until`.

    Args:
        model: The model.
        generate: Its `generate_until`.
        asked: The requests.
        **options: For `generate`.

    Returns:
        One reply a request, in their order. A request that an API does not answer, all tries
        included, has a reply that says so. One that goes on with the reasoning which the prompt
        opens has the mark that opens it, without which reasoning cut off looks like an answer.

    Raises:
        JudgeError: A prompt would be cut, or the API does not answer any more (what it did
            answer is in the response cache, if there is one).
    """
    _check_room(model, asked)
    guarded = _one_reply_each(model) if isinstance(model, TemplateAPI) else nullcontext()
    with guarded, _cached_whole(model):
        replies = generate(asked, **options)
    if len(replies) != len(asked):
        raise JudgeError(f"{type(model).__name__}: {len(replies)} replies to {len(asked)} requests")
    return [_whole(model, one.args[0], reply) for one, reply in zip(asked, replies, strict=True)]


def _whole(model: Any, prompt: Any, reply: str) -> Reply:
    whole = reply if isinstance(reply, Reply) else Reply(reply)
    opens = OPENS_REASONING.search(prompt) if isinstance(prompt, str) else None
    if opens is None or not whole.strip() or _ends_unseen(model, opens[0].strip()):
        return whole
    return Reply(opens[0] + whole, whole.finish, whole.failure)


def _ends_unseen(model: Any, mark: str) -> bool:
    """Whether the mark that ends the reasoning never reaches a reply, nor what stands before it."""
    if getattr(model, "think_end_token", None) is not None:
        return True  # lm-eval cuts the reply there
    tokens = getattr(getattr(model, "tokenizer", None), "added_tokens_decoder", {}).values()
    end = f"{mark[0]}/{mark[1:]}"
    return any(token.special and token.content == end for token in tokens)  # not decoded


@contextmanager
def _cached_whole(model: Any) -> Iterator[None]:
    """Files in the response cache what `ask` returns; lm-eval files each reply as it comes."""
    hook = model.cache_hook
    stock = hook.add_partial

    def add_whole(method: str, args: Any, reply: str) -> None:
        stock(method, args, _whole(model, args[0], reply))

    hook.add_partial = add_whole
    try:
        yield
    finally:
        hook.add_partial = stock


def _check_room(model: Any, asked: Sequence[Instance]) -> None:
    """Stops before a prompt loses its head: lm-eval cuts on the left what is too long."""
    if not isinstance(model, TemplateLM) or model.tokenizer is None:
        return
    if isinstance(model, TemplateAPI) and not model.tokenized_requests:
        return  # the server takes the text as it is, or says that it is too long
    for request in asked:
        prompt, settings = request.args
        budget = normalize_gen_kwargs(dict(settings))["max_gen_toks"]
        size = len(model.tok_encode(prompt))
        if size + budget > model.max_length:
            raise JudgeError(
                f"{request.task_name}, {(request.doc or {}).get('paper_id')}: the prompt has "
                f"{size} tokens and the reply may take {budget} (max_gen_toks), but the model "
                f"takes {model.max_length} in all (max_length). The prompt's beginning would be "
                "cut off. Give --gen_kwargs max_gen_toks=N, or max_length=N in --model_args if "
                "the model can take more."
            )


@contextmanager
def _one_reply_each(model: TemplateAPI) -> Iterator[None]:
    """Has each request of an API model end in exactly one `Reply`."""
    parse, call, acall = model.parse_generations, model.model_call, model.amodel_call
    tries = model.max_retries
    outcomes = _Outcomes()
    retrying = tenacity.retry(
        retry=tenacity.retry_if_exception(_worth_another_try),
        stop=tenacity.stop_after_attempt(tries),
        wait=WAIT,
        reraise=True,
    )

    def parse_one(outputs: Any, **_: Any) -> list[Reply]:
        return [outputs if isinstance(outputs, Reply) else read_reply(parse, outputs)]

    def call_one(*args: Any, **kwargs: Any) -> Reply:
        def once() -> Reply:
            try:
                return read_reply(parse, call(*args, **kwargs))
            except requests.HTTPError as error:
                response: Any = error.response
                raise _HTTPError(response.status_code, response.text) from error
            except requests.JSONDecodeError as error:
                raise _no_json(model.base_url, error.doc) from error

        try:
            return outcomes.count(retrying(once)())
        except Exception as error:
            return outcomes.count(_unanswered(error))

    async def acall_one(*args: Any, session: Any, **kwargs: Any) -> list[Reply]:
        # aiohttp's own exceptions lack what the server says.
        post = partial(session.post, raise_for_status=_check_response)
        once = partial(acall, *args, session=SimpleNamespace(post=post), **kwargs)
        try:
            (reply,) = await retrying(once)()
        except Exception as error:
            reply = _unanswered(error)
        return [outcomes.count(reply)]

    ours = {
        "parse_generations": parse_one,
        "model_call": call_one,
        "amodel_call": acall_one,
        "max_retries": 1,  # the tries are counted here
    }
    vars(model).update(ours)
    try:
        yield
    finally:
        for name in ours:
            vars(model).pop(name)
        model.max_retries = tries
    outcomes.finish()


class _Outcomes:
    """Counts what became of the requests, and stops the run when nothing does any more."""

    def __init__(self) -> None:
        self.answered = self.failed = self.in_a_row = 0

    def count(self, reply: Reply) -> Reply:
        if reply.failure is None:
            self.answered += 1
            self.in_a_row = 0
            return reply
        self.failed += 1
        self.in_a_row += 1
        logger.warning("a request has no answer: %s", reply.failure)
        self.last = reply.failure
        if self.in_a_row >= STOP_AFTER:
            self._stop(f"{self.in_a_row} requests in a row have no answer")
        return reply

    def finish(self) -> None:
        if self.failed and not self.answered:
            self._stop(f"none of {self.failed} request(s) has an answer")

    def _stop(self, why: str) -> None:
        raise JudgeError(
            f"{why}; the last error: {self.last}. {self.answered} answered before. With "
            "--use_cache PATH what is answered is kept, and a rerun asks for the rest only."
        )


def _worth_another_try(error: BaseException) -> bool:
    status = getattr(error, "status", None)
    lasting = isinstance(status, int) and 400 <= status < 500 and status not in _PASSING
    return isinstance(error, Exception) and not lasting


async def _check_response(response: Any) -> None:
    text = await response.text()
    if not response.ok:
        raise _HTTPError(response.status, text)
    try:
        json.loads(text)
    except ValueError as error:
        raise _no_json(response.url, text) from error


def _no_json(url: Any, text: str) -> ValueError:
    return ValueError(f"{url} sent no JSON but {' '.join(text.split())[:80]!r}")


def _unanswered(error: Exception) -> Reply:
    text = str(error) if isinstance(error, _HTTPError) else f"{type(error).__name__} {error}"
    return Reply("", failure=" ".join(text.split())[:400])


def read_reply(parse: Callable[..., list[str | None]], outputs: Any) -> Reply:
    """Returns the one reply in what an API sent.

    Args:
        parse: The model's own way from outputs to texts, which knows its marks of reasoning.
        outputs: The decoded JSON.

    Raises:
        ValueError: It is no reply but, say, an error sent with status 200.
    """
    if not isinstance(outputs, Mapping):
        raise ValueError(f"the API sent no JSON object but {str(outputs)[:100]!r}")
    if isinstance(blocks := outputs.get("content"), list):
        # Anthropic's form: blocks of thinking stand beside those of text.
        parts = [block["text"] for block in blocks if block.get("type") == "text"]
        return Reply("".join(parts), finish=outputs.get("stop_reason"))
    choices = outputs.get("choices")
    if not isinstance(choices, list):
        raise ValueError(f"the API sent no choices: {' '.join(str(outputs).split())[:200]}")
    if not choices:
        return Reply("", finish="no choices")
    message = choices[0].get("message") or {}
    finish = "refusal" if message.get("refusal") else choices[0].get("finish_reason")
    if message and message.get("content") is None:
        return Reply("", finish=finish)
    (text, *_) = parse(outputs=outputs)
    return Reply(text or "", finish=finish)
