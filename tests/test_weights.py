"""Level 1: token weights by hand-computed values."""

import torch

from lopti_trl.weights import ar_weights


def test_ar_weights_match_hand_computation():
    probs = torch.tensor([[0.0, 0.5, 1.0]])
    expected = torch.tensor([[0.7, 0.85, 1.0]])  # 0.3 * p + 0.7
    torch.testing.assert_close(ar_weights(probs, alpha=0.3), expected)


def test_ar_is_exactly_one_at_alpha_zero_and_exactly_pi_at_alpha_one():
    probs = torch.rand(5, 7)
    assert torch.equal(ar_weights(probs, alpha=0.0), torch.ones(5, 7))
    assert torch.equal(ar_weights(probs, alpha=1.0), probs)


def test_ar_weights_carry_no_gradient():
    logps = torch.log(torch.rand(2, 3)).requires_grad_()
    assert not ar_weights(logps.exp(), alpha=0.5).requires_grad


def test_ar_weights_lie_between_one_minus_alpha_and_one_and_grow_with_pi():
    probs = torch.linspace(0, 1, 101)
    weights = ar_weights(probs, alpha=0.4)
    assert torch.all(weights[1:] > weights[:-1])
    torch.testing.assert_close(weights[[0, -1]], torch.tensor([0.6, 1.0]))
