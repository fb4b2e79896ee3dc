"""Our fields on top of `trl.GRPOConfig`, and the rules they must keep."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from lopti_trl.diw_config import DIWConfig
from lopti_trl.sampling_config import SamplingConfig

TRICKS = ("trim", "balance", "skip", "cut", "project")  # on by themselves where exact


@dataclass
class LoptiGRPOConfig(DIWConfig, SamplingConfig):
    """`trl.GRPOConfig` with the token-probability methods, all off by default.

    pi_old is the probability of a sampled token under the policy that made the rollout, at the
    sampling temperature and by the training engine.

    Raises:
        ValueError: a field out of its range, or a combination that cannot work. The message names
            the value, the rule and the fix.
    """

    ar_alpha: float = field(
        default=0.0,
        metadata={
            "help": "Advantage Reweighting strength alpha, in [0, 1]: advantages are multiplied by "
            "alpha * pi_old + 1 - alpha. 0 disables it; 0.3 is the published K&K recipe, 0.1 the "
            "maths one."
        },
    )
    lopti_eta: float | None = field(
        default=None,
        metadata={
            "help": "Lopti threshold eta, in (0, 1): tokens with pi_old < eta train in a phase of "
            "their own. None disables Lopti; 0.5 is the published recipe."
        },
    )
    lopti_quantile: float | None = field(
        default=None,
        metadata={
            "help": "Lopti threshold as a quantile, in (0, 1), of pi_old over all valid tokens of "
            "the rollout batch and all processes, in place of lopti_eta."
        },
    )
    lopti_order: Literal["low_first", "high_first"] = field(
        default="low_first",
        metadata={
            "help": "Order of Lopti's phases. high_first is the paper's ablation, which collapses."
        },
    )
    lopti_schedule: Literal["batch", "minibatch"] = field(
        default="batch",
        metadata={
            "help": "batch: all optimizer steps of the first phase, then all of the second (the "
            "official code). minibatch: first and second phase in turn, one optimizer step each."
        },
    )
    prob_band: list[float] | None = field(
        default=None,
        metadata={
            "help": "Ablation: two numbers, low and high, in [0, 1]; only tokens with "
            "low < pi_old <= high get a gradient. Normalisers stay those of all tokens. None "
            "disables it."
        },
    )

    update_trim: bool | None = field(
        default=None,
        metadata={
            "help": "Cut a micro-batch to its own longest prompt and completion. This and the "
            "other update_ options keep every gradient as it is; None turns them on where that "
            "holds, if a method is on."
        },
    )
    update_balance: bool | None = field(
        default=None,
        metadata={"help": "Sort an optimizer step's rows into micro-batches of like lengths."},
    )
    update_skip: bool | None = field(
        default=None,
        metadata={
            "help": "Leave out rows without a gradient: zero advantage (if there is no KL term), "
            "or no token in the phase."
        },
    )
    update_cut: bool | None = field(
        default=None,
        metadata={"help": "Cut a row after its last token with a gradient."},
    )
    update_project: bool | None = field(
        default=None,
        metadata={"help": "Apply the LM head only to tokens with a gradient."},
    )
    update_padding_free: bool = field(
        default=False,
        metadata={
            "help": "Feed the rows of a micro-batch to the model as one sequence without padding, "
            "positions restarting with each row. For attn_implementation flash_attention_2 or _3; "
            "sdpa and eager are exact too, but attend over the whole sequence."
        },
    )

    generation_skip_finished: bool | None = field(
        default=None,
        metadata={
            "help": "In transformers' generate, leave completions that have ended out of the "
            "forward passes. They stay the same but for rounding. None: on if a method is on."
        },
    )

    diagnostics: bool | None = field(
        default=None,
        metadata={
            "help": "Log under prob/ which tokens drive the update, per band of pi_old. Training "
            "stays the same to the bit. None: on if a method is on."
        },
    )
    diagnostics_bands: list[float] = field(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0],
        metadata={
            "help": "Rising edges of the bands of pi_old, from 0 to 1; low < pi_old <= high."
        },
    )
    diagnostics_rows: float = field(
        default=0.03125,
        metadata={
            "help": "Share, in [0, 1], of a rollout batch's rows that are scored before and after "
            "its update for prob/rose. 0 turns that off; 1 costs two forward passes."
        },
    )

    @property
    def update_tricks(self) -> frozenset[str]:
        """Names of the update_ options in force."""
        inexact = self.inexact_tricks()
        flags = {name: getattr(self, f"update_{name}") for name in TRICKS}
        chosen = {
            name: self.uses_token_probs and name not in inexact if flag is None else flag
            for name, flag in flags.items()
        }
        chosen["padding_free"] = self.update_padding_free
        return frozenset(name for name, is_on in chosen.items() if is_on)

    def inexact_tricks(self) -> dict[str, str]:
        """Which update_ options would change a gradient, and why."""
        regrouping = ("balance", "skip", "cut")
        whole_rows = ("cut", "project")
        rules = (
            (
                self.steps_per_generation % self.gradient_accumulation_steps != 0,
                (*TRICKS, "padding_free"),
                "optimizer steps span rollout batches",
            ),
            (
                self.importance_sampling_level == "sequence" or self.loss_type == "vespo",
                whole_rows,
                "the ratio of a sequence needs all its tokens",
            ),
            (
                self.off_policy_mask_threshold is not None,
                whole_rows,
                "the off-policy mask of a sequence needs all its tokens",
            ),
            (
                self.diw,
                whole_rows,
                "the weights of a sequence need all its tokens",
            ),
            (
                self.diw and (self.diw_energy_beta != 0 or self.diw_learn_tau),
                ("skip",),
                "energy shaping and a learnt tau need every row",
            ),
            (
                self.loss_type in ("grpo", "sapo"),
                ("cut",),
                f"loss_type={self.loss_type} divides by a row's number of tokens",
            ),
            (
                self.loss_type == "bnpo",
                regrouping,
                "loss_type=bnpo divides by the micro-batch's number of tokens",
            ),
            (
                self.top_entropy_quantile < 1,
                (*regrouping, "project"),
                "the entropy quantile is taken over the micro-batch",
            ),
            (
                self.entropy_coef != 0 or self.use_adaptive_entropy,
                (*regrouping, "project"),
                "the entropy bonus is a mean over the micro-batch",
            ),
        )
        return {name: reason for holds, names, reason in rules if holds for name in names}

    @property
    def skips_finished(self) -> bool:
        flag = self.generation_skip_finished
        return self.uses_token_probs if flag is None else flag

    @property
    def uses_ar(self) -> bool:
        return self.ar_alpha != 0

    @property
    def uses_lopti(self) -> bool:
        return self.lopti_eta is not None or self.lopti_quantile is not None

    @property
    def uses_token_probs(self) -> bool:
        """Whether any method needs pi_old."""
        return self.uses_ar or self.uses_lopti or self.prob_band is not None or self.diw

    @property
    def uses_diagnostics(self) -> bool:
        return self.uses_token_probs if self.diagnostics is None else self.diagnostics

    def __post_init__(self):
        super().__post_init__()
        self._check_ranges()
        self._check_diagnostics()
        self.check_diw()
        if self.uses_lopti:
            self._check_phases()
        is_colocated = self.use_vllm and self.vllm_mode == "colocate"
        if is_colocated and "seed" in (self.generation_kwargs or {}):
            raise ValueError(
                "generation_kwargs sets a seed, with which a colocated vLLM engine gives every "
                "completion of a group the same tokens. Remove it: rollouts follow the seed option."
            )
        for name, reason in self.inexact_tricks().items():
            if getattr(self, f"update_{name}"):
                raise ValueError(
                    f"update_{name}=True would change the gradient here: {reason}. Leave it unset."
                )

    def _check_ranges(self):
        if not 0 <= self.ar_alpha <= 1:
            raise ValueError(
                f"ar_alpha={self.ar_alpha} is outside [0, 1], where the weight alpha * pi + "
                "1 - alpha stays between 0 and 1. Use 0 to turn AR off, 0.1 to 0.3 as published."
            )
        if self.lopti_eta is not None and self.lopti_quantile is not None:
            raise ValueError(
                f"lopti_eta={self.lopti_eta} and lopti_quantile={self.lopti_quantile} both set the "
                "threshold between the phases. Keep one and set the other to None."
            )
        for name in ("lopti_eta", "lopti_quantile"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ValueError(
                    f"{name}={value} is outside (0, 1): one phase would hold every token. Use a "
                    "value in between (0.3 to 0.5 as published), or None to turn Lopti off."
                )
        for name in ("lopti_order", "lopti_schedule"):
            value, choices = getattr(self, name), get_args(LoptiGRPOConfig.__annotations__[name])
            if value not in choices:
                raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(choices)}.")
        band = self.prob_band
        if band is not None and not (len(band) == 2 and 0 <= band[0] < band[1] <= 1):
            raise ValueError(
                f"prob_band={band} is not two numbers low < high in [0, 1]. For the rarest quarter "
                "of the probability range use [0, 0.25]; None keeps every token."
            )

    def _check_diagnostics(self):
        edges = self.diagnostics_bands
        is_rising = all(low < high for low, high in itertools.pairwise(edges))
        if not (is_rising and len(edges) > 1 and edges[0] == 0 and edges[-1] == 1):
            raise ValueError(
                f"diagnostics_bands={edges} does not rise from 0 to 1, so that some tokens would "
                "be in no band. For quarters use 0 0.25 0.5 0.75 1."
            )
        if not 0 <= self.diagnostics_rows <= 1:
            raise ValueError(
                f"diagnostics_rows={self.diagnostics_rows} is outside [0, 1]: it is a share of the "
                "rows. Use 0 to turn prob/rose off, 0.03125 for one row in 32."
            )

    def _check_phases(self):
        steps, accumulation = self.steps_per_generation, self.gradient_accumulation_steps
        if steps % accumulation:
            raise ValueError(
                f"Lopti needs whole optimizer steps in each phase: steps_per_generation={steps} is "
                f"not a multiple of gradient_accumulation_steps={accumulation}. Set "
                f"steps_per_generation to {math.ceil(steps / accumulation) * accumulation}, or "
                f"gradient_accumulation_steps to a divisor of {steps}."
            )
