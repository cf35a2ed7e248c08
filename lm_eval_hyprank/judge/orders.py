"""In which order a judge is shown the candidates: seeded, the same in every process."""

from __future__ import annotations

from lm_eval_hyprank.datasets.documents import shuffled
from lm_eval_hyprank.datasets.findings import DatasetError

ORDERS = ("seed", "gold_first", "gold_last")


def one_order(sample_id: str, size: int, order: str, seed: int) -> list[int]:
    """Returns the candidates' indices in the order to show them; the gold has index 0.

    Args:
        sample_id: The paper; with the seed it alone decides the order.
        size: The number of candidates.
        order: "seed" shuffles all; "gold_first" and "gold_last" put the gold there and shuffle
            the others, which measures a judge's position bias and nothing else.
        seed: The seed.

    Raises:
        DatasetError: There is no such order.
    """
    if order not in ORDERS:
        raise DatasetError(f"order is {order!r}; use one of: {', '.join(ORDERS)}")
    indices = shuffled(f"{seed}:{sample_id}", size)
    if order == "seed":
        return indices
    others = [index for index in indices if index != 0]
    return [0, *others] if order == "gold_first" else [*others, 0]


def balanced_orders(sample_id: str, size: int, count: int, seed: int) -> list[list[int]]:
    """Returns several orders between which each candidate visits early and late places alike.

    The candidates are dealt into `count` groups. From one order to the next the groups move on
    by one place, the last to the front, so that each candidate stands once in each of the
    `count` parts of the list; within its group it is shuffled anew each time.

    Args:
        sample_id: The paper.
        size: The number of candidates.
        count: The number of orders.
        seed: The seed.

    Raises:
        DatasetError: The number of orders is none from 2 to `size`, beyond which they would repeat.
    """
    if not isinstance(count, int) or not 2 <= count <= size:
        raise DatasetError(f"num_orders is {count!r}; use 2 to {size}")
    dealt = shuffled(f"{seed}:{sample_id}", size)
    groups = [dealt[start::count] for start in range(count)]
    orders = []
    for turn in range(count):
        order: list[int] = []
        for place in range(count):
            group = (place - turn) % count
            members = groups[group]
            keys = shuffled(f"{seed}:{sample_id}:{turn}:{group}", len(members))
            order += [members[key] for key in keys]
        orders.append(order)
    return orders
