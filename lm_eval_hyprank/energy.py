"""Logits, or hidden states and an output head, to token scores: the formulas, nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from lm_eval_hyprank.extras import Extras, free_energy_name

BLOCK_BYTES = {"cpu": 2 * 2**20}
"""Size of the blocks of logits that are worked on in float32, in bytes by device type.

On a CPU a block that stays in the cache is twice as fast as one that does not.
"""
DEFAULT_BLOCK_BYTES = 128 * 2**20
"""The same for every other device, where few large kernels beat many small ones."""


LEAST_TILE = 256
"""Columns of the smallest tile of an output head, and what the larger ones are multiples of.

Narrower or odd matrix products are slow.
"""


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
    the model returned it; their float64 sum is the NLL. Rows are taken in blocks, so that beside
    the input ``BLOCK_BYTES``, copies for ``extras`` included, or one row and its copies is held,
    and that block in the input's dtype if it is another. (Rajwal, Das and Ghosal, arXiv
    2608.17270, equations 1 and 2.)

    Args:
        logits: ``[M, vocabulary]``, any floating dtype and device.
        targets: ``[N]``, int64, on the same device.
        rows: ``[N]``, int64, on the same device: the row of ``logits`` that predicts each
            target; None where they correspond one to one (``M == N``).
        extras: What else to compute; None for nothing.
        uncapped: As ``logits``, before the model's final soft-capping; None where it has none,
            whose ``precap`` is the raw energy itself.

    Returns:
        Scores of the ``N`` targets, on the CPU.

    Raises:
        ValueError: No ``rows`` are given, and there is not one row of logits for each target.
    """
    extras = extras or Extras()
    if rows is None:
        if len(logits) != len(targets):
            raise ValueError(f"{len(logits)} rows of logits for {len(targets)} targets")
        rows = torch.arange(len(targets), device=logits.device)
    picked = logits[rows, targets].float()
    found: list[dict[str, torch.Tensor]] = []
    greedy = torch.empty(len(rows), dtype=torch.bool, device=logits.device)
    copies = 4 if extras.moments else 2 if extras.temperatures else 1
    block = max(1, _block_size(logits.device) // (copies * logits.shape[1]))
    for start in range(0, max(1, len(rows)), block):
        part = slice(start, start + block)
        scratch = logits[rows[part]].float()
        greedy[part] = scratch.argmax(dim=1) == targets[part]
        found.append(_statistics(scratch, extras))
        del scratch  # or it would stand beside the next one
    statistics = {name: torch.cat([part[name] for part in found])[None] for name in found[0]}
    logz, extra = _combine(statistics, extras)
    if extras.precap:
        before = picked if uncapped is None else uncapped[rows, targets].float()
        extra["precap"] = -before.cpu().double()
    return TokenScores(-picked.cpu().double(), logz, greedy.cpu(), extra)


@torch.no_grad()
def head_token_scores(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    extras: Extras | None = None,
) -> TokenScores:
    """`token_scores` of ``hidden @ weight.T + bias``, a tile of the vocabulary at a time.

    The logits are never held whole: a tile of ``BLOCK_BYTES`` is, up to three copies for
    ``extras``, the tile in the head's dtype if it is another, once more those of its rows whose
    targets it holds, and two numbers (with all extras six or more) of each tile and row, which
    are put together in float64.

    Args:
        hidden: ``[M, width]``, what the output head is given, any floating dtype and device.
        targets: ``[N]``, int64, on the same device, each less than ``vocabulary``.
        rows: ``[N]``, int64, on the same device: the row of ``hidden`` that predicts each target.
        weight: ``[vocabulary, width]``, of the head.
        bias: ``[vocabulary]``, of the head, or None.
        extras: What else to compute; None for nothing.

    Returns:
        Scores of the ``N`` targets, on the CPU.
    """
    extras = extras or Extras()
    picked = torch.full((len(rows),), math.nan, dtype=torch.float32, device=hidden.device)
    is_largest = torch.zeros(len(rows), dtype=torch.bool, device=hidden.device)
    found: list[dict[str, torch.Tensor]] = []
    # Alike whatever the extras, so that asking for them changes no digit of the rest.
    tile = max(1, _block_size(hidden.device) // max(1, len(hidden)) // LEAST_TILE) * LEAST_TILE
    for start in range(0, len(weight), tile):
        part = slice(start, start + tile)
        with torch.autocast(hidden.device.type, enabled=False):  # the caller's is not the model's
            logits = functional.linear(hidden, weight[part], None if bias is None else bias[part])
        scratch = logits.float()
        inside = (targets // tile == start // tile).nonzero()[:, 0]
        row, column = rows[inside], targets[inside] - start
        picked[inside] = scratch[row, column]
        used, at = torch.unique(row, return_inverse=True)  # one row may predict very many targets
        is_largest[inside] = scratch[used].argmax(dim=1)[at] == column
        found.append(_statistics(scratch, extras))
        del logits, scratch  # or they would stand beside the next ones
    statistics = {name: torch.stack([part[name] for part in found]) for name in found[0]}
    best = statistics["top"].argmax(dim=0)  # the first of the tiles with the largest logit
    greedy = is_largest & (best[rows] == targets // tile)
    logz, extra = _combine(statistics, extras)
    rows, raw = rows.cpu(), -picked.cpu().double()
    extra = {name: values[rows] for name, values in extra.items()}
    if extras.precap:
        extra["precap"] = raw
    return TokenScores(raw, logz[rows], greedy.cpu(), extra)


def _block_size(device: torch.device) -> int:
    """Logits of a block in float32."""
    return BLOCK_BYTES.get(device.type, DEFAULT_BLOCK_BYTES) // 4


def _statistics(logits: torch.Tensor, extras: Extras) -> dict[str, torch.Tensor]:
    """What the scores need of a part of the vocabulary, each ``[N]``, float32.

    Args:
        logits: ``[N, columns]``, float32; overwritten.
        extras: What else to compute.

    Returns:
        ``top``, the largest logit; ``sum`` of ``exp(z - top)``, and of ``exp((z - top) / T)``
        for each temperature; mean and variance of ``z - top`` over the part's own softmax.
    """
    top = logits.amax(dim=1)
    # A part may hold minus infinity only: minus infinity less itself is no number.
    ratios = logits.sub_(top.clamp(min=torch.finfo(torch.float32).min)[:, None])
    found = {"top": top}
    for temperature in extras.temperatures:
        found[free_energy_name(temperature)] = (ratios / temperature).exp_().sum(dim=1)
    if extras.moments:
        cut = ratios.clamp(min=LEAST_LOG_RATIO)
        weights = cut.exp()
        weights.div_(weights.sum(dim=1, keepdim=True))
        found["mean"] = (weights * cut).sum(dim=1)
        # In two steps: the difference of the second moment and the squared mean would cancel.
        cut.sub_(found["mean"][:, None]).square_().mul_(weights)
        found["variance"] = cut.sum(dim=1)
    found["sum"] = ratios.exp_().sum(dim=1)
    return found


def _combine(
    statistics: dict[str, torch.Tensor], extras: Extras
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Puts parts of the vocabulary together.

    Args:
        statistics: What `_statistics` found, ``[parts, N]`` each, float32.
        extras: What else to compute.

    Returns:
        Log-partitions and the extras that depend on no target, ``[N]``, float64, on the CPU.
    """
    # Not every device has float64.
    parts = {name: values.cpu().double() for name, values in statistics.items()}
    log_sums = parts["top"] + parts["sum"].log()
    logz = log_sums.logsumexp(dim=0)
    extra = {}
    if extras.moments:
        share = (log_sums - logz).exp()
        # A part without any mass has no moments of its own.
        means = torch.where(share > 0, parts["top"] + parts["mean"] - logz, 0.0)
        variances = torch.where(share > 0, parts["variance"], 0.0)
        extra["logp_mean"] = mean = (share * means).sum(dim=0)
        extra["logp_var"] = (share * (variances + (means - mean) ** 2)).sum(dim=0)
    for temperature in extras.temperatures:
        name = free_energy_name(temperature)
        extra[name] = -temperature * (parts["top"] / temperature + parts[name].log()).logsumexp(
            dim=0
        )
    return logz, extra
