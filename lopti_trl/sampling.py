"""Which prompts and completions make up a rollout batch: dynamic sampling, curriculum, advantage.

B = completions of a rollout batch, of all processes; F = reward functions; G = completions of a
prompt. Rows of all processes stand in the order of the processes, so a group is G rows in a row.
"""

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from trl.rewards import get_soft_overlong_punishment

from lopti_trl.advantages import whiten_over_tokens
from lopti_trl.checkpoint import ResumableGRPOTrainer
from lopti_trl.curriculum import CurriculumSampler, level_bounds
from lopti_trl.sampling_config import SamplingConfig

CURRICULUM_FILE = "curriculum.json"


def has_spread(
    rewards: Tensor,  # (B, K), NaN where nothing could be scored
    num_generations: int,  # G
) -> Tensor:  # (B / G,) bool
    """Groups with two different values in any of the K columns.

    By spread, never by the mean: a group of equal rewards teaches nothing whatever they are, and
    differences of rounding (a relative 1e-6) are none.
    """
    groups = rewards.view(-1, num_generations, rewards.size(1))
    highest = groups.nan_to_num(nan=-torch.inf).amax(1)
    lowest = groups.nan_to_num(nan=torch.inf).amin(1)
    scale = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1)
    return (highest - lowest > 1e-6 * scale).any(1)


def weighted_sum(
    rewards_per_func: Tensor,  # (B, F), NaN where a function gave none
    reward_weights: Tensor,  # (F,)
) -> Tensor:  # (B,), NaN where no function gave one
    """The reward of a completion, as TRL sums it."""
    total = (rewards_per_func * reward_weights.to(rewards_per_func.device)).nansum(1)
    return total.masked_fill(rewards_per_func.isnan().all(1), torch.nan)


class Row(NamedTuple):
    """A completion of a plain text prompt, with all that TRL goes on with."""

    example: dict  # of the data set
    prompt_ids: list[int]
    completion_ids: list[int]
    completion: str | list[dict]
    logps: list[float] | None  # the sampler's, if it tells
    extra: dict  # what reward functions logged of it


class SampledGRPOTrainer(ResumableGRPOTrainer):
    """`ResumableGRPOTrainer` with the options of `SamplingConfig`.

    For dynamic sampling a subclass calls `_replace_flat_groups` before TRL makes a rollout batch.
    """

    _curriculum: CurriculumSampler | None = None
    _is_extra_round = False
    _accepted: tuple | None = None  # completions that TRL's next rollout is to take over
    _accepted_rewards: Tensor | None = None
    _rewards_per_func: Tensor | None = None  # (B, F) of the last rollout batch

    def __init__(self, model, reward_funcs=None, args=None, train_dataset=None, *others, **kwargs):
        if isinstance(args, SamplingConfig):
            check_data(args, train_dataset, kwargs)
            if args.overlong_cache is not None:
                punish = get_soft_overlong_punishment(
                    args.max_completion_length, args.overlong_cache
                )
                if not isinstance(reward_funcs, list):
                    reward_funcs = [] if reward_funcs is None else [reward_funcs]
                reward_funcs = [*reward_funcs, punish]
        super().__init__(model, reward_funcs, args, train_dataset, *others, **kwargs)

    # Dynamic sampling

    def _replace_flat_groups(self, inputs: list[dict]) -> list[dict]:
        """The examples to train on, of this process, with their completions and rewards at hand.

        Completes and scores a rollout batch. Groups whose rewards do not spread give way to groups
        of fresh prompts, drawn as many as are missing, for `dynamic_sampling_rounds` rounds at
        most; a group that found no better one stays. Every process decides from the same rewards.
        """
        rows, rewards = self._draw(inputs)
        spread = has_spread(self._compared(rewards), self.num_generations)
        num_rounds = num_extra = 0
        first = {"first_reward": self._scores(rewards).nanmean(), "flat_drawn": _share_of(~spread)}
        if not spread.all():
            rows = gather_object(rows)
            fresh = self._fresh_examples([row.example["prompt"] for row in rows])
            with self._extra_rounds():
                while num_rounds < self.args.dynamic_sampling_rounds and not spread.all():
                    missing = (~spread).nonzero().flatten().tolist()
                    drawn, drawn_rewards = self._draw_fresh(fresh, len(missing))
                    if not drawn:
                        break  # every prompt was tried
                    good = has_spread(self._compared(drawn_rewards), self.num_generations)
                    for old, new in zip(missing, good.nonzero().flatten().tolist(), strict=False):
                        here, there = self._group(old), self._group(new)
                        rows[here], rewards[here] = drawn[there], drawn_rewards[there]
                        spread[old] = True
                    num_rounds, num_extra = num_rounds + 1, num_extra + len(drawn)
            rows = rows[self._share(len(rows))]
        last = {"flat_left": _share_of(~spread), "rounds": num_rounds, "completions": num_extra}
        for name, value in (first | last).items():
            self._metrics["train"][f"dynamic_sampling/{name}"].append(float(value))
        self._accept(rows, rewards)
        return [row.example for row in rows]

    def _draw_fresh(self, fresh: Iterator[dict], count: int) -> tuple[list[Row], Tensor]:
        """`_draw` with at least `count` fresh prompts, if so many are left: all processes' rows."""
        num_processes = self.accelerator.num_processes
        unit = num_processes // math.gcd(num_processes, self.num_generations)  # fills them alike
        examples = list(islice(fresh, math.ceil(count / unit) * unit))
        examples = examples[: len(examples) // unit * unit]
        if not examples:
            return [], torch.empty(0)
        rows = [example for example in examples for _ in range(self.num_generations)]
        drawn, rewards = self._draw(rows[self._share(len(rows))])
        return gather_object(drawn), rewards

    def _draw(self, inputs: list[dict]) -> tuple[list[Row], Tensor]:
        """Complete and score these examples: this process's rows, all processes' rewards (B, F)."""
        prompts = [example["prompt"] for example in inputs]
        prompt_ids, completion_ids, _, completions, logps, *_ = self._generate(prompts)
        rewards = self._calculate_rewards(inputs, prompts, completions, completion_ids)
        columns = dict(self._pending_extra_logs)
        self._pending_extra_logs.clear()
        extras = [{name: values[i] for name, values in columns.items()} for i in range(len(inputs))]
        logps = logps or [None] * len(inputs)
        rows = zip(inputs, prompt_ids, completion_ids, completions, logps, extras, strict=True)
        return [Row(*row) for row in rows], rewards

    def _accept(self, rows: list[Row], rewards: Tensor) -> None:
        """Let TRL's rollout find these completions and rewards where it would make its own."""
        _, prompt_ids, completion_ids, completions, logps, extras = map(
            list, zip(*rows, strict=True)
        )
        logps = None if logps[0] is None else logps
        self._accepted = (prompt_ids, completion_ids, None, completions, logps, {}, None, [])
        self._accepted_rewards = rewards
        for name in dict.fromkeys(name for extra in extras for name in extra):
            self._pending_extra_logs[name] = [extra.get(name) for extra in extras]

    def _generate(self, prompts):
        accepted, self._accepted = self._accepted, None
        return super()._generate(prompts) if accepted is None else accepted

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards, self._accepted_rewards = self._accepted_rewards, None
        if rewards is None:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            by_success = self.args.curriculum_success_rate is not None
            if by_success and self.model.training and not self._is_extra_round:
                self._observe(inputs, rewards)
        self._rewards_per_func = rewards
        return rewards

    @contextmanager
    def _extra_rounds(self) -> Iterator[None]:
        """What TRL and reward functions log stays that of the first draw, but for the tokens."""
        self._is_extra_round = True
        metrics = {name: list(values) for name, values in self._metrics["train"].items()}
        pending = {name: list(values) for name, values in self._pending_metrics.items()}
        yield
        self._is_extra_round = False
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        self._metrics["train"] = defaultdict(list, metrics)
        self._pending_metrics = defaultdict(list, pending)

    def _fresh_examples(self, used: list) -> Iterator[dict]:
        """Examples of other prompts than the `used` ones, in an order of this rollout batch's own.

        It depends on the seed and the count of rollout batches alone, so a resumed run draws alike.
        """
        size, batch = len(self.train_dataset), self._rollout_batch
        for index in random.Random(f"{self.args.seed}/{batch}").sample(range(size), size):
            if self._curriculum is None or self._curriculum.allows(index, batch):
                example = self.train_dataset[index]
                if example["prompt"] not in used:
                    yield example

    def _scores(self, rewards: Tensor) -> Tensor:
        return weighted_sum(rewards, self.reward_weights)

    def _compared(self, rewards: Tensor) -> Tensor:
        """(B, K): the values in which TRL compares the completions of a group."""
        is_summed = self.multi_objective_aggregation == "sum_then_normalize"
        return self._scores(rewards).unsqueeze(1) if is_summed else rewards

    def _share(self, num_rows: int) -> slice:
        """This process's part of the rows of all processes."""
        size = num_rows // self.accelerator.num_processes
        first = size * self.accelerator.process_index
        return slice(first, first + size)

    def _group(self, index: int) -> slice:
        return slice(index * self.num_generations, (index + 1) * self.num_generations)

    @property
    def _rollout_batch(self) -> int:
        """Number of the current rollout batch, from 0."""
        return self._step // self._steps_per_rollout

    # Advantage

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        if not self.model.training or self.args.advantage == "grpo":
            return rollout
        valid = rollout["completion_mask"] * rollout.get("tool_mask", 1)
        advantages = whiten_over_tokens(
            self._scores(self._rewards_per_func), self.accelerator.gather(valid.sum(1))
        )
        self._logs["advantages"].extend(advantages.tolist())  # in place of GRPO's: it is a ring
        return {**rollout, "advantages": advantages[self._share(len(advantages))]}

    # Curriculum

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        if self.args.curriculum_column is None:
            return sampler
        difficulties = list(sampler.data_source[self.args.curriculum_column])
        self._curriculum = CurriculumSampler(
            sampler,
            difficulties,
            level_bounds(difficulties, self.args.curriculum_levels),
            self.args.curriculum_batches,
            self.args.curriculum_success_rate,
        )
        return self._curriculum

    def training_step(self, model, inputs, num_items_in_batch):
        if self._curriculum is not None:  # the latest value stands
            level = self._curriculum.level(self._rollout_batch)
            self._metrics["train"]["curriculum/level"] = [level]
        return super().training_step(model, inputs, num_items_in_batch)

    def _observe(self, inputs: list[dict], rewards: Tensor) -> None:
        """Tell the curriculum how the prompts of its newest level went, on all processes."""
        top = [
            self._curriculum.is_at_the_top(example[self.args.curriculum_column])
            for example in inputs
        ]
        top = torch.tensor(top, device=rewards.device)
        scores = self._scores(rewards)[self._share(len(rewards))]
        successes = scores >= self.args.curriculum_success_reward
        counts = torch.stack([(successes & top).sum(), top.sum()])
        self._curriculum.observe(*self.accelerator.reduce(counts).tolist())

    # Resume

    def _rollout_settings(self) -> dict:
        names = ("advantage", "dynamic_sampling_rounds", "overlong_cache")
        return super()._rollout_settings() | {name: getattr(self.args, name) for name in names}

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        if self._curriculum is not None and self.args.should_save:
            state = {"reached": self._curriculum.reached, "history": self._curriculum.history}
            (Path(output_dir) / CURRICULUM_FILE).write_text(json.dumps(state))

    def _resume_rollout(self, folder):
        super()._resume_rollout(folder)
        if self._curriculum is None:
            return
        self._curriculum.epoch = math.floor(self.state.epoch)
        state = Path(folder) / CURRICULUM_FILE
        if state.is_file():  # a checkpoint made without a curriculum has none
            state = json.loads(state.read_text())
            self._curriculum.reached, self._curriculum.history = state["reached"], state["history"]


def _share_of(mask: Tensor) -> float:
    return mask.float().mean().item()


def check_data(args: SamplingConfig, dataset, extras: dict) -> None:
    """Raise, before the model loads, what the data set or the other arguments rule out."""
    uses_dynamic, column = args.dynamic_sampling_rounds > 0, args.curriculum_column
    if not (uses_dynamic or column):
        return
    option = f"dynamic_sampling_rounds={args.dynamic_sampling_rounds}"
    if column:
        option = f"curriculum_column={column}"
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"{option} picks prompts by number, which {type(dataset).__name__} does not offer. "
            "Load the data set without streaming."
        )
    if column and column not in dataset.column_names:
        raise ValueError(
            f"{option} is no column of the data set. Use one of {', '.join(dataset.column_names)}."
        )
    if column and not all(isinstance(value, int | float) for value in dataset[column]):
        raise ValueError(f"{option} holds values that are no numbers. Give every prompt a number.")
    if not uses_dynamic:
        return
    option = f"dynamic_sampling_rounds={args.dynamic_sampling_rounds}"
    interactive = [
        name for name in ("tools", "rollout_func", "environment_factory") if extras.get(name)
    ] + [name for name in ("image", "images") if name in dataset.column_names]
    if interactive:
        raise ValueError(
            f"{option} redraws completions of plain text prompts, found {', '.join(interactive)}. "
            "Set dynamic_sampling_rounds to 0."
        )
