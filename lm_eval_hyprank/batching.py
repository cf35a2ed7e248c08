"""The batching policy: how many sequences go into one forward pass, by device and vocabulary."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lm_eval_hyprank.predictions import parameter_dtype


@dataclass
class Batching:
    """How much goes into one forward pass; all its limits and costs stand here.

    Attributes:
        max_sequences: Upper limit of sequences (lm-eval's ``batch_size``); None for no limit.
        max_tokens: Upper limit of padded tokens that are scored in one pass, halved when the
            device runs out of memory. One sequence always goes, however long.
        min_saving: Prefix tokens that sharing must save for a group of continuations to get a
            pass of its own; below it, sequences of many groups are batched whole.
        pass_tokens: What a forward pass costs beside its tokens, in tokens.
        max_logits: Upper limit of padded tokens in one pass whose logits are held whole; does not
            count where a plain head is left out of the passes.
    """

    max_sequences: int | None
    max_tokens: int
    min_saving: int
    pass_tokens: int = 48
    max_logits: int = sys.maxsize

    @classmethod
    def for_model(cls, model: Any, device: torch.device, max_sequences: int | None) -> Batching:
        """Chooses limits by the device and the size of a row of logits.

        Args:
            model: Whose vocabulary and dtype decide how large a row is.
            device: Where it is; on CUDA its free memory counts.
            max_sequences: As of the attribute.
        """
        config = model.config.get_text_config()
        row_bytes = config.vocab_size * parameter_dtype(model).itemsize
        if device.type == "cpu":
            # Measured on 2 cores: 512 tokens keep the matrix products busy, more only pads
            # more; a pass costs as much as 48 tokens beside its own; a quarter of a GiB of logits
            # is where a larger block stops paying.
            return cls(max_sequences, 512, 256, max_logits=max(64, 2**28 // row_bytes))
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 4 * 2**30
        # Logits and their float32 copies take about three rows a token; leave half for the rest.
        # Not measured on a device; without logits it stands for what else grows with the tokens.
        return cls(max_sequences, max(512, min(16384, free // 2 // (3 * row_bytes))), 4096, 512)

    def plan(self, lengths: Sequence[int]) -> list[int]:
        """Cuts sequences into batches so that padding and passes together cost least.

        A batch of ``n`` sequences costs ``n`` times its longest, and ``pass_tokens`` for the
        pass; the cheapest cut of the sorted list is found by dynamic programming.

        Args:
            lengths: Tokens of each sequence, descending.

        Returns:
            The size of each batch, in order; they add up to ``len(lengths)``.
        """
        limit = self.max_sequences or len(lengths)
        max_tokens = min(self.max_tokens, self.max_logits)
        cost = [0] * (len(lengths) + 1)  # of all from here on
        size = [0] * len(lengths)  # of the batch that begins here
        for start in reversed(range(len(lengths))):
            most = min(limit, len(lengths) - start, max_tokens // max(1, lengths[start]))
            cost[start], size[start] = min(
                (lengths[start] * count + self.pass_tokens + cost[start + count], count)
                for count in range(1, max(1, most) + 1)
            )
        sizes: list[int] = []
        start = 0
        while start < len(lengths):
            sizes.append(size[start])
            start += size[start]
        return sizes
