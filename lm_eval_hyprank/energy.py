"""Logits to token scores: the formulas, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_BYTES = {"cpu": 2 * 2**20}
"""Extra memory that :func:`token_scores` may hold beside its input, in bytes by device type.

On a CPU a block that stays in the cache is twice as fast as one that does not.
"""
DEFAULT_BLOCK_BYTES = 128 * 2**20
"""The same for every other device, where few large kernels beat many small ones."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of N tokens; every field a CPU tensor of shape ``[N]``, all values in nats.

    Attributes:
        raw: float64, raw target-logit energy ``-z[x]``.
        logz: float64, log-partition ``logsumexp(z)``.
        greedy: bool, whether ``x`` is the first of the largest logits.
    """

    raw: torch.Tensor
    logz: torch.Tensor
    greedy: torch.Tensor

    @property
    def nll(self) -> torch.Tensor:
        """float64, negative log-likelihood ``logsumexp(z) - z[x]``."""
        return self.logz + self.raw

    def __getitem__(self, part: slice) -> TokenScores:
        return TokenScores(self.raw[part], self.logz[part], self.greedy[part])

    @staticmethod
    def concatenate(parts: list[TokenScores]) -> TokenScores:
        """Joins scores end to end."""
        return TokenScores(
            torch.cat([part.raw for part in parts]),
            torch.cat([part.logz for part in parts]),
            torch.cat([part.greedy for part in parts]),
        )


def token_scores(
    logits: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor | None = None
) -> TokenScores:
    """Scores each token from the logits that predict it.

    With ``z`` a row of logits and ``x`` its target: the log-partition is
    ``m + log(sum(exp(z - m)))`` with ``m = max(z)``, in float32 whatever the model's dtype (a
    softmax in bfloat16 turns different candidates into ties); the raw energy is ``-z[x]`` as
    the model returned it; their float64 sum is the NLL. Rows are taken in blocks, so that at
    most ``BLOCK_BYTES`` (or one row in float32) is held beside the input whatever the
    vocabulary. (Rajwal, Das and Ghosal, arXiv 2608.17270, equations 1 and 2.)

    Args:
        logits: ``[M, vocabulary]``, any floating dtype and device.
        targets: ``[N]``, int64, on the same device.
        rows: ``[N]``, int64, on the same device: the row of ``logits`` that predicts each
            target; None where they correspond one to one (``M == N``).
    """
    if rows is None:
        rows = torch.arange(len(targets), device=logits.device)
    picked = logits[rows, targets].float()
    # Not every device has float64: parts are float32 there and added up in float64 here.
    tops = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(tops)
    greedy = torch.empty(len(rows), dtype=torch.bool, device=logits.device)
    budget = BLOCK_BYTES.get(logits.device.type, DEFAULT_BLOCK_BYTES)
    block = max(1, budget // (4 * logits.shape[1]))
    for start in range(0, len(rows), block):
        part = slice(start, start + block)
        scratch = logits[rows[part]].float()
        top, index = scratch.max(dim=1)
        scratch.sub_(top[:, None]).exp_()
        tops[part] = top
        sums[part] = scratch.sum(dim=1)
        greedy[part] = index == targets[part]
    logz = tops.cpu().double() + sums.cpu().double().log()
    return TokenScores(-picked.cpu().double(), logz, greedy.cpu())
