"""Python functions from a description (HumanEval, MBPP): data, prompt and unit-test reward.

Programs are untrusted: they run in the sandbox, and never in this process.
"""

import ast
import builtins
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lopti_trl.tasks import sandbox
from lopti_trl.tasks.kk import message_text
from lopti_trl.tasks.rows import BadRow, check_text, read_rows

if TYPE_CHECKING:
    from datasets import Dataset

Message = dict

CONFIGS = {"google-research-datasets/mbpp": "full"}
INSTRUCTION = "Write Python code. Answer with the whole code in one ```python block.\n\n"


# Data


def _names(code: str, kind: type[ast.expr_context]) -> set[str]:
    nodes = list(ast.walk(ast.parse(code)))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}


def bound_names(code: str) -> set[str]:
    """Names that a piece of code binds anywhere: by assignment, import, definition or argument."""
    nodes = list(ast.walk(ast.parse(code)))
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    imports = [
        alias for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for alias in n.names
    ]
    return (
        _names(code, ast.Store)
        | {node.name for node in nodes if isinstance(node, definitions)}
        | {node.arg for node in nodes if isinstance(node, ast.arg)}
        | {alias.asname or alias.name.split(".")[0] for alias in imports}
    )


def called_names(setup: str, tests: str) -> list[str]:
    """Names that the tests use and neither they, their setup nor Python define: the program's."""
    known = bound_names(tests) | bound_names(setup) | set(dir(builtins))
    return sorted(_names(tests, ast.Load) - known)


def _check_python(index: int, row: dict, column: str, code: str) -> None:
    try:
        ast.parse(code)
    except SyntaxError as error:
        raise BadRow(index, row, column, f"correct its Python: {error}") from error


def _humaneval(index: int, row: dict) -> dict:
    check_text(index, row, "prompt", "test", "entry_point")
    prompt, name = row["prompt"], row["entry_point"]
    tests = f"{row['test']}\ncheck({name})\n"
    _check_python(index, row, "prompt", prompt)
    _check_python(index, row, "test", tests)
    solution = row.get("canonical_solution")
    return {
        "description": f"Complete this function.\n\n```python\n{prompt.strip()}\n```",
        "header": prompt,
        "setup": prompt,  # its helper functions; the function itself has no body there
        "tests": tests,
        "names": sorted({name, *called_names(prompt, tests)}),
        "reference": None if solution is None else prompt + solution,
    }


def _mbpp(index: int, row: dict) -> dict:
    column = "text" if "text" in row else "prompt"
    check_text(index, row, column)
    tests = row.get("test_list")
    if not tests or not all(isinstance(test, str) and test.strip() for test in tests):
        raise BadRow(index, row, "test_list", "list the tests as texts, at least one")
    setup = "\n".join([*(row.get("test_imports") or []), row.get("test_setup_code") or ""])
    every_test = "\n".join([*tests, *(row.get("challenge_test_list") or [])])
    _check_python(index, row, "test_setup_code", setup)
    _check_python(index, row, "test_list", every_test)
    names = called_names(setup, every_test)
    if not names:
        raise BadRow(index, row, "test_list", "let a test call a function of the program")
    # one test is shown, for the names and types; the others are not there to be learnt by heart
    description = f"{row[column].strip()}\nIt must pass this test, and others:\n{tests[0].strip()}"
    return {
        "description": description,
        "header": "",
        "setup": setup,
        "tests": every_test,
        "names": names,
        "reference": row.get("code"),
    }


def read_problem(index: int, row: dict) -> dict:
    """A row of HumanEval's or MBPP's columns in ours. ValueError names the row and column."""
    return _humaneval(index, row) if "entry_point" in row else _mbpp(index, row)


def _job(problem: dict, program: str) -> sandbox.Job:
    return sandbox.Job(program, problem["setup"], problem["tests"], tuple(problem["names"]))


def drop_unsound(problems: dict[int, dict]) -> list[dict]:
    """Problems whose tests their own solution passes and the lack of one does not.

    MBPP has rows that pass objects between program and tests, which the sandbox does not allow.
    Warns of the rows that are left out; ValueError if none is left.
    """
    solved = [(index, p) for index, p in problems.items() if p["reference"] is not None]
    jobs = [_job(p, p["reference"]) for _, p in solved]
    jobs += [_job(p, p["header"]) for p in problems.values()]
    verdicts = sandbox.judge(jobs)
    bad = {i for (i, _), v in zip(solved, verdicts[: len(solved)], strict=True) if v != "passed"}
    empty = verdicts[len(solved) :]
    bad |= {i for i, v in zip(problems, empty, strict=True) if v == "passed"}
    found = (
        f"{len(bad)} of {len(problems)} rows have tests that their own solution does not pass, or "
        f"that pass without one: {', '.join(map(str, sorted(bad)[:10]))}"
    )
    if len(bad) == len(problems):
        raise ValueError(f"{found}. No row is left; correct the tests.")
    if bad:
        warnings.warn(f"{found}. They are left out; correct or remove them.", stacklevel=3)
    return [problem for index, problem in problems.items() if index not in bad]


def load_problems(
    source: str,  # a .parquet, .jsonl or .json file, or a data set on the hub
    split: str = "train",
    num_rows: int | None = None,
    seed: int = 0,
    max_characters: int | None = None,  # of a description: longer ones are left out
) -> "Dataset":
    """Columns: prompt (messages), and what the reward takes: header, setup, tests and names.

    Raises FileNotFoundError for a missing file, ValueError for a bad row or if none is left,
    SandboxUnavailable where programs cannot be confined.
    """
    from datasets import Dataset

    rows = read_rows(source, split, CONFIGS.get(source), num_rows, seed)
    problems = {index: read_problem(index, row) for index, row in rows}
    if max_characters is not None:
        problems = {i: p for i, p in problems.items() if len(p["description"]) <= max_characters}
        if not problems:
            raise ValueError(
                f"every description is longer than {max_characters} characters. Raise "
                "max_prompt_characters."
            )
    columns = ("header", "setup", "tests", "names")
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": INSTRUCTION + problem["description"]}],
                **{column: problem[column] for column in columns},
            }
            for problem in drop_unsound(problems)
        ]
    )


# Reward

_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_NEXT = re.compile(r"\n(?:class |def |if |print|@|#|```)")  # where a base model goes on after it


def extract_program(completion: str, header: str, names: Sequence[str]) -> str:
    """The program that a completion means, by text alone: parsing it here could end the trainer.

    It is the last code block that defines one of the names, or the completion itself, below the
    header; and else the completion continues the header's last function.
    """
    texts = [*reversed(_BLOCK.findall(completion)), completion]
    definition = rf"(?m)^(?:async def|def|class)? *(?:{'|'.join(map(re.escape, names))})\b *[(:=]"
    for text in texts:
        if re.search(definition, text):
            return f"{header}\n\n{text}"
    return header + _NEXT.split(texts[0])[0]


def code_reward(
    completions: Sequence[str | list[Message]],
    header: Sequence[str],
    setup: Sequence[str],
    tests: Sequence[str],
    names: Sequence[Sequence[str]],
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs,
) -> list[float]:
    """TRL reward: 1 if the program passes all tests, else 0.

    Logs the shares of programs that pass (code/passed) and that were stopped, by a limit or by
    themselves (code/stopped). Raises SandboxUnavailable where programs cannot be confined.
    """
    jobs = [
        sandbox.Job(extract_program(message_text(text), top, called), before, after, tuple(called))
        for text, top, before, after, called in zip(
            completions, header, setup, tests, names, strict=True
        )
    ]
    verdicts = sandbox.judge(jobs)
    if log_metric and verdicts:
        log_metric("code/passed", verdicts.count("passed") / len(verdicts))
        stopped = verdicts.count("died") + verdicts.count("late")
        log_metric("code/stopped", stopped / len(verdicts))
    return [float(verdict == "passed") for verdict in verdicts]
