"""What dynamic importance weights do to rare tokens: weight and gradient share per band of pi_old.

Trains the laptop recipe and looks at some optimizer steps before they are taken: the mean weight
of the tokens of each band, and the norm of the gradient of that band alone, with the weights and
without them at the same parameters and rows. Writes a JSON and a Markdown table:

    python scripts/measure_diw.py --every 10 --output outputs/measure_diw -- --max_steps 80
"""

import argparse
import functools
import json
from pathlib import Path

import torch

from lopti_trl import LoptiGRPOTrainer
from lopti_trl.tasks import kk
from lopti_trl.train import load_datasets, load_tokenizer, parse_args
from lopti_trl.update import valid_tokens

BANDS = [[0.0, 0.25], [0.25, 0.5], [0.5, 0.75], [0.75, 1.0]]


class MeasuringTrainer(LoptiGRPOTrainer):
    every = 1
    rows = ()
    is_measuring = False
    _factors = None

    def _weigh(self, inputs, logps):
        weighted = super()._weigh(inputs, logps)
        self._factors = weighted / inputs["advantages"].reshape(len(logps), -1)
        return weighted

    def _compute_loss(self, model, inputs):
        is_due = self.state.global_step % self.every == 0 or self.state.global_step == 1
        if is_due and not self.is_measuring:
            self.is_measuring = True
            kept = {k: list(v) for k, v in self._metrics["train"].items()}, self._diw_sums
            self.rows = [*self.rows, self.measure(model, inputs)]
            self._metrics["train"].clear()
            self._metrics["train"].update(kept[0])
            self._diw_sums, self.is_measuring = kept[1], False
        return super()._compute_loss(model, inputs)

    def measure(self, model, inputs) -> dict:
        probs, mask = inputs["old_per_token_logps"].exp(), valid_tokens(inputs).bool()
        counted = mask & (inputs["advantages"] != 0)[:, None]
        row = {"step": self.state.global_step, "xi": self._xi, "bands": []}
        for low, high in BANDS:
            inside = counted & (probs <= high) & ((probs > low) | (low == 0))
            norms = {}
            for name, is_on in (("diw", True), ("grpo", False)):
                self.args.diw, self.args.prob_band = is_on, [low, high]
                norms[name] = self.gradient_norm(model, {**inputs, **self._memberships(inputs)})
            row["bands"].append(
                {
                    "tokens": inside.sum().item() / max(counted.sum().item(), 1),
                    "weight": self._factors[inside].mean().item(),
                    "grew": (self._factors[inside] > 1).float().mean().item(),
                    "norm": norms,
                }
            )
        self.args.diw, self.args.prob_band = True, None
        return row

    def gradient_norm(self, model, inputs) -> float:
        loss = self.compute_loss(model, inputs)
        gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
        return torch.stack([g.norm() for g in gradients]).norm().item()


def table(rows: list[dict]) -> str:
    """Markdown: of each measured step and band."""
    lines = [
        "| step | xi | band of pi_old | tokens | mean w | w > 1 | gradient share, DIW | GRPO |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        totals = {k: sum(b["norm"][k] for b in row["bands"]) for k in ("diw", "grpo")}
        for (low, high), band in zip(BANDS, row["bands"], strict=True):
            shares = " | ".join(f"{band['norm'][k] / totals[k]:.3f}" for k in totals)
            lines.append(
                f"| {row['step']} | {row['xi']:.2f} | ({low}, {high}] | {band['tokens']:.3f} | "
                f"{band['weight']:.3f} | {band['grew']:.3f} | {shares} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="kk_tiny_diw.yaml")
    parser.add_argument("--every", type=int, default=10, help="optimizer steps between looks")
    parser.add_argument("--output", default="outputs/measure_diw")
    parser.add_argument("options", nargs="*", help="options of the run, after --")
    options = parser.parse_args()

    plain = ["--diw_softmax", "off", "--diw_learn_tau", "false", "--diw_warmup", "false"]
    whole = [f"--update_{name}=false" for name in ("balance", "skip", "trim")]
    task, args, model = parse_args(
        [
            "--config",
            options.config,
            "--output_dir",
            options.output,
            *plain,
            *whole,
            *options.options,
        ]
    )
    tokenizer = load_tokenizer(model)
    train_set, _ = load_datasets(task, tokenizer)
    trainer = MeasuringTrainer(
        model.model_name_or_path,
        functools.partial(kk.kk_reward, mode=task.reward_mode),
        args,
        train_dataset=train_set,
        processing_class=tokenizer,
    )
    trainer.every = options.every
    trainer.train()
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    text = table(trainer.rows)
    (output / "bands.json").write_text(json.dumps(trainer.rows, indent=1))
    (output / "bands.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
