"""How the rows of an optimizer step are laid out in micro-batches: less padding, no idle rows.

R = rows of an optimizer step on this process, P / T = prompt / completion tokens,
K = micro-batches. Rows never leave their optimizer step, so every step sees the rows that stock
TRL gives it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer import utils as trl_utils

from lopti_trl.phases import low_prob_mask

PACKABLE = ("flash_attention_2", "flash_attention_3", "sdpa", "eager")


def valid_tokens(inputs: dict) -> Tensor:
    """(B, T): 1 on tokens that TRL's loss counts: not padding, not a tool's output."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def base_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model without the wrapper that PEFT puts around it."""
    return model.get_base_model() if is_peft_model(model) else model


class Layout(NamedTuple):
    """One micro-batch: which rows, cut to which lengths."""

    rows: list[int]  # indices into the step's rows; empty if there is nothing left to do
    prompt_lengths: list[int]
    completion_lengths: list[int]  # up to the last token that the gradient needs

    @property
    def num_useful(self) -> int:
        """Tokens that the gradient needs."""
        return sum(self.prompt_lengths) + sum(self.completion_lengths)

    @property
    def width(self) -> tuple[int, int]:
        """Longest prompt and completion."""
        return max(self.prompt_lengths, default=0), max(self.completion_lengths, default=0)

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding included."""
        return len(self.rows) * sum(self.width)


def partition_by_length(
    prompt_lengths: Tensor,  # (R,)
    completion_lengths: Tensor,  # (R,)
    num_micro_batches: int,  # K
    max_tokens: int,  # of a micro-batch, padding included; at least any row's length
) -> list[list[int]]:  # K lists of rows, some maybe empty
    """The split of length-sorted rows into at most K runs with the fewest padded tokens.

    Dynamic programme over the sorted rows: least[k][j] = min_i least[k - 1][i] + cost(i, j), where
    rows i..j-1 form a micro-batch. `max_tokens` bounds the peak memory. If K runs cannot keep
    within it, it gives way.
    """
    num_rows = len(prompt_lengths)
    order = (prompt_lengths + completion_lengths).argsort(descending=True, stable=True)
    prompts, completions = prompt_lengths[order].double(), completion_lengths[order].double()
    cost = torch.full((num_rows + 1, num_rows + 1), torch.inf, dtype=torch.double)
    for first in range(num_rows):
        width = prompts[first:].cummax(0).values + completions[first:].cummax(0).values
        cost[first, first + 1 :] = width * torch.arange(1, num_rows - first + 1)
    bounded = cost.masked_fill(cost > max_tokens, torch.inf)
    cuts = _cheapest_cuts(bounded, num_micro_batches) or _cheapest_cuts(cost, num_micro_batches)
    runs = [order[i:j].tolist() for i, j in zip([0, *cuts], [*cuts, num_rows], strict=True)]
    runs = [run for run in runs if run]
    return runs + [[]] * (num_micro_batches - len(runs))


def _cheapest_cuts(cost: Tensor, num_runs: int) -> list[int] | None:
    """Where to cut 0..R into at most `num_runs` runs of least total cost; None if they cannot."""
    num_rows = len(cost) - 1
    least, choices = cost[0].clone(), []
    least[0] = 0.0
    for _ in range(num_runs - 1):
        with_empty = cost.clone().fill_diagonal_(0.0)  # a run may be empty
        least, choice = (least[:, None] + with_empty).min(dim=0)
        choices.append(choice)
    if least[num_rows].isinf():
        return None
    cuts = [num_rows]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return cuts[:0:-1]


def lay_out(
    prompt_mask: Tensor,  # (R, P), left padded
    completion_mask: Tensor,  # (R, T), right padded: tokens that are attended to
    trainable: Tensor,  # (R, T) bool: tokens that carry a gradient in this step
    idle: Tensor,  # (R,) bool: rows whose gradient is zero whatever their tokens
    num_micro_batches: int,
    *,
    balance: bool,  # rows may change micro-batch
    skip: bool,  # rows without gradient may leave
    cut: bool,  # tokens after a row's last trainable one may leave (causal attention)
) -> list[Layout]:
    """One layout per micro-batch; those beyond the rows left are empty."""
    num_rows, width = completion_mask.shape
    positions = torch.arange(1, width + 1, device=completion_mask.device)
    needed = trainable if cut else completion_mask.bool()
    prompt_lengths = prompt_mask.sum(1).cpu()
    completion_lengths = (needed * positions).amax(1).cpu()
    active = (~idle & trainable.any(1)).cpu() if skip else torch.ones(num_rows, dtype=torch.bool)
    rows = active.nonzero().flatten()
    stock = torch.arange(num_rows).chunk(num_micro_batches)
    if balance and len(rows):
        tokens = (prompt_mask.size(1) + width) * len(stock[0])  # of a stock micro-batch
        runs = partition_by_length(
            prompt_lengths[rows], completion_lengths[rows], num_micro_batches, tokens
        )
        groups = [rows[run].tolist() for run in runs]
    else:
        groups = [[row for row in chunk.tolist() if active[row]] for chunk in stock]
    return [
        Layout(group, prompt_lengths[group].tolist(), completion_lengths[group].tolist())
        for group in groups
    ]


def concatenate(slices: list[dict]) -> dict:
    """Rows of several slices of the rollout buffer as one; scalars are the first slice's."""
    return {
        key: torch.cat([piece[key] for piece in slices]) if value.ndim else value
        for key, value in slices[0].items()
    }


def take(rows: dict, layout: Layout, trim: bool, height: int = 1) -> dict:
    """The micro-batch of a layout, filled up to `height` rows with some that no mask counts.

    TRL gathers a number a row, so every process needs as many rows. An empty layout's are of two
    tokens: every process goes forward and backward the same number of times, as sharded models
    need, and the gradient is a zero.
    """
    filler = [0] * (height - len(layout.rows))
    device = rows["prompt_ids"].device
    index = torch.tensor([*layout.rows, *filler], device=device)
    lengths = torch.tensor([*layout.completion_lengths, *filler], device=device)
    prompt_width, width = rows["prompt_ids"].size(1), rows["completion_ids"].size(1)
    if trim or not layout.rows:
        prompt_width, width = (max(longest, 1) for longest in layout.width)
    batch = {}
    for key, value in rows.items():
        if value.ndim:
            value = value[index]
        if value.ndim == 2:
            value = value[:, -prompt_width:] if key.startswith("prompt_") else value[:, :width]
        batch[key] = value
    batch["position_offset"] = rows["prompt_ids"].size(1) - prompt_width
    batch["completion_mask"] *= torch.arange(width, device=device) < lengths[:, None]
    return batch


class RolloutScores:
    """pi_old of a rollout batch, gathered from the micro-batches of its first optimizer step.

    The slices of the rollout buffer then have `old_per_token_logps` and `low_prob_mask` (B, T), as
    from a pass of its own. Rows that the step skips keep zeros: no later phase has them either.
    """

    def __init__(self, slices: list[dict]):  # of the rollout buffer, in order
        sizes = [len(piece["completion_ids"]) for piece in slices]
        ids = torch.cat([piece["completion_ids"] for piece in slices])
        self.logps = torch.zeros_like(ids, dtype=torch.float)  # (R, T)
        self.low = torch.zeros_like(ids, dtype=torch.bool)
        views = zip(slices, self.logps.split(sizes), self.low.split(sizes), strict=True)
        for piece, logps, low in views:
            piece |= {"old_per_token_logps": logps, "low_prob_mask": low}

    def add(
        self,
        rows: Tensor,  # (B,), of R
        valid: Tensor,  # (B, T') bool: tokens of these rows; T' may be cut
        logps: Tensor,  # (B, T')
        eta: float,
    ) -> Tensor:  # (B, T') bool
        """Keep a micro-batch's log pi_old; returns its low-probability tokens [Lopti]."""
        low = low_prob_mask(logps, valid, eta)
        row, column = valid.nonzero(as_tuple=True)
        place = rows[row], column
        self.logps[place], self.low[place] = logps[valid].float(), low[valid]
        return low


@contextmanager
def _compact_head() -> Iterator[None]:
    """Let TRL's fused head project the scored positions alone on CPU too.

    TRL does so where Triton runs and keeps fixed shapes elsewhere, for the sake of Neuron.
    """
    original = trl_utils._use_triton
    trl_utils._use_triton = lambda device: device.type != "neuron"
    try:
        yield
    finally:
        trl_utils._use_triton = original


def only_where(
    scored: Tensor,  # (B, T) bool
    model: Callable,  # with TRL's fused head
) -> Callable:
    """The model, with its LM head applied only to these completion tokens; elsewhere log-prob 0."""

    def score(*, labels: Tensor, **inputs):
        ignored = torch.zeros_like(labels, dtype=torch.bool)
        ignored[:, -scored.size(1) :] = ~scored
        with _compact_head():
            return model(labels=labels.masked_fill(ignored, -100), **inputs)

    return score


def at_positions(offset: int, model: Callable) -> Callable:
    """The model, with the positions that its tokens had before `offset` columns were trimmed.

    Attention by RoPE depends on differences alone, but its rounding does not.
    """

    def score(*, input_ids: Tensor, **inputs):
        positions = torch.arange(input_ids.size(1), device=input_ids.device) + offset
        return model(input_ids=input_ids, position_ids=positions.expand_as(input_ids), **inputs)

    return score


def padding_free(model: Callable) -> Callable:
    """The model, fed a batch's tokens as one sequence, in which positions restart with each row.

    Flash attention reads the rows' bounds from the positions; for sdpa and eager transformers makes
    a block-diagonal mask of them. Log-probs and entropies come back in the batch's shape.
    """

    def score(*, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **inputs):
        inputs.pop("position_ids", None)  # of the padded batch
        valid = attention_mask.bool()
        positions = attention_mask.cumsum(1)[valid] - 1
        outputs = model(
            input_ids=input_ids[valid][None],
            attention_mask=None,
            position_ids=positions[None],
            labels=labels[valid][None],  # rows start with a prompt token: none scores another row
            **inputs,
        )
        for name in ("log_probs", "entropy", "log_sum_sq_probs"):
            if (scores := outputs.get(name)) is not None:
                scores = torch.nn.functional.pad(scores, (1, 0))  # the first token has none
                outputs[name] = scores.new_zeros(valid.shape).masked_scatter(valid, scores)
        return outputs

    return score


def check_padding_free(model: PreTrainedModel) -> None:
    """Raise ValueError if rows in one sequence would see each other in this model."""
    implementation = model.config._attn_implementation
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
    strange = layers - {"full_attention", "sliding_attention"}
    if not implementation.startswith(PACKABLE) or strange:
        raise ValueError(
            "update_padding_free needs a model whose layers all attend, with "
            f"attn_implementation in {', '.join(PACKABLE)}; here it is {implementation}"
            f"{f', with layers of {strange}' if strange else ''}. Set update_padding_free to false."
        )


def score_by_length(
    score: Callable,  # (model, input_ids, attention_mask, width) -> log-probs (..., B, width)
    model: Callable,
    input_ids: Tensor,  # (B, P + T), prompts left and completions right padded
    attention_mask: Tensor,  # (B, P + T)
    width: int,  # T
    batch_size: int,
) -> Tensor:  # (..., B, T), 0 where no row of the same batch has a token
    """Score rows of like lengths together, each batch cut to its own longest prompt and completion.

    TRL scores the rows as they come, all padded to the longest.
    """
    prompt_width = input_ids.size(1) - width
    prompts = attention_mask[:, :prompt_width].sum(1)
    completions = attention_mask[:, prompt_width:].sum(1)
    result = None
    for rows in (prompts + completions).argsort(descending=True).split(batch_size):
        offset = prompt_width - int(prompts[rows].max())
        length = max(int(completions[rows].max()), 1)
        span = slice(offset, prompt_width + length)
        logps = score(
            at_positions(offset, model), input_ids[rows, span], attention_mask[rows, span], length
        )
        if result is None:
            result = logps.new_zeros(*logps.shape[:-2], len(input_ids), width)
        result[..., rows, :length] = logps
    return result
