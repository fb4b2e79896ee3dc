"""Token weights as pure functions on tensors: what a token counts, before TRL's loss sees it.

B = sequences, T = completion tokens. Probabilities are at the sampling temperature. Weights carry
no gradient; masking, products and reductions belong to the caller unless said otherwise.

[AR] Advantage Reweighting, "Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs",
     arXiv 2505.12929, section 4.1.
[DIW] Dynamic importance weighting: a token counts by its probability ratio to a frozen reference,
     capped, scheduled and smoothed. It has no paper; docs/diw.md names what we had to decide.
"""

import math

import torch
from torch import Tensor

# exp of it is finite in float32, also times an advantage and summed over tokens
_MAX_LOG_RATIO = 80.0


def ar_weights(
    probs: Tensor,  # (B, T), in [0, 1]
    alpha: float,  # in [0, 1]: 0 = plain GRPO, 1 = weight by pi itself
) -> Tensor:  # (B, T), in [1 - alpha, 1], detached
    """Advantage Reweighting [AR]: w = alpha * pi_old + (1 - alpha)."""
    return alpha * probs.detach() + (1 - alpha)


def log_prob_ratio(
    per_token_logps: Tensor,  # (B, T), any dtype, -inf allowed
    ref_per_token_logps: Tensor,  # (B, T)
) -> Tensor:  # (B, T) float32, finite, detached
    """log r = log pi_theta - log pi_ref [DIW]. Two impossible tokens have r = 1."""
    log_r = per_token_logps.detach().float() - ref_per_token_logps.detach().float()
    return log_r.nan_to_num(nan=0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def ratio_filter(
    log_r: Tensor,  # (B, T)
    r_max: float | None,  # > 1; None keeps every token
) -> Tensor:  # (B, T) bool
    """Tokens with r in [1 / r_max, r_max] [DIW]."""
    return log_r.abs() <= (math.inf if r_max is None else math.log(r_max))


def softmax_scores(
    log_r: Tensor,  # (B, T)
    xi: float,
    over: str,  # "ratio" or "log_ratio"
) -> Tensor:  # (B, T)
    """What the sequence-level softmax ranks tokens by [DIW]: min(r, xi), or its logarithm."""
    return log_r.exp().clamp(max=xi) if over == "ratio" else log_r.clamp(max=math.log(xi))


def sequence_softmax(
    scores: Tensor,  # (B, T)
    mask: Tensor,  # (B, T) bool
    tau: float | Tensor,  # temperature > 0; may be infinite, may carry a gradient
) -> Tensor:  # (B, T), mean 1 over a row's tokens in the mask, 0 outside
    """T_i * softmax_t(scores / tau) over the T_i tokens of a row [DIW]; exactly 1 at tau = inf."""
    scores = scores.masked_fill(~mask, -torch.inf)
    highest = scores.amax(1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)  # empty rows
    exps = (torch.where(mask, scores - highest, 0.0) / tau).exp() * mask
    # their mean and not their sum: equal weights are then ones to the bit
    return exps / (exps.sum(1, keepdim=True) / _count(mask)).where(mask.any(1, keepdim=True), 1.0)


def diw_weights(
    per_token_logps: Tensor,  # (B, T), log pi_theta
    ref_per_token_logps: Tensor,  # (B, T), log pi_ref
    xi: float,  # cap, >= 1; may be infinite
    mode: str = "cap",  # or "zero": tokens above the cap with A > 0 count nothing
    advantages: Tensor | None = None,  # (B, 1) or (B, T), for "zero"
    r_max: float | None = None,  # tokens with r outside [1 / r_max, r_max] count nothing
    softmax: str = "off",  # or "ratio", "log_ratio": weights compete within their sequence
    tau: float = 1.0,  # temperature of the softmax
    mask: Tensor | None = None,  # (B, T), 1 on valid tokens, for the softmax
) -> Tensor:  # (B, T) float32, in [0, xi], detached
    """Dynamic importance weights [DIW]: w = min(r, xi), r = pi_theta / pi_ref.

    With the softmax: w = min(T_i * softmax_t(score / tau), xi) over the T_i valid tokens of a
    sequence that the filter keeps.
    """
    log_r = log_prob_ratio(per_token_logps, ref_per_token_logps)
    kept = ratio_filter(log_r, r_max)
    weights = log_r.exp().clamp(max=xi)
    if softmax != "off":
        kept = kept & mask.bool()
        scores = softmax_scores(log_r, xi, softmax)
        weights = sequence_softmax(scores, kept, tau).detach().clamp(max=xi)
    if mode == "zero":
        weights = weights.masked_fill((log_r.exp() > xi) & (advantages > 0), 0.0)
    return weights.masked_fill(~kept, 0.0)


def effective_sample_ratio(
    weights: Tensor,  # (B, T), >= 0
    mask: Tensor,  # (B, T) bool
) -> Tensor:  # (B,), in [1 / T_i, 1]; 0 for a row without tokens
    """Effective sample size of a sequence's weights over its T_i tokens [DIW].

    (sum w)^2 / (T_i * sum w^2): 1 if they are equal, 1 / T_i if one token has them all.
    """
    weights = weights * mask
    squares = (weights**2).sum(1) * _count(mask).squeeze(1)
    return weights.sum(1) ** 2 / squares.where(squares > 0, 1.0)


def energy_deviation(
    per_token_logps: Tensor,  # (B, T)
    ref_per_token_logps: Tensor,  # (B, T)
    mask: Tensor,  # (B, T), 1 on valid tokens
    xi: float,
    lam: float,  # weight of the ratio against the surprise
) -> Tensor:  # (B, T), sums to 0 over a row's valid tokens, 0 elsewhere, detached
    """E_t - mean_t(E), E_t = -log pi_ref(o_t) + lam * clip(r_t, 0, xi) [DIW]."""
    ratio = log_prob_ratio(per_token_logps, ref_per_token_logps).exp()
    energy = lam * ratio.clamp(max=xi) - ref_per_token_logps.detach().float()
    mean = (energy * mask).sum(1, keepdim=True) / _count(mask)
    return (energy - mean) * mask


def linear_schedule(
    step: int,  # optimizer steps done
    start: float,
    end: float,
    begin: int,  # step at which it leaves `start`
    horizon: int,  # steps from there until it reaches `end`
) -> float:
    """From `start` to `end` in a straight line, constant before and after."""
    if start == end or step <= begin:  # both may be infinite
        return start
    progress = min((step - begin) / horizon, 1.0) if horizon > 0 else 1.0
    return start + progress * (end - start) if progress < 1 else end


def _count(mask: Tensor) -> Tensor:  # (B, 1), at least 1
    return mask.sum(1, keepdim=True).clamp(min=1)
