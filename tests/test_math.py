"""Math problems: answers judged by hand-made pairs, hostile answers by the clock, data by hand."""

import json
import multiprocessing
import random
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from lopti_trl.tasks import math as math_task
from lopti_trl.tasks.math import (
    COLUMNS,
    INSTRUCTION,
    NAMED,
    boxed_answers,
    build_prompt,
    find_columns,
    load_problems,
    math_reward,
    stop_server,
    validate_rows,
)

pytest.importorskip("math_verify")

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "math"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the official files are not here")


def box(text: str) -> str:
    return f"So the answer is $\\boxed{{{text}}}$."


def rewards(golds, answers):
    return math_reward([box(answer) for answer in answers], golds)


# Equivalence: reference on the left, answer on the right

PAIRS = {
    "integers": r"""
        5 == 5
        025 == 25
        7 == 07
        0 == -0
        -4 == -4.0
        5 == 5.0
        5 == 5.
        1000 == 1,000
        1,000,000 == 10^6
        12345 == 12\,345
        1000 == 1{,}000
        120 == 5!
        10! == 3628800
        5 != 6
        5 != -5
        5 != 50
        11 != 1 1
        5 != 2 3
        6 != 2 3
        1000 != 1,0000
        12,000 != 12
        100000000000000000000001 != 100000000000000000000002
        2004! != 2006!
        5 != five
        5 != ?
    """,
    "fractions": r"""
        1/2 == 0.5
        \frac12 == \dfrac{1}{2}
        -\frac{1}{2} == \frac{-1}{2}
        -\frac{1}{2} == \frac{1}{-2}
        \frac{14}{3} == 4\frac{2}{3}
        7/2 == 3 1/2
        -7/2 == -3\frac{1}{2}
        3\frac12 == 3.5
        75\frac{1}{5} == \frac{376}{5}
        \frac{1}{2} != \frac{2}{1}
        7/2 != 3 2/1
        7/2 != \frac{31}{2}
        7/2 != 3 \cdot \frac12
        \frac{1}{2004!} != \frac{1}{2006!}
        5 != \frac{5}{0}
        0 != \frac{0}{0}
    """,
    "decimals": r"""
        2.50 == 2.5
        .5 == 0.5
        1/3 == 0.333333
        2/3 == 0.6666667
        0.\overline{3} == \frac{1}{3}
        0.1\overline{6} == 1/6
        \pi == 3.141593
        e == 2.718281828
        1/3 != 0.33
        \frac{1}{7} != 0.143
        1/2 != 0.05
        \pi != 3.14
        \pi != 22/7
        \sqrt{2} != 1.41
        2.0000001 != 2
        1000000 != 1000000.5
        1,5 != 1.5
        1,000 != 1.000
    """,
    "scientific notation": r"""
        8.7 \times 10^{8} == 870000000
        4.5e33 == 4.5 \times 10^{33}
        1e-5 == 10^{-5}
        1500 == 1.5 \cdot 10^3
        3.0\times10^8 \text{ m/s} == 3e8
        3.83 \times 10^{35} != 3.84 \times 10^{35}
        4.5e33 != 4.5e32
        2.7778 \times 10^{-6} != 3.4e-6
        2^{-99} != 2^{-98}
        10^{-20} != 10^{-21}
        10^{-300} != 0
        1e-9 != 0
        0 != 1e-9
        10^{50} != 10^{50}+1
        100 != 10^{10}
    """,
    "roots and constants": r"""
        \sqrt{8} == 2\sqrt{2}
        11\sqrt2 == 11\sqrt{2}
        \sqrt2 == sqrt(2)
        \frac{1}{\sqrt{3}} == \frac{\sqrt{3}}{3}
        \frac{1+\sqrt5}{2} == \frac{\sqrt{5}+1}{2}
        \sqrt[3]{8} == 2
        2^{\frac{7}{8}} == 2^{7/8}
        \log_2 8 == 3
        \ln 2 - \frac{1}{2} == \ln(2)-0.5
        \arcsin{\frac{1}{1.3}} == \arcsin\left(\frac{10}{13}\right)
        \infty == \infty
        10^{100}+\sqrt{2} != 10^{100}+\sqrt{3}
        1+\sqrt{2} != 1-\sqrt{2}
        \infty != -\infty
        \ln 2 != \log 2
        \gamma != 0.5772156649
    """,
    "products written side by side": r"""
        2(3) == 6
        (2)(3) == 6
        2\binom{5}{2} == 20
        5 != 2(3)
        5 != (2)(3)
        12 != 2\binom{5}{2}
        2t != 2
        3h != 3
        5m != 5
        120 != 5!!
        720 != 3!!
    """,
    "percent": r"""
        50\% == 50
        50\% == 0.5
        50\% == \frac{1}{2}
        0.5 == 50\%
        50 == 50\%
        50\% == 50 \text{ percent}
        \frac{3}{4} == 75\%
        50\% != 5
        50\% != 0.05
        \frac{1}{2} != 50
        0.5 != 0.5\%
        1/2 != 1/2\%
    """,
    "units": r"""
        5 == 5\text{ cm}
        5\text{ cm} == 5
        5\text{ cm} == 5 \mathrm{~cm}
        5\text{ cm} == 5 cm
        24 \text{ km} == 24\text{ kilometers}
        5\text{ cm}^2 == 5 \text{ square centimeters}
        12 == 12 \text{ square units}
        15000 \text{ kcal m}^{-2} \text{yr}^{-1} == 15000
        60 \text{ km/h} == 60 \text{ km per hour}
        \frac{1}{2} \text{ hour} == 0.5 \text{ hours}
        7 == 7 \text{ apples}
        5 \text{ m} == 5 m
        12 \text{ inches} == 1 \text{ foot}
        5\text{ cm} != 5\text{ m}
        5\text{ cm} != 5\text{ cm}^2
        5\text{ cm} != 6\text{ cm}
        3 \text{ hours} != 3 \text{ minutes}
        60 \text{ km/h} != 60 \text{ km}
        5 != 5 \text{ or more}
        5 != \text{not } 5
    """,
    "money": r"""
        \$15 == 15
        \$15 == $15
        \$15 == 15 \text{ dollars}
        \$ 4.80 == 4.8
        1000 == \$1,000
        \$5 != 5\text{ cents}
        \$5 != \$6
    """,
    "degrees": r"""
        90^\circ == 90
        90^\circ == 90^{\circ}
        108\text{ degrees} == 108^\circ
        20^\circ\text{C} == 20
        1 == \sin 90^\circ
        (0^\circ, 90^\circ) == (0,90)
        90^\circ != \frac{\pi}{2}
        90^\circ != 45^\circ
        20^\circ\text{C} != 20^\circ\text{F}
    """,
    "times, ratios and bases": r"""
        8\!:\!34 \text{ p.m.} == 8:34 \text{ PM}
        3:30 PM == 3:30
        3 : 2 == 6:4
        3:2 == 3/2
        52_8 == 52_{8}
        52_8 == 52
        8:34 \text{ p.m.} != 8:34 \text{ a.m.}
        12:30 != 2:5
        6:00 != 6:30
        3:2 != 2:3
        52_8 != 52_9
        42 != 52_8
    """,
    "equations": r"""
        x=5 == 5
        5 == x = 5.
        f(x)=2x == 2x
        f(x)=2x == f(x) = x+x
        (x,y)=(1,2) == (1,2)
        y=2x+1 == 2x-y+1=0
        12 == 3\cdot 4=12
        AB=12+12\sqrt{3} == 12(1+\sqrt{3})
        x' + rx = 0 == x' = -rx
        x=5 != y=5
        x=5 != x=6
        5 != 9=5
        5 != 2+2=5
        5 != x=4=5
        0 != x-5=0
        y=2x+1 != y=2x+2
        x^2+1=0 != x^2+2=0
        f(x)=2x != f(x)=3x
        5 != 5 \neq 6
    """,
    "tuples and intervals": r"""
        (1,2) == (1, 2)
        (1,2) == \left(1,2\right)
        (1,2) == 1,2
        (1,2) == \langle 1,2 \rangle
        \left( 3, \frac{\pi}{2} \right) == (3, \pi/2)
        (6,31,-1) == (6, 31, -1)
        [1,2) == [1, 2)
        (3,4] == 3<x\le 4
        (3,4] == x \in (3,4]
        x>3 == 3<x
        x>3 == (3,\infty)
        k \geqslant 2 == [2,\infty)
        (-\infty,1)\cup(2,\infty) == (2,\infty)\cup(-\infty,1)
        \mathbb{R} == (-\infty,\infty)
        (1,2) != (2,1)
        (1,2) != [1,2]
        (1,2) != (1,2]
        (1,2) != \{1,2\}
        (2,1) != (5,3)
        (1,2) != (1,2,3)
        (2^{-99},1) != (2^{-98},1)
        (0,1) != 0.1
        x>3 != x<3
        x>3 != x\geq 3
        x>3 != k>3
        x>3 != 3
        (3,4] != 3\le x\le 4
        (-\infty,1)\cup(2,\infty) != (-\infty,1)\cup[2,\infty)
        (-\infty,1)\cup(2,\infty) != (2,\infty)
    """,
    "sets and several values": r"""
        \{1,2,3\} == \{3,2,1\}
        \{1,2,3\} == 1,2,3
        1,-2 == -2,1
        3, 5, 7 == 7, 5 \text{ and } 3
        x=1 \text{ or } x=3 == 1,3
        x=1, y=2 == y=2, x=1
        (1,1),(3,2) == (3,2),(1,1)
        1 \pm \sqrt{19} == 1+\sqrt{19}, 1-\sqrt{19}
        \pm 2 == 2,-2
        125,250 == 125, 250
        $69$,$84$ == 84, 69
        \emptyset == \varnothing
        1,2 != 1
        1,2 != 1,2,3
        1,1 != 1
        5 != 5 \text{ or } 6
        3 != \pm 3
        2,3 != 23
        1 != \{1,2\}
        (1,1),(3,2) != (1,1),(2,3)
        1 \pm \sqrt{19} != 1+\sqrt{19}
        x=1, y=2 != x=2, y=1
        \emptyset != \{0\}
    """,
    "matrices": r"""
        \begin{pmatrix}1&2\\3&4\end{pmatrix} == \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
        \begin{pmatrix} -1/3 \\ 5 \end{pmatrix} == \begin{pmatrix}-\frac13\\ 5\\ \end{pmatrix}
        \begin{pmatrix}1&2\\3&4\end{pmatrix} == \left[\begin{array}{cc}1&2\\3&4\end{array}\right]
        \begin{vmatrix}1&2\\3&4\end{vmatrix} == -2
        \begin{pmatrix}1&2\\3&4\end{pmatrix} != \begin{pmatrix}1&2\\3&5\end{pmatrix}
        \begin{pmatrix}1&2\\3&4\end{pmatrix} != \begin{pmatrix}1&3\\2&4\end{pmatrix}
        \begin{pmatrix}1&2\end{pmatrix} != \begin{pmatrix}1\\2\end{pmatrix}
        \begin{vmatrix}1&2\\3&4\end{vmatrix} != 2
    """,
    "words and letters": r"""
        \text{Evelyn} == Evelyn
        \text{east} == East
        \text{No} == no
        (C) == \text{(C)}
        (C) == C
        W \text{ and } Z == Z \text{ and } W
        \text{Evelyn} != \text{Carla}
        \text{abc} != cba
        \text{east} != seat
        \text{odd} != \text{not odd}
        n \text{ odd} != n
        (C) != (D)
        N != n
        C != c
        0 != \text{no solution}
        \frac{1}{2} != \text{garbage } \frac{1}{2}
    """,
    "expressions": r"""
        2k+2 == 2(k+1)
        (a+5)(b+2) == ab+2a+5b+10
        x^5 - x^4 + x^3 - x^2 + x - 1 == (x-1)(x^4+x^2+1)
        \frac{n(n+1)(2n+1)}{6} == \frac{1}{6}n(n+1)(2n+1)
        \cot x == \frac{\cos x}{\sin x}
        \sin 2x == 2\sin x\cos x
        \frac{e^{at}-e^{-at}}{2a} == \frac{1}{2a}\left(e^{at}-e^{-at}\right)
        I(0)e^{-\frac{t}{RC}} == I(0) e^{-t/(RC)}
        \lfloor\sqrt{n-1}\rfloor == \left\lfloor \sqrt{n-1} \right\rfloor
        |x-1| == |1-x|
        \sum_{k=1}^{10} k == 55
        x != y
        x' != x
        2\sin x != \sin 2x
        n(n-1) != n(n+1)
        \sqrt{x^2} != x
        \lfloor x+\frac12\rfloor != \lfloor x\rfloor
        x != x+10^{-40}
        a_1 != a_2
        I(0) != 0
        x != x+\infty-\infty
    """,
    "complex numbers": r"""
        6-5i == -5i+6
        1+\sqrt{3}i == 1+i\sqrt{3}
        -2i == \frac{2}{i}
        e^{i\pi} == -1
        6-5i != 6+5i
        i != 1
    """,
}
# right answers that get no reward: a unit of one letter reads as a factor, none is converted
MISSES = {r"5 \text{ m} == 5 m", r"12 \text{ inches} == 1 \text{ foot}"}


def pairs_of(form: str) -> list[tuple[str, str, str, bool]]:
    """Line, reference, answer, and whether they are the same."""
    lines = [line.strip() for line in PAIRS[form].strip().splitlines()]
    sides = [re.fullmatch(r"(.+?) (==|!=) (.+)", line).groups() for line in lines]
    return [
        (line, gold, answer, sign == "==")
        for line, (gold, sign, answer) in zip(lines, sides, strict=True)
    ]


@pytest.mark.parametrize("form", PAIRS)
def test_equal_answers_are_rewarded_and_unequal_ones_are_not(form):
    lines, golds, answers, same = zip(*pairs_of(form), strict=True)
    wrong = {
        line
        for line, reward, truth in zip(lines, rewards(golds, answers), same, strict=True)
        if reward != float(truth)
    }
    assert wrong == MISSES & set(lines)


def test_the_table_is_large_and_every_answer_equals_itself():
    pairs = [pair for form in PAIRS for pair in pairs_of(form)]
    assert len(pairs) >= 150
    assert len(MISSES) <= 2
    golds = [gold for _, gold, _, _ in pairs]
    assert rewards(golds, golds) == [1.0] * len(golds)


def test_unicode_reads_like_latex():
    answers = ["\u221a13", "2\u03c0", "90\u00b0", "x\u22652", "\u22125", "\u00bd"]
    golds = [r"\sqrt{13}", r"2\pi", r"90^\circ", r"x \ge 2", "-5", "0.5"]
    assert rewards(golds, answers) == [1.0] * 6
    assert rewards(["52"], ["5\u00b2"]) == [0.0]


def test_any_of_several_accepted_answers_counts():
    accepted = [["0.01\n", "0.02\n"]] * 3
    assert rewards(accepted, ["0.01", "0.020", "0.03"]) == [1.0, 1.0, 0.0]
    assert rewards([json.dumps(answers) for answers in accepted], ["0.01", "0.02", "0.03"]) == [
        1.0,
        1.0,
        0.0,
    ]
    assert rewards([142.0, 142.0, 0.5], ["142", "143", r"\frac12"]) == [1.0, 0.0, 1.0]


# Reward


@pytest.mark.parametrize(
    ("completion", "answers"),
    [
        (r"\boxed{1}. Wait, \boxed{2}.", ["2"]),
        (r"\boxed{\frac{1}{\sqrt{2}}}", [r"\frac{1}{\sqrt{2}}"]),
        (r"\boxed{\boxed{5}}", ["5"]),
        (r"\boxed{\left\{1,2\right.}", [r"\left\{1,2\right."]),
        (r"\boxed {7}", ["7"]),
        (r"$\boxed{1}$, $\boxed{2}$ and $\boxed{3}$", ["3", "1, 2, 3"]),
        (r"\boxed{1}, then " + "x" * 50 + r"\boxed{2}", ["2"]),
        (r"\boxed{1} and \boxed{2", []),
        (r"\boxed5 \boxedsymbol{6}", []),
        ("The answer is 5.", []),
    ],
)
def test_the_last_box_counts_or_all_that_stand_side_by_side(completion, answers):
    assert boxed_answers(completion) == answers


def test_without_a_closed_box_there_is_no_reward():
    completions = ["5", r"\boxed{5", r"\boxed{5} or rather \boxed{6", r"\boxed{}", ""]
    assert math_reward(completions, ["5"] * 5) == [0.0] * 5


def test_boxes_side_by_side_answer_a_question_with_several_values():
    completion = r"$x = \boxed{2}$ and $\boxed{-3}$".replace("x = ", "")
    assert math_reward([completion] * 3, ["-3, 2", "2, 3", "2"]) == [1.0, 0.0, 0.0]


def test_messages_are_judged_by_the_last_one():
    texts = [box("5"), box("6"), "no box"]
    messages = [
        [{"role": "user", "content": box("5")}, {"role": "assistant", "content": text}]
        for text in texts
    ]
    assert math_reward(messages, ["5"] * 3) == math_reward(texts, ["5"] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "gold",
    [None, "", "  ", float("nan"), [], r"\frac{1}{", "?", "(1000000!)!", "where b is any integer"],
)
def test_an_answer_that_cannot_be_read_is_excluded(gold):
    assert math_reward([box("5"), "no box", box(r"\text{so}")], [gold] * 3) == [None] * 3


def test_what_cannot_be_read_still_equals_itself():
    gold = "10^{10^{10}}"
    assert rewards([gold] * 2, ["10^{ 10^{10} }", "10^{10}"]) == [1.0, None]


def test_shares_are_logged():
    logged = {}
    completions = [box("5"), box("6"), "5", box("1")]
    math_reward(completions, ["5", "5", "5", None], log_metric=logged.__setitem__)
    assert logged == {
        "math/boxed": 0.75,
        "math/correct": 0.25,
        "math/gold_unparseable": 0.25,
        "math/late": 0.0,
    }
    assert math_reward([], [], log_metric=logged.__setitem__) == []


# Cost

HOSTILE = {
    "power tower": "9^{9^{9^9}}",
    "power of a power": "10^{10^{10}}",
    "tower of small numbers": "2^{2^{2^{2^{2^{2}}}}}",
    "tower of e": "e^{e^{e^{e^{e}}}}",
    "long power": "((9999^{9999})^{9999})^{9999}",
    "power of a factorial": "(9999!)^{9999}",
    "products of powers": "9^{9999}" * 120,
    "factorial of a factorial": "(1000000!)!",
    "binomial": r"\binom{9999999}{4999999}",
    "nested parentheses": "(" * 3000 + "1" + ")" * 3000,
    "digits": "7" * 100_000,
    "nested fractions": r"\frac{1}{" * 500 + "2" + "}" * 500,
    "nested sines": r"\sin(" * 18 + "x" + ")" * 18,
    "matrix": r"\begin{pmatrix}" + r"\\".join(["&".join("1" * 200)] * 200) + r"\end{pmatrix}",
    "long sum": r"\sum_{k=1}^{1000000000} \frac{1}{k^3+k+1}",
    "integral": r"\int_0^1 \frac{\sin(x^3)e^{x}}{\ln(x+2)+\cos x} dx",
    "expansion": "((x+1)^{99}+(x+2)^{99}+y)^{99}",
    "roots": "+".join(rf"\sqrt{{{number}}}" for number in range(2, 90)),
    "commas": "1," * 100_000,
    "spaces": r"\text{" + " " * 100_000 + "}",
    "boxes": r"\boxed{" * 20_000 + "1" + "}" * 20_000,
    "unbalanced": "{{{((1",
    "backslashes": "\\" * 50_001,
    "null": "\0\ud800",
}


@pytest.fixture
def warm_server():
    rewards(["5"], ["6"])


# a judge that must be stopped takes a second: the fast target has one of them
STOPPED = ["nested sines", "tower of small numbers", "binomial", "integral", "products of powers"]
STOPPED += ["power of a factorial"]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in STOPPED)) for k in HOSTILE]
)
def test_a_hostile_answer_costs_less_than_two_seconds(kind, warm_server):
    for gold in ("5", r"x^2+\sqrt{2}y"):
        start = time.monotonic()
        assert rewards([gold], [HOSTILE[kind]]) == [0.0]
        assert time.monotonic() - start < 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tower of e", "roots", None])
def test_a_thousand_hostile_answers_cost_less_than_thirty_seconds_of_two_cores(kind):
    texts = [HOSTILE[kind]] if kind else list(HOSTILE.values())
    answers = [f"{texts[i % len(texts)]}+{i}" for i in range(1000)]
    stop_server()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert rewards(["5"] * 1000, answers) == [0.0] * 1000
    math_task._server.stdin.close()  # so that it ends by itself and waits for its workers
    math_task._server.wait()
    stop_server()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # processor time, so that what else the machine does is not counted
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60


def test_quick_answers_are_judged_right_among_hostile_ones():
    logged = {}
    answers = [f"{HOSTILE['tower of e']}+1{i}" if i % 10 == 0 else f"{i}+0" for i in range(40)]
    found = math_reward(
        [box(answer) for answer in answers],
        [str(i) for i in range(40)],
        log_metric=logged.__setitem__,
    )
    assert found == [float(i % 10 > 0) for i in range(40)]
    assert logged["math/late"] == 0.1


def test_a_repeated_hostile_answer_is_paid_for_once(warm_server):
    rewards(["5"], ["e^{e^{e^{e^{e^{2}}}}}"])
    start = time.monotonic()
    rewards(["5"] * 100, ["e^{e^{e^{e^{e^{2}}}}}"] * 100)
    assert time.monotonic() - start < 0.3


VOCABULARY = r"""
    \frac{ \sqrt \sqrt{ \text{ \overline{ \binom{ \boxed{ \begin{pmatrix} \end{pmatrix} \left(
    \right) { } ( ) [ ] \{ \} ^ _ ^{ _{ , ; = < \leq \pm \cup \in & \\ ! % \% $ \$ | ' \circ
    \sin \log_ \int \infty \emptyset \mathbb{R} \sum_ i e I x n 0 1 2 7 12 0.5 1,000 1e5
    3:30 cm} and or percent
"""


@pytest.mark.slow
def test_ten_thousand_random_strings_raise_nothing_and_earn_nothing():
    rng = random.Random(0)
    pieces = [*VOCABULARY.split(), " ", "\n", "\0", "\u221a", "\u00b0", "\u4e2d", "\ud800"]
    answers = ["".join(rng.choices(pieces, k=rng.randint(1, 9))) for _ in range(10_000)]
    assert set(rewards([r"\sqrt{7919}+\pi"] * 10_000, answers)) == {0.0}


# Processes

GOLDS, ANSWERS = ["x+1", r"\sqrt{8}", "3"], ["1+x", r"2\sqrt{2}", "4"]


def test_works_in_other_threads():
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: rewards(GOLDS, ANSWERS), range(8))) == [[1.0, 1.0, 0.0]] * 8


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_works_in_other_processes(method, warm_server):
    completions = [box(answer) for answer in ANSWERS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            jobs = [pool.submit(math_reward, completions, GOLDS) for _ in range(4)]
            assert [job.result() for job in jobs] == [[1.0, 1.0, 0.0]] * 4
    assert rewards(GOLDS, ANSWERS) == [1.0, 1.0, 0.0]


def test_leaves_the_alarm_of_the_caller_alone():
    def handler(signum, frame):
        raise AssertionError

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 600)
    try:
        rewards(GOLDS, ANSWERS)
        assert signal.getsignal(signal.SIGALRM) is handler
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_killed_server_is_replaced(warm_server):
    math_task._server.kill()
    assert rewards(["x+3"], ["3+x"]) == [1.0]


def test_the_server_ends_with_a_killed_caller():
    script = (
        "import os, signal\n"
        "from lopti_trl.tasks import math\n"
        "math.math_reward([r'\\boxed{5}'], ['6'])\n"
        "print(math._server.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 20
    while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_importing_the_task_loads_nothing_heavy():
    script = "import sys, lopti_trl.tasks.math; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    heavy = {"torch", "sympy", "math_verify", "datasets", "transformers", "numpy"}
    assert "lopti_trl.tasks.math" in done.stdout.split()
    assert not heavy & set(done.stdout.split())


# Data


class Tokenizer:
    """A chat template that writes the BOS token, and a tokenizer that adds it again."""

    bos_token, bos_token_id = "<s>", 1

    def __call__(self, text):
        return {"input_ids": [1]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        turns = "".join(f"<|{m['role']}|>{m['content']}" for m in messages)
        return f"<s>{turns}<|assistant|>"


@pytest.fixture
def write_jsonl(tmp_path):
    def write(*rows):
        path = tmp_path / "problems.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        return str(path)

    return write


def test_the_instruction_is_added_once_in_both_styles():
    expected = "What is 2+2?" + INSTRUCTION
    assert build_prompt("What is 2+2?") == build_prompt(expected) == expected
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "What is 2+2?"}]
    assert build_prompt(messages) == expected
    chat = build_prompt(messages, Tokenizer(), "chat")
    assert chat == f"<|system|>S<|user|>{expected}<|assistant|>"
    assert build_prompt("What is 2+2?", Tokenizer(), "chat") == f"<|user|>{expected}<|assistant|>"


@pytest.mark.parametrize("style", ["base", "chat"])
def test_a_rendered_prompt_is_not_rendered_again(style):
    rendered = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert build_prompt(rendered, Tokenizer(), style) == rendered
    wrapped = [{"role": "user", "content": rendered}]
    assert build_prompt(wrapped, Tokenizer(), style) == rendered


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"problem": "P", "answer": "5"}, "5"),
        ({"problem": "P", "answer": 142.0}, "142"),
        ({"problem": "P", "answer": -0.875}, "-0.875"),
        ({"problem": "P", "answer": 7}, "7"),
        ({"problem": "P", "answer": ["0.01\n", "0.02\n"]}, '["0.01", "0.02"]'),
        ({"problem": "P", "answer": ["4\n", "4"]}, "4"),
        ({"question": "P", "answer": "2+2=4, so\n#### 1,234"}, "1,234"),
        ({"question": "P", "final_answer": ["$2n$"]}, "$2n$"),
        ({"problem": "P", "solution": r"So \boxed{\frac{1}{2}}."}, r"\frac{1}{2}"),
        ({"problem": "P", "solution": r"\boxed{6}", "answer": "5"}, "5"),
        ({"prompt": "P", "reward_model": {"ground_truth": "5"}}, "5"),
        ({"prompt": [{"role": "user", "content": "P"}], "answer": "5"}, "5"),
    ],
)
def test_every_known_format_loads(row, answer, write_jsonl):
    problems = load_problems(write_jsonl(row))
    assert problems.to_list() == [
        {"prompt": "P" + INSTRUCTION, "answer": answer, "source": "problems"}
    ]


def test_a_missing_answer_stays_missing(write_jsonl):
    path = write_jsonl({"problem": "P", "answer": "5"}, {"problem": "Q", "answer": None})
    assert load_problems(path)["answer"][:] == ["5", None]


def test_orz_pairs_of_turns_load(tmp_path):
    turns = [{"from": "human", "value": "P"}, {"from": "assistant", "ground_truth": {"value": "5"}}]
    path = tmp_path / "orz.json"
    path.write_text(json.dumps([turns, turns]))
    assert load_problems(str(path))["prompt"][:] == ["P" + INSTRUCTION] * 2
    assert load_problems(str(path))["answer"][:] == ["5", "5"]


def test_a_choice_depends_on_the_seed_and_keeps_the_order(write_jsonl):
    path = write_jsonl(*({"problem": f"P{i:02}", "answer": str(i)} for i in range(50)))
    chosen = [load_problems(path, num_problems=10, seed=seed)["answer"][:] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert chosen[0] == sorted(chosen[0], key=int)
    assert len(set(chosen[0])) == 10
    assert len(load_problems(path, num_problems=99)) == 50


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"problem": "", "answer": "5"}, r"row 1, column 'problem': found ''; give a text or mess"),
        ({"problem": 5, "answer": "5"}, r"row 1, column 'problem': found 5; give a text"),
        ({"problem": ["P"], "answer": "5"}, r"row 1, column 'problem': found \['P'\]; give a text"),
        ({"problem": "P", "answer": []}, r"row 1, column 'answer': found \[\]; give a text, a num"),
        ({"problem": "P", "answer": {"a": 1}}, r"row 1, column 'answer': found \{'a': 1\}; give"),
        ({"problem": "P", "answer": [["5"]]}, r"row 1, column 'answer': found \[\['5'\]\]; give a"),
    ],
)
def test_bad_rows_are_named_with_the_remedy(row, complaint):
    good = {"problem": "P", "answer": "5"}
    validate_rows([good, good])
    with pytest.raises(ValueError, match=complaint):
        validate_rows([good, row])


def test_a_solution_without_a_box_is_a_bad_row():
    rows = [{"problem": "P", "solution": r"\boxed{5}"}, {"problem": "P", "solution": "5"}]
    with pytest.raises(ValueError, match="row 1, column 'solution': found '5'; box the final"):
        validate_rows(rows)


def test_bad_arguments_are_named_with_the_remedy(tmp_path, write_jsonl):
    path = write_jsonl({"problem": "P", "answer": "5"})
    with pytest.raises(
        ValueError, match=r"style='instruct' is unknown\. Set it to 'base' or 'chat'"
    ):
        load_problems(path, style="instruct")
    with pytest.raises(ValueError, match="Pass tokenizer"):
        load_problems(path, style="chat")
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl.*\.parquet.*gsm8k"):
        load_problems(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"\['text'\] hold no known pair. Rename them"):
        load_problems(write_jsonl({"text": "P"}))
    with pytest.raises(ValueError, match="empty"):
        validate_rows([])


def test_every_named_source_has_a_split_and_every_column_pair_is_found():
    assert all(source.path.count("/") == 1 and source.split for source in NAMED.values())
    for pair in COLUMNS:
        assert find_columns([name.split(".")[0] for name in pair]) == pair


# The official files


def perturbed(text: str) -> str:
    """The last digit counted up, or 1 added."""
    digits = list(re.finditer(r"\d", text))
    if not digits:
        return f"{text}+1"
    position = digits[-1].start()
    return text[:position] + str((int(text[position]) + 1) % 10) + text[position + 1 :]


@needs_shared
@pytest.mark.parametrize(
    ("name", "size", "num_unreadable"),
    [
        ("aime", 30, 0),
        ("amc", 83, 0),
        ("math", 500, 0),
        pytest.param("minerva", 272, 5, marks=pytest.mark.slow),
        ("olympiad_bench", 675, 2),
    ],
)
def test_official_answers_equal_themselves_and_not_a_perturbed_copy(name, size, num_unreadable):
    problems = load_problems(str(SHARED / f"{name}.parquet"))
    assert len(problems) == size
    assert all(prompt.count(INSTRUCTION) == 1 for prompt in problems["prompt"])
    assert all(prompt.endswith(INSTRUCTION) for prompt in problems["prompt"])
    golds = [text for answer in problems["answer"] for text in math_task.accepted_answers(answer)]
    assert rewards(golds, golds) == [1.0] * len(golds)
    against = rewards(golds, [perturbed(gold) for gold in golds])
    assert against.count(None) == num_unreadable
    assert set(against) <= {0.0, None}


@needs_shared
@pytest.mark.slow
def test_official_training_answers_can_all_be_read():
    problems = load_problems(str(SHARED / "dsr_uniform_train.parquet"))
    assert len(problems) == 10_000
    assert set(problems["source"]) == {"deepscaler"}
    golds = problems["answer"][:]
    assert rewards(golds, golds) == [1.0] * 10_000
    assert set(rewards(golds, [perturbed(gold) for gold in golds])) == {0.0}
