"""Code problems: HumanEval's and MBPP's columns, programs in completions, and the reward."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from sandboxed import need_sandbox

from lopti_trl.tasks.code import (
    bound_names,
    called_names,
    code_reward,
    extract_program,
    load_problems,
    read_problem,
)

need_sandbox()

DATA = Path(__file__).parent / "data"
HUMANEVAL, MBPP = DATA / "humaneval.jsonl", DATA / "mbpp.jsonl"


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def write(tmp_path):
    def write(rows: list[dict]) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


# Data


def test_humaneval_rows_become_problems():
    problems = load_problems(str(HUMANEVAL))
    assert problems.column_names == ["prompt", "header", "setup", "tests", "names"]
    row = rows_of(HUMANEVAL)[1]
    assert problems[1]["names"] == ["find_square_root"]  # square, which the tests use, is the row's
    assert problems[1]["header"] == problems[1]["setup"] == row["prompt"]
    assert problems[1]["tests"] == row["test"] + "\ncheck(find_square_root)\n"
    (message,) = problems[1]["prompt"]
    assert message["role"] == "user"
    assert row["prompt"].strip() in message["content"]
    assert "check" not in message["content"]


def test_mbpp_rows_become_problems_that_show_one_test():
    problems = load_problems(str(MBPP))
    row = rows_of(MBPP)[0]
    assert problems["names"] == [["dash_join"], ["count_letters"], ["circle_area"], ["swap"]]
    assert problems[0]["tests"].split("\n") == row["test_list"] + row["challenge_test_list"]
    assert problems[2]["setup"].strip() == "import math"
    content = problems[0]["prompt"][0]["content"]
    assert row["text"] in content
    assert row["test_list"][0] in content
    assert row["test_list"][1] not in content


def test_sanitized_mbpp_has_its_own_names_of_columns(write):
    row = rows_of(MBPP)[2]
    sanitized = {
        "prompt": row["text"],
        "code": row["code"],
        "test_imports": ["import math"],
        "test_list": row["test_list"],
    }
    (problem,) = load_problems(write([sanitized]))
    assert problem["names"] == ["circle_area"]
    assert problem["setup"].strip() == "import math"


def test_names_that_tests_call_are_told_from_their_own():
    tests = "import math as m\ndef check(c, *, k=1):\n    for x in range(3): assert f(c(x), m.pi)\n"
    assert bound_names(tests) == {"m", "check", "c", "k", "x"}
    assert called_names("", tests) == ["f"]
    assert called_names("def f(): pass", tests) == []


def test_rows_and_characters_can_be_limited():
    assert len(load_problems(str(MBPP), num_rows=2)) == 2
    lengths = [len(read_problem(i, r)["description"]) for i, r in enumerate(rows_of(MBPP))]
    assert len(load_problems(str(MBPP), max_characters=sorted(lengths)[1])) == 2
    with pytest.raises(ValueError, match=r"longer than 10 characters. Raise max_prompt_characters"):
        load_problems(str(MBPP), max_characters=10)


@pytest.mark.parametrize(
    ("path", "index", "change", "message"),
    [
        (HUMANEVAL, 1, {"prompt": ""}, r"row 1, column 'prompt': found ''; give a text"),
        (HUMANEVAL, 0, {"entry_point": None}, r"row 0, column 'entry_point': found None"),
        (HUMANEVAL, 1, {"test": "def check(:"}, r"row 1, column 'test': .*correct its Python"),
        (HUMANEVAL, 0, {"prompt": "def f(:"}, r"row 0, column 'prompt': .*correct its Python"),
        (MBPP, 2, {"text": " "}, r"row 2, column 'text': found ' '; give a text"),
        (MBPP, 3, {"test_list": []}, r"row 3, column 'test_list': found \[\]; list the tests"),
        (MBPP, 0, {"test_list": ["", "a"]}, r"row 0, column 'test_list'.*at least one"),
        (MBPP, 1, {"test_list": ["assert ("]}, r"row 1, column 'test_list'.*its Python"),
        (MBPP, 1, {"test_list": ["assert True"]}, r"row 1, column 'test_list'.*call a function"),
    ],
)
def test_a_bad_row_is_named(write, path, index, change, message):
    rows = rows_of(path)
    rows[index] |= change
    with pytest.raises(ValueError, match=message):
        load_problems(write(rows))


def test_a_missing_or_empty_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file: none.jsonl"):
        load_problems("none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty.jsonl is empty"):
        load_problems(str(tmp_path / "empty.jsonl"))


def test_rows_that_no_answer_or_every_answer_passes_are_left_out(write):
    rows = rows_of(MBPP)
    rows[1] |= {"code": "def count_letters(text): return None"}
    rows[3] |= {"test_list": ["swap"], "code": "swap = 1", "challenge_test_list": []}
    rows.append(  # an object cannot cross between program and tests
        {
            "text": "A pair.",
            "code": "class Pair:\n    x = 1\ndef pair(p): return p.x",
            "test_list": ["assert pair(Pair()) == 1"],
        }
    )
    with pytest.warns(UserWarning, match=r"3 of 5 rows have tests that .*: 1, 3, 4. They are left"):
        problems = load_problems(write(rows))
    assert problems["names"] == [["dash_join"], ["circle_area"]]
    with pytest.raises(ValueError, match=r"1 of 1 rows have .*No row is left"):
        load_problems(write(rows[3:4]))


def test_a_row_without_a_solution_of_its_own_is_taken(write):
    row = rows_of(MBPP)[0]
    del row["code"]
    assert len(load_problems(write([row]))) == 1


# Programs in completions

HEADER = 'import math\n\n\ndef area(r):\n    """Of a circle."""\n'


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\ndef area(r): return 1\n```", HEADER + "\n\ndef area(r): return 1"),
        ("So:\n```py\ndef area(r): return 1\n```\nDone.", HEADER + "\n\ndef area(r): return 1"),
        ("```\narea = abs\n```", HEADER + "\n\narea = abs"),
        ("```python\ndef area(r): return 1", HEADER + "\n\ndef area(r): return 1"),  # cut short
        (  # the last block that defines it, not the one that shows its use
            "```python\ndef area(r): return 0\n```\n```python\ndef area(r): return 1\n```\n"
            "```python\nprint(area(2))\n```",
            HEADER + "\n\ndef area(r): return 1",
        ),
        ("def area(r):\n    return 1\n", HEADER + "\n\ndef area(r):\n    return 1\n"),
        ("    return 1\n\ndef next(): pass", HEADER + "    return 1\n"),  # a base model goes on
        ("    return 1\nprint(area(1))", HEADER + "    return 1"),
        ("```python\n    return 1\n```", HEADER + "    return 1"),
    ],
)
def test_the_program_of_a_completion(completion, program):
    assert extract_program(completion, HEADER, ["area"]) == program


# Reward


def columns(problems, indices) -> dict:
    chosen = problems.select(indices)
    return {name: chosen[name] for name in ("header", "setup", "tests", "names")}


def test_the_reward_is_1_if_all_tests_pass():
    problems = load_problems(str(MBPP))
    solution = rows_of(MBPP)[0]["code"]
    shown_only = "def dash_join(words): return 'ccc-bb-a'"
    answers = [f"```python\n{text}\n```" for text in (solution, shown_only, "while True: pass")]
    answers += [solution, "I do not know.", "", "```python\nimport os; os._exit(0)\n```"]
    logged = {}
    rewards = code_reward(answers, **columns(problems, [0] * 7), log_metric=logged.__setitem__)
    assert rewards == [1, 0, 0, 1, 0, 0, 0]
    assert logged == {"code/passed": 2 / 7, "code/stopped": 2 / 7}


def test_messages_are_judged_as_text():
    problems = load_problems(str(HUMANEVAL))
    body = rows_of(HUMANEVAL)[0]["canonical_solution"]
    full = "```python\n" + rows_of(HUMANEVAL)[1]["prompt"] + "    return y ** 0.5\n```"
    # redefining the row's own helper does not help
    cheat = "def square(x): return 0\ndef find_square_root(y): return 0"
    completions = [[{"role": "assistant", "content": text}] for text in (body, full, body, cheat)]
    assert code_reward(completions, **columns(problems, [0, 1, 1, 1])) == [1, 1, 0, 0]


def test_every_row_of_the_samples_is_solved_by_its_own_solution_and_by_no_other():
    problems = load_problems(str(MBPP))
    solutions = [row["code"] for row in rows_of(MBPP)]
    table = defaultdict(list)
    for index in range(4):
        for solution in solutions:
            table[index] += code_reward([solution], **columns(problems, [index]))
    assert [table[i] for i in range(4)] == [[float(i == j) for j in range(4)] for i in range(4)]
