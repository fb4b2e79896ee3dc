"""The micro-batches of an optimizer step in TRL's trainer, laid out anew by update.py."""

import functools
import inspect

import torch
from torch import Tensor

from lopti_trl.checkpoint import ResumableGRPOTrainer
from lopti_trl.update import Layout, base_model, lay_out, take, valid_tokens


class LeanGRPOTrainer(ResumableGRPOTrainer):
    """`ResumableGRPOTrainer` that lays out micro-batches as the `update_` options say.

    A subclass says in `_trainable_tokens` which tokens carry a gradient, and asks for the layout.
    """

    @functools.cached_property
    def _tricks(self) -> frozenset[str]:
        """The update_ options in force."""
        tricks = self.args.update_tricks
        if self.aux_loss_enabled:  # a mean over the tokens of the micro-batch
            tricks -= {"balance", "skip", "cut"}
        if "position_ids" not in inspect.signature(base_model(self.model).forward).parameters:
            tricks -= {"trim"}  # a recurrent model sees the padding on the left
        return tricks

    def _lay_out(self, rows: dict) -> list[dict]:
        """The micro-batches of an optimizer step over these rows."""
        trainable = self._trainable_tokens(rows)
        layouts = lay_out(
            rows["prompt_mask"],
            rows["completion_mask"],
            trainable,
            (rows["advantages"] == 0) & (self.beta == 0),
            self.args.gradient_accumulation_steps,
            balance="balance" in self._tricks,
            skip="skip" in self._tricks,
            cut="cut" in self._tricks,
        )
        num_rows = self._log_savings(rows, trainable, layouts)
        heights = torch.tensor([len(layout.rows) for layout in layouts], device=trainable.device)
        heights = self.accelerator.gather(heights).view(-1, len(layouts)).amax(0).clamp(min=1)
        return [
            take(rows, layout, "trim" in self._tricks, height)
            | {
                # TRL takes a mean over the rows it is given
                "row_share": height / self.args.per_device_train_batch_size,
                "is_empty": not count,
            }
            for layout, count, height in zip(layouts, num_rows, heights.tolist(), strict=True)
        ]

    def _log_savings(self, rows: dict, trainable: Tensor, layouts: list[Layout]) -> list[float]:
        """Log what the layout saves. Returns the rows in each micro-batch, of all processes."""
        valid = valid_tokens(rows)
        scored = trainable if "project" in self._tricks else valid
        sums = [
            *(len(layout.rows) for layout in layouts),
            len(valid),
            sum(
                layout.num_useful if "padding_free" in self._tricks else layout.num_tokens
                for layout in layouts
            ),
            sum(layout.num_useful for layout in layouts),
            sum(scored[layout.rows].sum() for layout in layouts),
            valid.sum(),
        ]
        sums = torch.tensor(sums, dtype=torch.float, device=valid.device)
        *num_rows, total, computed, useful, projected, valid = self.accelerator.reduce(
            sums
        ).tolist()
        self._log("update/rows_skipped", 1 - sum(num_rows) / total)
        self._log("update/padding_fraction", 1 - useful / max(computed, 1))
        self._log("update/tokens_projected", projected / max(valid, 1))
        return num_rows

    # Metrics

    def _mean(self, values: Tensor, mask: Tensor) -> float:
        """Mean of (B, T) values over the valid tokens of all processes."""
        sums = torch.stack([(values * mask).sum().float(), mask.sum().float()])
        total, count = self.accelerator.reduce(sums).tolist()
        return total / max(count, 1)

    def _log(self, name: str, value: Tensor | float):
        self._metrics["train"][name].append(float(value))
