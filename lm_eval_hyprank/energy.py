"""Logits to token scores: the formulas, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from lm_eval_hyprank.extras import Extras, free_energy_name

BLOCK_BYTES = {"cpu": 2 * 2**20}
"""Extra memory that the functions here may hold beside their input, in bytes by device type.

On a CPU a block that stays in the cache is twice as fast as one that does not.
"""
DEFAULT_BLOCK_BYTES = 128 * 2**20
"""The same for every other device, where few large kernels beat many small ones."""


LEAST_TILE = 256
"""Columns of the smallest tile of an output head: narrower matrix products are slow."""


LEAST_LOG_RATIO = -200.0
"""Where log-probabilities, relative to the largest, are cut for the moments.

``exp`` of anything this small is 0 in float32, so nothing is lost, and a logit of minus infinity
does not make 0 times infinity.
"""


@dataclass(frozen=True)
class TokenScores:
    """Scores of N tokens; every field a CPU tensor of shape ``[N]``, all values in nats.

    Attributes:
        raw: float64, raw target-logit energy ``-z[x]``.
        logz: float64, log-partition ``logsumexp(z)``.
        greedy: bool, whether ``x`` is the first of the largest logits.
        extra: float64, what `Extras` asked for, by name.
    """

    raw: torch.Tensor
    logz: torch.Tensor
    greedy: torch.Tensor
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def nll(self) -> torch.Tensor:
        """float64, negative log-likelihood ``logsumexp(z) - z[x]``."""
        return self.logz + self.raw

    def __getitem__(self, part: slice) -> TokenScores:
        extra = {name: values[part] for name, values in self.extra.items()}
        return TokenScores(self.raw[part], self.logz[part], self.greedy[part], extra)

    @staticmethod
    def concatenate(parts: list[TokenScores]) -> TokenScores:
        """Joins scores end to end."""
        return TokenScores(
            torch.cat([part.raw for part in parts]),
            torch.cat([part.logz for part in parts]),
            torch.cat([part.greedy for part in parts]),
            {name: torch.cat([part.extra[name] for part in parts]) for name in parts[0].extra},
        )


def token_scores(
    logits: torch.Tensor,
    targets: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    extras: Extras | None = None,
    uncapped: torch.Tensor | None = None,
) -> TokenScores:
    """Scores each token from the logits that predict it.

    With ``z`` a row of logits and ``x`` its target: the log-partition is
    ``m + log(sum(exp(z - m)))`` with ``m = max(z)``, in float32 whatever the model's dtype (a
    softmax in bfloat16 turns different candidates into ties); the raw energy is ``-z[x]`` as
    the model returned it; their float64 sum is the NLL. Rows are taken in blocks, so that at
    most ``BLOCK_BYTES`` (or, in float32, one row and one for each step of ``extras``) is held
    beside the input whatever the vocabulary. (Rajwal, Das and Ghosal, arXiv 2608.17270,
    equations 1 and 2.)

    Args:
        logits: ``[M, vocabulary]``, any floating dtype and device.
        targets: ``[N]``, int64, on the same device.
        rows: ``[N]``, int64, on the same device: the row of ``logits`` that predicts each
            target; None where they correspond one to one (``M == N``).
        extras: What else to compute; None for nothing.
        uncapped: As ``logits``, before the model's final soft-capping; None where it has none,
            whose ``precap`` is the raw energy itself.
    """
    extras = extras or Extras()
    if rows is None:
        rows = torch.arange(len(targets), device=logits.device)
    picked = logits[rows, targets].float()
    # Not every device has float64: parts are float32 there and added up in float64 here.
    tops = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(tops)
    greedy = torch.empty(len(rows), dtype=torch.bool, device=logits.device)
    cooled = {temperature: torch.empty_like(tops) for temperature in extras.temperatures}
    means, variances = torch.empty_like(tops), torch.empty_like(tops)
    budget = BLOCK_BYTES.get(logits.device.type, DEFAULT_BLOCK_BYTES)
    copies = 3 if extras.moments else 2 if cooled else 1
    block = max(1, budget // (4 * copies * logits.shape[1]))
    for start in range(0, len(rows), block):
        part = slice(start, start + block)
        scratch = logits[rows[part]].float()
        top, index = scratch.max(dim=1)
        scratch.sub_(top[:, None])
        for temperature, ratios in cooled.items():
            ratios[part] = (scratch / temperature).exp_().sum(dim=1)
        if extras.moments:
            means[part], variances[part] = _moments(scratch.clamp(min=LEAST_LOG_RATIO))
        scratch.exp_()
        tops[part] = top
        sums[part] = scratch.sum(dim=1)
        greedy[part] = index == targets[part]
    log_sums = sums.cpu().double().log()
    highest = tops.cpu().double()
    extra = {}
    if extras.precap:
        before = picked if uncapped is None else uncapped[rows, targets].float()
        extra["precap"] = -before.cpu().double()
    if extras.moments:
        extra["logp_mean"] = means.cpu().double() - log_sums
        extra["logp_var"] = variances.cpu().double()
    for temperature, ratios in cooled.items():
        energy = -highest - temperature * ratios.cpu().double().log()
        extra[free_energy_name(temperature)] = energy
    return TokenScores(-picked.cpu().double(), highest + log_sums, greedy.cpu(), extra)


@torch.no_grad()
def head_token_scores(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> TokenScores:
    """`token_scores` of ``hidden @ weight.T + bias``, a tile of the vocabulary at a time.

    The logits are never held whole: a tile of ``BLOCK_BYTES`` (in float32) is, and the largest
    logit and the sum of each tile, from which the log-partition is put together in float64.

    Args:
        hidden: ``[M, width]``, what the output head is given, any floating dtype and device.
        targets: ``[N]``, int64, on the same device.
        rows: ``[N]``, int64, on the same device: the row of ``hidden`` that predicts each target.
        weight: ``[vocabulary, width]``, of the head.
        bias: ``[vocabulary]``, of the head, or None.
    """
    picked = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
    first = torch.empty(len(rows), dtype=torch.bool, device=hidden.device)
    tops, sums = [], []
    budget = BLOCK_BYTES.get(hidden.device.type, DEFAULT_BLOCK_BYTES)
    tile = max(LEAST_TILE, budget // (4 * len(hidden)))
    for start in range(0, len(weight), tile):
        part = slice(start, start + tile)
        logits = functional.linear(hidden, weight[part], None if bias is None else bias[part])
        scratch = logits.float()
        inside = (targets // tile == start // tile).nonzero()[:, 0]
        own, column = scratch[rows[inside]], targets[inside] - start
        picked[inside] = own.gather(1, column[:, None])[:, 0]
        first[inside] = own.argmax(dim=1) == column
        top = scratch.amax(dim=1)
        tops.append(top)
        # A tile may hold minus infinity only: minus infinity less itself is no number.
        least = torch.finfo(torch.float32).min
        sums.append(scratch.sub_(top.clamp(min=least)[:, None]).exp_().sum(dim=1))
    rows, targets = rows.cpu(), targets.cpu()
    highest = torch.stack(tops).cpu().double()
    logz = (highest + torch.stack(sums).cpu().double().log()).logsumexp(dim=0)
    greedy = first.cpu() & (highest.argmax(dim=0)[rows] == targets // tile)
    return TokenScores(-picked.cpu().double(), logz[rows], greedy)


def _moments(log_ratios: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance over each row's own softmax; overwrites the input ``[N, vocabulary]``."""
    weights = log_ratios.exp()
    weights.div_(weights.sum(dim=1, keepdim=True))
    mean = (weights * log_ratios).sum(dim=1)
    # In two steps: the difference of the second moment and the squared mean would cancel.
    variance = log_ratios.sub_(mean[:, None]).square_().mul_(weights).sum(dim=1)
    return mean, variance
