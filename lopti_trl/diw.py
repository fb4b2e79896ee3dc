"""Dynamic importance weighting [DIW] in TRL's trainer: its reference, temperature and warm-up."""

import copy
import logging
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOConfig
from trl.trainer import grpo_trainer

from lopti_trl.checkpoint import ResumableGRPOTrainer
from lopti_trl.diw_config import DIWConfig
from lopti_trl.update import valid_tokens
from lopti_trl.weights import (
    diw_weights,
    effective_sample_ratio,
    energy_deviation,
    linear_schedule,
    log_prob_ratio,
    ratio_filter,
    sequence_softmax,
    softmax_scores,
)

logger = logging.getLogger(__name__)

STATE_FILE = "diw.pt"
WINDOW = 10  # optimizer steps or logs over which a value is averaged before it is compared
MIN_SEQUENCES = 512  # of an optimizer step; fewer give noisy weights


class DIWTrainer(ResumableGRPOTrainer):
    """Multiplies advantages by dynamic importance weights; off unless `args.diw` says so.

    TRL scores the policy inside its loss and reads the advantages afterwards. The weights of the
    current policy need those very scores, so they reach the advantages in between.
    """

    _diw_inputs: dict | None = None  # of the loss that is being computed
    _diw_sums: Tensor | float = 0.0  # of the optimizer step's micro-batches
    _temperature = None
    _warmup_end: int | None = None  # where it ended early
    _is_whole = False  # whether this process has started ZeRO's frozen groups

    def __init__(self, model, reward_funcs=None, args=None, *others, **kwargs):
        if not (isinstance(args, DIWConfig) and args.diw):
            super().__init__(model, reward_funcs, args, *others, **kwargs)
            return
        is_adapted = not isinstance(model, str) and is_peft_model(model)
        if args.diw_warmup and (is_adapted or kwargs.get("peft_config") is not None):
            raise ValueError(
                "diw_warmup=True trains the last block's own weights, which PEFT freezes. Set "
                "diw_warmup to false, or train without an adapter."
            )
        with _reference_of(model, args):
            super().__init__(model, reward_funcs, args, *others, **kwargs)
        self.beta = args.beta
        self._spreads = []
        if args.diw_learn_tau:
            self._temperature = Temperature(
                args.diw_tau,
                args.diw_tau_min,
                args.diw_target_ess,
                args.diw_tau_learning_rate,
                self.accelerator.device,
            )
        if args.diw_warmup:
            self._last_block = last_block_parameters(self.model)
        self.add_callback(SymptomCallback())

    # Rollout

    def _generate_and_score_completions(self, inputs):
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        beta = self.beta
        if self.args.needs_reference:
            self.beta = beta or 1.0  # TRL scores the reference only for a KL term
        try:
            rollout = super()._generate_and_score_completions(inputs)
        finally:
            self.beta = beta
        if self.args.raft:
            rollout = {**rollout, "advantages": (rollout["advantages"] > 0).float()}
        return rollout

    # Update

    def _compute_loss(self, model, inputs):
        if self.model.training and self.args.diw:
            inputs = self._diw_inputs = dict(inputs)
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        scored = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        inputs, self._diw_inputs = self._diw_inputs, None
        if inputs is not None:
            inputs["advantages"] = self._weigh(inputs, scored[0].detach())
            if self.args.diw_pure:
                # TRL then takes the policy's own: a ratio of 1 with the gradient of log pi
                del inputs["old_per_token_logps"]
        return scored

    def _weigh(self, inputs: dict, logps: Tensor) -> Tensor:
        """(B, T) advantages, shaped by energy and times the importance weights [DIW]."""
        args, xi = self.args, self._xi
        mask = valid_tokens(inputs).bool()
        old_logps = inputs["old_per_token_logps"]
        policy = logps if args.diw_policy == "current" else old_logps
        reference = inputs["ref_per_token_logps"] if args.diw_reference == "initial" else old_logps
        advantages = inputs["advantages"].reshape(len(mask), -1)
        has_gradient = mask & (advantages != 0)
        if args.diw_energy_beta:
            deviation = energy_deviation(
                policy, inputs["ref_per_token_logps"], mask, xi, args.diw_energy_lambda
            )
            advantages = advantages - args.diw_energy_beta * deviation
        tau = args.diw_tau if self._temperature is None else self._temperature.tau.item()
        weights = diw_weights(
            policy,
            reference,
            xi,
            args.diw_mode,
            advantages,
            args.diw_r_max,
            args.diw_softmax,
            tau,
            mask,
        )
        self._observe_weights(log_prob_ratio(policy, reference), weights, has_gradient)
        return advantages * weights

    @property
    def _xi(self) -> float:
        args, horizon = self.args, self.args.diw_xi_horizon
        if horizon is None:
            horizon = self.state.max_steps - args.diw_xi_begin
        return linear_schedule(
            self.state.global_step, args.diw_xi_start, args.diw_xi_end, args.diw_xi_begin, horizon
        )

    def _observe_weights(self, log_r: Tensor, weights: Tensor, mask: Tensor):
        """Add up what the optimizer step's metrics and temperature need.

        Only tokens of rows with an advantage: those without may be left out of the update.
        """
        args, xi = self.args, self._xi
        kept = mask & ratio_filter(log_r, args.diw_r_max)
        ess, slope = effective_sample_ratio(weights, kept).sum(), torch.zeros_like(weights[0, 0])
        if self._temperature is not None:
            # before the cap, where every weight depends on tau
            scores = softmax_scores(log_r, xi, args.diw_softmax)
            smoothed = sequence_softmax(scores, kept, self._temperature.tau)
            ess, slope = self._temperature.slope(effective_sample_ratio(smoothed, kept).sum())
        excess = (weights - 1) * mask  # squares of small differences, and not of ones
        values = (
            mask,
            excess,
            excess**2,
            mask & (log_r.exp() > xi),
            mask & ~kept,
            kept.any(1),
        )
        sums = [*(value.sum().float() for value in values), ess, slope]
        self._diw_sums = self._diw_sums + torch.stack(sums)

    def training_step(self, model, inputs, num_items_in_batch):
        if self.args.uses_warmup and self.is_deepspeed_enabled:
            self._set_groups()
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._in_warmup and not self.is_deepspeed_enabled:
            for name, parameter in self.model.named_parameters():
                if name not in self._last_block:
                    parameter.grad = None  # the optimizer then skips it, weight decay and all
        if self.args.diw and self.accelerator.sync_gradients:
            self._end_step()
        return loss

    def _end_step(self):
        """Log the optimizer step's weights, learn from them, and see whether they settled."""
        sums = self.accelerator.reduce(self._diw_sums).tolist()
        num_tokens, excess, squares, capped, filtered, num_rows, ess, slope = sums
        self._diw_sums = 0.0
        metrics = {"xi": self._xi}
        if self.args.diw_warmup:
            metrics["in_warmup"] = float(self._in_warmup)
        if self.args.diw_softmax != "off":
            metrics["tau"] = (
                self.args.diw_tau if self._temperature is None else self._temperature.tau.item()
            )
        if num_tokens:
            mean = excess / num_tokens
            spread = max(squares / num_tokens - mean**2, 0.0) ** 0.5
            metrics |= {
                "weight_mean": 1 + mean,
                "weight_std": spread,
                "capped_fraction": capped / num_tokens,
                "filtered_fraction": filtered / num_tokens,
            }
            self._spreads = [*self._spreads, spread][-2 * WINDOW :]
        if num_rows:
            metrics["ess"] = ess / num_rows
            if self._temperature is not None:
                self._temperature.step(ess / num_rows, slope / num_rows)
        for name, value in metrics.items():
            self._metrics["train"][f"diw/{name}"].append(value)
        tolerance = self.args.diw_warmup_tolerance
        if self._in_warmup and tolerance is not None and has_settled(self._spreads, tolerance):
            self._warmup_end = self.state.global_step + 1

    # Warm-up of the last block

    @property
    def _in_warmup(self) -> bool:
        if not self.args.uses_warmup:
            return False
        end, steps = self._warmup_end, self.args.diw_warmup_steps
        if end is None:
            end = min(1000, self.state.max_steps // 10) if steps is None else steps
        return self.state.global_step < end

    def create_optimizer(self, model=None):
        optimizer = super().create_optimizer(model)
        if self.args.uses_warmup and self.is_deepspeed_enabled:
            # ZeRO owns the gradients and flattens a group: what is frozen needs its own
            later = {
                parameter
                for name, parameter in (model or self.model).named_parameters()
                if name not in self._last_block
            }
            for parameter in later:
                parameter.register_hook(lambda grad: grad * 0 if self._in_warmup else grad)
            split_groups(optimizer, later)
        return optimizer

    def _set_groups(self):
        """Keep ZeRO's frozen groups where they are; after the warm-up start them afresh."""
        for group in self.optimizer.param_groups:
            if "later" not in group:
                raise ValueError(
                    "diw_warmup=True splits the parameter groups of the optimizer that the trainer "
                    "builds. Remove the optimizer of the DeepSpeed config, or set it to false."
                )
            group["weight_decay"] = 0.0 if group["later"] and self._in_warmup else group["decay"]
        if not (self._in_warmup or self._is_whole):
            forget_empty_steps(self.optimizer)
            self._is_whole = True

    # Checkpoint

    def _rollout_settings(self) -> dict:
        settings = super()._rollout_settings()
        return settings | {
            name: getattr(self.args, name)
            for name in DIWConfig.__dataclass_fields__
            if name.startswith("diw") or name == "raft"
        }

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        if self.args.diw and self.args.should_save:
            temperature = self._temperature and self._temperature.state_dict()
            state = {
                "temperature": temperature,
                "spreads": self._spreads,
                "warmup_end": self._warmup_end,
            }
            torch.save(state, Path(output_dir) / STATE_FILE)

    def _load_optimizer_and_scheduler(self, folder):
        super()._load_optimizer_and_scheduler(folder)
        path = folder and Path(folder) / STATE_FILE
        if self.args.diw and path and path.is_file():
            state = torch.load(path, map_location="cpu", weights_only=True)
            self._spreads, self._warmup_end = state["spreads"], state["warmup_end"]
            if self._temperature is not None and state["temperature"] is not None:
                self._temperature.load_state_dict(state["temperature"])


class Temperature:
    """tau = tau_min + softplus(rho), learnt towards a target effective sample ratio [DIW].

    The objective is (mean ESS ratio - target)^2 over the sequences of an optimizer step, of all
    processes: every process takes the same step. rho has an optimizer of its own, since FSDP2 and
    ZeRO cannot hold a parameter that is none of the model's.
    """

    def __init__(
        self,
        tau: float,  # first value
        tau_min: float,
        target_ess: float,
        learning_rate: float,
        device: torch.device | str = "cpu",
    ):
        self.tau_min, self.target_ess = tau_min, target_ess
        rho = torch.tensor(tau - tau_min, dtype=torch.float).expm1().log()
        self.rho = nn.Parameter(rho.where(rho.isfinite(), tau - tau_min).to(device))
        self.optimizer = torch.optim.Adam([self.rho], lr=learning_rate)

    @property
    def tau(self) -> Tensor:  # scalar, with a gradient to rho
        return self.tau_min + nn.functional.softplus(self.rho)

    def slope(self, ess: Tensor) -> tuple[Tensor, Tensor]:
        """An ESS ratio and its derivative by rho, both detached."""
        (slope,) = torch.autograd.grad(ess, self.rho)
        return ess.detach(), slope

    def step(self, ess: float, slope: float) -> None:
        """One step of Adam, from the mean ESS ratio and its derivative by rho."""
        self.rho.grad = torch.full_like(self.rho, 2 * (ess - self.target_ess) * slope)
        self.optimizer.step()

    def state_dict(self) -> dict:
        return {"rho": self.rho.detach(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.rho.data.copy_(state["rho"])
        self.optimizer.load_state_dict(state["optimizer"])


@contextmanager
def _reference_of(model: str | PreTrainedModel, args: GRPOConfig) -> Iterator[None]:
    """Let TRL build its frozen reference at beta = 0 too, and from a model in memory.

    TRL loads the reference from the path that the policy's config names, which a model in memory
    may not have, or may have moved away from: there it becomes a copy.
    """
    if isinstance(model, PreTrainedModel) and is_deepspeed_zero3_enabled():
        raise ValueError(
            "diw=True needs a reference model, and ZeRO-3 has split the model that was passed, so "
            "it cannot be copied. Pass the model's path, or use another back end."
        )
    beta, load = args.beta, grpo_trainer.create_model_from_path
    if args.needs_reference:
        args.beta = beta or 1.0
        if isinstance(model, PreTrainedModel):
            grpo_trainer.create_model_from_path = lambda *_, **__: copy.deepcopy(model).eval()
    try:
        yield
    finally:
        args.beta, grpo_trainer.create_model_from_path = beta, load


def last_block_parameters(model: PreTrainedModel) -> set[str]:
    """Names of the parameters of the last decoder block, the final norm and an untied head."""
    decoder = model.get_decoder()
    children = list(decoder.children())
    blocks = max((i for i, c in enumerate(children) if isinstance(c, nn.ModuleList)), default=None)
    if blocks is None:
        raise ValueError(
            f"diw_warmup=True found no list of blocks in {type(decoder).__name__}. Set diw_warmup "
            "to false."
        )
    modules = [children[blocks][-1], *children[blocks + 1 :], model.get_output_embeddings()]
    chosen = {parameter for module in modules for parameter in module.parameters()}
    chosen -= set(model.get_input_embeddings().parameters())
    return {name for name, parameter in model.named_parameters() if parameter in chosen}


def split_groups(optimizer: torch.optim.Optimizer, later: set[Tensor]) -> None:
    """Give each group's parameters in `later` a group of their own, marked so."""
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups.clear()
    for group in groups:
        for is_later in (False, True):
            params = [p for p in group["params"] if (p in later) is is_later]
            if params:
                marks = {"later": is_later, "decay": group["weight_decay"]}
                optimizer.add_param_group({**group, "params": params, **marks})


def forget_empty_steps(optimizer: torch.optim.Optimizer) -> None:
    """Set the step count of parameters that have seen no gradient to 0.

    Adam divides its averages by 1 - beta^step: after many empty steps the first real one would be
    several times too large.
    """
    for state in optimizer.state.values():
        averages = [v for k, v in state.items() if k != "step" and torch.is_tensor(v)]
        if "step" in state and not any(average.any() for average in averages):
            state["step"] = state["step"] * 0


def has_settled(spreads: list[float], tolerance: float) -> bool:
    """Whether the mean of the last WINDOW values is within `tolerance` of that of those before."""
    if len(spreads) < 2 * WINDOW:
        return False
    before, now = statistics.fmean(spreads[:WINDOW]), statistics.fmean(spreads[WINDOW:])
    return abs(now - before) <= tolerance * before


class Symptom(NamedTuple):
    name: str
    evidence: str
    remedy: str


def find_symptoms(rows: list[dict], max_steps: int) -> list[Symptom]:
    """What goes wrong in a run by its logs, oldest first, and what helps."""
    rows = [row for row in rows if "diw/xi" in row]
    if len(rows) <= WINDOW:
        return []
    symptoms, first, last = [], rows[:WINDOW], rows[-WINDOW:]
    capped = statistics.fmean(row.get("diw/capped_fraction", 0.0) for row in last)
    if capped > 0.2:
        symptoms.append(
            Symptom(
                "outputs too conservative",
                f"xi holds back {capped:.0%} of the tokens",
                "raise diw_xi_end (and diw_xi_start), or diw_tau with the softmax on",
            )
        )
    *earlier, latest = (row.get("grad_norm") or 0.0 for row in rows)
    norm = statistics.median(earlier)
    if rows[-1]["step"] <= max(0.1 * max_steps, 100) and latest > 5 * norm > 0:
        symptoms.append(
            Symptom(
                "early instability",
                f"grad_norm {latest:.3g}, median so far {norm:.3g}",
                "lower learning_rate by 30 to 50 %, set diw_warmup to true, or take more sequences "
                "an optimizer step",
            )
        )
    before, now = (statistics.fmean(row["entropy"] for row in part) for part in (first, last))
    if now < 0.5 * before:
        symptoms.append(
            Symptom(
                "falling diversity",
                f"entropy {now:.3g}, at first {before:.3g}",
                "set use_adaptive_entropy to true with entropy_target at the least entropy you "
                "want, raise diw_tau, or set diw_mode to zero",
            )
        )
    return symptoms


class SymptomCallback(TrainerCallback):
    """Warns of too few sequences at the start, and once of each symptom with its remedy."""

    def __init__(self):
        self.reported = set()

    def on_train_begin(self, args, state, control, **kwargs):
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        if rows < MIN_SEQUENCES and state.is_world_process_zero:
            logger.warning(
                "An optimizer step has %d sequences; below %d dynamic importance weights are "
                "noisy. Raise gradient_accumulation_steps (and steps_per_generation with it).",
                rows,
                MIN_SEQUENCES,
            )

    def on_log(self, args, state, control, **kwargs):
        for name, evidence, remedy in find_symptoms(state.log_history, state.max_steps):
            if name not in self.reported and state.is_world_process_zero:
                self.reported.add(name)
                logger.warning("Step %d, %s: %s. %s.", state.global_step, name, evidence, remedy)
