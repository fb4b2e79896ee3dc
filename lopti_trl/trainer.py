"""`LoptiGRPOTrainer`: when TRL's GRPO trainer calls the pure functions of weights and phases."""

import copy
import functools
import textwrap
from collections import defaultdict
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from lopti_trl.config import LoptiGRPOConfig
from lopti_trl.diagnostics import Diagnostics
from lopti_trl.diw import DIWTrainer
from lopti_trl.engines import replaced
from lopti_trl.lean import LeanGRPOTrainer
from lopti_trl.phases import (
    LOW,
    MicroStep,
    low_prob_mask,
    phase_schedule,
    prob_band_mask,
    prob_quantile,
)
from lopti_trl.rollout import EngineGRPOTrainer
from lopti_trl.sampling import SampledGRPOTrainer
from lopti_trl.update import (
    RolloutScores,
    at_positions,
    check_padding_free,
    concatenate,
    only_where,
    padding_free,
    score_by_length,
    valid_tokens,
)
from lopti_trl.weights import ar_weights

# loss types that average over the rows of a micro-batch
_ROW_MEAN_LOSS_TYPES = ("grpo", "sapo", "dr_grpo", "luspo")
# loss types whose gradient vanishes outside a clip range; the others shape the ratio smoothly
_CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo")


class Scored(NamedTuple):
    """What the policy's forward pass of a micro-step left for the metrics, all (B, T)."""

    gate: Tensor  # bool: tokens with a gradient
    logps: Tensor
    entropies: Tensor


class LoptiGRPOTrainer(EngineGRPOTrainer, LeanGRPOTrainer, DIWTrainer, SampledGRPOTrainer):
    """`trl.GRPOTrainer` with Advantage Reweighting [AR], Lopti, probability bands and [DIW].

    Takes the arguments of `GRPOTrainer`; `args` is a `LoptiGRPOConfig` (a plain `GRPOConfig` means
    every method off). With every method off it trains to the same bits as `GRPOTrainer`, but for
    the rollouts of a colocated vLLM engine: they follow `seed`, which TRL's do not.

    [AR] multiplies the advantages by a token weight. [Lopti] sweeps the rollout buffer twice, as
    `num_iterations=2` does: in each phase only that phase's tokens carry a gradient, while values,
    ratios, clipping and normalisers stay those of all tokens, so that at fixed parameters the two
    gradients add up to GRPO's. Source: arXiv 2505.12929.
    """

    _tag_names = ["trl", "grpo", "lopti"]  # noqa: RUF012 (TRL's own declaration)
    _name = "Lopti GRPO"
    _paper = {  # noqa: RUF012
        "title": "Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs",
        "id": "2505.12929",
        "citation": textwrap.dedent("""\
            @article{yang2025not,
                title   = {{Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs}},
                author  = {Zhihe Yang and Xufang Luo and Zilong Wang and Dongqi Han and
                           Zhiyuan He and Dongsheng Li and Yunjian Xu},
                year    = 2025,
                journal = {arXiv preprint arXiv:2505.12929},
            }"""),
    }

    def __init__(self, model, reward_funcs=None, args=None, *others, **kwargs):
        super().__init__(model, reward_funcs, args, *others, **kwargs)
        if not isinstance(self.args, LoptiGRPOConfig):
            self.args = copy.copy(self.args)  # the caller's object stays a GRPOConfig
            self.args.__class__ = LoptiGRPOConfig  # our fields read their class defaults: off
        if self.args.update_padding_free:
            check_padding_free(self.model)
        # What the policy's forward pass of one loss needs and leaves: see `_compute_loss`.
        self._gradient_gate: Tensor | None = None
        self._frozen_logps: Tensor | None = None
        self._position_offset = 0
        self._scored: Scored | None = None
        self._late_inputs: dict | None = None  # TRL reads the advantages after scoring
        self._rollout_scores: RolloutScores | None = None
        self._old_sums = 0.0  # for the metrics, over the optimizer step's micro-batches so far
        self._diagnostics: Diagnostics | None = None
        if self.args.uses_diagnostics:
            self._diagnostics = Diagnostics(self)
            self.add_callback(self._diagnostics)
        if self.args.uses_lopti:
            self.num_iterations *= 2  # two phases an iteration [Lopti]

    # Rollout: once per rollout batch

    def _generate_and_score_completions(self, inputs):
        self._seed_engine()
        if self.model.training and self.args.dynamic_sampling_rounds:
            inputs = self._replace_flat_groups(inputs)
        if not (self.model.training and (self.args.uses_token_probs or self._diagnostics)):
            return super()._generate_and_score_completions(inputs)
        if self._reads_update:
            with replaced(self, num_iterations=self.args.num_iterations):  # without the phases
                return super()._generate_and_score_completions(inputs)
        # TRL leaves old_per_token_logps out when gradient_accumulation_steps is a multiple of
        # steps_per_generation * num_iterations; a larger number of iterations never is.
        num_iterations = self.num_iterations + self.args.gradient_accumulation_steps
        observer = self._diagnostics.of_rollout() if self._diagnostics else nullcontext()
        with observer, replaced(self, num_iterations=num_iterations):
            rollout = super()._generate_and_score_completions(inputs)
        rollout |= self._memberships(rollout)
        if self._diagnostics:
            self._diagnostics.log_rollout(
                valid_tokens(rollout), rollout["advantages"], self._gradient_weights(rollout)
            )
            rollout |= self._diagnostics.watch(rollout)
            if not (self.args.uses_token_probs or self._has_old_logps):
                rollout["rollout_logps"] = rollout.pop("old_per_token_logps")
        return rollout

    @property
    def _has_old_logps(self) -> bool:
        """Whether plain TRL would compute pi_old: it takes the ratio as 1 if that is exact."""
        is_aligned = self.args.gradient_accumulation_steps % self._steps_per_rollout == 0
        corrects_engine = self.use_vllm and self.args.vllm_importance_sampling_correction
        return not is_aligned or corrects_engine

    @functools.cached_property
    def _reads_update(self) -> bool:
        """Whether the update's first forward pass gives pi_old, so that no pass for it is made.

        TRL takes the ratio as 1 there, for the same reason: the policy is still the rollout's.
        """
        args = self.args
        needs_before = args.prob_band is not None or args.lopti_quantile is not None or args.diw
        if needs_before or self._diagnostics or not (args.uses_ar or args.uses_lopti):
            return False
        with replaced(self, num_iterations=args.num_iterations):  # without the phases
            if self._has_old_logps:
                return False
        # the second phase needs the rows' places, which the layout knows
        return not args.uses_lopti or (bool(self._tricks) and not self._is_vlm)

    def _memberships(self, rollout: dict) -> dict[str, Tensor]:
        """Token sets that stay fixed over every pass of a rollout batch, (B, T) bool each."""
        old_logps, mask = rollout["old_per_token_logps"], valid_tokens(rollout)
        memberships = {}
        if self.args.uses_lopti:
            eta = self.args.lopti_eta
            if eta is None:
                eta = prob_quantile(self._gather_probs(old_logps, mask), self.args.lopti_quantile)
                self._log("lopti/eta", eta)
            memberships["low_prob_mask"] = low_prob_mask(old_logps, mask, eta)
            self._log("lopti/low_fraction", self._mean(memberships["low_prob_mask"], mask))
        if self.args.prob_band is not None:
            band = prob_band_mask(old_logps, mask, *self.args.prob_band)
            memberships["prob_band_mask"] = band
            self._log("prob_band/fraction", self._mean(band, mask))
        if self.args.uses_ar:
            self._log("ar/weight_mean", self._mean(self._token_weights(rollout), mask))
        return memberships

    def _gather_probs(self, old_logps: Tensor, mask: Tensor) -> Tensor:
        """pi_old of the valid tokens of all processes, (N,)."""
        no_token = 2.0  # no probability; ranks differ in length
        probs = old_logps[mask.bool()].float().exp()
        probs = self.accelerator.pad_across_processes(probs, dim=0, pad_index=no_token)
        probs = self.accelerator.gather(probs)
        return probs[probs != no_token]

    # Update: once per micro-step

    def _micro_step(self, steps_ago: int = 0) -> MicroStep:
        """Slice and phase of the current micro-step [Lopti]; TRL counts them in `_step`."""
        return phase_schedule(
            self._step - steps_ago,
            self.args.steps_per_generation,
            self.args.gradient_accumulation_steps,
            self.args.lopti_order,
            self.args.lopti_schedule,
        )

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        first = self._step % self.args.steps_per_generation
        if self.args.uses_lopti:
            first = self._micro_step().slice_index
            inputs = self._buffered_inputs[first]
        if self._tricks and "num_images" not in inputs:
            position = self._step % self.args.gradient_accumulation_steps
            if position == 0:
                last = first + self.args.gradient_accumulation_steps
                slices = self._buffered_inputs[first:last]
                rows = concatenate(slices)
                if self.args.uses_lopti and self._lacks_old_logps(rows):
                    rows["row"] = torch.arange(len(rows["prompt_ids"]), device=self.model.device)
                    self._rollout_scores = RolloutScores(slices)
                self._micro_batches = self._lay_out(rows)
            inputs = self._micro_batches[position]
        return inputs

    def training_step(self, model, inputs, num_items_in_batch):
        # a count, not a mean: the latest value stands, as for TRL's num_tokens
        self._metrics["train"]["rollout_batches"] = [self._step // self._steps_per_rollout + 1]
        return super().training_step(model, inputs, num_items_in_batch)

    def _compute_loss(self, model, inputs):
        watches = self.args.uses_token_probs or self._diagnostics
        if not (self.model.training and (watches or self._tricks)):
            return super()._compute_loss(model, inputs)
        if self._lacks_old_logps(inputs):
            inputs = self._late_inputs = dict(inputs)
        elif self.args.uses_ar:
            advantages = inputs["advantages"].unsqueeze(1) * self._token_weights(inputs)
            inputs = {**inputs, "advantages": advantages}  # (B, T) [AR]
        self._gradient_gate = self._trainable_tokens(inputs)
        self._frozen_logps = inputs.get("old_per_token_logps")
        self._position_offset = inputs.get("position_offset", 0)
        metrics = {name: list(values) for name, values in self._metrics["train"].items()}
        loss = super()._compute_loss(model, inputs)
        if self.loss_type in _ROW_MEAN_LOSS_TYPES:
            loss = loss * inputs.get("row_share", 1.0)
        if inputs.get("is_empty"):  # no row of any process: there is nothing to average
            self._metrics["train"] = defaultdict(list, metrics)
        if watches:
            self._log_scored(inputs, loss.detach())
        return loss

    def _token_weights(self, inputs: dict) -> Tensor:
        """(B, T) factor on the advantages."""
        return ar_weights(inputs["old_per_token_logps"].exp(), self.args.ar_alpha)

    def _gradient_weights(self, rollout: dict) -> Tensor:
        """(B, T) factor of the methods on a token's gradient, all phases together."""
        weights = self._token_weights(rollout)
        return weights * rollout["prob_band_mask"] if self.args.prob_band is not None else weights

    def _trainable_tokens(self, inputs: dict) -> Tensor:
        """(B, T) bool: tokens that carry a gradient in this micro-step."""
        trainable = valid_tokens(inputs).bool()
        if self.args.uses_lopti and not self._lacks_old_logps(inputs):
            low = inputs["low_prob_mask"]
            trainable = trainable & self._of_phase(low)
        if self.args.prob_band is not None:
            trainable = trainable & inputs["prob_band_mask"]
        return trainable

    def _of_phase(self, low: Tensor) -> Tensor:
        """(B, T) bool: the low-probability tokens or the others, as the phase is [Lopti]."""
        return low if self._micro_step().phase == LOW else ~low

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        score = super()._get_per_token_logps_and_entropies
        gate, self._gradient_gate = self._gradient_gate, None
        has_tricks = self.model.training and not kwargs.get("num_images")
        if has_tricks and "padding_free" in self._tricks:
            model = padding_free(model)
        if gate is None:
            # pi_old and the reference, over the whole rollout batch
            is_observed = self._diagnostics is not None and self._diagnostics.awaits_rollout
            if is_observed:
                score = functools.partial(self._diagnostics.score, score)
            if has_tricks and "trim" in self._tricks:
                logps = score_by_length(
                    lambda *batch: score(*batch)[0], model, *args, kwargs["batch_size"]
                )
                scored = logps, None, None
            else:
                scored = score(model, *args, **kwargs)
            return (self._diagnostics.keep(scored[0]), None, None) if is_observed else scored
        if self._position_offset:
            model = at_positions(self._position_offset, model)
        project = "project" in self._tricks
        if project:
            model = only_where(gate, model)
        logps, entropies, aux_loss = score(model, *args, **kwargs)
        if self._late_inputs is not None:
            gate = self._take_old_logps(self._late_inputs, gate, logps.detach())
        self._scored = Scored(gate, logps.detach(), entropies.detach())
        # [Lopti] the value stays, the gradient goes: ratios, clipping, KL and normalisers of every
        # loss type are untouched, so that the phases' gradients add up to the whole one
        frozen = (
            self._frozen_logps if project and self._frozen_logps is not None else logps.detach()
        )
        logps = torch.where(gate, logps, frozen)
        entropies = torch.where(gate, entropies, entropies.detach())
        if aux_loss is not None and self._is_second_phase:
            aux_loss = aux_loss.detach()  # the router's loss has no tokens to split: it acts once
        return logps, entropies, aux_loss

    def _lacks_old_logps(self, inputs: dict) -> bool:
        """Whether the forward pass of this micro-step is the one that gives pi_old."""
        return self._reads_update and "old_per_token_logps" not in inputs

    def _take_old_logps(self, inputs: dict, valid: Tensor, logps: Tensor) -> Tensor:
        """Weights [AR] and gate [Lopti] of the loss that is being computed, from its log pi_old."""
        self._late_inputs = None
        weights = ar_weights(logps.exp(), self.args.ar_alpha)
        inputs["advantages"] = inputs["advantages"].unsqueeze(1) * weights
        low, gate = torch.zeros_like(valid), valid
        if self.args.uses_lopti:
            low = self._rollout_scores.add(inputs["row"], valid, logps, self.args.lopti_eta)
            gate = valid & self._of_phase(low)
        self._old_sums += torch.stack([(weights * valid).sum(), low.sum(), valid.sum()]).float()
        if (self._step + 1) % self.args.gradient_accumulation_steps == 0:
            weight_sum, num_low, num_tokens = self.accelerator.reduce(self._old_sums).tolist()
            self._old_sums = 0.0
            if self.args.uses_ar:
                self._log("ar/weight_mean", weight_sum / max(num_tokens, 1))
            if self.args.uses_lopti:
                self._log("lopti/low_fraction", num_low / max(num_tokens, 1))
        return gate

    @property
    def _is_second_phase(self) -> bool:
        first = "low" if self.args.lopti_order == "low_first" else "high"
        return self.args.uses_lopti and self._micro_step().phase != first

    # Metrics

    def _get_grad_norm(self, model, grad_norm=None):
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.args.uses_lopti:
            phase = self._micro_step(steps_ago=1).phase  # the counter has moved on already
            self._log(f"lopti/{phase}/grad_norm", grad_norm)
        return grad_norm

    def _ratio(self, inputs: dict, logps: Tensor, old_logps: Tensor) -> Tensor:
        """pi / pi_old as the loss takes it: (B, T), or (B, 1) of whole sequences."""
        log_ratio = logps - old_logps
        if self.args.importance_sampling_level == "sequence":
            mask = valid_tokens(inputs)
            log_ratio = (log_ratio * mask).sum(1, keepdim=True)
            log_ratio = log_ratio / mask.sum(1, keepdim=True).clamp(min=1)
        return log_ratio.exp()

    def _is_clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """(B, T) bool: outside the clip range, on the side where the gradient ends."""
        lowest, highest = 1 - self.epsilon_low, 1 + self.epsilon_high
        if self.loss_type == "cispo":  # TRL caps the ratio itself, from above only
            lowest, highest = 0.0, self.epsilon_high
        return ((ratio < lowest) & (advantages < 0)) | ((ratio > highest) & (advantages > 0))

    def _log_scored(self, inputs: dict, loss: Tensor):
        """Log this micro-step's phase: loss, and ratio, clipping and entropy of its own tokens."""
        in_phase, logps, entropies = self._scored
        # TRL's loss must not see pi_old where TRL would not compute it
        old_logps = inputs.get("old_per_token_logps", inputs.get("rollout_logps", logps))
        ratio = self._ratio(inputs, logps, old_logps)
        advantages = inputs["advantages"].reshape(len(ratio), -1)
        clipped = self._is_clipped(ratio, advantages)
        if self._diagnostics:
            trained = in_phase & (advantages != 0)
            has_clipping = self.loss_type in _CLIPPED_LOSS_TYPES
            self._diagnostics.add_update(
                old_logps, trained, logps, clipped if has_clipping else None
            )
        values = (ratio, clipped, entropies, torch.ones_like(entropies))
        sums = torch.stack([*((value * in_phase).sum().float() for value in values), loss.float()])
        *sums, num_tokens, loss_sum = self.accelerator.reduce(sums).tolist()
        ratio_mean, clip_ratio, entropy = (value / max(num_tokens, 1) for value in sums)
        if num_tokens and "project" in self._tricks:
            self._metrics["train"]["entropy"][-1] = entropy  # TRL counted the others as zeros
        if not self.args.uses_lopti:
            return
        prefix = f"lopti/{self._micro_step().phase}"
        # the log averages over micro-steps, a step's loss is their sum
        loss_of_step = loss_sum / self.accelerator.num_processes
        self._log(f"{prefix}/loss", loss_of_step * self.current_gradient_accumulation_steps)
        if num_tokens:
            self._log(f"{prefix}/ratio_mean", ratio_mean)
            self._log(f"{prefix}/entropy", entropy)
            if self.loss_type in _CLIPPED_LOSS_TYPES:
                self._log(f"{prefix}/clip_ratio", clip_ratio)
