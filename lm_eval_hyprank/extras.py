"""What a run may want of every token beside its raw energy and log-partition."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Extras:
    """What to compute of each token beside its raw energy and log-partition.

    Attributes:
        precap: ``precap``: minus the target's logit before the model's final soft-capping.
        moments: ``logp_mean`` and ``logp_var``: mean and variance of the log-probability of a
            token drawn from the model's own prediction. Two further passes over the vocabulary.
        temperatures: For each ``T``, ``free_energy_t{T}``: ``-T * logsumexp(z / T)``. One
            further pass each.
    """

    precap: bool = False
    moments: bool = False
    temperatures: frozenset[float] = frozenset()


def union(wanted: Iterable[Extras | None]) -> Extras | None:
    """What serves all who want something of every token; None where nobody does."""
    extras = [each for each in wanted if each is not None]
    if not extras:
        return None
    return Extras(
        any(each.precap for each in extras),
        any(each.moments for each in extras),
        frozenset().union(*(each.temperatures for each in extras)),
    )


def free_energy_name(temperature: float) -> str:
    """The name of the free energy at a temperature among a token's values."""
    return f"free_energy_t{float(temperature)}"
