"""Level 1: membership and schedule by hand-computed values."""

import itertools
import math

import pytest
import torch

from lopti_trl.phases import low_prob_mask, phase_schedule, prob_band_mask, prob_quantile


def logs(*probs: float) -> torch.Tensor:
    return torch.tensor([probs]).log()


def test_low_means_strictly_below_eta():
    mask = torch.ones(1, 4)
    low = low_prob_mask(logs(0.1, 0.49, 0.5, 0.9), mask, eta=0.5)
    assert low.tolist() == [[True, True, False, False]]


def test_padding_belongs_to_no_phase_whatever_its_log_prob():
    mask = torch.tensor([[1, 0, 0]])
    low = low_prob_mask(torch.tensor([[-9.0, 0.0, -9.0]]), mask, eta=0.5)
    assert low.tolist() == [[True, False, False]]


def test_a_probability_that_underflows_to_zero_is_low():
    assert low_prob_mask(torch.tensor([[-200.0]]), torch.ones(1, 1), eta=0.01).item()


@pytest.mark.parametrize("edges", [(0, 0.25, 0.5, 0.75, 1), (0, 0.1, 1)])
def test_bands_from_zero_to_one_partition_the_valid_tokens(edges):
    probs = torch.tensor([[0.0, 1e-30, 0.1, 0.25, 0.2500001, 0.5, 0.75, 0.9, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1, 0]])
    bands = [
        prob_band_mask(probs.log(), mask, low, high).int()
        for low, high in itertools.pairwise(edges)
    ]
    assert torch.equal(sum(bands), mask.int())


def test_band_excludes_its_lower_and_includes_its_upper_edge():
    band = prob_band_mask(logs(0.25, 0.5, 0.75), torch.ones(1, 3), 0.25, 0.5)
    assert band.tolist() == [[False, True, False]]


@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.37, 0.5, 0.99, 1.0])
def test_prob_quantile_equals_torch_quantile_bit_for_bit(quantile):
    probs = torch.rand(1001, generator=torch.Generator().manual_seed(3))
    assert prob_quantile(probs, quantile).item() == torch.quantile(probs, quantile).item()


def test_prob_quantile_is_right_where_torch_quantile_refuses():
    count = 2**24 + 3
    probs = torch.arange(count, dtype=torch.float32).flip(0)  # all integers up to 2**24 are exact
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(probs, 0.25)
    assert prob_quantile(probs, 0.25).item() == pytest.approx(0.25 * (count - 1), abs=1)


def test_prob_quantile_of_no_tokens_puts_nothing_below():
    assert prob_quantile(torch.tensor([]), 0.5).item() == 0


def test_batch_schedule_sweeps_the_buffer_once_a_phase():
    steps = [phase_schedule(i, 4, 2) for i in range(9)]
    assert [s.slice_index for s in steps] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [s.phase for s in steps] == ["low"] * 4 + ["high"] * 4 + ["low"]


def test_minibatch_schedule_alternates_the_phases_on_the_same_rows():
    steps = [phase_schedule(i, 4, 2, schedule="minibatch") for i in range(9)]
    assert [s.slice_index for s in steps] == [0, 1, 0, 1, 2, 3, 2, 3, 0]
    assert [s.phase for s in steps] == ["low", "low", "high", "high"] * 2 + ["low"]


def test_high_first_swaps_the_phases_and_nothing_else():
    for schedule in ("batch", "minibatch"):
        for i in range(20):
            low_first = phase_schedule(i, 6, 3, "low_first", schedule)
            high_first = phase_schedule(i, 6, 3, "high_first", schedule)
            assert low_first.slice_index == high_first.slice_index
            assert {low_first.phase, high_first.phase} == {"low", "high"}


@pytest.mark.parametrize("schedule", ["batch", "minibatch"])
@pytest.mark.parametrize(("slices", "accumulation"), [(1, 1), (2, 1), (4, 4), (6, 2)])
def test_every_sweep_pairs_each_slice_with_each_phase_once_and_keeps_steps_whole(
    schedule, slices, accumulation
):
    for iteration in range(3):
        start = iteration * 2 * slices
        steps = [
            phase_schedule(start + i, slices, accumulation, schedule=schedule)
            for i in range(2 * slices)
        ]
        assert sorted(steps) == sorted((i, p) for i in range(slices) for p in ("low", "high"))
        for i in range(0, len(steps), accumulation):
            assert len({s.phase for s in steps[i : i + accumulation]}) == 1
            assert [s.slice_index % accumulation for s in steps[i : i + accumulation]] == list(
                range(accumulation)
            )


def test_membership_is_a_comparison_of_probabilities_not_of_logs():
    # log(0.3) and exp(log(0.3)) round differently; the definition is pi < eta
    logp = torch.tensor([[math.log(0.3)]])
    assert low_prob_mask(logp, torch.ones(1, 1), 0.3).item() == (logp.exp() < 0.3).item()
