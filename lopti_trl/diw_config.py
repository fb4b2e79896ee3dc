"""Fields of dynamic importance weighting, and the rules they must keep."""

import logging
import math
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

logger = logging.getLogger(__name__)

# the loss types whose ratio of one has the plain gradient of log pi
_PURE_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")


@dataclass
class DIWConfig:
    """Dynamic importance weighting: w = min(pi_theta / pi_ref, xi), a factor on the advantage."""

    diw: bool = field(
        default=False,
        metadata={
            "help": "Dynamic importance weighting: a token's advantage is multiplied by "
            "min(r, xi), r = pi_theta / pi_ref, the ratio to the frozen initial policy."
        },
    )
    diw_mode: Literal["cap", "zero"] = field(
        default="cap",
        metadata={"help": "Above xi, cap: w = xi. zero: w = 0 if the advantage is positive."},
    )
    diw_policy: Literal["current", "rollout"] = field(
        default="current",
        metadata={
            "help": "Numerator of r. current: the policy of this optimizer step. rollout: pi_old, "
            "so that weights stay as they are while a rollout batch is used."
        },
    )
    diw_reference: Literal["initial", "rollout"] = field(
        default="initial",
        metadata={
            "help": "Denominator of r. initial: the model that training started from. rollout: "
            "pi_old, an ablation that needs no reference model."
        },
    )
    diw_pure: bool = field(
        default=False,
        metadata={"help": "No PPO ratio and no clipping: the gradient is -w * A * grad log pi."},
    )
    diw_xi_start: float = field(
        default=1.8, metadata={"help": "First value of the cap xi, >= 1; inf caps nothing."}
    )
    diw_xi_end: float = field(
        default=1.2, metadata={"help": "Last value of xi; the one of diw_xi_start keeps it."}
    )
    diw_xi_begin: int = field(
        default=0, metadata={"help": "Optimizer step at which xi leaves diw_xi_start."}
    )
    diw_xi_horizon: int | None = field(
        default=None,
        metadata={"help": "Optimizer steps until diw_xi_end; None: until training ends."},
    )
    diw_softmax: Literal["off", "ratio", "log_ratio"] = field(
        default="off",
        metadata={
            "help": "Weights compete within a sequence of T tokens: w = T * softmax(score / tau), "
            "capped at xi again. The score is min(r, xi) or its logarithm."
        },
    )
    diw_tau: float = field(
        default=1.0,
        metadata={"help": "Temperature of the softmax, or its first value; inf is plain GRPO."},
    )
    diw_learn_tau: bool = field(
        default=False,
        metadata={"help": "Learn tau = diw_tau_min + softplus(rho) towards diw_target_ess."},
    )
    diw_tau_min: float = field(default=0.1, metadata={"help": "tau is never below it."})
    diw_tau_learning_rate: float = field(
        default=1e-2, metadata={"help": "Adam's learning rate for rho; no schedule."}
    )
    diw_target_ess: float = field(
        default=0.8,
        metadata={
            "help": "Effective sample size of a sequence's weights, as a share of its tokens, that "
            "tau is learnt towards; in (0, 1)."
        },
    )
    diw_r_max: float | None = field(
        default=None,
        metadata={"help": "Tokens with r outside [1 / diw_r_max, diw_r_max] get w = 0; > 1."},
    )
    diw_energy_beta: float = field(
        default=0.0,
        metadata={
            "help": "Energy shaping: beta_E * (E - mean of E over the sequence) is subtracted from "
            "the advantage, E = -log pi_ref + lambda * min(r, xi). 0 turns it off."
        },
    )
    diw_energy_lambda: float = field(default=1.0, metadata={"help": "lambda in E; >= 0."})
    diw_warmup: bool = field(
        default=False,
        metadata={
            "help": "At first train only the last decoder block, the final norm and the head "
            "(unless it is tied to the embedding)."
        },
    )
    diw_warmup_steps: int | None = field(
        default=None,
        metadata={"help": "Optimizer steps of it. None: a tenth of them all, at most 1000."},
    )
    diw_warmup_tolerance: float | None = field(
        default=None,
        metadata={
            "help": "End it early once the standard deviation of the weights settles: its mean "
            "over 10 optimizer steps is within this fraction of the 10 before. None: never."
        },
    )
    raft: bool = field(
        default=False,
        metadata={"help": "Rejection sampling (RAFT): advantage 1 where it is positive, else 0."},
    )

    @property
    def needs_reference(self) -> bool:
        """Whether weights need log-probs of the initial policy, KL term or not."""
        return self.diw and (self.diw_reference == "initial" or self.diw_energy_beta != 0)

    @property
    def uses_warmup(self) -> bool:
        return self.diw and self.diw_warmup

    def check_diw(self) -> None:
        """Raise ValueError for the first broken rule; the message names value, rule and fix."""
        if not self.diw:
            self._warn_of_idle_options()
            return
        for name in ("diw_mode", "diw_policy", "diw_reference", "diw_softmax"):
            value, choices = getattr(self, name), get_args(DIWConfig.__annotations__[name])
            if value not in choices:
                raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(choices)}.")
        for is_kept, message in (*self._ranges(), *self._combinations()):
            if not is_kept:
                raise ValueError(message)

    def _warn_of_idle_options(self):
        # no error: a recipe stays usable with diw turned off on the command line
        idle = [
            f"{option.name}={getattr(self, option.name)}"
            for option in fields(DIWConfig)
            if option.name.startswith("diw_") and getattr(self, option.name) != option.default
        ]
        if idle:
            logger.warning("diw is false: %s do nothing. Set diw to true.", ", ".join(idle))

    def _ranges(self) -> list[tuple[bool, str]]:
        start, end, tau, r_max = self.diw_xi_start, self.diw_xi_end, self.diw_tau, self.diw_r_max
        return [
            (
                start >= 1 and end >= 1,
                f"diw_xi_start={start} and diw_xi_end={end} must be at least 1: below, xi would "
                "scale every weight down from the start. Use 1.5 to 2.0.",
            ),
            (
                start == end or math.isfinite(start + end),
                f"diw_xi_start={start} and diw_xi_end={end} have no straight line between them. "
                "Set both to inf, or both to numbers.",
            ),
            (
                self.diw_xi_begin >= 0 and (self.diw_xi_horizon is None or self.diw_xi_horizon > 0),
                f"diw_xi_begin={self.diw_xi_begin} must be at least 0 and diw_xi_horizon="
                f"{self.diw_xi_horizon} above 0: they count optimizer steps.",
            ),
            (
                self.diw_tau_min > 0 and tau > self.diw_tau_min,
                f"diw_tau={tau} must be above diw_tau_min={self.diw_tau_min}, and that above 0. "
                "Use 1.0 and 0.1, or inf for equal weights.",
            ),
            (
                0 < self.diw_target_ess < 1,
                f"diw_target_ess={self.diw_target_ess} is outside (0, 1): 1 means equal weights. "
                "Use 0.8, or diw_tau=inf.",
            ),
            (
                self.diw_tau_learning_rate > 0,
                f"diw_tau_learning_rate={self.diw_tau_learning_rate} must be above 0. To keep tau "
                "fixed set diw_learn_tau to false.",
            ),
            (
                r_max is None or r_max > 1,
                f"diw_r_max={r_max} must be above 1, or [1 / r_max, r_max] holds no token. Use 5, "
                "or None to keep every token.",
            ),
            (
                self.diw_energy_beta >= 0 and self.diw_energy_lambda >= 0,
                f"diw_energy_beta={self.diw_energy_beta} and diw_energy_lambda="
                f"{self.diw_energy_lambda} must be at least 0. Use 0 to turn energy shaping off.",
            ),
            (
                self.diw_warmup_steps is None or self.diw_warmup_steps > 0,
                f"diw_warmup_steps={self.diw_warmup_steps} must be above 0. To train everything "
                "from the start set diw_warmup to false.",
            ),
            (
                self.diw_warmup_tolerance is None or self.diw_warmup_tolerance > 0,
                f"diw_warmup_tolerance={self.diw_warmup_tolerance} must be above 0. Use 0.05, or "
                "None to run all of diw_warmup_steps.",
            ),
        ]

    def _combinations(self) -> list[tuple[bool, str]]:
        pure = self.diw_pure
        return [
            (
                not (self.diw_policy == "rollout" and self.diw_reference == "rollout"),
                "diw_policy=rollout with diw_reference=rollout divides pi_old by itself: every "
                "weight is 1. Set one of them to current or initial.",
            ),
            (
                not self.diw_learn_tau or (self.diw_softmax != "off" and self.diw_tau < math.inf),
                "diw_learn_tau=True needs a softmax with a finite temperature, found "
                f"diw_softmax={self.diw_softmax} and diw_tau={self.diw_tau}. Set diw_softmax to "
                "ratio and diw_tau to 1.0.",
            ),
            (
                self.diw_warmup or (self.diw_warmup_steps or self.diw_warmup_tolerance) is None,
                f"diw_warmup_steps={self.diw_warmup_steps} and diw_warmup_tolerance="
                f"{self.diw_warmup_tolerance} do nothing without diw_warmup. Set it to true.",
            ),
            (
                not pure or self.importance_sampling_level == "token",
                f"diw_pure=True weighs tokens, importance_sampling_level="
                f"{self.importance_sampling_level} sequences. Set it to token.",
            ),
            (
                not pure or self.loss_type in _PURE_LOSS_TYPES,
                f"diw_pure=True replaces the ratio of a clipped loss, loss_type={self.loss_type} "
                f"has none. Use one of {', '.join(_PURE_LOSS_TYPES)}.",
            ),
            (
                not pure or self.off_policy_mask_threshold is None,
                "diw_pure=True drops pi_old, which off_policy_mask_threshold="
                f"{self.off_policy_mask_threshold} compares with. Set it to None; use diw_r_max.",
            ),
            (
                not (self.needs_reference and self.sync_ref_model),
                "diw=True needs a frozen reference, sync_ref_model=True moves it. Set it to false.",
            ),
        ]
