"""Held-out accuracy that can be trusted: tasks x metrics, resumable, with 95 % intervals.

A completion becomes a sample, samples become one score a prompt and metric, scores become
estimates. Samples are drawn once for all metrics that share their sampling.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from rich.markup import escape
from rich.table import Table
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback

from lopti_trl.engines import Sampling, TrainerEngine, random_state_kept
from lopti_trl.estimators import avg_at_k, interval, maj_at_k, pass_at_k
from lopti_trl.tasks import kk, math

if TYPE_CHECKING:
    from datasets import Dataset

AVERAGE = "average"
SAMPLE = pa.schema(
    {
        "prompt": pa.int64(),  # row of the task's data set
        "sample": pa.int64(),
        "completion": pa.string(),
        "num_tokens": pa.int64(),
        "finished": pa.bool_(),  # ended by itself, before max_tokens
        "correct": pa.bool_(),  # null: the reference answer cannot be read
        "vote": pa.string(),  # the answer in the completion; null: there is none
    }
)

# metric -> group of prompts -> one score in [0, 1] a prompt
Scores = dict[str, dict[str, list[float]]]


# Tasks


@dataclass
class HeldOutArguments:
    """How held-out prompts are made and answers judged, in training and in `lopti-trl eval`."""

    num_people: list[int] = field(
        default_factory=lambda: [3, 4, 5, 6, 7], metadata={"help": "Puzzle sizes, in 2..8."}
    )
    test_puzzles: int = field(
        default=100,
        metadata={"help": "Held-out puzzles of each size; 0 turns evaluation in training off."},
    )
    dataset_seed: int = field(default=0, metadata={"help": "Seed of generated puzzles."})
    reward_mode: Literal["strict", "lenient"] = field(
        default="strict",
        metadata={"help": "strict: the official rule. lenient: what a person would accept."},
    )
    prompt_style: Literal["base", "chat"] = field(
        default="base",
        metadata={
            "help": "Maths prompts. base: problem and instruction as a text to go on with. chat: "
            "the same in the model's chat template."
        },
    )


class Task(NamedTuple):
    """Prompts, and what is right."""

    name: str
    rows: "Dataset"  # column prompt: text
    groups: list[str]  # of each row; a task's score is the mean over its groups
    # completions and their rows -> (whether it is right, the answer in it) of each
    judge: Callable[[list[str], list[Mapping]], list[tuple[bool | None, str | None]]]
    # answers of the samples of each prompt -> the same with one word for all that mean the same
    merge: Callable[[list[list[str | None]]], list[list]] = list


def kk_task(puzzles: "Dataset", mode: str = "strict", name: str = "kk") -> Task:
    """Knights and Knaves, a group for each number of people: right at the maximal reward."""

    def judge(completions, rows):
        marks = []
        for text, row in zip(completions, rows, strict=True):
            prefilled = kk.is_prefilled(row["prompt"], text)
            _, roles = kk.read_completion(text, row["names"], mode, prefilled)
            marks.append((roles == row["solution"], None if roles is None else str(roles)))
        return marks

    return Task(name, puzzles, [str(size) for size in puzzles["num_people"]], judge)


def math_task(problems: "Dataset", name: str) -> Task:
    """Problems of `tasks.math.load_problems`."""
    math.require_judge()

    def judge(completions, rows):
        rewards = math.math_reward(completions, [row["answer"] for row in rows])
        votes = [math.final_answer(text) for text in completions]
        marks = [None if reward is None else reward == 1 for reward in rewards]
        return list(zip(marks, votes, strict=True))

    return Task(name, problems, [name] * len(problems), judge, math.merge_answers)


def load_task(
    spec: str,  # kk, kk=SOURCE, NAME=SOURCE, or a SOURCE of maths problems
    tokenizer,
    args: HeldOutArguments,
    num_problems: int | None = None,  # a random choice of maths problems; None takes all
) -> Task:
    name, _, source = spec.rpartition("=")
    name = name or Path(source).stem if source.endswith((".parquet", ".jsonl", ".json")) else name
    if (name or source) == "kk":
        puzzles = kk.load_puzzles(
            source if name else "generated",
            "test",
            args.num_people,
            args.test_puzzles,
            args.dataset_seed,
            tokenizer,
        )
        return kk_task(puzzles, args.reward_mode)
    problems = math.load_problems(
        source,
        num_problems=num_problems,
        seed=args.dataset_seed,
        tokenizer=tokenizer,
        style=args.prompt_style,
    )
    return math_task(problems, name or source)


# Metrics


class Metric(NamedTuple):
    name: str
    kind: Literal["avg", "pass", "maj"]
    k: int
    draw: Literal["greedy", "sampled"]

    @classmethod
    def of(cls, name: str) -> "Metric":
        """From greedy, sampled (avg@1), avg@k, pass@k or maj@k."""
        if name in ("greedy", "sampled"):
            return cls(name, "avg", 1, name)
        match = re.fullmatch(r"(avg|pass|maj)@([1-9]\d*)", name)
        if not match:
            raise ValueError(
                f"metric {name!r} is unknown. Use greedy, sampled, avg@K, pass@K or maj@K."
            )
        return cls(name, match[1], int(match[2]), "sampled")

    def score(self, correct: Sequence[bool], votes: Sequence) -> float:
        """Of one prompt, from all its samples."""
        if self.kind == "pass":
            return pass_at_k(correct, self.k)
        return maj_at_k(correct, votes, self.k) if self.kind == "maj" else avg_at_k(correct)


def count_samples(metrics: Sequence[Metric]) -> dict[str, int]:
    """Samples a prompt that each draw needs."""
    draws = dict.fromkeys(metric.draw for metric in metrics)
    return {draw: max(m.k for m in metrics if m.draw == draw) for draw in draws}


def score_samples(
    task: Task, samples: Mapping[str, list[dict]], metrics: Sequence[Metric]
) -> Scores:
    """Prompts whose reference answer cannot be read are left out."""
    scores: Scores = {}
    for metric in metrics:
        by_prompt: dict[int, list[dict]] = {}
        for sample in samples[metric.draw]:
            by_prompt.setdefault(sample["prompt"], []).append(sample)
        correct = {
            prompt: [s["correct"] for s in by_prompt[prompt]]
            for prompt in sorted(by_prompt)
            if all(s["correct"] is not None for s in by_prompt[prompt])
        }
        votes = [[s["vote"] for s in by_prompt[prompt]] for prompt in correct]
        votes = task.merge(votes) if metric.kind == "maj" else votes
        scores[metric.name] = {group: [] for group in sorted(set(task.groups))}
        for prompt, vote in zip(correct, votes, strict=True):
            group = scores[metric.name][task.groups[prompt]]
            group.append(metric.score(correct[prompt], vote))
    return scores


def mean_scores(several: Sequence[Mapping[str, Scores]]) -> dict[str, Scores]:
    """Scores of the same prompts by several checkpoints, averaged prompt by prompt."""
    first = several[0]
    return {
        task: {
            metric: {
                group: [
                    fmean(marks)
                    for marks in zip(*(s[task][metric][group] for s in several), strict=True)
                ]
                for group in first[task][metric]
            }
            for metric in first[task]
        }
        for task in first
    }


def estimate(scores: Scores) -> dict[str, dict[str, dict[str, float]]]:
    """metric -> group, and "average" over groups -> value, low and high (95 %), num_prompts."""
    estimates = {}
    for metric, groups in scores.items():
        parts = {group: [marks] for group, marks in groups.items()} if len(groups) > 1 else {}
        parts[AVERAGE] = list(groups.values())
        estimates[metric] = {}
        for name, part in parts.items():
            if not all(part):
                raise ValueError(f"{name}: no prompt has a reference answer that can be read.")
            low, high = interval(part)
            estimates[metric][name] = {
                "value": fmean(fmean(marks) for marks in part),
                "low": low,
                "high": high,
                "num_prompts": sum(map(len, part)),
            }
    return estimates


# Samples


def read_samples(folder: Path) -> list[dict]:
    """All finished samples; parts are renamed when whole, so a kill leaves none that is broken."""
    return [
        row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def write_part(folder: Path, samples: list[dict]) -> None:
    path = folder / f"part-{len(list(folder.glob('*.parquet'))):05}.parquet"
    staging = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist(samples, SAMPLE), staging)
    os.replace(staging, path)


def claim_folder(folder: Path, settings: dict) -> None:
    """Raise ValueError if the folder has samples that were drawn with other settings."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    if not path.is_file():
        staging = folder / f"settings.{PartialState().process_index}"
        staging.write_text(json.dumps(settings, indent=2))
        os.replace(staging, path)
    before = json.loads(path.read_text())
    changed = [
        f"{name}: {before.get(name)} -> {settings.get(name)}"
        for name in before | settings
        if before.get(name) != settings.get(name)
    ]
    if changed:
        raise ValueError(
            f"{folder} has samples that were drawn with other settings ({'; '.join(changed)}). "
            "Restore them, remove the folder, or set another output_dir."
        )


def plan_batches(
    todo: Sequence[tuple[int, int]],  # (prompt, sample)
    lengths: Sequence[int],  # tokens of every prompt
    max_tokens: int,  # of a completion
    batch_tokens: int,
) -> Iterator[list[tuple[int, int]]]:
    """Longest prompts first, so that a lack of memory shows at once; at least one a batch."""
    batch: list[tuple[int, int]] = []
    for key in sorted(todo, key=lambda key: (-lengths[key[0]], key)):
        longest = lengths[batch[0][0]] if batch else 0
        if batch and (len(batch) + 1) * (longest + max_tokens) > batch_tokens:
            yield batch
            batch = []
        batch.append(key)
    if batch:
        yield batch


def draw_samples(
    engine,
    tokenizer,
    task: Task,
    sampling: Sampling,
    num_samples: int,  # of each prompt
    seed: int = 0,
    folder: Path | None = None,  # keeps them; what is there already is not drawn again
    label: str = "",
) -> list[dict]:
    """Samples of the fields of SAMPLE, on the first process; the others get an empty list.

    A batch is divided among the processes, which all get the same number of rows: some engines
    need that. What is left of a killed evaluation is batched and seeded as it was.
    """
    state = PartialState()
    samples = []
    if folder and state.is_main_process:
        samples = [s for s in read_samples(folder) if s["sample"] < num_samples]
    done = {(sample["prompt"], sample["sample"]) for sample in samples}
    keys = [(p, s) for p in range(len(task.rows)) for s in range(num_samples)]
    todo = broadcast_object_list([[key for key in keys if key not in done]])[0]
    prompt_ids = tokenizer(list(task.rows["prompt"]))["input_ids"]
    lengths = [len(ids) for ids in prompt_ids]
    world = state.num_processes
    bar = tqdm(
        desc=f"evaluate {label or task.name}",
        total=len(keys),
        initial=len(done),
        leave=False,
        disable=not state.is_main_process,
    )
    with bar, random_state_kept():
        for batch in plan_batches(todo, lengths, sampling.max_tokens, engine.batch_tokens * world):
            share = -(-len(batch) // world)
            padded = batch + batch[-1:] * (share * world - len(batch))
            mine = padded[state.process_index * share :][:share]
            ids = engine([prompt_ids[p] for p, _ in mine], sampling, (seed, *batch[0]))
            ids = gather_object(ids)[: len(batch)]
            if state.is_main_process:
                part = make_samples(task, batch, ids, tokenizer, engine.eos_ids)
                if folder:
                    write_part(folder, part)
                samples += part
            bar.update(len(batch))
    return sorted(samples, key=lambda sample: (sample["prompt"], sample["sample"]))


def make_samples(
    task: Task,
    keys: Sequence[tuple[int, int]],
    completion_ids: Sequence[list[int]],
    tokenizer,
    eos_ids: Sequence[int],
) -> list[dict]:
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    marks = task.judge(texts, [task.rows[prompt] for prompt, _ in keys])
    return [
        {
            "prompt": prompt,
            "sample": sample,
            "completion": text,
            "num_tokens": len(ids),
            "finished": bool(ids) and ids[-1] in eos_ids,
            "correct": correct,
            "vote": vote,
        }
        for (prompt, sample), text, ids, (correct, vote) in zip(
            keys, texts, completion_ids, marks, strict=True
        )
    ]


# Evaluation


def evaluate(
    engine,
    tokenizer,
    tasks: Sequence[Task],
    metrics: Sequence[str],
    sampling: Sampling,  # of every metric but greedy
    seed: int = 0,
    folder: Path | None = None,
    settings: Mapping | None = None,  # what else the samples in the folder depend on
    label: str = "",
) -> dict:
    """{"scores": {task: Scores}, "samples": {task: {draw: what they are like}}}, on every process.

    Samples lie in folder/TASK/DRAW. ValueError for unknown metrics or a folder of other settings.
    """
    metrics = [Metric.of(name) for name in metrics]
    result = {"scores": {}, "samples": {}}
    for task in tasks:
        samples = {}
        for draw, num_samples in count_samples(metrics).items():
            how = sampling if draw == "sampled" else Sampling(sampling.max_tokens)
            place = folder and folder / task.name / draw
            if place:
                prompts = hashlib.sha256(json.dumps(list(task.rows["prompt"])).encode())
                known = {"prompts": prompts.hexdigest()[:16], "seed": seed, **how._asdict()}
                claim_folder(place, {**(settings or {}), **known})
            samples[draw] = draw_samples(
                engine,
                tokenizer,
                task,
                how,
                num_samples,
                seed,
                place,
                " ".join(filter(None, (label, task.name, draw))),
            )
        if PartialState().is_main_process:
            result["scores"][task.name] = score_samples(task, samples, metrics)
            result["samples"][task.name] = {d: describe(rows) for d, rows in samples.items()}
    return broadcast_object_list([result])[0]


def describe(samples: Sequence[dict]) -> dict[str, float]:
    return {
        "num_samples": len(samples),
        "finished": fmean(sample["finished"] for sample in samples),
        "answered": fmean(sample["vote"] is not None for sample in samples),
        "tokens": fmean(sample["num_tokens"] for sample in samples),
        "without_reference": len({s["prompt"] for s in samples if s["correct"] is None}),
    }


def accuracy(scores: Mapping[str, Scores]) -> dict[str, dict[str, float]]:
    """metric -> column -> value: the groups of a lone task or else the tasks, and their average."""
    table: dict[str, dict[str, float]] = {}
    for task, of_task in scores.items():
        for metric, groups in of_task.items():
            columns = {group: fmean(marks) for group, marks in groups.items()}
            if len(scores) > 1:
                columns = {task: fmean(columns.values())}
            table.setdefault(metric, {}).update(columns)
    return {m: columns | {AVERAGE: fmean(columns.values())} for m, columns in table.items()}


def make_rows(estimates: Mapping[str, dict]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, in percent, of a table of model -> task -> `estimate`."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for model, tasks in estimates.items():
        for task, metrics in tasks.items():
            for metric, groups in metrics.items():
                for group, part in groups.items():
                    name = task if len(groups) == 1 else f"{task} {group}"
                    row = rows.setdefault((model, name), {"prompts": str(part["num_prompts"])})
                    value, low, high = (f"{100 * part[x]:.1f}" for x in ("value", "low", "high"))
                    row[metric] = f"{value} ({low}-{high})"
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    table = [["model", "task", *columns]]
    table += [[*key, *(row.get(c, "") for c in columns)] for key, row in rows.items()]
    header, *cells = table if len(estimates) > 1 else [row[1:] for row in table]
    return header, cells


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def save_result(folder: Path, result: dict, estimates: Mapping[str, dict], **facts) -> Table:
    """results.json, scores.json (prompt by prompt) and results.md; the same table for a terminal.

    `estimates`: model -> task -> `estimate`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    header, rows = make_rows(estimates)
    (folder / "scores.json").write_text(json.dumps(result["scores"]))
    content = {**facts, "samples": result["samples"], "estimates": estimates}
    (folder / "results.json").write_text(json.dumps(content, indent=2))
    (folder / "results.md").write_text(markdown(header, rows))
    table = Table(title="Held-out accuracy in percent (95 % interval)")
    for column in header:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


# In training


def evaluate_trainer(
    trainer,
    tasks: Sequence[Task],
    metrics: Sequence[str] = ("greedy", "sampled"),
    temperature: float = 1.0,
    folder: Path | None = None,  # for samples and results; what it held is removed
    label: str = "",
) -> dict[str, Scores]:
    """Scores of the trainer's policy by task. Training goes on as if nothing had happened."""
    state = PartialState()
    if folder and state.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
    state.wait_for_everyone()
    sampling = Sampling(trainer.args.max_completion_length, temperature)
    tokenizer = trainer.processing_class
    engine, seed = TrainerEngine(trainer), trainer.args.seed
    result = evaluate(engine, tokenizer, tasks, metrics, sampling, seed, folder, label=label)
    if folder and state.is_main_process:
        estimates = {task: estimate(scores) for task, scores in result["scores"].items()}
        save_result(folder, result, {label: estimates})
    return result["scores"]


class EvaluationCallback(TrainerCallback):
    """Evaluates after every so many optimizer steps; training takes the same course without it."""

    def __init__(self, trainer: Trainer, every_steps: int, folder: Path, **evaluation):
        self.trainer, self.every_steps, self.folder = trainer, every_steps, folder
        self.evaluation = evaluation  # of `evaluate_trainer`
        self.scores: dict[int, dict[str, Scores]] = {}  # by optimizer step

    def on_train_begin(self, args, state, control, **kwargs):
        for step in range(self.every_steps, state.global_step + 1, self.every_steps):
            path = self.folder / f"step-{step}" / "scores.json"
            if path.is_file():  # of the run that is resumed
                self.scores[step] = json.loads(path.read_text())

    def on_step_end(self, args, state, control, **kwargs):
        step = state.global_step
        if step % self.every_steps:
            return
        name = f"step-{step}"
        self.scores[step] = evaluate_trainer(
            self.trainer, folder=self.folder / name, label=name, **self.evaluation
        )
        values = accuracy(self.scores[step])
        if state.is_world_process_zero and not args.disable_tqdm:
            shown = (f"{metric} {columns[AVERAGE]:.3f}" for metric, columns in values.items())
            tqdm.write(f"{name}  {'  '.join(shown)}")
        logs = {f"eval_{m}/{c}": v for m, columns in values.items() for c, v in columns.items()}
        # Not the trainer's own log: GRPOTrainer's would add and clear its training metrics. Any log
        # takes back the order to log this step.
        should_log = control.should_log
        Trainer.log(self.trainer, logs)
        control.should_log = should_log

    def mean_of_last(self, count: int) -> dict[str, Scores] | None:
        """Scores averaged over the last evaluations, as the paper reports; None if none."""
        last = [self.scores[step] for step in sorted(self.scores)[-count:]]
        return mean_scores(last) if last else None
