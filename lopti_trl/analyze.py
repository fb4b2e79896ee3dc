"""`analyze`: the paper's figures 1, 3 and 5 on a model, from rollouts and gradients of the trainer.

B = sequences, T = completion tokens, K = bands of pi_old. Nothing is trained: every update is
undone. Source: arXiv 2505.12929.
"""

import argparse
import importlib.metadata
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from tqdm.auto import tqdm
from trl import GRPOTrainer, ModelConfig
from trl.trainer.utils import split_tensor_dict

from lopti_trl.config import LoptiGRPOConfig
from lopti_trl.diagnostics import (
    band_names,
    band_sums,
    evenly,
    logit_grad_norm,
)
from lopti_trl.language import WORDS, load_word_classes, reward_correlation, word_frequencies
from lopti_trl.phases import low_prob_mask, prob_band_mask
from lopti_trl.train import (
    VERSIONED,
    TaskArguments,
    build_trainer,
    load_datasets,
    load_tokenizer,
    parse_args,
)
from lopti_trl.trainer import LoptiGRPOTrainer
from lopti_trl.update import valid_tokens
from lopti_trl.weights import ar_weights

Gradient = dict[str, Tensor]  # by parameter name
FIGURES = ("1", "3", "5", "theory")


@dataclass(frozen=True)
class Settings:
    """What `analyze` takes beside the options of `train`."""

    figures: Sequence[str] = FIGURES
    batches: int = 4
    advantages: str = "reward"  # or random
    probe_lr: float = 1e-3  # of the SGD step of figure 1, the paper's
    optimizer: str = "adamw"  # of figure 3, from a fresh state at the recipe's learning rate
    activation_tokens: int = 32
    samples: int = 4
    words: str = str(WORDS)


class Probe:
    """One rollout batch of a trainer: gradients and undone updates on chosen tokens.

    The loss is TRL's own over the whole rollout batch as one optimizer step, so that every
    normaliser stays as it is whatever tokens are chosen. A single process.
    """

    def __init__(self, trainer: LoptiGRPOTrainer, rollout: dict):
        self.trainer, self.model, self.rollout = trainer, trainer.model, rollout
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.start = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.old_logps = rollout["old_per_token_logps"]
        self.mask = valid_tokens(rollout).bool()
        self.before = self.logps()

    def logps(self) -> Tensor:
        """log pi (B, T) of the model as it is."""
        return self.trainer._diagnostics.score_rows(self.rollout)

    def gradient(self, selected: Tensor, weights: Tensor | None = None) -> Gradient:
        """Of the loss with a gradient through the `selected` tokens (B, T) alone."""
        advantages = self.rollout["advantages"]
        if weights is not None:
            advantages = advantages.unsqueeze(1) * weights
        count = self.trainer.args.steps_per_generation
        pieces = split_tensor_dict(
            {**self.rollout, "advantages": advantages, "selected": selected}, count
        )
        self.trainer.current_gradient_accumulation_steps = count
        self.model.zero_grad()
        self.model.train()
        for piece in pieces:
            self.trainer._gradient_gate = piece.pop("selected")
            GRPOTrainer._compute_loss(self.trainer, self.model, piece).backward()
        gradient = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.parameters.items()
        }
        self.model.zero_grad()
        return gradient

    @torch.no_grad()
    def descend(self, gradient: Gradient, lr: float) -> Tensor:
        """log pi (B, T) after one step of plain SGD, which is undone."""
        for name, parameter in self.parameters.items():
            parameter.sub_(lr * gradient[name])
        logps = self.logps()
        self.restore()
        return logps

    def update(self, phases: Sequence[tuple[Tensor, Tensor | None]], optimizer: str) -> Tensor:
        """log pi (B, T) after one optimizer step a phase (tokens, weights), which are undone."""
        args = self.trainer.args
        kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
        # decay would move tokens that no gradient does
        stepper = kind(self.parameters.values(), lr=args.learning_rate, weight_decay=0.0)
        for selected, weights in phases:
            for name, gradient in self.gradient(selected, weights).items():
                self.parameters[name].grad = gradient
            if args.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(self.parameters.values(), args.max_grad_norm)
            stepper.step()
        logps = self.logps()
        self.restore()
        return logps

    @torch.no_grad()
    def restore(self):
        for name, parameter in self.parameters.items():
            parameter.copy_(self.start[name])


def norm(gradient: Gradient) -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in gradient.values()))


def dot(a: Gradient, b: Gradient) -> float:
    return sum((a[name].double() * b[name].double()).sum().item() for name in a)


def layer_of(name: str) -> str:
    """ "layer 3" of a parameter in the fourth block, else its module ("embed_tokens", ...)."""
    block = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
    return f"layer {block[1]}" if block else name.split(".")[-2]


def layer_norms(gradient: Gradient) -> dict[str, float]:
    """Of a gradient's part in each layer; their squares add up to the square of the whole."""
    layers = defaultdict(dict)
    for name, value in gradient.items():
        layers[layer_of(name)][name] = value
    return {layer: norm(part) for layer, part in layers.items()}


class Records:
    """Long table of results: one row a figure, series, place on the x axis and batch."""

    def __init__(self):
        self.rows = []

    def add(self, figure: str, series: str, batch: int, values: dict[str, float | None]):
        for x, value in values.items():
            if value is not None and not math.isnan(value):
                self.rows.append((figure, series, x, batch, value))

    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows, columns=["figure", "series", "x", "batch", "value"])


def band_means(probe: Probe, values: Tensor, edges: Sequence[float]) -> dict[str, float | None]:
    """Mean of a (B, T) value over the valid tokens of each band."""
    count, total = band_sums(probe.old_logps, probe.mask, (values,), edges).T.tolist()
    means = (t / n if n else None for n, t in zip(count, total, strict=True))
    return dict(zip(band_names(edges), means, strict=True))


def selective_updates(probe: Probe, records: Records, batch: int, settings: Settings):
    """Figure 1: tokens, advantages, gradients and probability changes per band."""
    args = probe.trainer.args
    edges, names = args.diagnostics_bands, band_names(args.diagnostics_bands)
    masks = {
        name: prob_band_mask(probe.old_logps, probe.mask, low, high)
        for name, (low, high) in zip(names, itertools.pairwise(edges), strict=True)
    }
    low = low_prob_mask(probe.old_logps, probe.mask, args.lopti_eta)
    parts = masks | {"low": low, "high": probe.mask & ~low, "all": probe.mask}
    gradients = {name: probe.gradient(mask) for name, mask in parts.items()}

    total = probe.mask.sum().item()
    advantages = probe.rollout["advantages"].unsqueeze(1).expand_as(probe.old_logps)
    records.add(
        "tokens", "share", batch, {name: mask.sum().item() / total for name, mask in masks.items()}
    )
    records.add("advantage", "mean", batch, band_means(probe, advantages, edges))
    records.add("advantage", "mean size", batch, band_means(probe, advantages.abs(), edges))
    norms = {name: norm(gradient) for name, gradient in gradients.items()}
    records.add("gradient norm", "norm", batch, norms)
    for name in parts:
        records.add("layers", name, batch, layer_norms(gradients[name]))
        cosines = {
            other: dot(gradients[name], gradients[other]) / (norms[name] * norms[other])
            for other in parts
            if norms[name] and norms[other]
        }
        records.add("cosine", name, batch, cosines)
    for name in [*names, "all"]:
        change = probe.descend(gradients[name], settings.probe_lr).exp() - probe.before.exp()
        records.add("change", name, batch, band_means(probe, change, edges))
        records.add("change size", name, batch, band_means(probe, change.abs(), edges))
    whole = gradients["all"]
    for split, members in (("bands", names), ("phases", ["low", "high"])):
        rest = {n: g - sum(gradients[m][n] for m in members) for n, g in whole.items()}
        records.add("sum error", split, batch, {"relative": norm(rest) / max(norms["all"], 1e-30)})


def whole_updates(probe: Probe, records: Records, batch: int, settings: Settings):
    """Figure 3: whose probability rose among tokens with a positive advantage, per method."""
    args, everything = probe.trainer.args, probe.mask
    low = low_prob_mask(probe.old_logps, everything, args.lopti_eta)
    high = everything & ~low
    ar = ar_weights(probe.old_logps.exp(), args.ar_alpha)
    methods = {
        "GRPO": [(everything, None)],
        "GRPO, two steps": [(everything, None)] * 2,
        "AR": [(everything, ar)],
        "Lopti": [(low, None), (high, None)],
        "AR + Lopti": [(low, ar), (high, ar)],
    }
    edges, before = args.diagnostics_bands, probe.before.exp()
    positive = everything & (probe.rollout["advantages"] > 0).unsqueeze(1)
    for method, phases in methods.items():
        after = probe.update(phases, settings.optimizer).exp()
        sums = band_sums(probe.old_logps, positive, (after > before, after == before), edges)
        for name, (tokens, rose, tied) in zip(band_names(edges), sums.tolist(), strict=True):
            if tokens:
                records.add("rose", method, batch, {name: rose / tokens})
                records.add("tied", method, batch, {name: tied / tokens})


def logit_bound(probe: Probe, squares: Tensor, records: Records, batch: int):
    """sqrt(N / (N - 1)) (1 - pi) <= ||d log pi / d logits|| <= sqrt(2) (1 - pi), on real logits.

    Over tokens with pi <= .99: above it float32 does not tell the norm from its bound.
    """
    logps, squares = (x[probe.mask].double() for x in (probe.old_logps, squares))
    told = logps.exp() <= 0.99
    logps, squares = logps[told], squares[told]
    norms = (1 - 2 * logps.exp() + squares.exp()).clamp(min=0).sqrt()
    ratio = norms / -logps.expm1()
    vocab = probe.model.config.get_text_config().vocab_size
    lowest, highest = math.sqrt(vocab / (vocab - 1)), math.sqrt(2)
    within = (ratio >= lowest * (1 - 1e-3)) & (ratio <= highest * (1 + 1e-3))
    found = {"lowest": ratio.min(), "highest": ratio.max(), "share within": within.double().mean()}
    records.add("bound", "found", batch, {name: value.item() for name, value in found.items()})
    records.add("bound", "theory", batch, {"lowest": lowest, "highest": highest})


def activation_gain(probe: Probe, records: Records, batch: int, num_tokens: int):
    """||d log pi / d activations|| over ||d log pi / d logits|| at the output of every layer.

    Proposition 4.2 bounds it by singular values that do not depend on the token: the less it
    varies, the more 1 - pi alone decides. One backward pass for each of `num_tokens` tokens.
    """
    row = int(probe.mask.sum(1).argmax())
    rollout, temperature = probe.rollout, probe.trainer.temperature
    prompt = rollout["prompt_ids"][row][rollout["prompt_mask"][row].bool()]
    completion = rollout["completion_ids"][row][rollout["completion_mask"][row].bool()]
    probe.model.eval()
    outputs = probe.model(
        input_ids=torch.cat([prompt, completion])[None], output_hidden_states=True, use_cache=False
    )
    logps = (outputs.logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
    positions = evenly(min(num_tokens, len(completion)), len(completion)).tolist()
    rest, gains = [], []
    for position in positions:
        logp = logps[position, completion[position]]
        squares = (2 * logps[position]).logsumexp(0)
        size = logit_grad_norm(logp.detach(), squares.detach()).item()
        if logp.exp() > 0.997 or not size:
            continue
        found = torch.autograd.grad(logp, outputs.hidden_states, retain_graph=True)
        rest.append(1 - logp.exp().item())
        gains.append([g.norm().item() * temperature / size for g in found])
    for layer, values in enumerate(np.array(gains).T):
        name = "embeddings" if layer == 0 else f"layer {layer - 1}"
        low, median, high = np.quantile(values, (0.05, 0.5, 0.95))
        records.add("gain", name, batch, {"5 %": low, "median": median, "95 %": high})
        if len(values) > 2:
            rank = stats.spearmanr(rest, values * np.array(rest)).statistic
            records.add("gain", name, batch, {"rank correlation with 1 - pi": float(rank)})


def language(
    texts: list[str], lengths: list[int], rewards: list[float], words: str
) -> dict[str, dict]:
    """Figure 5: per class, mean frequency and correlation with the reward over completions."""
    classes = load_word_classes(words)
    counts = [word_frequencies(t, n, classes) for t, n in zip(texts, lengths, strict=True)]
    results = {}
    for name in classes:
        frequencies = [count[name] for count in counts]
        r = reward_correlation(frequencies, rewards)
        results[name] = {
            "per_1000_tokens": float(np.mean(frequencies)),
            "r": r and {"value": r[0], "low": r[1], "high": r[2]},
        }
    return results


def token_samples(probe: Probe, squares: Tensor, rewards: list[float], count: int) -> list[dict]:
    """The first completions token by token: text, pi_old, share of the batch's logit gradient."""
    decode = probe.trainer.processing_class.decode
    weights = probe.rollout["advantages"].abs().unsqueeze(1) * probe.mask
    gradients = weights * logit_grad_norm(probe.old_logps, squares)
    total = gradients.sum().clamp(min=1e-30)
    samples = []
    for i in evenly(min(count, len(probe.mask)), len(probe.mask)).tolist():
        valid = probe.mask[i]
        prompt = probe.rollout["prompt_ids"][i][probe.rollout["prompt_mask"][i].bool()]
        samples.append(
            {
                "prompt": decode(prompt),
                "reward": rewards[i],
                "advantage": probe.rollout["advantages"][i].item(),
                "tokens": [decode([t]) for t in probe.rollout["completion_ids"][i][valid].tolist()],
                "probs": probe.old_logps[i][valid].exp().tolist(),
                "grad_shares": (gradients[i][valid] / total).tolist(),
            }
        )
    return samples


def random_advantages(count: int, seed: int) -> Tensor:
    """(B,) of +1 and -1, as many of each (one more +1 if B is odd), in random order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return 1.0 - 2.0 * (order % 2)


def rollouts(trainer: LoptiGRPOTrainer, count: int) -> Iterator[tuple[dict, list[float]]]:
    """Rollout batches of the training set, with the reward of each row."""
    step = trainer._steps_per_rollout  # the loader repeats a batch for its micro-steps
    prompts = itertools.islice(trainer.get_train_dataloader(), 0, None, step)
    for batch in itertools.islice(prompts, count):
        trainer.model.train()
        rollout = trainer._generate_and_score_completions(batch)
        rewards = zip(*trainer._logs["rewards"].values(), strict=True)
        yield rollout, [sum(row) for row in rewards]


def analyze(trainer: LoptiGRPOTrainer, settings: Settings) -> tuple[pd.DataFrame, dict]:
    """The table of results by batch, and what has no batches: language, samples, settings."""
    records, samples = Records(), []
    texts, lengths, all_rewards = [], [], []
    batches = tqdm(rollouts(trainer, settings.batches), total=settings.batches, desc="analyze")
    for batch, (rollout, rewards) in enumerate(batches):
        if settings.advantages == "random":
            signs = random_advantages(len(rewards), seed=trainer.args.seed + batch)
            rollout = {**rollout, "advantages": signs.to(trainer.accelerator.device)}
        elif not rollout["advantages"].any():
            raise ValueError(
                f"All {len(rewards)} completions of rollout batch {batch + 1} have advantage 0 "
                f"(rewards {sorted(set(rewards))}): there is no gradient to see. Take an easier "
                "task, more completions (--num_generations), or --advantages random."
            )
        probe = Probe(trainer, rollout)
        squares = trainer._diagnostics.squares_of(rollout)
        if "1" in settings.figures:
            selective_updates(probe, records, batch, settings)
        if "3" in settings.figures:
            whole_updates(probe, records, batch, settings)
        if "theory" in settings.figures:
            logit_bound(probe, squares, records, batch)
            if settings.activation_tokens:
                activation_gain(probe, records, batch, settings.activation_tokens)
        if batch == 0:
            samples = token_samples(probe, squares, rewards, settings.samples)
        texts += list(trainer._logs["completion"])
        lengths += probe.rollout["completion_mask"].sum(1).tolist()
        all_rewards += rewards
    facts = {
        "rewards": all_rewards,
        "language": language(texts, lengths, all_rewards, settings.words)
        if "5" in settings.figures
        else {},
        "samples": samples,
        "settings": {**asdict(settings), "words": Path(settings.words).name},
        "versions": {name: importlib.metadata.version(name) for name in VERSIONED},
    }
    return records.frame(), facts


def parse(
    args: list[str],
) -> tuple[Settings, TaskArguments, LoptiGRPOConfig, ModelConfig]:
    """MODEL, our own options, then those of `train`."""
    parser = argparse.ArgumentParser(
        prog="lopti-trl analyze",
        description="Figures 1, 3 and 5 of the paper on a model, from rollouts on its own task. "
        "Every option of `lopti-trl train` is taken too, such as --config, --num_people, "
        "--learning_rate, --ar_alpha and --lopti_eta (0.3 and 0.5 if the recipe has none).",
    )
    parser.add_argument("model", help="a folder, a model on the hub, or kk-tiny")
    parser.add_argument(
        "--figures",
        nargs="+",
        choices=FIGURES,
        default=list(FIGURES),
        help="what to make; theory: the bound and the gain of proposition 4.2",
    )
    parser.add_argument("--batches", type=int, default=4, help="rollout batches")
    parser.add_argument(
        "--advantages",
        choices=("reward", "random"),
        default="reward",
        help="random: +1 or -1 a completion, for a model whose rewards do not differ",
    )
    parser.add_argument("--probe_lr", type=float, default=1e-3, help="SGD step of figure 1")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--activation_tokens", type=int, default=32, help="0 leaves it out")
    parser.add_argument("--samples", type=int, default=4, help="completions shown by token")
    parser.add_argument("--words", default=str(WORDS), help="YAML of word classes")
    parser.add_argument("--output_dir", default=None, help="default: MODEL/analysis")
    known, others = parser.parse_known_args(args)
    output = known.output_dir
    if output is None:
        local = Path(known.model).is_dir()
        output = (
            str(Path(known.model) / "analysis") if local else f"analysis_{Path(known.model).name}"
        )
    if not torch.cuda.is_available():
        others = ["--use_cpu", "true", "--bf16", "false", *others]
    ours = ["--output_dir", output, "--report_to", "none", "--test_puzzles", "0"]
    task, config, model = parse_args([*others, *ours])
    model.model_name_or_path = known.model
    config.ar_alpha = config.ar_alpha or 0.3
    config.lopti_quantile, config.prob_band = None, None
    config.lopti_eta = config.lopti_eta or 0.5
    config.diagnostics, config.diagnostics_rows, config.save_strategy = True, 0.0, "no"
    fields = {name: getattr(known, name) for name in Settings.__dataclass_fields__}
    return Settings(**fields), task, config, model


def main(args: list[str]) -> Path:
    """Write analysis.parquet, analysis.json and the figures; returns their folder."""
    from lopti_trl.report import save_analysis_figures

    settings, task, config, model = parse(args)
    name = model.model_name_or_path
    load_word_classes(settings.words)  # a mistake in it shows before a model is loaded
    tokenizer = load_tokenizer(model, config.trust_remote_code)
    train_set, _ = load_datasets(task, tokenizer)
    trainer = build_trainer(task, config, model, tokenizer, train_set)
    if trainer.accelerator.num_processes > 1:
        raise ValueError("analyze runs in one process. Start it without accelerate launch.")
    frame, facts = analyze(trainer, settings)
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(output / "analysis.parquet")
    facts |= {"model": name, "task": asdict(task), "bands": band_names(config.diagnostics_bands)}
    facts |= {"ar_alpha": config.ar_alpha, "lopti_eta": config.lopti_eta}
    facts |= {"learning_rate": config.learning_rate, "temperature": config.temperature}
    (output / "analysis.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False))
    save_analysis_figures(frame, facts, output / "figures")
    return output
