import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_hyprank import energy
from lm_eval_hyprank.energy import TokenScores, head_token_scores, token_scores
from lm_eval_hyprank.extras import Extras, free_energy_name, union


def reference(logits: torch.Tensor, targets: torch.Tensor) -> TokenScores:
    """The formulas in float64, all rows at once."""
    z = logits.double()
    picked = z.gather(1, targets[:, None])[:, 0]
    return TokenScores(-picked, z.logsumexp(1), z.argmax(1) == targets)


def test_by_hand():
    """Three tokens over a vocabulary of three, by pencil."""
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 3.0, -1.0]])
    found = token_scores(logits, torch.tensor([0, 2, 1]))
    e = math.e
    logz = [math.log(e**2 + e + 1), math.log(3), math.log(e**3 + 2 / e)]
    assert found.logz.tolist() == pytest.approx(logz, abs=1e-6)
    assert found.raw.tolist() == [-2.0, 0.0, -3.0]
    assert found.nll.tolist() == pytest.approx([logz[0] - 2, math.log(3), logz[2] - 3], abs=1e-6)
    assert found.nll[0].item() == pytest.approx(0.4076, abs=5e-5)
    assert found.greedy.tolist() == [True, False, True]


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    vocabulary=st.integers(2, 500),
    scale=st.sampled_from([0.01, 1.0, 30.0, 1000.0]),
    shift=st.sampled_from([0.0, 500.0, -500.0, 3e4]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    block=st.integers(1, 4000),
    seed=st.integers(0, 2**31),
)
def test_equals_float64_whatever_the_blocks(rows, vocabulary, scale, shift, dtype, block, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocabulary, generator=generator) * scale + shift).to(dtype)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    expected = reference(logits, targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(energy.BLOCK_BYTES, "cpu", block)
        found = token_scores(logits, targets)
    assert torch.equal(found.raw, expected.raw)
    assert torch.equal(found.greedy, logits.argmax(1) == targets)
    torch.testing.assert_close(found.logz, expected.logz, rtol=1e-6, atol=2e-6)
    assert (found.nll >= -2e-6 * max(1.0, float(logits.abs().max()))).all()


def test_rows_may_be_picked_and_repeated():
    logits = torch.randn(5, 30)
    rows, targets = torch.tensor([3, 0, 3, 3]), torch.tensor([1, 2, 3, 1])
    found, expected = token_scores(logits, targets, rows), token_scores(logits[rows], targets)
    assert torch.equal(found.nll, expected.nll)
    assert torch.equal(found.greedy, expected.greedy)


def test_highest_token_id_and_single_row():
    logits = torch.randn(1, 50)
    found = token_scores(logits, torch.tensor([49]))
    assert found.raw.item() == -logits[0, 49].item()


def test_input_is_left_alone():
    logits = torch.randn(3, 20)
    before = logits.clone()
    token_scores(logits, torch.tensor([0, 1, 2]))
    assert torch.equal(logits, before)


def test_bfloat16_logits_do_not_make_ties():
    """Sixteen candidates whose NLL a bfloat16 softmax cannot tell apart."""
    torch.manual_seed(0)
    logits = (torch.randn(16, 4096) * 3).to(torch.bfloat16)
    logits[:, 7] = 9.0
    targets = torch.full((16,), 7)
    coarse = torch.log_softmax(logits, -1)[:, 7].tolist()
    fine = token_scores(logits, targets)
    assert len(set(coarse)) < 16
    assert len(set(fine.nll.tolist())) == 16
    exact = reference(logits, targets).nll
    assert torch.equal(fine.nll.argsort(), exact.argsort())


def test_a_nan_logit_gives_a_nan_score_of_its_row_only():
    logits = torch.randn(3, 20)
    logits[1, 5] = math.nan
    found = token_scores(logits, torch.tensor([0, 1, 2]))
    assert found.nll.isnan().tolist() == [False, True, False]


def test_rows_that_are_not_named_correspond_to_targets():
    with pytest.raises(ValueError, match="3 rows of logits for 2 targets"):
        token_scores(torch.randn(3, 20), torch.tensor([0, 1]))


def peak_of(work: Callable[[], Any]) -> int:
    """Bytes that are allocated at most at one time while something works."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    # Every operation's own balance, in the order in which they end.
    held = peak = 0
    for event in sorted(profile.events(), key=lambda event: event.time_range.end):
        held += event.self_cpu_memory_usage
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize(("extras", "copies"), [(None, 1), ("everything", 4)])
@pytest.mark.parametrize("vocabulary", [49_152, 262_144])
def test_extra_memory_is_bounded_whatever_the_vocabulary(vocabulary, extras, copies):
    logits = torch.randn(64, vocabulary)
    targets = torch.zeros(64, dtype=torch.long)
    peak = peak_of(lambda: token_scores(logits, targets, extras=EVERYTHING if extras else None))
    one_row = 4 * vocabulary * copies
    assert peak >= one_row, "memory is seen at all"
    assert peak <= 1.1 * max(energy.BLOCK_BYTES["cpu"], one_row) + 2**18


EVERYTHING = Extras(precap=True, moments=True, temperatures=frozenset({0.5, 3.0}))


# An output head in tiles


def whole_head(hidden, targets, rows, weight, bias, **options):
    """The reference: all logits at once."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return token_scores(logits, targets, rows, **options)


@settings(deadline=None)
@given(
    states=st.integers(1, 20),
    width=st.integers(1, 9),
    vocabulary=st.integers(2, 300),
    count=st.integers(1, 40),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block=st.integers(1, 4000),
    seed=st.integers(0, 2**31),
)
def test_a_head_in_tiles_equals_a_head_at_once(
    states, width, vocabulary, count, biased, dtype, block, seed
):
    """On small whole numbers, which every dtype holds exactly and which tie all the time."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    hidden, weight = some(states, width), some(vocabulary, width)
    bias = some(vocabulary) if biased else None
    targets = torch.randint(0, vocabulary, (count,), generator=generator)
    rows = torch.randint(0, states, (count,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(energy.BLOCK_BYTES, "cpu", block)
        patch.setattr(energy, "LEAST_TILE", 1)
        found, with_extras = (
            head_token_scores(hidden, targets, rows, weight, bias, extras=extras)
            for extras in (None, EVERYTHING)
        )
    expected = whole_head(hidden, targets, rows, weight, bias, extras=EVERYTHING)
    assert found.extra == {}
    assert torch.equal(with_extras.logz, found.logz), "extras change no digit of the rest"
    for each in (found, with_extras):
        assert torch.equal(each.raw, expected.raw)
        assert torch.equal(each.greedy, expected.greedy)
        torch.testing.assert_close(each.logz, expected.logz, rtol=1e-6, atol=2e-6)
    assert with_extras.extra.keys() == expected.extra.keys()
    for name, values in expected.extra.items():
        torch.testing.assert_close(with_extras.extra[name], values, rtol=3e-6, atol=2e-5)


@pytest.mark.parametrize("scale", [0.01, 1.0, 300.0])
@pytest.mark.parametrize(("vocabulary", "block"), [(500, 1), (49_152, 2 * 2**20)])
def test_a_head_in_tiles_equals_float64(scale, vocabulary, block, monkeypatch):
    monkeypatch.setitem(energy.BLOCK_BYTES, "cpu", block)
    hidden, weight = torch.randn(70, 16) * scale, torch.randn(vocabulary, 16)
    bias, targets = torch.randn(vocabulary), torch.randint(0, vocabulary, (70,))
    found = head_token_scores(hidden, targets, torch.arange(70), weight, bias)
    expected = reference(hidden.double() @ weight.double().T + bias, targets)
    largest = float(expected.raw.abs().max())
    for name in ("raw", "logz"):
        off = getattr(found, name) - getattr(expected, name)
        assert off.abs().max() <= 2e-6 * max(1.0, largest)


@pytest.mark.parametrize("least_tile", [1, 2, 5])
def test_tiles_without_mass_and_rows_without_numbers(least_tile, monkeypatch):
    """Columns at minus infinity fill tiles in front, between and behind; one state is NaN."""
    monkeypatch.setitem(energy.BLOCK_BYTES, "cpu", 1)
    monkeypatch.setattr(energy, "LEAST_TILE", least_tile)
    hidden, weight = torch.randn(4, 8), torch.randn(20, 8)
    hidden[2, 3] = math.nan
    bias = torch.zeros(20)
    bias[[0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14, 18, 19]] = -math.inf
    arguments = hidden, torch.tensor([6, 15, 7, 0]), torch.arange(4), weight, bias
    found = head_token_scores(*arguments, extras=EVERYTHING)
    expected = whole_head(*arguments, extras=EVERYTHING)
    for name, values in expected.extra.items():
        torch.testing.assert_close(found.extra[name], values, rtol=3e-6, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(found.raw, expected.raw, equal_nan=True)
    torch.testing.assert_close(found.logz, expected.logz, rtol=0, atol=5e-6, equal_nan=True)
    assert found.nll.isnan().tolist() == [False, False, True, False]
    assert found.nll[3] == math.inf
    assert torch.equal(found.greedy[[0, 1, 3]], expected.greedy[[0, 1, 3]])


@pytest.mark.parametrize("extras", [None, EVERYTHING])
@pytest.mark.parametrize(("states", "count"), [(512, 512), (1, 256)])
@pytest.mark.parametrize("vocabulary", [49_152, 262_144])
def test_a_head_in_tiles_never_holds_the_logits(vocabulary, states, count, extras):
    """Nor what a backward pass would need, nor a row for each of very many targets."""
    hidden, weight = torch.randn(states, 8), torch.nn.Parameter(torch.randn(vocabulary, 8))
    targets, rows = torch.arange(count), torch.arange(count) % states
    peak = peak_of(lambda: head_token_scores(hidden, targets, rows, weight, None, extras=extras))
    copies, numbers = (1, 2) if extras is None else (4, 6)
    width = max(energy.LEAST_TILE, energy.BLOCK_BYTES["cpu"] // (4 * states))
    # And once more the rows whose targets a tile holds: here all of them in the first.
    a_tile = (copies + 1) * 4 * min(width, vocabulary) * states
    # In float32 of each tile, stacked, and then in float64, with as many for the results' sake.
    a_number = 4 + 4 + 8 + 8 + 8
    assert peak >= 4 * min(width, vocabulary) * states, "memory is seen at all"
    assert peak <= 1.1 * a_tile + numbers * a_number * states * (vocabulary / width + 1) + 2**18


def reference_extras(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """The definitions in float64: moments as expectations over the softmax, all rows at once."""
    logp = logits.double().log_softmax(1)
    mean = (logp.exp() * logp.nan_to_num(neginf=0)).sum(1)
    square = (logp.exp() * logp.nan_to_num(neginf=0) ** 2).sum(1)
    return {
        "precap": -logits.double().gather(1, targets[:, None])[:, 0],
        "logp_mean": mean,
        "logp_var": square - mean**2,
        "free_energy_t0.5": -0.5 * (logits.double() / 0.5).logsumexp(1),
        "free_energy_t3.0": -3.0 * (logits.double() / 3.0).logsumexp(1),
    }


@settings(deadline=None)
@given(
    rows=st.integers(1, 20),
    vocabulary=st.integers(2, 300),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    shift=st.sampled_from([0.0, 500.0, -500.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block=st.integers(1, 4000),
    seed=st.integers(0, 2**31),
)
def test_extras_equal_float64_whatever_the_blocks(
    rows, vocabulary, scale, shift, dtype, block, seed
):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocabulary, generator=generator) * scale + shift).to(dtype)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(energy.BLOCK_BYTES, "cpu", block)
        plain, found = (
            token_scores(logits, targets),
            token_scores(logits, targets, extras=EVERYTHING),
        )
    assert plain.extra == {}
    assert torch.equal(found.nll, plain.nll)
    expected = reference_extras(logits, targets)
    assert found.extra.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found.extra[name], values, rtol=3e-6, atol=2e-5)


def test_logits_of_minus_infinity_leave_the_moments_finite():
    logits = torch.tensor([[1.0, -math.inf, 0.0]])
    found = token_scores(logits, torch.tensor([0]), extras=EVERYTHING).extra
    kept = token_scores(logits[:, [0, 2]], torch.tensor([0]), extras=EVERYTHING).extra
    for name, values in kept.items():
        assert torch.equal(found[name], values)


def test_a_small_variance_far_from_zero_is_not_lost():
    logits = torch.randn(1, 50_000) * 1e-3  # log-probabilities of -10.8 that vary by 1e-6
    found = token_scores(logits, torch.tensor([0]), extras=Extras(moments=True)).extra["logp_var"]
    assert found.item() == pytest.approx(logits.double().var().item(), rel=1e-2)


def test_uncapped_logits_are_read_for_precap_alone():
    logits, uncapped = torch.randn(4, 30), torch.randn(4, 30)
    rows, targets = torch.tensor([3, 0, 0]), torch.tensor([1, 2, 29])
    found = token_scores(logits, targets, rows, extras=Extras(precap=True), uncapped=uncapped)
    assert torch.equal(found.raw, token_scores(logits, targets, rows).raw)
    assert found.extra["precap"].tolist() == [-uncapped[3, 1], -uncapped[0, 2], -uncapped[0, 29]]


def test_extras_are_cut_and_joined_with_the_rest():
    logits = torch.randn(5, 30)
    whole = token_scores(logits, torch.arange(5), extras=EVERYTHING)
    joined = TokenScores.concatenate([whole[:2], whole[2:]])
    assert len(whole[:2].extra["precap"]) == 2
    for name, values in whole.extra.items():
        assert torch.equal(joined.extra[name], values)


def test_a_union_wants_all_that_each_wants():
    one, other = Extras(precap=True, temperatures=frozenset({2.0})), Extras(moments=True)
    assert union([one, None, other]) == Extras(True, True, frozenset({2.0}))
    assert union([Extras()]) == Extras()
    assert union([None]) is None


def test_temperatures_have_one_name_however_written():
    assert free_energy_name(2) == free_energy_name(2.0) == "free_energy_t2.0"


@pytest.mark.slow
def test_compiled_gives_the_same():
    logits = torch.randn(7, 300) * 5
    targets = torch.randint(0, 300, (7,))
    plain, compiled = token_scores(logits, targets), torch.compile(token_scores)(logits, targets)
    torch.testing.assert_close(compiled.nll, plain.nll, rtol=0, atol=2e-6)
    assert torch.equal(compiled.raw, plain.raw)
    assert torch.equal(compiled.greedy, plain.greedy)
