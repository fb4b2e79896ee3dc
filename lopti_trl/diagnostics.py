"""Which tokens drive the update: exact statistics per band of pi_old, live and at no extra pass.

B = sequences, T = completion tokens, N = vocabulary, K = probability bands, Q = quantities.
pi_old is the probability of a sampled token under the policy that made the rollout.

Source of the questions: "Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs",
arXiv 2505.12929, figures 1 and 3 and proposition 4.2.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback
from trl.trainer.utils import add_fused_lm_head

from lopti_trl.update import base_model, concatenate, score_by_length, valid_tokens

_TOKENS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def logit_grad_norm(
    logps: Tensor,  # log pi of the sampled token
    log_sum_sq_probs: Tensor,  # log sum_v pi_v^2, as TRL's fused head returns it
) -> Tensor:  # same shape, in [0, sqrt(2)]
    """||d log pi / d logits|| = sqrt(1 - 2 pi + sum_v pi_v^2), of logits over the temperature.

    Written as (1 - pi)^2 plus the squares of the other probabilities, which lie between 0 and
    (1 - pi)^2: near pi = 1 the textbook form is mere rounding. In float32 a token's error is below
    3e-4, and at that only where pi > .997.
    """
    rest = -logps.expm1()
    others = log_sum_sq_probs.exp() - (2 * logps).exp()
    return (rest.square() + others.clamp(min=0).minimum(rest.square())).sqrt()


def band_names(edges: Sequence[float]) -> list[str]:
    """Of the K bands between K + 1 edges: "0-0.25", "0.25-0.5", ..."""
    return [f"{low:g}-{high:g}" for low, high in itertools.pairwise(edges)]


def band_index(probs: Tensor, edges: Sequence[float]) -> Tensor:
    """Which band a probability lies in, as `phases.prob_band_mask` has it: low < p <= high."""
    return torch.bucketize(probs, torch.tensor(edges[1:-1], device=probs.device, dtype=probs.dtype))


def band_sums(
    old_logps: Tensor,  # (B, T)
    mask: Tensor,  # (B, T): tokens that count
    values: Sequence[Tensor],  # Q of (B, T), or of what broadcasts to it
    edges: Sequence[float],  # K + 1, from 0 to 1
) -> Tensor:  # (K, 1 + Q)
    """Number of tokens and sum of every value in each band. Sums of parts add up to the whole's."""
    counted = mask.bool()
    bands = band_index(old_logps.exp(), edges)[counted]
    ones = torch.ones_like(old_logps)
    columns = [torch.broadcast_to(v, ones.shape)[counted].float() for v in (ones, *values)]
    sums = old_logps.new_zeros(len(edges) - 1, len(columns), dtype=torch.float)
    return sums.index_add_(0, bands, torch.stack(columns, dim=1))


def ratios(numerators: Tensor, denominators: Tensor) -> list[float | None]:
    """Elementwise quotients, None over nothing: a band without tokens has no mean."""
    pairs = zip(numerators.tolist(), denominators.expand_as(numerators).tolist(), strict=True)
    return [a / b if b else None for a, b in pairs]


def evenly(count: int, size: int) -> Tensor:
    """`count` indices spread over range(size), both ends included; count <= size."""
    return torch.linspace(0, size - 1, count).round().long()


def watched_rows(advantages: Tensor, share: float) -> Tensor:
    """Indices of ceil(share * B) rows: positive advantages first, spread over the batch.

    The number does not depend on the advantages, so that every process scores as many.
    """
    count = math.ceil(share * len(advantages))
    is_positive = (advantages > 0).cpu()
    chosen = []
    for rows in (is_positive.nonzero().flatten(), (~is_positive).nonzero().flatten()):
        taken = min(count - sum(map(len, chosen)), len(rows))
        chosen.append(rows[evenly(taken, len(rows))])
    return torch.cat(chosen)


class Diagnostics(TrainerCallback):
    """What a `LoptiGRPOTrainer` shows under `prob/`: the functions above at their moments.

    Only reads: training is the same with and without. Sums are reduced over the processes before
    they are divided, so that no result depends on padding, micro-batches or their number.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.edges: list[float] = trainer.args.diagnostics_bands
        self.names = band_names(self.edges)
        self._outputs = ["log_probs", "entropy"]  # of the head, which looks at it in every call
        self.awaits_rollout = False
        self._scored: Tensor | None = None
        self._update: Tensor | None = None
        add_fused_lm_head(
            base_model(trainer.model),
            trainer.temperature,
            trainer.args.cast_lm_head_to_fp32,
            self._outputs,
        )

    # The rollout, from the pass that computes pi_old

    @contextmanager
    def of_rollout(self) -> Iterator[None]:
        """The next scoring pass is pi_old's."""
        self.awaits_rollout = True
        try:
            yield
        finally:
            self.awaits_rollout = False

    def score(self, score, model, input_ids, attention_mask, width, **kwargs) -> tuple:
        """TRL's scoring method, with entropy and log sum_v pi_v^2 beside log pi_old: (3, B, T)."""
        squares = []

        def keep_squares(**inputs):
            outputs = model(**inputs)
            squares.append(outputs.log_sum_sq_probs[:, -width:])
            return outputs

        self._outputs.append("log_sum_sq_probs")
        try:
            logps, entropies, _ = score(
                keep_squares, input_ids, attention_mask, width, compute_entropy=True, **kwargs
            )
        finally:
            self._outputs.pop()
        return torch.stack([logps, entropies, torch.cat(squares)]), None, None

    def keep(self, scored: Tensor) -> Tensor:
        """Take what `score` returned; hands back log pi_old (B, T)."""
        self.awaits_rollout, self._scored = False, scored
        return scored[0]

    def log_rollout(self, mask: Tensor, advantages: Tensor, weights: Tensor):
        """`weights` (B, T): the method's factor on a token's gradient."""
        (old_logps, entropies, squares), self._scored = self._scored, None
        advantages = advantages.abs().view(len(mask), -1)
        gradients = advantages * weights * logit_grad_norm(old_logps, squares)
        sums = band_sums(old_logps, mask, (advantages, gradients, entropies), self.edges)
        tokens, advantages, gradients, entropies = self._reduce(sums).T
        self._log("token_share", ratios(tokens, tokens.sum()))
        self._log("advantage_share", ratios(advantages, advantages.sum()))
        self._log("grad_share", ratios(gradients, gradients.sum()))
        self._log("entropy", ratios(entropies, tokens))

    # The update, from its own forward passes

    def add_update(self, old_logps: Tensor, trained: Tensor, logps: Tensor, clipped: Tensor | None):
        """Sum up a micro-step's `trained` tokens, (B, T); `clipped` ones have no gradient left."""
        changes = logps.exp() - old_logps.exp()
        values = (changes,) if clipped is None else (changes, clipped)
        sums = band_sums(old_logps, trained, values, self.edges)
        self._update = sums if self._update is None else self._update + sums

    def on_step_end(self, args, state, control, **kwargs):
        if self._update is not None:
            tokens, *sums = self._reduce(self._update).T
            self._update = None
            for quantity, values in zip(("change", "clip_ratio"), sums, strict=False):
                self._log(quantity, ratios(values, tokens))
        if self.trainer._step % self.trainer._steps_per_rollout == 0:
            self._log_rise()

    # Before and after the whole update, on some rows

    def watch(self, rollout: dict) -> dict[str, Tensor]:
        """Which rows `_log_rise` scores again, by number (-1: none), and their log pi_old."""
        share = self.trainer.args.diagnostics_rows
        if not share or "num_images" in rollout:
            return {}
        rows = watched_rows(rollout["advantages"], share).to(rollout["advantages"].device)
        numbers = torch.full_like(rollout["completion_ids"][:, 0], -1)
        numbers[rows] = torch.arange(len(rows), device=rows.device)
        logps = torch.zeros_like(rollout["completion_ids"], dtype=torch.float)
        logps[rows] = self.score_rows({key: rollout[key][rows] for key in _TOKENS})
        return {"watched": numbers, "watched_logps": logps}

    def score_rows(self, rows: dict) -> Tensor:
        """log pi (B, T) without dropout, in batches that do not depend on the weights."""
        trainer, model = self.trainer, self.trainer.model
        ids, mask = joined(rows)
        width, batch_size = rows["completion_ids"].size(1), trainer.args.per_device_train_batch_size

        def score(*batch) -> Tensor:
            return trainer._get_per_token_logps_and_entropies(*batch)[0]

        was_training = model.training
        model.eval()
        with torch.no_grad():
            if "trim" in trainer._tricks:
                logps = score_by_length(score, model, ids, mask, width, batch_size)
            else:
                logps = score(model, ids, mask, width, batch_size)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # no backward pass follows, after which it would
                module.reshard()
        model.train(was_training)
        return logps

    def squares_of(self, rows: dict) -> Tensor:
        """log sum_v pi_v^2 (B, T) of a rollout, by a pass of its own."""
        trainer = self.trainer
        ids, mask = joined(rows)
        size, width = trainer.args.per_device_train_batch_size, rows["completion_ids"].size(1)
        score, model = trainer._get_per_token_logps_and_entropies, trainer.model
        model.eval()
        with torch.no_grad():
            return self.score(score, model, ids, mask, width, batch_size=size)[0][2]

    def _log_rise(self):
        """Share of the positive-advantage tokens whose probability rose, or stayed [Fig 3]."""
        rows = concatenate(self.trainer._buffered_inputs)
        if "watched" not in rows:
            return
        order = rows["watched"].argsort()[(rows["watched"] < 0).sum() :]
        rows = {key: value[order] for key, value in rows.items() if value.ndim}
        before, after = rows["watched_logps"], self.score_rows(rows)
        mask = valid_tokens(rows) * (rows["advantages"] > 0).unsqueeze(1)
        values = (after.exp() > before.exp(), after.exp() == before.exp())
        tokens, rose, tied = self._reduce(band_sums(before, mask, values, self.edges)).T
        self._log("rose", ratios(rose, tokens))
        self._log("tied", ratios(tied, tokens))

    def _reduce(self, sums: Tensor) -> Tensor:
        return self.trainer.accelerator.reduce(sums)

    def _log(self, quantity: str, values: list[float | None]):
        for name, value in zip(self.names, values, strict=True):
            if value is not None:
                self.trainer._log(f"prob/{quantity}/{name}", value)


def joined(rows: dict) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask (B, P + T) of prompts and completions."""
    ids, mask = (
        torch.cat([rows[f"prompt_{name}"], rows[f"completion_{name}"]], dim=1)
        for name in ("ids", "mask")
    )
    return ids, mask
