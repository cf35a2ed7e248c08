"""The embedding baseline: cosine between a context and each of its continuations."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from transformers import PreTrainedTokenizerBase

from lm_eval_hyprank.models.fingerprint import add_weights
from lm_eval_hyprank.scores import SimilarityScore

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

logger = logging.getLogger(__name__)

_BATCH_SIZE = 32


@register_model("sentence-embedding")
class SentenceEmbeddingLM(LM):
    """A sentence-transformers model whose `loglikelihood` returns a `SimilarityScore`.

    It serves the tasks that read cosines, such as ``researchbench_embedding``, in one process.
    The context is embedded as a query and the continuation as a document, where the model tells
    the two apart.

    Args:
        pretrained: A folder or a name on the hub that sentence-transformers can load.
        device: A torch device; chosen by sentence-transformers by default. Without CUDA, a CUDA
            device (lm-eval's own default) becomes the CPU, as under lm-eval's ``hf``.
        batch_size: Texts a forward pass; "auto" takes 32.
        max_length: Tokens that fit; the model's own limit by default.
        dtype: The weights' dtype, as torch names it.
        revision: The hub's branch, tag or commit.
        trust_remote_code: Whether code that comes with the model may run.
        max_batch_size: Not used; lm-eval hands it to every model.

    Raises:
        ImportError: sentence-transformers is not installed.
        TypeError: The model has no Hugging Face tokenizer, so that cuts cannot be told.
        ValueError: It is started in several processes.
    """

    def __init__(
        self,
        pretrained: str,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_length: int | None = None,
        dtype: str = "float32",
        revision: str | None = None,
        trust_remote_code: bool = False,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("sentence-embedding runs in one process; start it without a launcher")
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ImportError(
                "--model sentence-embedding needs sentence-transformers: "
                "pip install 'lm_eval_hyprank[embedding]'"
            ) from error
        if (device or "").startswith("cuda") and not torch.cuda.is_available():
            logger.info("Cuda Available? False. Using device 'cpu' in place of '%s'", device)
            device = "cpu"
        self.model: Any = SentenceTransformer(
            pretrained,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            model_kwargs={"dtype": dtype},
        )
        self.model.eval()
        if max_length is not None:
            self.model.max_seq_length = max_length
        if not isinstance(self.model.tokenizer, PreTrainedTokenizerBase):
            raise TypeError(f"{pretrained} has no Hugging Face tokenizer; use another model")
        if batch_size is None or str(batch_size).startswith("auto"):
            batch_size = _BATCH_SIZE
        self.batch_size = int(batch_size)
        self._device = self.model.device

    @property
    def max_length(self) -> int | None:
        """Tokens that fit, special tokens and the model's own prompt included; None: any."""
        limit: int | None = self.model.max_seq_length
        return limit

    def fingerprint(self) -> str:
        """Identifies what decides the cosines: weights, modules, prompts and tokenizer."""
        digest = hashlib.sha256()
        tokenizer = self.model.tokenizer
        probe = tokenizer("Hypothesis: 3.14 α\n<x>")["input_ids"]
        digest.update(repr((str(self.model), self.model.prompts, self.max_length, probe)).encode())
        add_weights(digest, self.model)
        return digest.hexdigest()[:16]

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[SimilarityScore]:
        """Compares each request's continuation with its context.

        A context that does not fit is cut on the left, as the energy tasks cut theirs; a
        continuation that does not is cut at its end. Both are marked and counted.

        Args:
            requests: Instances whose ``args`` are ``(context, continuation)``.
            disable_tqdm: Whether to hide the progress bar.

        Returns:
            One `SimilarityScore` a request, in the order of the requests.
        """
        pairs = [(context.strip(), text.strip()) for context, text in (r.args for r in requests)]
        contexts = list(dict.fromkeys(context for context, _ in pairs))
        texts = list(dict.fromkeys(text for _, text in pairs))
        fitted = [self._cut_left(context) for context in contexts]
        cut = {context for context, fit in zip(contexts, fitted, strict=True) if fit != context}
        cut_texts = {text for text in texts if not self._fits(text, "document")}
        if cut or cut_texts:
            logger.warning(
                "%d of %d contexts (on the left) and %d of %d continuations (at their end) were "
                "cut to the model's %s tokens",
                len(cut),
                len(contexts),
                len(cut_texts),
                len(texts),
                self.max_length,
            )
        options = {
            "batch_size": self.batch_size,
            "convert_to_tensor": True,
            "show_progress_bar": not disable_tqdm,
        }
        queries = self.model.encode_query(fitted, **options).double().cpu()
        documents = self.model.encode_document(texts, **options).double().cpu()
        query_of = dict(zip(contexts, queries, strict=True))
        document_of = dict(zip(texts, documents, strict=True))
        return [
            SimilarityScore(
                cosine=_cosine(query_of[context], document_of[text]),
                num_tokens=len(self._tokens(text, special=False)),
                num_bytes=len(text.encode()),
                truncated=context in cut or text in cut_texts,
            )
            for context, text in pairs
        ]

    def _tokens(self, text: str, special: bool = True) -> list[int]:
        encoded = self.model.tokenizer(text, add_special_tokens=special, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _fits(self, text: str, kind: str) -> bool:
        whole = (self.model.prompts.get(kind) or "") + text
        return self.max_length is None or len(self._tokens(whole)) <= self.max_length

    def _cut_left(self, context: str) -> str:
        """Returns the longest end of the context, by whole tokens, that fits."""
        if self._fits(context, "query"):
            return context
        encoded = self.model.tokenizer(
            context, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        starts = [start for start, _ in encoded["offset_mapping"]]
        # What remains may be split anew at its beginning, and then be a token longer.
        for start in starts[max(1, len(starts) - (self.max_length or 0)) :]:
            if self._fits(context[start:], "query"):
                return context[start:]
        return ""

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Refused: an embedding is no language model.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("sentence-embedding gives cosines, no likelihoods of texts")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Refused: an embedding model writes nothing.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("sentence-embedding gives cosines, it cannot generate")


def check_embeds(lm: Any) -> None:
    """Stops a run on a model that gives no cosines, before anything is computed.

    Raises:
        TypeError: The model is no `SentenceEmbeddingLM`.
    """
    if not isinstance(lm, SentenceEmbeddingLM):
        raise TypeError(
            f"the task ranks candidates by cosines of embeddings, which {type(lm).__name__} does "
            "not return. Run `hyprank run --model sentence-embedding --model_args pretrained=...`"
        )


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    """NaN where a vector has no direction."""
    return float((one @ other) / (one.norm() * other.norm()))
