"""Which tokens train in which pass, and which slice and phase a micro-step has.

B = sequences, T = completion tokens, N = valid tokens of a rollout batch.

[Lopti] Low-Probability Token Isolation, "Do Not Let Low-Probability Tokens Over-Dominate in RL
        for LLMs", arXiv 2505.12929, section 4.2 and Algorithm 1.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOW, HIGH = "low", "high"


def low_prob_mask(
    old_per_token_logps: Tensor,  # (B, T), log pi_old at the sampling temperature
    completion_mask: Tensor,  # (B, T), 1 on valid tokens
    eta: float | Tensor,  # threshold, in (0, 1)
) -> Tensor:  # (B, T) bool
    """Membership of the low-probability phase [Lopti]: pi_old < eta, on valid tokens.

    Strict, as the official code has it (the paper's Algorithm 1 writes <=). Padding has log-prob
    0, hence probability 1, and belongs to no phase.
    """
    return (old_per_token_logps.exp() < eta) & completion_mask.bool()


def prob_band_mask(
    old_per_token_logps: Tensor,  # (B, T), log pi_old at the sampling temperature
    completion_mask: Tensor,  # (B, T), 1 on valid tokens
    low: float,
    high: float,
) -> Tensor:  # (B, T) bool
    """Valid tokens with low < pi_old <= high; adjoining bands from 0 to 1 partition them.

    A band that opens at 0 takes pi_old = 0 too: rarer than the smallest float is still rare.
    """
    probs = old_per_token_logps.exp()
    above = probs > low if low > 0 else torch.ones_like(probs, dtype=torch.bool)
    return above & (probs <= high) & completion_mask.bool()


def prob_quantile(
    probs: Tensor,  # (N,)
    quantile: float,  # in [0, 1]
) -> Tensor:  # scalar
    """The linearly interpolated quantile of `torch.quantile`, which refuses N > 2**24.

    Without tokens it is 0, so that nothing lies below it.
    """
    if probs.numel() == 0:
        return probs.new_zeros(())
    ordered = probs.sort().values  # kthvalue turns quadratic on sorted input
    position = quantile * (probs.numel() - 1)
    below = math.floor(position)
    return torch.lerp(ordered[below], ordered[math.ceil(position)], position - below)


class MicroStep(NamedTuple):
    """What one forward and backward pass works on."""

    slice_index: int  # micro-batch of the rollout buffer
    phase: str  # "low" or "high"


def phase_schedule(
    step: int,  # micro-steps done so far
    steps_per_generation: int,  # micro-batches in the rollout buffer
    gradient_accumulation_steps: int,  # micro-batches in an optimizer step
    order: str = "low_first",
    schedule: str = "batch",
) -> MicroStep:
    """Slice and phase of a micro-step [Lopti].

    `batch` (the official code): the whole buffer in the first phase, then the whole buffer in the
    second. `minibatch` (the paper's prose): every optimizer step of the first phase is followed by
    one of the second on the same rows. Either way the buffer is swept twice per iteration.
    """
    block = steps_per_generation if schedule == "batch" else gradient_accumulation_steps
    pair, within_pair = divmod(step, 2 * block)
    slice_index = (pair * block + within_pair % block) % steps_per_generation
    first, second = (LOW, HIGH) if order == "low_first" else (HIGH, LOW)
    return MicroStep(slice_index, first if within_pair < block else second)
