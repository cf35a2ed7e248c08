import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, TaskType, get_peft_model

from lm_eval_hyprank.models.fingerprint import folder_state, model_fingerprint
from lm_eval_hyprank.report.found import RUNNING_ARGS
from tests import tiny
from tests.models.test_hf import hflm


@pytest.fixture(scope="module")
def lm():
    return hflm()


@pytest.mark.parametrize("change", ["alpha", "off", "scale"])
def test_fingerprint_tells_adapters_apart(change):
    """Their weights are the same, and what is made of them is not."""

    def adapted(alpha=8):
        config = LoraConfig(task_type=TaskType.CAUSAL_LM, lora_alpha=alpha)
        torch.manual_seed(0)
        return get_peft_model(tiny.llama(), config).eval()

    before = model_fingerprint(hflm(model=adapted()))
    assert model_fingerprint(hflm(model=adapted())) == before
    other = adapted(16 if change == "alpha" else 8)
    if change == "off":
        other.disable_adapter_layers()
    if change == "scale":
        for module in other.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] = 3.0
    assert model_fingerprint(hflm(model=other)) != before


@pytest.mark.slow
def test_fingerprint_of_an_adapter_is_the_same_in_every_process():
    """Its settings hold sets, whose order is the process's own."""
    program = (
        "import torch; from peft import LoraConfig, get_peft_model; from tests import tiny\n"
        "from lm_eval_hyprank.models.fingerprint import model_fingerprint\n"
        "from tests.models.test_hf import hflm\n"
        "torch.manual_seed(0); names = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'up_proj']\n"
        "model = get_peft_model(tiny.llama(), LoraConfig(target_modules=names))\n"
        "print(model_fingerprint(hflm(model=model)))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_fingerprint_is_not_of_how_a_model_is_printed(monkeypatch):
    """Which differs between versions of torch and transformers, and may show an address."""
    before = model_fingerprint(hflm())
    monkeypatch.setattr(torch.nn.Linear, "extra_repr", lambda self: f"at {id(self)}")
    assert model_fingerprint(hflm()) == before


@pytest.mark.parametrize("entry", [0, 300, 383])
def test_fingerprint_sees_all_of_a_tensor(entry):
    """Of which it reads some values, not the first ones only."""
    model = tiny.llama(384)
    before = model_fingerprint(hflm(model=model))
    bias = torch.zeros(384)
    bias[max(0, entry - 1) : entry + 1] = 1.0
    model.register_buffer("bias", torch.zeros(384))
    zero = model_fingerprint(hflm(model=model))
    model.bias = bias
    assert len({before, zero, model_fingerprint(hflm(model=model))}) == 3


def test_fingerprint_tells_models_apart():
    same = [model_fingerprint(hflm()) for _ in range(2)]
    assert same[0] == same[1]
    requantised = tiny.llama()
    requantised.lm_head.weight.data += 1e-3
    moved = tiny.llama()
    moved.config._name_or_path = "/elsewhere"
    assert model_fingerprint(hflm(model=moved)) == same[0]
    others = [
        hflm(model=tiny.llama(seed=1)),
        hflm(model=requantised),
        hflm(model=tiny.llama().to(torch.bfloat16)),
        hflm(max_length=100),
        hflm(tokenizer=tiny.tokenizer(bos=True)),
        hflm(tokenizer=tiny.tokenizer(vocabulary=300)),
        hflm(model=tiny.llama(rope_theta=500.0)),
    ]
    assert len({same[0], *map(model_fingerprint, others)}) == len(others) + 1


# Of what HFLM takes: a value that changes what a model answers, and what does so by itself or not.
CHANGING = {
    "tokenizer": tiny.tokenizer(bos=True),
    "max_length": 100,
    "mixed_precision_dtype": "bfloat16",
    "add_bos_token": True,
    "prefix_token_id": 5,
    "think_end_token": "</think>",
    "enable_thinking": False,
    "chat_template_args": {"reasoning_effort": "low"},
}
LOADING = {
    *("pretrained", "backend", "revision", "subfolder", "dtype", "peft", "delta"),
    *("autogptq", "gptqmodel", "gguf_file", "use_fast_tokenizer"),
}
"""Which weights or tokenizer are loaded, and as what: these enter themselves."""

CHANGING_NOTHING = {
    "truncation",  # prompts of judges that would be cut are refused
    "logits_cache",  # saves time in lm-eval's own scoring
    "softmax_dtype",  # of lm-eval's own scoring
}


def test_every_argument_of_a_model_is_accounted_for():
    takes = inspect.signature(HFLM.__init__).parameters.keys() - {"self", "kwargs"}
    groups = (CHANGING.keys(), LOADING, CHANGING_NOTHING, takes & RUNNING_ARGS)
    assert sorted(takes) == sorted(name for group in groups for name in group)


@pytest.mark.parametrize("name", CHANGING)
def test_an_argument_that_changes_what_a_model_answers_changes_its_fingerprint(name, lm):
    assert model_fingerprint(hflm(**{name: CHANGING[name]})) != model_fingerprint(lm)


def test_thinking_of_another_kind_is_another_model(lm):
    thinking = {"enable_thinking": True, "think_end_token": "</think>"}
    found = [
        hflm(**thinking),
        hflm(**thinking | {"enable_thinking": False}),
        hflm(**thinking | {"think_end_token": 7}),
        hflm(chat_template_args={"thinking_budget": 1}),
        hflm(chat_template_args={"thinking_budget": 2}),
        lm,
    ]
    assert len({model_fingerprint(one) for one in found}) == len(found)


def write_model(folder):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"1234")
    (folder / "pytorch_model.bin").write_bytes(b"12")
    (folder / "README.md").write_text("a model")


@pytest.mark.parametrize("readable", [True, False])
def test_weights_that_cannot_be_read_enter_by_their_files(tmp_path, readable):
    """Those of the folder that they were loaded from, by size and time."""
    write_model(tmp_path / "model")
    lm = hflm()
    lm.model.config.name_or_path = str(tmp_path / "model")
    if not readable:
        layer = lm.model.model.layers[0].mlp.up_proj
        layer.weight = torch.nn.Parameter(layer.weight.detach().to("meta"))
    before = model_fingerprint(lm)
    (tmp_path / "model" / "README.md").write_text("a good model")
    assert model_fingerprint(lm) == before
    os.utime(tmp_path / "model" / "model.safetensors", ns=(1, 1))
    assert (model_fingerprint(lm) == before) is readable
    lm.model.config.name_or_path = "acme/Lark-1B"
    assert (model_fingerprint(lm) == before) is readable


def test_the_state_of_a_folder_is_that_of_its_weights(tmp_path, monkeypatch):
    write_model(tmp_path / "model")
    (tmp_path / "model" / "deep.bin").mkdir()
    found = folder_state(str(tmp_path / "model"))
    assert [entry[:2] for entry in found] == [("model.safetensors", 4), ("pytorch_model.bin", 2)]
    assert found == folder_state(str(tmp_path / "model"))
    monkeypatch.chdir(tmp_path / "model")
    for no_folder in ("", "acme/Lark-1B", "README.md"):
        assert folder_state(no_folder) == []
