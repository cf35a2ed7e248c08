"""Runs of the judge through lm-eval against a server that plays a script."""

import threading
from collections import Counter
from types import SimpleNamespace

import lm_eval
import lm_eval.evaluator
import pytest
import requests
import tenacity
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from tokenizers import AddedToken

from lm_eval_hyprank import tasks
from lm_eval_hyprank.judge import asking
from lm_eval_hyprank.judge.asking import JudgeError
from lm_eval_hyprank.judge.replies import read_ranking
from tests import tiny
from tests.conftest import TASK_CONFIGS
from tests.judge.scripted import reply, serve

TASK = "hyprank_demo_judge"
ORDER = {"order": "gold_first"}
GOOD = '{"ranking": [5, 4, 3, 2, 0]}'  # hits the gold at the fifth place


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(asking, "WAIT", tenacity.wait_none())
    # It asks pip and git about the machine, which takes longer than all else in a run.
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def papers():
    return list(tasks.judge(demo=True, **ORDER)["test"])


def run(url="http://127.0.0.1:9/v1", lm="local-chat-completions", task=TASK, **options):
    arguments = {"model": "m", "base_url": url, "max_retries": 2, "timeout": 5}
    arguments["num_concurrent"] = options.pop("concurrent", 1)
    return lm_eval.simple_evaluate(
        model=lm,
        model_args=arguments | options.pop("model_args", {}),
        tasks=[task] if isinstance(task, str) else task,
        task_manager=TaskManager(
            include_path=str(TASK_CONFIGS),
            include_defaults=False,
            metadata=ORDER,
        ),
        apply_chat_template=options.pop("apply_chat_template", True),
        bootstrap_iters=0,
        **options,
    )


def notes(results, task=TASK):
    return [sample["judge"] for sample in results["samples"][task]]


def which(papers, prompt):
    """The number of the paper that a prompt is about."""
    (number,) = (n for n, paper in enumerate(papers) if paper["question"] in prompt)
    return number


PLAY = {
    "good": (reply(GOOD), None),
    "429, then good": ([(429, {"error": "slow down"}), reply(GOOD)], None),
    "500, then good": ([(500, {"error": "oops"}), reply(GOOD)], None),
    "cut in mid-body, then good": ([b'{"choices": [{"ind', reply(GOOD)], None),
    "an error with status 200, then good": ([{"error": "busy"}, reply(GOOD)], None),
    "no JSON, then good": ([["x"], reply(GOOD)], None),
    "500 for ever": ((500, {"error": "oops"}), 'no answer: HTTP 500: {"error": "oops"}'),
    "400": ((400, {"error": "no max_tokens"}), 'no answer: HTTP 400: {"error": "no max_tokens"}'),
    "cut for ever": (b'{"choices": [{"ind', "no answer: "),
    "an error with status 200": ({"error": "busy"}, "no answer: ValueError the API sent no cho"),
    "null": (reply(None), "empty"),
    "null, all spent on reasoning": (
        reply(None, "length", reasoning_content="hm"),
        "empty: the token budget was spent",
    ),
    "no choices": ({"choices": []}, "empty"),
    "empty": (reply(""), "empty"),
    "cut off": (reply("<think>so [1, 2, 3, 4, 5]", "length"), "cut off: the token budget"),
    "refusal": (reply(None, refusal="No."), "refusal"),
    "refusal in words": (reply("I'm sorry, I can't."), "refusal"),
    "content filter": (reply(None, "content_filter"), "content filter"),
    "message without content": (
        {"choices": [{"index": 0, "message": {"role": "assistant"}, "finish_reason": "stop"}]},
        "empty",
    ),
    "from 1": (reply('{"ranking": [16, 1, 2, 3, 4]}'), "counts from 1"),
}


@pytest.mark.parametrize("concurrent", [1, 4])
@pytest.mark.parametrize("part", [slice(0, 10), slice(10, 20)])
def test_what_a_paper_meets_is_told_in_its_sample_and_touches_no_other(papers, part, concurrent):
    plays = list(PLAY.values())[part]

    def script(prompt, tries):
        number = which(papers, prompt)
        play = plays[number][0] if number < len(plays) else reply(GOOD)
        return play[tries] if isinstance(play, list) else play

    with serve(script) as server:
        results = run(server.url, concurrent=concurrent)
        tries = {which(papers, prompt): count for prompt, count in server.tries.items()}
    reasons = []
    for number, (note, paper) in enumerate(zip(notes(results), papers, strict=True)):
        play, invalid = plays[number] if number < len(plays) else (reply(GOOD), None)
        sample = results["samples"][TASK][number]
        if invalid is None:
            ranking = [paper["candidate_ids"][n] for n in (5, 4, 3, 2, 0)]
            assert note == {"ranking": ranking, "invalid": None}
            assert tries[number] == 1 + isinstance(play, list)
        else:
            assert note["ranking"] is None
            assert note["invalid"].startswith(invalid)
            assert sample["hit@5"] == sample["win_rate_half"] == 0
            assert "hit@5_valid" not in sample
            again = invalid.startswith("no answer") and "400" not in invalid
            assert tries[number] == (2 if again else 1)
            reasons.append(invalid.partition(":")[0])
    row, found = results["results"][TASK], results["hyprank"]["judge"][TASK]
    assert found["invalid"] == Counter(reasons)
    assert row["parse_rate,judge"] == pytest.approx(1 - len(reasons) / 12)
    assert row["hit@5,judge"] == row["parse_rate,judge"]
    assert row["hit@5_valid,judge"] == 1
    assert row["hit@3,judge"] == row["hit@3_valid,judge"] == 0
    # The gold beats the eleven unranked of its 15 rivals.
    assert row["win_rate_terminal_valid,judge"] == pytest.approx(11 / 15)
    assert row["win_rate_half,judge"] == pytest.approx(11 / 15 * row["parse_rate,judge"])


def test_replies_that_come_in_another_order_are_not_mixed_up(papers):
    """The server holds all twelve until the last has come, then lets the last go first."""
    arrived = []
    lock, everyone = threading.Lock(), threading.Event()
    turns = [threading.Event() for _ in range(12)]

    def script(prompt, _):
        with lock:
            place = len(arrived)
            arrived.append(prompt)
        if place == 11:
            everyone.set()
            turns[11].set()
        assert everyone.wait(20)
        assert turns[place].wait(20)
        if place:
            turns[place - 1].set()
        number = which(papers, prompt)
        return reply(f'{{"ranking": [{number}, 15, 14, 13, 12]}}')

    with serve(script) as server:
        results = run(server.url, concurrent=12, model_args={"timeout": 60})
    for number, (note, paper) in enumerate(zip(notes(results), papers, strict=True)):
        if number < 12:
            assert note["ranking"][0] == paper["candidate_ids"][number]


@pytest.mark.parametrize("concurrent", [1, 4])
def test_a_time_out_is_a_request_without_answer(papers, concurrent):
    over = threading.Event()

    def script(prompt, _):
        if which(papers, prompt) == 1:
            over.wait(20)
        return reply(GOOD)

    with serve(script) as server:
        results = run(
            server.url, concurrent=concurrent, limit=2, model_args={"timeout": 1, "max_retries": 1}
        )
        over.set()
    good, bad = notes(results)
    assert good["invalid"] is None
    assert bad["invalid"].startswith("no answer: ")
    assert "ime" in bad["invalid"]  # TimeoutError, ReadTimeout


@pytest.mark.parametrize("concurrent", [1, 4])
def test_a_rerun_asks_only_for_what_has_no_answer(papers, concurrent, tmp_path):
    replies = {1: (500, "oops"), 3: reply(None), 5: {"choices": []}, 7: reply("", "length")}
    options = {"concurrent": concurrent, "use_cache": str(tmp_path / "cache")}
    with serve(lambda prompt, _: replies.get(which(papers, prompt), reply(GOOD))) as server:
        first = run(server.url, **options)
        assert first["results"][TASK]["parse_rate,judge"] == pytest.approx(8 / 12)
        server.payloads.clear()
        server.script = lambda prompt, _: reply(GOOD)
        second = run(server.url, **options)
        asked = {which(papers, p["messages"][0]["content"]) for p in server.payloads}
        assert asked == set(replies)
        assert second["results"][TASK]["parse_rate,judge"] == 1
        server.payloads.clear()
        third = run(server.url, **options)
        assert not server.payloads
    assert third["results"] == second["results"]


@pytest.mark.parametrize("concurrent", [1, 4])
def test_a_server_that_is_gone_stops_the_run_and_what_came_before_is_kept(
    papers, concurrent, tmp_path
):
    options = {"concurrent": concurrent, "use_cache": str(tmp_path / "cache")}
    seen = []

    def dies(prompt, _):
        if prompt not in seen and len(seen) < 2:
            seen.append(prompt)
        return reply(GOOD) if prompt in seen else (503, "gone")

    with serve(dies) as server:
        with pytest.raises(JudgeError, match=r"10 requests in a row.*HTTP 503.*2 answered.*cache"):
            run(server.url, **options)
        server.payloads.clear()
        server.script = lambda prompt, _: reply(GOOD)
        results = run(server.url, **options)
        assert len(server.payloads) == 10
    assert results["results"][TASK]["parse_rate,judge"] == 1


@pytest.mark.parametrize("concurrent", [1, 4])
def test_a_parameter_that_the_model_rejects_is_named_after_few_calls(concurrent):
    error = {"error": {"message": "Unsupported parameter: 'max_tokens'", "code": 400}}
    with serve(lambda *_: (400, error)) as server:
        with pytest.raises(JudgeError, match="Unsupported parameter: 'max_tokens'"):
            run(server.url, concurrent=concurrent, limit=4)
        assert len(server.payloads) == 4  # no second try


@pytest.mark.parametrize("concurrent", [1, 4])
def test_a_reply_that_is_no_json_is_shown_with_the_url(concurrent):
    page = "<html>\n<title>Sign in</title>" + "x" * 100
    with serve(lambda *_: page) as server:
        with pytest.raises(JudgeError) as error:
            run(server.url, concurrent=concurrent, limit=1)
        shown = "<html> <title>Sign in</title>" + "x" * 51
        assert f"{server.url} sent no JSON but '{shown}'." in str(error.value)


def test_unreadable_replies_come_with_a_remedy(caplog):
    replies = iter([reply("<think>so", "length"), reply("The first one.")])
    with serve(lambda *_: next(replies)) as server:
        run(server.url, limit=2)
    (line,) = [text for text in caplog.messages if "that can be scored" in text]
    assert "2 of 2 replies" in line
    assert "cut off (1), no ranking (1); give replies more room: --gen_kwargs max_gen_" in line
    assert line.endswith("hold the server to the form: docs/judge.md, structured output")


def test_nothing_answered_is_no_result():
    with pytest.raises(JudgeError, match=r"none of 2 request\(s\) has an answer.*Connect"):
        run("http://127.0.0.1:9/v1/chat/completions", limit=2)


def test_the_model_is_left_as_it_was(papers):
    from lm_eval.models.openai_completions import LocalChatCompletion

    with serve(lambda *_: reply(GOOD)) as server:
        lm = LocalChatCompletion(base_url=server.url, model="m", max_retries=7)
        before = dict(vars(lm))
        run(lm=lm, limit=1)
    before.pop("cache_hook")
    assert {k: v for k, v in vars(lm).items() if k in before} == before
    assert not {"generate_until", "parse_generations", "model_call", "amodel_call"} & set(vars(lm))


def test_the_payload_suits_reasoning_models_and_can_be_changed():
    with serve(lambda *_: reply(GOOD)) as server:
        run(server.url, limit=1)
        run(server.url, limit=1, gen_kwargs={"max_gen_toks": 9000, "reasoning_effort": "low"})
        default, changed = server.payloads
    assert default["max_tokens"] == 4096
    assert default["temperature"] == 0
    assert not any(stop.isspace() for stop in default["stop"])
    assert default["stop"]
    assert changed["max_tokens"] == 9000
    assert changed["reasoning_effort"] == "low"


def test_openais_reasoning_models_are_sent_what_they_take(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with serve(lambda *_: reply(GOOD)) as server:
        run(server.url, "openai-chat-completions", model_args={"model": "gpt-5"}, limit=1)
        (payload,) = server.payloads
    assert payload["max_completion_tokens"] == 4096
    assert payload["temperature"] == 1
    assert not {"max_tokens", "stop"} & set(payload)


def test_a_paper_has_one_prompt_however_it_is_reached():
    with serve(lambda *_: reply(GOOD)) as server:
        every = run(server.url, concurrent=8)
        chosen = run(server.url, samples={TASK: [5, 2, 9]})
    hashes = {s["doc"]["paper_id"]: s["prompt_hash"] for s in every["samples"][TASK]}
    assert len(set(hashes.values())) == 12
    for sample in chosen["samples"][TASK]:
        assert sample["prompt_hash"] == hashes[sample["doc"]["paper_id"]]


def test_anthropic_thinking_is_not_the_answer(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    blocks = [
        {"type": "thinking", "thinking": '{"ranking": [0, 1, 2, 3, 4]}'},
        {"type": "text", "text": '{"ranking": '},
        {"type": "text", "text": "[5, 4, 3, 2, 0]}"},
    ]
    with serve(lambda *_: {"content": blocks, "stop_reason": "end_turn"}) as server:
        results = run(server.url, "anthropic-chat", limit=2)
    assert [note["invalid"] for note in notes(results)] == [None, None]
    assert all(None not in payload["stop_sequences"] for payload in server.payloads)


# ---- refused before the first call


def test_a_chat_model_needs_the_chat_template():
    with serve(lambda *_: reply(GOOD)) as server:
        with pytest.raises(JudgeError, match="add --apply_chat_template"):
            run(server.url, apply_chat_template=False)
        assert not server.payloads


@pytest.mark.parametrize(
    ("lm", "variable"),
    [("openai-chat-completions", "OPENAI_API_KEY"), ("anthropic-chat", "ANTHROPIC_API_KEY")],
)
def test_a_missing_key_is_named(monkeypatch, lm, variable):
    monkeypatch.delenv(variable, raising=False)
    with serve(lambda *_: reply(GOOD)) as server:
        with pytest.raises(JudgeError, match=variable):
            run(server.url, lm)
        assert not server.payloads


def test_several_prompts_a_request_are_refused():
    arguments = {"model": "m", "tokenizer_backend": None, "tokenized_requests": False}
    with pytest.raises(JudgeError, match="--batch_size 4"):
        run(lm="local-completions", model_args=arguments, batch_size=4, apply_chat_template=False)


def test_a_prompt_that_would_be_cut_is_refused(tmp_path):
    tiny.demo_llama().save_pretrained(tmp_path)
    tiny.demo_tokenizer().save_pretrained(tmp_path)
    arguments = {"pretrained": str(tmp_path), "dtype": "float32"}
    with pytest.raises(JudgeError, match=r"Astronomy/\S+ the prompt has \d+ tokens.*max_gen_toks"):
        lm_eval.simple_evaluate(
            model="hf",
            model_args=arguments | {"max_length": 512},
            tasks=[TASK],
            device="cpu",
            task_manager=TaskManager(include_path=str(TASK_CONFIGS), include_defaults=False),
            limit=1,
        )


def test_another_models_cache_is_refused(tmp_path):
    cache = str(tmp_path / "cache")
    with serve(lambda *_: reply(GOOD)) as server:
        run(server.url, use_cache=cache, limit=1)
        with pytest.raises(ValueError, match=r"written by another model.*--use_cache"):
            run(server.url, use_cache=cache, limit=1, model_args={"model": "other"})


class Echo(LM):
    """A backend that says nothing of its model."""

    def generate_until(self, requests):  # without disable_tqdm, as the interface has it
        return [GOOD for _ in requests]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def test_a_cache_needs_a_model_that_can_be_told(tmp_path):
    with pytest.raises(ValueError, match="Echo does not tell which model"):
        lm_eval.simple_evaluate(
            model=Echo(),
            tasks=[TASK],
            task_manager=TaskManager(include_path=str(TASK_CONFIGS), include_defaults=False),
            use_cache=str(tmp_path / "cache"),
        )


def test_samples_that_are_not_asked_for_are_not_there():
    results = lm_eval.simple_evaluate(
        model=Echo(),
        tasks=[TASK],
        task_manager=TaskManager(include_path=str(TASK_CONFIGS), include_defaults=False),
        log_samples=False,
    )
    assert "samples" not in results
    assert results["hyprank"]["judge"][TASK]["valid"] == 12


def test_other_tasks_in_the_run_are_asked_as_lm_eval_does(papers, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"q": "Say nothing.", "a": ""}\n', encoding="utf-8")
    stock = {
        "task": "stock_generation",
        "output_type": "generate_until",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "q",
        "doc_to_target": "a",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5},
        "metric_list": [{"metric": "exact_match"}],
    }

    def script(prompt, _):
        return (400, "no") if "Say nothing." in prompt else reply(GOOD)

    with serve(script) as server:
        # lm-eval's own way: two tries, then the error.
        with pytest.raises(requests.HTTPError):
            run(server.url, task=[TASK, stock], limit=2)
        server.script = lambda *_: reply(None)
        results = run(server.url, task=[TASK, stock], limit=2)
    assert results["results"]["stock_generation"]["exact_match,none"] == 1
    assert results["hyprank"]["judge"][TASK]["invalid"] == {"empty": 2}


@pytest.mark.parametrize("opened", ["<think>\n", "<Thinking>", "[THINK]"])
def test_reasoning_that_the_prompt_opens_is_no_answer(opened):
    """The templates of some models open the block, so that a reply cut off in it has no mark."""

    class Thinker(LM):
        def generate_until(self, asked, disable_tqdm=False):
            closed = opened.strip().replace("<", "</").replace("[", "[/")
            replies = [f"The form is {GOOD}, so", f"Hm.{closed}{GOOD}"]
            for request, answer in zip(asked, replies, strict=True):
                self.cache_hook.add_partial("generate_until", request.args, answer)
            return replies

        loglikelihood = loglikelihood_rolling = generate_until

    filed = []
    model = Thinker()
    model.cache_hook.add_partial = lambda method, args, answer: filed.append(answer)
    asked = [Instance("generate_until", {}, (f"Rank them. {opened}", {}), 0) for _ in range(2)]
    replies = asking.ask(model, model.generate_until, asked)
    assert filed == replies
    thought, answered = (read_ranking(answer, 16) for answer in replies)
    assert thought.value is None
    assert thought.invalid == "cut off: it ends within its reasoning"
    assert answered.value == [5, 4, 3, 2, 0]
    bare = Instance("generate_until", {}, ("Rank them.", {}), 0)
    assert asking.ask(model, lambda asked: [GOOD], [bare]) == [GOOD]


def test_a_model_in_a_server_of_its_own_is_known_by_its_files(tmp_path):
    """The weights of lm-eval's vllm and sglang are out of reach, and a name may get new ones."""
    served = SimpleNamespace(model_args={"model": str(tmp_path), "tensor_parallel_size": 1})
    # Arguments may be long texts, and of a model of the hub they are all there is.
    served.model_args["hf_overrides"] = "x" * 5000
    fingerprints = [asking.judge_fingerprint(served)]
    for content in ("first", "second one"):
        (tmp_path / "model.safetensors").write_text(content, encoding="utf-8")
        fingerprints.append(asking.judge_fingerprint(served))
        assert asking.judge_fingerprint(served) == fingerprints[-1]
    assert len(set(fingerprints)) == 3


@pytest.mark.parametrize("hidden", ["by lm-eval", "by decoding", "by nobody"])
def test_an_answer_whose_reasoning_was_cut_away_stays_one(hidden):
    """lm-eval's think_end_token cuts, and special tokens are not decoded."""
    token = AddedToken("</think>", special=hidden == "by decoding")
    model = SimpleNamespace(
        tokenizer=SimpleNamespace(added_tokens_decoder={7: token}),
        think_end_token="</think>" if hidden == "by lm-eval" else None,
        cache_hook=SimpleNamespace(add_partial=None),
    )
    asked = [Instance("generate_until", {}, ("Rank them. <think>\n", {}), 0) for _ in range(2)]
    answered, empty = asking.ask(model, lambda asked: [GOOD, ""], asked)
    assert (answered == GOOD) == (hidden != "by nobody")
    assert empty == ""
    assert not empty.is_answer
