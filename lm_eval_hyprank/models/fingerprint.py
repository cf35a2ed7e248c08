"""What decides a model's scores, as a short hash that guards response caches and joins runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM


def model_fingerprint(lm: HFLM) -> str:
    """Identifies what decides a model's scores: weights, config, tokenizer and their settings.

    Weights enter by up to 256 values spread evenly over each tensor, so a file replaced under the
    same name is noticed and a large model costs no full pass. Where some cannot be read, the state
    of the files in the model's folder enters too.
    """
    digest = hashlib.sha256()

    def add(*values: object) -> None:
        digest.update(repr(values).encode())

    config = lm.model.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):  # the same model, wherever it lies
        config.pop(name, None)
    add(type(lm.model).__name__, json.dumps(config, sort_keys=True, default=str))
    add(lm.max_length, lm.add_bos_token, lm.mixed_precision_dtype, lm.prefix_token_id)
    if lm.chat_template_args or lm.think_end_token is not None:
        arguments = json.dumps(lm.chat_template_args, sort_keys=True, default=str)
        add(arguments, lm.think_end_token)
    probe = "Hypothesis: 3.14 \u03b1\n<x>"
    add(type(lm.tokenizer).__name__, len(lm.tokenizer), lm.tokenizer.encode(probe))
    if not add_weights(digest, lm.model):
        for file in folder_state(str(lm.model.config.name_or_path)):
            add(*file)
    for name, adapter in getattr(lm.model, "peft_config", {}).items():
        settings = adapter.to_dict()
        for key in ("base_model_name_or_path", "peft_version"):
            settings.pop(key, None)
        add(name, json.dumps(settings, sort_keys=True, default=_in_order))
    for module in lm.model.modules():  # an adapter's layers may be scaled or switched off
        if isinstance(getattr(type(module), "disable_adapters", None), property):
            add(module.disable_adapters, module.active_adapters, getattr(module, "scaling", None))
    return digest.hexdigest()[:16]


def _in_order(value: object) -> object:
    """What JSON has no name for; the order of a set is another in every process."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def folder_state(path: str) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file of weights in a folder; empty for what is none."""
    if not os.path.isdir(path):  # unlike Path.is_dir, it takes a text of any length
        return []
    weights = [file for file in sorted(Path(path).iterdir()) if file.suffix in _WEIGHTS]
    found = [(file.name, file.stat()) for file in weights if file.is_file()]
    return [(name, state.st_size, state.st_mtime_ns) for name, state in found]


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def add_weights(digest: Any, module: torch.nn.Module) -> bool:
    """Adds a module's weights to a hash: up to 256 values spread evenly over each tensor.

    Returns:
        Whether all of them could be read.
    """
    whole = True
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        digest.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode())
        step = max(1, math.ceil(tensor.numel() / 256))
        try:
            sample = tensor.detach().flatten()[::step].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
        except (NotImplementedError, RuntimeError):
            whole = False  # on the meta device, or packed by a quantiser: the shape has to do
    return whole
