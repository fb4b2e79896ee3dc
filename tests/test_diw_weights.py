"""Level 1: dynamic importance weights and what belongs to them, by hand-computed values."""

import math

import pytest
import torch
from torch.testing import assert_close

from lopti_trl.diw import Temperature, find_symptoms, has_settled
from lopti_trl.weights import (
    diw_weights,
    effective_sample_ratio,
    energy_deviation,
    linear_schedule,
    sequence_softmax,
)

RATIOS = torch.tensor([[0.5, 1.0, 1.5, 3.0]])
REF = torch.tensor([[-1.0, -2.0, -3.0, -4.0]])
LOGPS = REF + RATIOS.log()
ONES = torch.ones(1, 4, dtype=torch.bool)


def test_the_ratio_is_capped_at_xi():
    assert_close(diw_weights(LOGPS, REF, xi=1.8), torch.tensor([[0.5, 1.0, 1.5, 1.8]]))
    assert_close(diw_weights(LOGPS, REF, xi=math.inf), RATIOS)


def test_zero_mode_drops_what_is_above_the_cap_only_where_the_advantage_is_positive():
    for advantage, last in ((1.0, 0.0), (-1.0, 1.8), (0.0, 1.8)):
        weights = diw_weights(LOGPS, REF, 1.8, "zero", advantages=torch.tensor([[advantage]]))
        assert_close(weights, torch.tensor([[0.5, 1.0, 1.5, last]]))
    per_token = torch.tensor([[1.0, 1.0, 1.0, -1.0]])
    assert diw_weights(LOGPS, REF, 1.2, "zero", per_token)[0, 2:].tolist() == [
        0.0,
        pytest.approx(1.2),
    ]


def test_the_filter_drops_ratios_outside_its_range_on_both_sides():
    weights = diw_weights(LOGPS, REF, xi=1.8, r_max=1.6)
    assert_close(weights, torch.tensor([[0.0, 1.0, 1.5, 0.0]]))


def test_weights_are_exactly_one_where_policy_and_reference_agree():
    logps = torch.randn(3, 5)
    for softmax in ("off", "ratio", "log_ratio"):
        weights = diw_weights(logps, logps.clone(), 1.8, softmax=softmax, tau=0.3, mask=logps < 9)
        assert torch.equal(weights, torch.ones(3, 5))


def test_the_softmax_matches_hand_computation():
    # scores 0.5, 1, 1.5, 1.8 at tau = 0.5: exponents 1, 2, 3, 3.6
    exps = [math.e, math.e**2, math.e**3, math.e**3.6]
    expected = torch.tensor([[4 * e / sum(exps) for e in exps]])
    weights = diw_weights(LOGPS, REF, 1.8, softmax="ratio", tau=0.5, mask=ONES)
    assert expected[0, 3] > 1.8
    assert_close(weights, expected.clamp(max=1.8))
    # scores log 0.5, log 1, log 1.5, log 1.8 at tau = 1: the capped ratios, with mean 1
    expected = torch.tensor([[0.5, 1.0, 1.5, 1.8]]) * 4 / 4.8
    weights = diw_weights(LOGPS, REF, 1.8, softmax="log_ratio", tau=1.0, mask=ONES)
    assert_close(weights, expected)


def test_the_softmax_is_over_the_kept_valid_tokens_alone():
    mask = torch.tensor([[True, True, False, True]])
    weights = diw_weights(LOGPS, REF, 9.0, r_max=2.5, softmax="log_ratio", tau=1.0, mask=mask)
    assert_close(weights, torch.tensor([[0.5, 1.0, 0.0, 0.0]]) * 2 / 1.5)
    garbage = torch.tensor([[0.0, 0.0, 700.0, 0.0]])  # in a place that the mask hides
    again = diw_weights(LOGPS + garbage, REF, 9.0, None, None, 2.5, "log_ratio", 1.0, mask)
    assert torch.equal(again, weights)


@pytest.mark.parametrize("softmax", ["ratio", "log_ratio"])
def test_ragged_rows_have_mean_one_each_and_an_empty_row_has_no_weight(softmax):
    log_r = torch.randn(3, 7)
    mask = torch.arange(7) < torch.tensor([[7], [4], [0]])
    weights = diw_weights(log_r, torch.zeros(3, 7), math.inf, "cap", None, None, softmax, 2.0, mask)
    assert_close(weights.sum(1), torch.tensor([7.0, 4.0, 0.0]))
    assert not weights[~mask].any()
    for row, length in ((0, 7), (1, 4)):  # padding does not matter
        alone = diw_weights(
            log_r[row : row + 1, :length],
            torch.zeros(1, length),
            math.inf,
            softmax=softmax,
            tau=2.0,
            mask=torch.ones(1, length),
        )
        assert_close(alone[0], weights[row, :length])


def test_an_infinite_temperature_gives_ones_to_the_bit_and_a_large_one_nearly():
    log_r, mask = torch.randn(2, 49), torch.ones(2, 49)
    for tau, tolerance in ((math.inf, 0.0), (1e4, 1e-3)):
        weights = diw_weights(log_r, log_r * 0, 1.8, softmax="ratio", tau=tau, mask=mask)
        assert (weights - 1).abs().max() <= tolerance


EXTREME = torch.tensor([0.0, -1e4, -math.inf, -1.0])


@pytest.mark.parametrize("softmax", ["off", "ratio", "log_ratio"])
@pytest.mark.parametrize("xi", [1.5, math.inf])
def test_extreme_log_probs_stay_finite(xi, softmax):
    logps, ref = EXTREME.repeat(4, 1), EXTREME[:, None].repeat(1, 4)  # all pairs
    mask = torch.ones(4, 4)
    weights = diw_weights(logps, ref, xi, softmax=softmax, tau=0.1, mask=mask)
    assert weights.isfinite().all()
    assert (100 * weights).sum().isfinite()
    deviation = energy_deviation(logps, ref.clamp(min=-1e4), mask, xi, 1.0)
    assert deviation.isfinite().all()


def test_extreme_log_probs_give_the_weights_that_they_should():
    weights = diw_weights(EXTREME.repeat(4, 1), EXTREME[:, None].repeat(1, 4), xi=1.5)
    vanished = pytest.approx(0.0, abs=1e-30)
    assert weights[0].tolist() == [1.0, vanished, vanished, pytest.approx(1 / math.e)]
    assert weights[1].tolist() == [1.5, 1.0, vanished, 1.5]
    assert weights[2].tolist() == [1.5, 1.5, 1.0, 1.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_log_probs_are_subtracted_in_float32(dtype):
    logps, ref = LOGPS.to(dtype), REF.to(dtype)
    weights = diw_weights(logps, ref, 1.8)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, diw_weights(logps.float(), ref.float(), 1.8))


def test_no_weight_carries_a_gradient():
    logps, ref = LOGPS.clone().requires_grad_(), REF.clone().requires_grad_()
    for softmax in ("off", "ratio", "log_ratio"):
        tau = torch.tensor(0.7, requires_grad=True)
        weights = diw_weights(logps, ref, 1.8, softmax=softmax, tau=tau, mask=ONES)
        assert not weights.requires_grad
    assert not energy_deviation(logps, ref, ONES, 1.8, 1.0).requires_grad


def test_the_effective_sample_ratio_matches_hand_computation():
    weights = torch.tensor([[1.0, 1.0, 1.0, 9.0], [3.0, 1.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    # 3^2 / (3 * 3), 4^2 / (4 * 10), no token
    assert_close(effective_sample_ratio(weights, mask), torch.tensor([1.0, 0.4, 0.0]))


def test_energy_matches_hand_computation():
    # E = -log ref + 2 * min(r, 1.8) = 1 + 1, 2 + 2, 3 + 3, (4 + 3.6); the last token is padding
    mask = torch.tensor([[1, 1, 1, 0]])
    deviation = energy_deviation(LOGPS, REF, mask, xi=1.8, lam=2.0)
    assert_close(deviation, torch.tensor([[-2.0, 0.0, 2.0, 0.0]]))
    deviation = energy_deviation(LOGPS, REF, ONES, xi=1.8, lam=2.0)
    assert_close(deviation, torch.tensor([[2.0, 4.0, 6.0, 7.6]]) - 4.9)


@pytest.mark.parametrize(
    ("step", "xi"), [(0, 1.8), (10, 1.8), (11, 1.77), (15, 1.65), (29, 1.23), (30, 1.2), (99, 1.2)]
)
def test_the_schedule_is_a_line_between_its_ends(step, xi):
    assert linear_schedule(step, 1.8, 1.2, begin=10, horizon=20) == pytest.approx(xi, abs=1e-12)


def test_the_schedule_takes_its_ends_exactly_and_may_be_constant_or_have_no_horizon():
    assert linear_schedule(30, 1.8, 1.2, 10, 20) == 1.2
    assert linear_schedule(7, math.inf, math.inf, 0, 10) == math.inf
    assert linear_schedule(0, 1.8, 1.2, 0, 0) == 1.8
    assert linear_schedule(1, 1.8, 1.2, 0, 0) == 1.2


# The learnable temperature


def mean_ess(tau, log_r):
    mask = torch.ones_like(log_r, dtype=torch.bool)
    return effective_sample_ratio(sequence_softmax(log_r, mask, tau), mask).mean()


@pytest.mark.parametrize("first", [0.3, 20.0])
def test_tau_is_learnt_until_the_effective_sample_size_is_the_target(first):
    torch.manual_seed(0)
    log_r = torch.randn(16, 50)
    temperature = Temperature(first, 0.1, target_ess=0.8, learning_rate=0.05)
    assert temperature.tau.item() == pytest.approx(first, rel=1e-5)
    for _ in range(1000):
        temperature.step(*temperature.slope(mean_ess(temperature.tau, log_r)))
    assert mean_ess(temperature.tau, log_r).item() == pytest.approx(0.8, abs=0.01)


def test_one_step_of_tau_follows_the_gradient_of_the_squared_error():
    log_r = torch.randn(4, 9)
    temperature = Temperature(0.7, 0.1, target_ess=0.5, learning_rate=0.01)
    before = temperature.rho.item()
    rho = torch.tensor(before, dtype=torch.double, requires_grad=True)
    tau = 0.1 + (1 + rho.exp()).log()
    ((mean_ess(tau, log_r.double()) - 0.5) ** 2).backward()
    temperature.step(*temperature.slope(mean_ess(temperature.tau, log_r)))
    assert temperature.rho.grad.item() == pytest.approx(rho.grad.item(), rel=1e-4)
    # Adam's first step has the size of the learning rate
    assert temperature.rho.item() == pytest.approx(before - 0.01 * rho.grad.sign().item(), abs=1e-6)


def test_a_row_without_tokens_does_not_spoil_the_slope_of_tau():
    log_r = torch.randn(2, 9)
    mask = torch.tensor([[True] * 9, [False] * 9])
    tau = torch.tensor(0.7, requires_grad=True)
    slopes = []
    for rows in (2, 1):
        ess = effective_sample_ratio(sequence_softmax(log_r, mask, tau)[:rows], mask[:rows])
        slopes += torch.autograd.grad(ess.sum(), tau)
    assert slopes[0] == slopes[1] > 0


def test_tau_never_falls_below_its_minimum():
    log_r = 0.01 * torch.randn(4, 9)  # no temperature above 0.1 spreads weights that far
    temperature = Temperature(0.2, 0.1, target_ess=0.3, learning_rate=1.0)
    for _ in range(300):
        temperature.step(*temperature.slope(mean_ess(temperature.tau, log_r)))
        assert temperature.tau >= 0.1
    assert temperature.tau < 0.11


# Early end of the warm-up, symptoms


def test_the_spread_settles_when_ten_steps_are_like_the_ten_before():
    assert not has_settled([0.1] * 19, tolerance=0.05)
    assert has_settled([0.1] * 20, tolerance=0.05)
    assert has_settled([0.1] * 10 + [0.104] * 10, tolerance=0.05)
    assert not has_settled([0.1] * 10 + [0.106] * 10, tolerance=0.05)
    assert not has_settled([0.1] * 10 + [0.094] * 10, tolerance=0.05)


HEALTHY = {"diw/xi": 1.5, "diw/capped_fraction": 0.01, "grad_norm": 1.0, "entropy": 0.5}


def names(rows, max_steps=1000):
    rows = [{"step": i, **row} for i, row in enumerate(rows, 1)]
    return {symptom.name: symptom.remedy for symptom in find_symptoms(rows, max_steps)}


def test_a_healthy_run_and_a_short_one_have_no_symptoms():
    assert names([HEALTHY] * 30) == {}
    assert names([HEALTHY] * 9 + [HEALTHY | {"grad_norm": 99.0}]) == {}


@pytest.mark.parametrize(
    ("change", "count", "name", "remedy"),
    [
        ({"diw/capped_fraction": 0.3}, 10, "outputs too conservative", "raise diw_xi_end"),
        ({"grad_norm": 6.0}, 1, "early instability", "lower learning_rate by 30 to 50 %"),
        ({"entropy": 0.2}, 10, "falling diversity", "entropy_target"),
    ],
)
def test_each_symptom_is_named_with_its_remedy(change, count, name, remedy):
    found = names([HEALTHY] * 20 + [HEALTHY | change] * count)
    assert found.keys() == {name}
    assert remedy in found[name]


def test_a_late_jump_of_the_gradient_is_no_early_instability():
    assert names([HEALTHY] * 150 + [HEALTHY | {"grad_norm": 6.0}]) == {}
