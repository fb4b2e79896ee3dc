"""Token weights as pure functions on tensors: what a token counts, before TRL's loss sees it.

B = sequences, T = completion tokens. Probabilities are the rollout policy's, at the sampling
temperature. Weights are elementwise; masking, products and reductions belong to the caller.

[AR] Advantage Reweighting, "Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs",
     arXiv 2505.12929, section 4.1.
"""

from torch import Tensor


def ar_weights(
    probs: Tensor,  # (B, T), in [0, 1]
    alpha: float,  # in [0, 1]: 0 = plain GRPO, 1 = weight by pi itself
) -> Tensor:  # (B, T), in [1 - alpha, 1], detached
    """Advantage Reweighting [AR]: w = alpha * pi_old + (1 - alpha)."""
    return alpha * probs.detach() + (1 - alpha)
