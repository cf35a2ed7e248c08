import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model

from lm_eval_hyprank.models.fingerprint import model_fingerprint
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
