"""Worked solutions of Knights-and-Knaves puzzles, in the format that the reward wants.

For supervised fine-tuning: the tiny model's warm start and the SFT baseline.
"""

import itertools
import random
from collections.abc import Sequence

from lopti_trl.tasks import kk

CONNECTIVES = {"and": "and", "or": "or", "->": "implies", "<=>": "equals"}
TRUTH = {True: "true", False: "false"}
ROLE = {True: "knight", False: "knave"}
# other words than the claims', so that a case is easy to look up
SUPPOSED = {True: "honest", False: "lying"}


def holds(statement: tuple, assignment: Sequence[bool]) -> bool:
    """Whether a statement is true in a case; True is a knight."""
    kind, *parts = statement
    if kind in ("telling-truth", "lying"):
        return assignment[parts[0]] == (kind == "telling-truth")
    values = [holds(part, assignment) for part in parts]
    match kind:
        case "not":
            return not values[0]
        case "and":
            return all(values)
        case "or":
            return any(values)
        case "->":
            return not values[0] or values[1]
        case "<=>":
            return values[0] == values[1]


def check(statement: tuple, names: Sequence[str], case: Sequence[bool]) -> str:
    """ "Zoey knave true and Luke knight false": each part of a claim, and its truth in a case."""
    kind, *parts = statement
    if kind in CONNECTIVES:
        return f" {CONNECTIVES[kind]} ".join(check(part, names, case) for part in parts)
    (role, person) = parts[0] if kind == "not" else statement
    claimed = (role == "telling-truth") != (kind == "not")
    return f"{names[person]} {ROLE[claimed]} {TRUTH[case[person] == claimed]}"


def solution_text(
    names: Sequence[str],
    statements: Sequence[tuple],
    rng: random.Random,
    haste: tuple[float, float] = (0.0, 0.0),
    conclusions: Sequence[str] = ("So", "Thus"),
) -> str:
    """A solution text after the opened <think>: cases are tried until one fits.

    haste: the chance to stop and guess before the first case, and before each later one.
    """
    cases = list(itertools.product((True, False), repeat=len(names)))
    if rng.random() < 0.5:
        cases.reverse()
    assume = rng.choice(("Assume", "Suppose"))
    verb = rng.choice(("check", "examine", "verify", "analyze"))
    text = f" Let me {verb} each {rng.choice(('claim', 'statement'))}."
    for number, case in enumerate(cases):
        if rng.random() < haste[number > 0]:
            answer = rng.choice(cases[number:])
            text = (text if number else "") + f" {rng.choice(conclusions)} it must be clear."
            break
        roles = " ".join(f"{name} {SUPPOSED[r]}" for name, r in zip(names, case, strict=True))
        text += f" {assume} {roles}."
        fits = True
        for name, statement, role in zip(names, statements, case, strict=True):
            fits = holds(statement, case) == role
            verdict = "fits" if fits else "contradiction"
            text += f" {name} says {check(statement, names, case)} {verdict}."
            if not fits:
                break
        if fits:
            answer = case
            text += " Therefore all fits."
            break
    lines = "\n".join(
        f"({i}) {name} is a {ROLE[role]}"
        for i, (name, role) in enumerate(zip(names, answer, strict=True), 1)
    )
    return f"{text}</think>\n<answer>{lines}</answer>"


def solve_quiz(quiz: str, seed: int = 0) -> str:
    """The worked solution of a puzzle text; `seed` and the text choose its words."""
    names, statements = kk.parse_puzzle(quiz)
    return solution_text(names, statements, random.Random(f"{seed} {quiz}"))
