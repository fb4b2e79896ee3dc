"""Advantages beside GRPO's, as pure functions on tensors.

B = sequences of a rollout batch, of all processes.
"""

import torch
from torch import Tensor


def whiten_over_tokens(
    rewards: Tensor,  # (B,), NaN where nothing could be scored
    num_tokens: Tensor,  # (B,), valid tokens of each sequence
) -> Tensor:  # (B,), 0 where the reward is NaN
    """REINFORCE++ with gamma = 1: the reward of a sequence, whitened over the batch's tokens.

    Every valid token of sequence i returns r_i, so with n_i tokens and N = sum_i n_i

        mean = sum_i n_i r_i / N
        var  = sum_i n_i (r_i - mean)^2 / (N - 1)
        A_i  = (r_i - mean) / sqrt(var + 1e-8)

    A sequence without a valid token moves neither; there is no baseline of its group. As in the
    official code of arXiv 2505.12929 (verl's masked_whiten).
    """
    scored = ~rewards.isnan()
    values = rewards.nan_to_num().double()
    counts = num_tokens * scored
    total = counts.sum()
    centred = values - (counts * values).sum() / total.clamp(min=1)
    variance = (counts * centred**2).sum() / (total - 1).clamp(min=1)
    return (centred * scored / torch.sqrt(variance + 1e-8)).to(rewards.dtype)
