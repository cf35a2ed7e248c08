"""Tiny models and tokenizers, made on the spot."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lm_eval_hyprank.datasets.demo import FOLDER as DEMO_FOLDER
from lm_eval_hyprank.datasets.validation import RANKING_FILE
from lm_eval_hyprank.energy import TokenScores
from lm_eval_hyprank.prefix import Row

CORPUS = [
    "Background: the sea is salt.\nResearch Question: why is the sea salt?\nHypothesis: rivers.",
    "The quick brown fox jumps over the lazy dog; 3.14159, x_1 + y^2 = {z}.",
]


def tokenizer(
    *, bos: bool = False, eos: bool = False, vocabulary: int = 320, corpus: list[str] = CORPUS
) -> Any:
    """A byte-level BPE tokenizer that knows every text, with optional BOS and EOS."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    backend.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if bos or eos:
        single = [*(["<s>"] if bos else []), "$A", *(["</s>"] if eos else [])]
        ids = [(token, backend.token_to_id(token)) for token in special]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def llama(vocabulary: int = 320, *, seed: int = 0, scale: float = 1.0, **changes: Any) -> Any:
    """A two-layer Llama with random weights, large enough to give logits of a few nats."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "initializer_range": 0.2 * scale,
    }
    return LlamaForCausalLM(LlamaConfig(**(options | changes))).eval()


DEMO_VOCABULARY = 2000


def demo_tokenizer() -> Any:
    """A tokenizer that knows the demo set's words, so that its prompts are short."""
    text = (DEMO_FOLDER / RANKING_FILE).read_text(encoding="utf-8")
    return tokenizer(vocabulary=DEMO_VOCABULARY, corpus=text.splitlines())


def demo_llama(**changes: Any) -> Any:
    """A model with room for the demo set's prompts."""
    return llama(DEMO_VOCABULARY, max_position_embeddings=4096, **changes)


def requests(pairs: list[tuple[str, str]], task: str = "task") -> list[Instance]:
    """Loglikelihood requests of (context, continuation) pairs."""
    return [
        Instance("loglikelihood", {"paper_id": f"paper {i}"}, pair, i, (task, i, 1))
        for i, pair in enumerate(pairs)
    ]


def plain_sums(
    model: Any, prefix: tuple[int, ...], continuation: tuple[int, ...]
) -> tuple[float, float, float, bool]:
    """NLL, raw, log-partition sums and greediness from one plain forward pass, in float64."""
    ids = torch.tensor([[*prefix, *continuation]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prefix) - 1 : -1].double()
    target = logits.gather(1, ids[0, len(prefix) :, None])[:, 0]
    logz = logits.logsumexp(1)
    greedy = bool((logits.argmax(1) == ids[0, len(prefix) :]).all())
    return float((logz - target).sum()), float(-target.sum()), float(logz.sum()), greedy


def plain_scores(model: Any, row: Row) -> TokenScores:
    """Scores by the formulas, in float64, from one forward pass over the sequence alone.

    Positions are counted from the end: adapters may put tokens of their own in front.
    """
    ids = torch.tensor([[*row.prefix, *row.continuation]])
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    options = {"use_cache": False} if "use_cache" in signature(base.forward).parameters else {}
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1], **options).logits[0, -len(row.continuation) :]
    logits, targets = logits.double(), ids[0, len(row.prefix) :]
    picked = logits.gather(1, targets[:, None])[:, 0]
    return TokenScores(-picked, logits.logsumexp(1), logits.argmax(1) == targets)
