"""Math problems with a reference answer: data, prompt and reward.

The reward judges answers in processes of its own, since no answer may stall or end a training run.
What "the same answer" means is defined in math_judge.py.
"""

import atexit
import importlib.util
import itertools
import json
import logging
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from lopti_trl.tasks.kk import message_text
from lopti_trl.tasks.math_judge import MAX_LENGTH, is_costly, judge, tidy
from lopti_trl.tasks.rows import FILE_KINDS, choose, load_source

if TYPE_CHECKING:
    from datasets import Dataset

Message = dict
Verdict = bool | Literal["late", "given up"] | None  # None: no accepted answer can be read

INSTRUCTION = " Let's think step by step and output the final answer within \\boxed{}."


# Data sets


class HubSource(NamedTuple):
    path: str
    config: str | None
    split: str


# Names for data sets on the hub. Only the formats of local files are tested: no test has a network.
# DSR-Uniform is the subset of `deepscaler` that AdaRFT publishes as a parquet file: give its path.
NAMED = {
    "deepscaler": HubSource("agentica-org/DeepScaleR-Preview-Dataset", None, "train"),
    "orz57k": HubSource("Open-Reasoner-Zero/orz_math_57k_collection", None, "train"),
    "math": HubSource("DigitalLearningGmbH/MATH-lighteval", None, "train"),
    "gsm8k": HubSource("openai/gsm8k", "main", "train"),
    "math500": HubSource("HuggingFaceH4/MATH-500", None, "test"),
    "amc2023": HubSource("AI-MO/aimo-validation-amc", None, "train"),
    "aime2024": HubSource("HuggingFaceH4/aime_2024", None, "train"),
    "aime2025": HubSource("math-ai/aime25", None, "test"),
    "minerva": HubSource("math-ai/minervamath", None, "test"),
    "olympiadbench": HubSource("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train"),
}
WITH_TEST_SPLIT = ("math", "gsm8k")  # of the named ones: training sets that have one too
COLUMNS = (  # of the problem and its answer; the first pair that a data set has is used
    ("prompt", "reward_model.ground_truth"),
    ("problem", "answer"),
    ("prompt", "answer"),
    ("question", "answer"),
    ("question", "final_answer"),
    ("problem", "solution"),  # MATH: the answer is in the last box of the solution
    ("0.value", "1.ground_truth.value"),  # ORZ: a list of pairs of turns
)
_RENDERED = re.compile(r"<[|\uff5c]\w+[|\uff5c]>|\[/?INST\]|<start_of_turn>")


def _field(row: Mapping, path: str):
    for key in path.split("."):
        row = row.get(key) if isinstance(row, Mapping) else None
    return row


def accepted_answers(answer) -> list[str]:
    """The answers of a row, each of which counts: from a text, a number, or a list of them.

    A text may be a JSON list of texts, which is how `load_problems` keeps several in one column.
    """
    if answer is None or answer != answer:  # nan
        return []
    if isinstance(answer, str):
        if answer.startswith('["'):
            with suppress(ValueError):
                return accepted_answers(json.loads(answer))
        return [answer.strip()] if answer.strip() else []
    if isinstance(answer, int | float):
        return [f"{answer:.15g}"]
    return list(dict.fromkeys(text for item in answer for text in accepted_answers(item)))


def _answer(row: Mapping, column: str):
    answer = _field(row, column)
    if column == "solution":
        return boxed_answers(answer)[0]
    if isinstance(answer, str):  # GSM8K: reasoning, then "#### 42"
        return answer.rpartition("####")[2]
    return answer


def find_columns(names: Sequence[str]) -> tuple[str, str]:
    """Problem and answer column of a data set. ValueError if it has neither known pair."""
    for problem, answer in COLUMNS:
        if {problem.split(".")[0], answer.split(".")[0]} <= set(names):
            return problem, answer
    known = "; ".join(" and ".join(pair) for pair in COLUMNS)
    raise ValueError(f"columns {list(names)} hold no known pair. Rename them to one of: {known}.")


def validate_rows(dataset: "Dataset | Sequence[Mapping]") -> None:
    """Raise ValueError, naming row and column, unless every row can be prompted and judged."""
    if not len(dataset):
        raise ValueError("the data set is empty. Give it at least one row.")
    problem_column, answer_column = find_columns(list(dataset[0]))
    for index, row in enumerate(dataset):
        problem, answer = _field(row, problem_column), _field(row, answer_column)
        items = answer if isinstance(answer, list) else [answer]
        is_messages = isinstance(problem, list) and all(isinstance(m, Mapping) for m in problem)
        if not (isinstance(problem, str) or is_messages) or not message_text(problem).strip():
            column, found, fix = problem_column, problem, "give a text or messages, not empty"
        elif answer_column == "solution" and not boxed_answers(str(answer)):
            column, found, fix = answer_column, answer, "box the final answer"
        elif not items or not all(isinstance(item, str | int | float | None) for item in items):
            column, found = answer_column, answer
            fix = "give a text, a number, a list of accepted ones, or null for unknown"
        else:
            continue
        raise ValueError(f"row {index}, column {column!r}: found {found!r}; {fix}.")


def build_prompt(
    problem: str | list[Message], tokenizer=None, style: Literal["base", "chat"] = "base"
) -> str:
    """The prompt as text: the problem and `INSTRUCTION`, in a chat template if style is "chat".

    A problem that is a rendered chat already stays as it is.
    """
    messages = [{"role": "user", "content": problem}] if isinstance(problem, str) else problem
    text = message_text(messages)
    if _RENDERED.search(text):
        return text
    text = text.strip().removesuffix(INSTRUCTION.strip()).rstrip() + INSTRUCTION
    if style == "base":
        return text
    messages = [*messages[:-1], {**messages[-1], "content": text}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # TRL tokenizes text prompts with special tokens added: a BOS from the template would double
    bos = tokenizer.bos_token
    if bos and tokenizer(text="")["input_ids"][:1] == [tokenizer.bos_token_id]:
        text = text.removeprefix(bos)
    return text


def load_problems(
    source: str,  # a .parquet, .jsonl or .json file, a key of NAMED, or a data set on the hub
    split: str | None = None,  # of the hub's data set; None is the usual one of a key of NAMED
    num_problems: int | None = None,  # a random choice, in the order of the source; None takes all
    seed: int = 0,
    tokenizer=None,
    style: Literal["base", "chat"] = "base",
) -> "Dataset":
    """Problems ready to train on. Columns: prompt (text), answer (text or None) and source.

    Raises FileNotFoundError for a missing file, ValueError for bad rows or arguments.
    """
    from datasets import Dataset

    if style not in ("base", "chat"):
        raise ValueError(f"style={style!r} is unknown. Set it to 'base' or 'chat'.")
    if style == "chat" and tokenizer is None:
        raise ValueError("style='chat' needs the chat template of a tokenizer. Pass tokenizer.")
    hub = NAMED.get(source, HubSource(source, None, "train"))
    others = f"one of {', '.join(NAMED)}, or the name of a data set on the hub"
    dataset = load_source(hub.path, split or hub.split, hub.config, others)
    rows = dataset.select(choose(dataset, num_problems, seed)).to_list()
    validate_rows(rows)
    problem_column, answer_column = find_columns(dataset.column_names)
    name = Path(source).stem if Path(source).suffix in FILE_KINDS else source
    problems = []
    for row in rows:
        answers = accepted_answers(_answer(row, answer_column))
        problems.append(
            {
                "prompt": build_prompt(_field(row, problem_column), tokenizer, style),
                "answer": json.dumps(answers) if len(answers) > 1 else next(iter(answers), None),
                "source": row.get("data_source") or name,
            }
        )
    return Dataset.from_list(problems)


# Reward

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;]|\\text\{|\}|\band\b|\bor\b){1,12}")


def _box_end(text: str, start: int) -> int | None:
    """Where the box whose content starts here is closed."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return brace.start()
    return None


def boxed_answers(text: str) -> list[str]:
    r"""Content of the last \boxed{}; then, if more stand side by side, of all of these as a list.

    Empty if the text has no box or the last is not closed.
    """
    parts, following = [], None
    for box in list(_BOX.finditer(text))[:-6:-1]:
        end = _box_end(text, box.end())
        if end is None or (parts and not _BETWEEN_BOXES.fullmatch(text[end + 1 : following])):
            break
        parts.append(text[box.end() : end].strip())
        following = box.start()
    return parts if len(parts) < 2 else [parts[0], ", ".join(reversed(parts))]


def final_answer(text: str) -> str | None:
    """The last boxed answer, spelled as `judge_all` compares it; None if there is none to read."""
    answers = [tidy(answer) for answer in boxed_answers(text)[:1] if len(answer) <= MAX_LENGTH]
    return next(filter(None, answers), None)


def merge_answers(problems: Sequence[Sequence[str | None]]) -> list[list[str | None]]:
    """Each problem's answers, with the first one in place of any that means the same."""
    pairs = [
        (index, first, second)
        for index, answers in enumerate(problems)
        for first, second in itertools.combinations(list(dict.fromkeys(filter(None, answers))), 2)
    ]
    merged = [{} for _ in problems]
    verdicts = judge_all([([first], [second]) for _, first, second in pairs])
    for (index, first, second), verdict in zip(pairs, verdicts, strict=True):
        if verdict is True:
            merged[index].setdefault(second, merged[index].get(first, first))
    return [
        [same.get(answer, answer) for answer in answers]
        for answers, same in zip(problems, merged, strict=True)
    ]


def math_reward(
    completions: Sequence[str | list[Message]],
    answer: Sequence[str | float | list[str] | None],
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs,
) -> list[float | None]:
    r"""TRL reward: 1 if the last \boxed{} is right, 0 if not, None if the answer cannot be read.

    Logs the shares of completions with a box (math/boxed), that are right (math/correct), without a
    readable reference (math/gold_unparseable) or not judged in time, so 0 (math/late).
    """
    boxes = [boxed_answers(message_text(completion)) for completion in completions]
    golds = [accepted_answers(reference) for reference in answer]
    verdicts = judge_all(list(zip(golds, boxes, strict=True)))
    if log_metric and verdicts:
        log_metric("math/boxed", sum(map(bool, boxes)) / len(verdicts))
        log_metric("math/correct", verdicts.count(True) / len(verdicts))
        log_metric("math/gold_unparseable", verdicts.count(None) / len(verdicts))
        late = verdicts.count("late") + verdicts.count("given up")
        log_metric("math/late", late / len(verdicts))
    return [None if verdict is None else float(verdict is True) for verdict in verdicts]


# Verdicts in bounded time. A server process forks workers, which the kernel ends when their time is
# up, even inside a product of long numbers. So nothing depends on threads, signals or CUDA in the
# caller, and a new worker costs milliseconds: it is a copy with everything imported. The pools of
# multiprocessing would import the caller's main script into every worker, or fork the caller.

Task = tuple[list[str], list[str]]  # accepted answers, answers of a completion
SECONDS = (0.01, 0.1, 0.7)  # of processor time, so load cannot change a verdict: one try each
MAX_SECONDS = 4.0  # per worker, batch and try but the first; what is left then is given up
MAX_BYTES = 4 << 30
WARM_UP = (
    (r"\frac{1}{2}x+\sqrt{3}", r"\frac{x}{2}+\sqrt{3}"),
    (r"(2\pi, 3^{n-1}], 1.5", r"\frac{3}{2}, (2\pi, \frac{1}{3}3^n]"),
    (r"f(x)=\sin^2 x e^{-2t}-\ln(a)", r"f(x)=-\ln(a)+\sin(x)^2e^{-2t}"),
    (r"-\frac{3\sqrt{2}}{4}(n!+i)", r"\frac{-3}{4} \cdot |\sqrt{2}|(n!+i)"),
)
MAX_CACHED = 100_000


def _work(servers_end: connection.Connection, tasks: connection.Connection) -> None:
    servers_end.close()  # or the worker would not notice the end of the server
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    while True:
        try:
            golds, answers, seconds = tasks.recv()
        except EOFError:
            return
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            verdict = judge(golds, answers)
        except MemoryError:
            os._exit(1)
        except Exception:  # sympy does not say what it raises
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        tasks.send((verdict, time.process_time() - start))


class Workers:
    """Processes that judge tasks side by side; one that runs out of time is replaced."""

    def __init__(self, count: int):
        self.count = count
        self.idle = [self._start() for _ in range(count)]

    @staticmethod
    def _start():
        fork = get_context("fork")
        ours, theirs = fork.Pipe()
        process = fork.Process(target=_work, args=(ours, theirs), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def run(
        self, tasks: Sequence[Task], seconds: float, max_seconds: float = float("inf")
    ) -> list[Verdict]:
        """Verdicts in order; "late" after `seconds`, and the rest "given up" after max_seconds."""
        verdicts: list[Verdict] = ["given up"] * len(tasks)
        waiting, busy, used = list(enumerate(tasks))[::-1], {}, 0.0
        while True:
            while waiting and self.idle and used < max_seconds:
                index, task = waiting.pop()
                ours, process = self.idle.pop()
                ours.send((*task, seconds))
                busy[ours] = index, process
            if not busy:
                return verdicts
            for ours in connection.wait(list(busy)):
                index, process = busy.pop(ours)
                try:
                    verdicts[index], spent = ours.recv()
                    self.idle.append((ours, process))
                except (EOFError, ConnectionResetError):
                    verdicts[index], spent = "late", seconds
                    ours.close()
                    process.join()
                    self.idle.append(self._start())
                used += spent

    def judge(self, tasks: Sequence[Task]) -> list[Verdict]:
        """A short try for all, then longer ones for those that need it.

        The many quick ones neither wait for the few slow ones nor fail because of them, and a batch
        of nothing but hostile answers is given up early.
        """
        verdicts = self.run(tasks, SECONDS[0])
        for seconds in SECONDS[1:]:
            slow = [index for index, verdict in enumerate(verdicts) if verdict == "late"]
            again = self.run([tasks[i] for i in slow], seconds, MAX_SECONDS * self.count)
            for index, verdict in zip(slow, again, strict=True):
                verdicts[index] = verdict
        return verdicts


def serve(count: int) -> None:
    """Answer each line of tasks on stdin by a line of verdicts on stdout, until the caller ends."""
    logging.disable()
    caller = os.getppid()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may write there
    for gold, answer in WARM_UP:  # imports sympy and warms the parser, once for all workers
        judge([gold], [answer])
    workers = Workers(count)
    while True:
        while not select.select([sys.stdin], [], [], 10)[0]:
            if os.getppid() != caller:
                return
        line = sys.stdin.readline()
        if not line:
            return
        print(json.dumps(workers.judge(json.loads(line))), file=answers, flush=True)


_lock = threading.Lock()
_server: subprocess.Popen | None = None
_inherited = []  # servers of the processes that forked this one: not ours to use or to end
_cache: dict[str, Verdict] = {}


def require_judge() -> None:
    """Raise ImportError if what judges answers is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("math_reward needs math-verify. Run: pip install 'lopti-trl[math]'.")


def _start_server() -> subprocess.Popen:
    require_judge()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    count = max(1, min(4, (os.cpu_count() or 1) // ranks))
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return subprocess.Popen(
        # -P: a folder with a math.py must not come first on the path
        [sys.executable, "-P", "-m", "lopti_trl.tasks.math", str(count)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the caller
    )


def _after_fork() -> None:
    global _lock, _server
    _inherited.append(_server)  # or collecting it would close its pipes
    _lock, _server = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def stop_server() -> None:
    """End the judging processes, if there are any; the next call starts others."""
    global _server
    server, _server = _server, None
    if server is not None:
        with suppress(ProcessLookupError, BrokenPipeError), server:  # closes its pipes and waits
            os.killpg(server.pid, signal.SIGKILL)


def _ask(tasks: Sequence[Task]) -> list[Verdict]:
    global _server
    if not tasks:
        return []
    request = json.dumps(tasks).encode() + b"\n"
    with _lock:
        for _ in range(2):  # a server that was killed is replaced once
            if _server is None:
                _server = _start_server()
            try:
                _server.stdin.write(request)
                _server.stdin.flush()
                reply = _server.stdout.readline()
            except BrokenPipeError:
                reply = b""
            except BaseException:  # interrupted: its late reply must not answer the next request
                stop_server()
                raise
            if reply:
                return json.loads(reply)
            stop_server()
    raise RuntimeError("the math judge ended twice without a verdict; its message is above.")


def _is_literally(golds: Sequence[str], answers: Sequence[str]) -> bool:
    texts = {tidy(text) for text in answers if len(text) <= MAX_LENGTH} - {""}
    return any(tidy(gold) in texts for gold in golds if len(gold) <= MAX_LENGTH)


def judge_all(tasks: Sequence[Task]) -> list[Verdict]:
    """Verdicts in order, in bounded time, from any thread or process."""
    keys, known, new = [], {}, {}
    for golds, answers in tasks:
        golds, literal = [g for g in golds if not is_costly(g)], _is_literally(golds, answers)
        answers = [text for text in answers if not is_costly(text)]
        keys.append(json.dumps([golds, answers, literal]))
        known[keys[-1]] = literal or _cache.get(keys[-1], "new")
        if known[keys[-1]] == "new":
            new[keys[-1]] = golds, answers
    known.update(zip(new, _ask(list(new.values())), strict=True))
    if len(_cache) > MAX_CACHED:
        _cache.clear()
    _cache.update((key, known[key]) for key in new if known[key] != "given up")
    return [known[key] for key in keys]


if __name__ == "__main__":
    serve(int(sys.argv[1]))
