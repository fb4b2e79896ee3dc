"""Plain PyTorch oracle of one GRPO / AR / Lopti rollout batch, written from the maths alone.

Literal on purpose. It shares no code with `lopti_trl` or TRL, so that no bug can cancel out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

# N = sequences of the rollout batch, B = sequences of a micro-batch, P = prompt tokens,
# T = completion tokens, V = vocabulary; a window = micro-batches of one optimizer step


@dataclass(frozen=True)
class Method:
    alpha: float = 0.0  # AR strength, in [0, 1]
    eta: float | None = None  # Lopti threshold; None = one ordinary update
    quantile: float | None = None  # Lopti threshold as a quantile of all valid pi_old
    order: str = "low_first"  # or "high_first"
    schedule: str = "batch"  # or "minibatch"
    num_iterations: int = 1  # sweeps over the rollout batch
    beta: float = 0.0  # KL coefficient
    epsilon_low: float = 0.2
    epsilon_high: float = 0.24
    dual_clip: float | None = None  # c: a token loss with A < 0 is at most -c * A
    temperature: float = 1.0

    def __post_init__(self):
        # a typo must not turn the oracle into a different method
        if self.order not in ("low_first", "high_first"):
            raise ValueError(f"unknown order {self.order!r}")
        if self.schedule not in ("batch", "minibatch"):
            raise ValueError(f"unknown schedule {self.schedule!r}")
        if self.eta is not None and self.quantile is not None:
            raise ValueError("give eta or quantile, not both")


def advantages(
    rewards: Tensor,  # (N,)
    group: Tensor,  # (N,) long, equal value = same prompt
) -> Tensor:  # (N,)
    """A[i] = (r[i] - mean) / (std + 1e-4) within the group of i, std unbiased (ddof=1)."""
    result = torch.zeros_like(rewards)
    for i in range(len(rewards)):
        members = rewards[group == group[i]]
        result[i] = (rewards[i] - members.mean()) / (members.std(unbiased=True) + 1e-4)
    return result


def per_token_logps(
    model: nn.Module, batch: dict[str, Tensor], temperature: float
) -> Tensor:  # (B, T), 0 at padding
    """log softmax(logits / temperature) of each completion token."""
    completion_ids, completion_mask = batch["completion_ids"], batch["completion_mask"].bool()
    input_ids = torch.cat([batch["prompt_ids"], completion_ids], dim=1)  # (B, P + T)
    attention_mask = torch.cat([batch["prompt_mask"].bool(), completion_mask], dim=1).long()
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits  # (B, P + T, V)
    # the logits at a position predict the next token: start at the last prompt token
    logits = logits[:, batch["prompt_ids"].size(1) - 1 : -1]  # (B, T, V)
    logps = (logits / temperature).log_softmax(dim=-1)
    logps = logps.gather(2, completion_ids.unsqueeze(2)).squeeze(2)
    # an arbitrary log-prob could overflow in the KL, and inf * 0 is nan
    return logps.masked_fill(~completion_mask, 0.0)


def per_token_loss(
    logps: Tensor,  # (B, T), with gradient
    old_logps: Tensor,  # (B, T)
    ref_logps: Tensor | None,  # (B, T), None = no KL
    token_advantages: Tensor,  # (B, T), after AR
    method: Method,
) -> Tensor:  # (B, T)
    """max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)), at most -c A where A < 0, plus beta * KL.

    r = exp(logp - old_logp), KL = exp(ref_logp - logp) - (ref_logp - logp) - 1 (k3).
    """
    ratio = torch.exp(logps - old_logps)
    clipped = ratio.clamp(1 - method.epsilon_low, 1 + method.epsilon_high)
    loss = torch.maximum(-token_advantages * ratio, -token_advantages * clipped)
    if method.dual_clip is not None:
        bound = -method.dual_clip * token_advantages
        loss = torch.where(token_advantages < 0, torch.minimum(loss, bound), loss)
    if ref_logps is not None:
        log_ratio = ref_logps - logps
        loss = loss + method.beta * (torch.exp(log_ratio) - log_ratio - 1)
    return loss


def step_order(method: Method, num_windows: int) -> list[tuple[str, int]]:
    """(phase, window) of every optimizer step."""
    phases = ["low", "high"] if method.order == "low_first" else ["high", "low"]
    if method.eta is None and method.quantile is None:
        phases = ["all"]
    if method.schedule == "batch":
        sweep = [(phase, window) for phase in phases for window in range(num_windows)]
    else:
        sweep = [(phase, window) for window in range(num_windows) for phase in phases]
    return sweep * method.num_iterations


def train_on_rollout_batch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[dict[str, Tensor]],  # one rollout batch, in buffer order
    method: Method,
    *,
    gradient_accumulation_steps: int,  # micro-batches per window
    max_grad_norm: float,  # 0 = no clipping
    reference_model: nn.Module | None = None,  # needed when beta > 0
) -> list[str]:  # phase of each optimizer step, in order
    """Update `model` in place. Each step minimises, over the tokens of its window and phase,

    sum(token losses) / (valid tokens of the rollout batch / windows of the rollout batch).
    """
    num_windows, remainder = divmod(len(micro_batches), gradient_accumulation_steps)
    if remainder:
        raise ValueError("the rollout batch must consist of whole windows")
    if method.beta and reference_model is None:
        raise ValueError("beta needs a reference_model")
    masks = [batch["completion_mask"].bool() for batch in micro_batches]
    with torch.no_grad():
        old_logps = [per_token_logps(model, batch, method.temperature) for batch in micro_batches]
        ref_logps = [
            per_token_logps(reference_model, batch, method.temperature) if method.beta else None
            for batch in micro_batches
        ]
    old_probs = [logps.exp() for logps in old_logps]
    valid_probs = torch.cat([p[mask] for p, mask in zip(old_probs, masks, strict=True)])
    normaliser = len(valid_probs) / num_windows

    threshold = method.eta
    if method.quantile is not None:
        threshold = torch.quantile(valid_probs, method.quantile)
    in_phase = {"all": masks}
    if threshold is not None:
        in_phase["low"] = [m & (p < threshold) for p, m in zip(old_probs, masks, strict=True)]
        in_phase["high"] = [m & ~(p < threshold) for p, m in zip(old_probs, masks, strict=True)]

    rewards = torch.cat([batch["rewards"] for batch in micro_batches])
    group = torch.cat([batch["group"] for batch in micro_batches])
    sequence_advantages = advantages(rewards, group).split([len(mask) for mask in masks])
    token_advantages = [
        (method.alpha * p + (1 - method.alpha)) * a.unsqueeze(1)  # [AR]
        for p, a in zip(old_probs, sequence_advantages, strict=True)
    ]

    steps = step_order(method, num_windows)
    for phase, window in steps:
        first = window * gradient_accumulation_steps
        for i in range(first, first + gradient_accumulation_steps):
            logps = per_token_logps(model, micro_batches[i], method.temperature)
            loss = per_token_loss(logps, old_logps[i], ref_logps[i], token_advantages[i], method)
            ((loss * in_phase[phase][i].float()).sum() / normaliser).backward()
        if max_grad_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return [phase for phase, _ in steps]
