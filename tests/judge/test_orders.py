import itertools
import subprocess
import sys
from collections import Counter

import pytest
from scipy.stats import chisquare

from lm_eval_hyprank.datasets.findings import DatasetError
from lm_eval_hyprank.judge.orders import balanced_orders, one_order

IDS = [f"Physics/{number}" for number in range(400)]


def test_every_place_is_as_likely_for_the_gold():
    places = Counter(one_order(name, 16, "seed", seed).index(0) for name in IDS for seed in (0, 1))
    assert chisquare([places[place] for place in range(16)]).pvalue > 0.01


def test_an_order_is_a_permutation_of_the_paper_and_the_seed_alone():
    assert sorted(one_order("a", 16, "seed", 0)) == list(range(16))
    assert one_order("a", 16, "seed", 0) == one_order("a", 16, "seed", 0)
    assert one_order("a", 16, "seed", 0) != one_order("a", 16, "seed", 1)
    assert one_order("a", 16, "seed", 0) != one_order("b", 16, "seed", 0)


def test_an_order_is_the_same_in_another_process():
    code = "from lm_eval_hyprank.judge.orders import *; "
    code += "print(one_order('a', 16, 'seed', 3), balanced_orders('a', 16, 5, 3))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    mine = f"{one_order('a', 16, 'seed', 3)} {balanced_orders('a', 16, 5, 3)}"
    assert other.stdout.strip() == mine


def test_the_gold_can_be_put_at_either_end():
    seeded = [index for index in one_order("a", 16, "seed", 0) if index]
    assert one_order("a", 16, "gold_first", 0) == [0, *seeded]
    assert one_order("a", 16, "gold_last", 0) == [*seeded, 0]


def test_an_unknown_order_is_refused():
    with pytest.raises(DatasetError, match=r"'first'.*gold_first"):
        one_order("a", 16, "first", 0)


@pytest.mark.parametrize("count", range(2, 17))
def test_each_candidate_stands_once_in_each_part_of_the_list(count):
    orders = balanced_orders("a", 16, count, 0)
    assert len(orders) == count == len({tuple(order) for order in orders})
    for order in orders:
        assert sorted(order) == list(range(16))
    parts = -(-16 // count)  # places in a part, rounded up
    for candidate in range(16):
        places = sorted(order.index(candidate) for order in orders)
        assert places[0] < parts
        assert places[-1] >= 16 - parts
        assert max(b - a for a, b in itertools.pairwise(places)) < 2 * parts


def test_balanced_orders_leave_no_place_to_the_gold_alone():
    places = Counter(o.index(0) for name in IDS for o in balanced_orders(name, 16, 5, 0))
    # The parts are of 4, 3, 3, 3 and 3 places or a turn of it, so places differ a little.
    assert all(0.75 < places[place] / (400 * 5 / 16) < 1.25 for place in range(16))


@pytest.mark.parametrize("count", [0, 1, 17, 2.0, "5", None])
def test_a_number_of_orders_that_cannot_be_balanced_is_refused(count):
    with pytest.raises(DatasetError, match="num_orders is"):
        balanced_orders("a", 16, count, 0)
