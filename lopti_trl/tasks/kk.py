"""Knights and Knaves (K&K): puzzles, prompt and reward.

A puzzle is a tuple of statements, one per person; people are indices into `names`. A statement is
`("telling-truth", person)`, `("lying", person)`, `("not", s)`, `("and", s, s)`, `("or", s, s)`,
`("->", s, s)` or `("<=>", s, s)`, as in the official files. A solution is one bool per person,
True for a knight.
"""

import functools
import hashlib
import itertools
import math
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from lopti_trl.tasks.rows import load_source

if TYPE_CHECKING:
    from datasets import Dataset

Statement = tuple
Message = dict

INTRODUCTION = (
    "A very special island is inhabited only by knights and knaves. "
    "Knights always tell the truth, and knaves always lie."
)
QUESTION = "So who is a knight and who is a knave?"

SPEECH_FORMS = (
    "{name} said that {claim}.",
    "{name} told you that {claim}.",
    "{name} expressed that {claim}.",
    '{name} said, "{claim}."',
    '{name} stated, "{claim}".',
    '{name} remarked, "{claim}".',
    '{name} commented, "{claim}".',
    '{name} noted, "{claim}".',
    '{name} was heard saying, "{claim}".',
    '{name} asserted: "{claim}".',
    'According to {name}, "{claim}".',
    'As {name} put it, "{claim}".',
    'In {name}\'s words: "{claim}".',
    'In a statement by {name}: "{claim}".',
    '"{claim}," {name} declared.',
    '"{claim}," {name} mentioned.',
    '"{claim}," {name} claimed.',
    '"{claim}" - {name}.',
)

NAMES = (  # noqa: SIM905 - a list literal would take 51 lines
    "Abigail Aiden Alexander Amelia Aria Aurora Ava Avery Benjamin Charlotte Chloe Daniel David "
    "Elizabeth Ella Emily Emma Ethan Evelyn Grace Harper Henry Isabella Jack Jackson Jacob James "
    "Joseph Liam Lily Logan Lucas Luke Mason Matthew Mia Michael Noah Oliver Olivia Owen Penelope "
    "Riley Samuel Scarlett Sebastian Sofia Sophia Victoria William Zoey"
).split()

CLAIM_FORMS = {
    "<=>": "{} if and only if {}",  # before "and", which the parser would find in it
    "->": "If {} then {}",
    "and": "{} and {}",
    "or": "{} or {}",
}
COMMUTATIVE = ("and", "or", "<=>")

SYSTEM_PROMPT = (
    "You solve logic puzzles. Reason step by step between <think> and </think>, then conclude "
    "between <answer> and </answer>. The conclusion lists the identity of every character, one "
    "numbered line each, in this form:\n<answer>(1) NAME is a knight\n(2) ...</answer>"
)


# Puzzles


@functools.cache
def _assignments(num_people: int) -> tuple[list[tuple[bool, ...]], list[int]]:
    """The 2^n assignments, and per person the truth table (bit a: a knight in assignment a)."""
    assignments = list(itertools.product((True, False), repeat=num_people))
    is_knight = [
        sum(assignment[person] << a for a, assignment in enumerate(assignments))
        for person in range(num_people)
    ]
    return assignments, is_knight


def _truth_table(statement: Statement, is_knight: Sequence[int], everywhere: int) -> int:
    """Truth of a statement in every assignment at once: one bit each, so one operation a node."""
    match statement:
        case "telling-truth" | "lying" as kind, int(person) if 0 <= person < len(is_knight):
            return is_knight[person] if kind == "telling-truth" else everywhere ^ is_knight[person]
        case "telling-truth" | "lying", person:
            raise ValueError(f"no person {person!r} among {len(is_knight)} people: {statement!r}")
    kind, *parts = statement
    tables = [_truth_table(part, is_knight, everywhere) for part in parts]
    match kind, len(tables):
        case "not", 1:
            return everywhere ^ tables[0]
        case "and", count if count >= 2:
            return functools.reduce(operator.and_, tables)
        case "or", count if count >= 2:
            return functools.reduce(operator.or_, tables)
        case "->", 2:
            return everywhere ^ tables[0] | tables[1]
        case "<=>", 2:
            return everywhere ^ tables[0] ^ tables[1]
    raise ValueError(f"unknown operator or wrong number of operands: {statement!r}")


def solve(statements: Sequence[Statement]) -> list[tuple[bool, ...]]:
    """All assignments in which each person is a knight iff their statement is true.

    Ordered lexicographically, knights first. Raises ValueError on a malformed statement.
    """
    assignments, is_knight = _assignments(len(statements))
    consistent = everywhere = (1 << len(assignments)) - 1
    for knight, statement in zip(is_knight, statements, strict=True):
        consistent &= everywhere ^ knight ^ _truth_table(statement, is_knight, everywhere)
    return [assignment for a, assignment in enumerate(assignments) if consistent >> a & 1]


def _relabel(statement: Statement, labels: Sequence[int]) -> Statement:
    """The statement with `labels[person]` for each person, commutative operands sorted."""
    kind, *parts = statement
    if kind in ("telling-truth", "lying"):
        return kind, labels[parts[0]]
    parts = [_relabel(part, labels) for part in parts]
    return kind, *(sorted(parts) if kind in COMMUTATIVE else parts)


def _refine(statements: Sequence[Statement], colours: list[int]) -> list[int]:
    """Split colour classes by what people say and what is said of them, until nothing splits."""
    while True:
        keys = []
        for person in range(len(statements)):
            labels = [2 * colour for colour in colours]
            labels[person] += 1
            views = [_relabel(statement, labels) for statement in statements]
            told = tuple(sorted(zip(colours, views, strict=True)))
            keys.append((colours[person], views[person], told))
        ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
        refined = [ranks[key] for key in keys]
        if len(ranks) == len(set(colours)):
            return refined
        colours = refined


def _interchangeable(statements: Sequence[Statement], first: int, second: int) -> bool:
    """Whether swapping two people leaves the puzzle as it is."""
    same = list(range(len(statements)))
    swap = list(same)
    swap[first], swap[second] = second, first
    return all(
        _relabel(statements[swap[person]], same) == _relabel(statements[person], swap)
        for person in same
    )


def _smallest_form(statements: Sequence[Statement], colours: list[int]) -> tuple[Statement, ...]:
    colours = _refine(statements, colours)
    people = range(len(colours))
    tied = [colour for colour, count in sorted(Counter(colours).items()) if count > 1]
    if not tied:
        order = sorted(people, key=lambda person: colours[person])
        return tuple(_relabel(statements[person], colours) for person in order)
    branches: list[int] = []
    for person in people:
        if colours[person] == tied[0] and not any(
            _interchangeable(statements, person, other) for other in branches
        ):
            branches.append(person)
    return min(
        _smallest_form(statements, [2 * colours[p] + (p != person) for p in people])
        for person in branches
    )


def canonical_form(statements: Sequence[Statement]) -> str:
    """Equal for two puzzles iff they differ only in the names and order of the people and in the
    order of the operands of `and`, `or` and `<=>`.

    Colour refinement (Weisfeiler-Leman) orders the people as far as it can. Where it cannot, each
    of the tied people is put first in turn and the smallest outcome wins: nothing is left to a
    heuristic. Of two people whose swap changes nothing, one turn is enough.
    """
    return repr(_smallest_form(statements, [0] * len(statements)))


def split_of(statements: Sequence[Statement]) -> Literal["train", "test"]:
    """The split a puzzle belongs to, whoever generates it: one canonical form in five is test.

    The split is a property of the puzzle and not of a seed, so no generated train set shares a
    puzzle with any generated test set, not even up to renaming.
    """
    digest = hashlib.sha256(canonical_form(statements).encode()).digest()
    return "test" if int.from_bytes(digest) % 5 == 0 else "train"


def _parse_single(claim: str, names: Sequence[str]) -> Statement:
    match = re.fullmatch(r"(.+) is (not )?a (knight|knave)", claim)
    if not match or match[1] not in names:
        raise ValueError(f"cannot parse the claim {claim!r} about {', '.join(names)}")
    single = ("telling-truth" if match[3] == "knight" else "lying", names.index(match[1]))
    return ("not", single) if match[2] else single


def _parse_claim(claim: str, names: Sequence[str]) -> Statement:
    for kind, form in CLAIM_FORMS.items():
        if match := re.fullmatch(form.replace("{}", "(.+)"), claim):
            return kind, *(_parse_single(part, names) for part in match.groups())
    return _parse_single(claim, names)


_PUZZLE = re.compile(
    rf"{re.escape(INTRODUCTION)} You meet \d+ inhabitants: (?P<names>.+?)\. (?P<speeches>.+) "
    + re.escape(QUESTION)
)
_SPEECHES = [
    re.compile(
        re.escape(form)
        .replace(r"\{name\}", r'(?P<name>[^".:,]+)')
        .replace(r"\{claim\}", r'(?P<claim>[^".]+?)')
        + "(?: |$)"
    )
    for form in SPEECH_FORMS
]


def parse_puzzle(quiz: str) -> tuple[list[str], tuple[Statement, ...]]:
    """Names and statements of a puzzle text. ValueError quotes the piece that does not parse."""
    puzzle = _PUZZLE.fullmatch(quiz.strip())
    if not puzzle:
        raise ValueError(f"introduction, names or question not found in {quiz!r}")
    names = re.split(r", and |, | and ", puzzle["names"])
    statements: dict[str, Statement] = {}
    speeches = puzzle["speeches"]
    while speeches:
        speech = next(filter(None, (form.match(speeches) for form in _SPEECHES)), None)
        if not speech or speech["name"] not in names or speech["name"] in statements:
            raise ValueError(f"cannot parse a statement by one of {', '.join(names)}: {speeches!r}")
        statements[speech["name"]] = _parse_claim(speech["claim"], names)
        speeches = speeches[speech.end() :]
    if len(statements) != len(names):
        raise ValueError(f"{len(statements)} statements by {len(names)} people in {quiz!r}")
    return names, tuple(statements[name] for name in names)


def _claim_text(statement: Statement, names: Sequence[str]) -> str:
    match statement:
        case "telling-truth", person:
            return f"{names[person]} is a knight"
        case "lying", person:
            return f"{names[person]} is a knave"
        case "not", single:
            return _claim_text(single, names).replace(" is a ", " is not a ")
    kind, *parts = statement
    return CLAIM_FORMS[kind].format(*(_claim_text(part, names) for part in parts))


def _quiz_text(statements: Sequence[Statement], names: Sequence[str], forms: Sequence[str]) -> str:
    people = ", ".join(names[:-1]) + (", and " if len(names) > 2 else " and ") + names[-1]
    speeches = [
        form.format(name=name, claim=_claim_text(statement, names))
        for form, name, statement in zip(forms, names, statements, strict=True)
    ]
    meeting = f"You meet {len(names)} inhabitants: {people}."
    return " ".join([INTRODUCTION, meeting, *speeches, QUESTION])


@functools.cache
def _single_claims(speaker: int, num_people: int) -> list[Statement]:
    """What a claim is made of. As in the official puzzles, never of "I am a knave"."""
    singles = itertools.product(("telling-truth", "lying"), range(num_people))
    return [single for single in singles if single != ("lying", speaker)]


def _draw_statements(rng: random.Random, num_people: int) -> tuple[Statement, ...]:
    statements = []
    for speaker in range(num_people):
        kind = rng.choice(("single", "not", *CLAIM_FORMS))
        num_parts = 2 if kind in CLAIM_FORMS else 1
        parts = rng.sample(_single_claims(speaker, num_people), num_parts)
        statements.append(parts[0] if kind == "single" else (kind, *parts))
    return tuple(statements)


# reasoning-gym has a generator too, but as data for this task it falls short: 7.7 ms a 7-person
# puzzle (here 0.7), no "is not a knave" in its text, other role words at random (angel, devil),
# duplicates up to renaming, no disjoint test split, and 11 more packages to install.
def generate_puzzles(
    num_people: int,
    num_puzzles: int,
    seed: int,
    split: Literal["train", "test"] = "train",
) -> "Dataset":
    """Puzzles in the official grammar and wording, each with exactly one solution.

    No two have the same canonical form, and all belong to `split` (see `split_of`). A request is
    the beginning of any larger one with the same people, seed and split.
    Columns: quiz, names, solution, statements (a Python literal), num_people.
    """
    from datasets import Dataset

    if not 2 <= num_people <= 8:
        raise ValueError(
            f"num_people={num_people}, but puzzles have 2 to 8 people. Set it in that range."
        )
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} is unknown. Set it to 'train' or 'test'.")
    if num_puzzles < 1:
        raise ValueError(
            f"num_puzzles={num_puzzles}, but at least one is needed. Set it to 1 or more."
        )
    rng = random.Random(f"{seed}/{num_people}/{split}")
    rows, seen, draws_in_vain = [], set(), 0
    while len(rows) < num_puzzles:
        if draws_in_vain == 20_000:
            raise ValueError(
                f"num_puzzles={num_puzzles}, but only {len(rows)} distinct puzzles with "
                f"{num_people} people turned up for {split}. Ask for at most that many."
            )
        draws_in_vain += 1
        statements = _draw_statements(rng, num_people)
        solutions = solve(statements)
        if len(solutions) != 1 or split_of(statements) != split:
            continue
        form = canonical_form(statements)
        if form in seen:
            continue
        seen.add(form)
        draws_in_vain = 0
        names = rng.sample(NAMES, num_people)
        rows.append(
            {
                "quiz": _quiz_text(statements, names, rng.choices(SPEECH_FORMS, k=num_people)),
                "names": names,
                "solution": list(solutions[0]),
                "statements": repr(statements),
                "num_people": num_people,
            }
        )
    return Dataset.from_list(rows)


# two people have so few different puzzles; other sizes have thousands
_MOST = {(2, "train"): 75, (2, "test"): 20}


# Prompt


def _render(messages: list[Message], tokenizer) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    bos = tokenizer.bos_token
    # TRL tokenizes text prompts with special tokens added: a BOS from the template would double
    if (
        bos
        and text.startswith(bos)
        and tokenizer(text="")["input_ids"][:1] == [tokenizer.bos_token_id]
    ):
        text = text.removeprefix(bos)
    return text if text.rstrip().endswith("<think>") else text + "<think>"


def build_prompt(quiz: str, tokenizer=None) -> list[Message] | str:
    """The prompt of a puzzle: messages, or with a tokenizer the rendered text up to `<think>`.

    Text, because TRL renders messages with `add_generation_prompt=True`, which leaves no way to
    open the assistant turn with `<think>`.
    """
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": quiz},
    ]
    return _render(messages, tokenizer) if tokenizer else messages


# Reward


class Verdict(NamedTuple):
    """What a completion achieved. Each stage includes the one before."""

    format_ok: bool  # the tags are in order
    parsed: bool  # every person has exactly one role
    correct: bool  # and it is the right one

    @property
    def score(self) -> float:
        """3 correct, -0.5 wrong, -1 no answer to read, -3 format failure (Logic-RL's values)."""
        return (-3.0, -1.0, -0.5, 3.0)[sum(self)]


def _strict_answer(completion: str, prefilled: bool) -> str | None:
    """The answer's text if each tag occurs once and all are in order, as in the official rule."""
    text = "<think>" + completion if prefilled else completion
    # the official rule looks for the assistant turn here, and so loses the prefilled <think>
    text = text.split("Assistant:", 1)[-1]
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    positions = [text.find(tag) for tag in tags]
    if any(text.count(tag) != 1 for tag in tags) or positions != sorted(positions):
        return None
    return text[positions[2] + len("<answer>") : positions[3]]


def _read_strict(answer: str, names: Sequence[str]) -> list[bool] | None:
    """Roles by the official rule: as many role words as people, and `NAME is a ROLE` for each."""
    lowered = answer.lower()
    if lowered.count("knight") + lowered.count("knave") != len(names):
        return None
    claims = [
        re.search(rf"(?<!\w){re.escape(name)}\s+is\s+a\s+(knight|knave)\b", answer, re.IGNORECASE)
        for name in names
    ]
    return [claim[1].lower() == "knight" for claim in claims] if all(claims) else None


def _lenient_answer(completion: str) -> str | None:
    """The text of all answer blocks, which must then agree; None if there is none or one is open.

    Tags may be repeated, in capitals or spaced, and the reasoning may lack its own.
    """
    texts = re.split(r"<\s*(?:(/)\s*)?answer\s*>", completion, flags=re.IGNORECASE)
    texts, slashes = texts[::2], texts[1::2]
    blocks = [
        text
        for text, before, after in zip(texts[1:], slashes, slashes[1:], strict=False)
        if after and not before
    ]
    return "\n".join(blocks) if blocks and slashes[-1] else None


# The lenient reader turns an answer into a string of token kinds and looks for claims in it: with
# N for a name, "Zoey is not a knave" reads NLXAV. Every name and every role has to end up in a
# claim, so what the reader does not understand costs the reward instead of earning it.
_KINDS = {
    "k": "knights",
    "v": "knaves",
    "K": "knight",
    "V": "knave",
    "X": r"not|never|cannot|[^\W_]+n['\u2019]t|[\u2260\u00ac]",  # negation
    "D": (  # doubt or retraction
        r"maybe|perhaps|possibly|probably|likely|unlikely|might|may|could|seems?|appears?|guess"
        r"|unsure|uncertain|unclear|unknown|assume|assuming|suppose|unless|except|besides"
        r"|(?:all|every\w*)\s+but|neither|nor|no|wait|actually|instead|rather|correction|opposite"
        r"|reverse|wrong|false|untrue|incorrect|impossible|a\s+lie|[%\u274c\u2717\u2718]"
    ),
    "O": r"or|either|whether|if|iff|when|whenever|provided|\?",  # alternative or condition
    "L": r"is|are|was|were|must|be|['\u2019]s|[:=>\u2192\u2013\u2014-]+",  # links name and role
    "A": r"an?|the|both|also|indeed|clearly|definitely|certainly|therefore|thus|hence",
    "S": r",\s*(?:and)?|and|&",  # between names
    "E": r"[.;!\n]+",  # end of a sentence
    "W": r"[^\W_]+",  # any other word
}
_CLAIM = re.compile(r"(?<!NS)N(?:SN)*[LA]{0,4}X?[LA]{0,4}[KVkv]")


@functools.lru_cache(maxsize=1024)
def _token_pattern(names: tuple[str, ...]) -> re.Pattern:
    """Tokens of an answer, in groups named by kind; the group of names[3] is N3."""
    longest_first = sorted(enumerate(names), key=lambda item: -len(item[1]))
    groups = {f"N{person}": re.escape(name) for person, name in longest_first} | _KINDS
    tokens = "|".join(f"(?P<{kind}>{pattern})" for kind, pattern in groups.items())
    # no token ends inside a word: "Ann" is not in "Anna", while ":" may touch what follows
    return re.compile(rf"(?:{tokens})(?:(?<![^\W_])|(?![^\W_]))", re.IGNORECASE)


def _read_lenient(answer: str, names: Sequence[str]) -> list[bool] | None:
    """Roles as a careful person reads them; None if any is missing, doubtful or contradicted.

    A claim is `names [is|:|-|=] [not] [a|the] role`, in any order and markup. What precedes the
    first name is a heading and may talk of knights and knaves; later only plurals that are not
    predicated of anyone may ("the knights tell the truth", but not "the others are knaves").
    """
    tokens = list(_token_pattern(tuple(names)).finditer(answer))
    kinds = "".join(token.lastgroup[0] for token in tokens)
    heading, _, _ = kinds.partition("N")
    roles: dict[int, bool] = {}
    for claim in _CLAIM.finditer(kinds):
        groups = [token.lastgroup for token in tokens[claim.start() : claim.end()]]
        people = {int(group[1:]) for group in groups if group[0] == "N"}
        if len(people) > 1 and groups[-1] in "KV":  # "Zoey, Max is a knight"
            return None
        is_knight = (groups[-1] in "Kk") != ("X" in groups)
        if any(roles.setdefault(person, is_knight) != is_knight for person in people):
            return None
    rest = _CLAIM.sub(" ", kinds[len(heading) :])
    predicated = (
        0 <= sentence.find("L") < max(sentence.rfind("k"), sentence.rfind("v"))
        for sentence in rest.split("E")
    )
    if set(heading) & set("XD") or set(rest) & set("NKVXDO") or any(predicated):
        return None
    return [roles[person] for person in range(len(names))] if len(roles) == len(names) else None


def read_completion(
    completion: str,
    names: Sequence[str],
    mode: Literal["strict", "lenient"] = "strict",
    prefilled: bool = True,  # the prompt ended with <think>
) -> tuple[bool, list[bool] | None]:
    """Whether the tags are in order, and each person's role, if all can be read.

    An answer that the official rule can read is read by it in both modes.
    """
    if mode not in ("strict", "lenient"):
        raise ValueError(f"mode={mode!r} is unknown. Set it to 'strict' or 'lenient'.")
    answer = _strict_answer(completion, prefilled)
    roles = None if answer is None else _read_strict(answer, names)
    if mode == "lenient" and roles is None:
        answer = _lenient_answer(completion) if answer is None else answer
        roles = None if answer is None else _read_lenient(answer, names)
    return answer is not None, roles


def judge(
    completion: str,
    names: Sequence[str],
    solution: Sequence[bool],
    mode: Literal["strict", "lenient"] = "strict",
    prefilled: bool = True,  # the prompt ended with <think>
) -> Verdict:
    """Judge one completion. `strict` is the official rule, `lenient` never scores below it."""
    format_ok, roles = read_completion(completion, names, mode, prefilled)
    return Verdict(format_ok, roles is not None, roles == list(solution))


def message_text(completion: str | list[Message]) -> str:
    """The text itself, or that of the last message, its text blocks joined; "" if there is none."""
    if isinstance(completion, str):
        return completion
    content = (completion[-1].get("content") if completion else None) or ""
    if isinstance(content, str):
        return content
    return "".join(block.get("text") or "" for block in content if block.get("type") == "text")


def is_prefilled(prompt: str | list[Message] | None, completion: str) -> bool:
    if isinstance(prompt, str):
        return prompt.rstrip().endswith("<think>")
    # the template of a conversational prompt is unknown here: whoever wrote <think>, it was once
    return prompt is None or "<think>" not in completion


def kk_reward(
    completions: Sequence[str | list[Message]],
    names: Sequence[Sequence[str]],
    solution: Sequence[Sequence[bool]],
    mode: Literal["strict", "lenient"] = "strict",
    prompts: Sequence[str | list[Message]] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs,
) -> list[float]:
    """TRL reward: 3 correct, -0.5 wrong, -1 unreadable or incomplete, -3 format failure.

    Logs the shares of the batch that reach each stage of `Verdict`, as kk/format_ok, kk/parsed
    and kk/correct.
    """
    texts = [message_text(completion) for completion in completions]
    verdicts = [
        judge(text, *puzzle, mode, is_prefilled(prompt, text))
        for text, prompt, *puzzle in zip(
            texts, prompts or [None] * len(texts), names, solution, strict=True
        )
    ]
    if log_metric and verdicts:
        for stage, reached in zip(Verdict._fields, zip(*verdicts, strict=True), strict=True):
            log_metric(f"kk/{stage}", sum(reached) / len(reached))
    return [verdict.score for verdict in verdicts]


# Data sets


def validate_rows(dataset: "Dataset | Sequence[Mapping]") -> None:
    """Raise ValueError, naming row and column, unless every row can be prompted and judged."""
    if not len(dataset):
        raise ValueError("the data set is empty. Give it at least one row.")
    for index, row in enumerate(dataset):
        names, solution = row.get("names"), row.get("solution")
        if not row.get("prompt") and not row.get("quiz"):
            column, found, fix = "prompt", row.get("prompt"), "give a prompt, or a quiz to build it"
        elif not names or not all(isinstance(name, str) and name.strip() for name in names):
            column, found, fix = "names", names, "list the people's names, none of them empty"
        elif len({name.casefold() for name in names}) < len(names):
            column, found, fix = "names", names, "give each person a name of their own"
        elif not solution or not all(isinstance(is_knight, bool) for is_knight in solution):
            column, found, fix = "solution", solution, "list one bool per person, true for a knight"
        elif len(solution) != len(names):
            column, found = "solution", solution
            fix = f"make it as long as names ({len(names)})"
        else:
            continue
        raise ValueError(f"row {index}, column {column!r}: found {found!r}; {fix}.")


def _prompt(row: Mapping, tokenizer) -> str | list[Message]:
    prompt = row.get("prompt")
    if not prompt:
        return build_prompt(row["quiz"], tokenizer)
    if isinstance(prompt, str):
        return prompt
    # the official files wrap a rendered chat in a user message: a template would nest it
    if len(prompt) == 1 and message_text(prompt).rstrip().endswith("<think>"):
        return message_text(prompt)
    return _render(prompt, tokenizer) if tokenizer else prompt


def load_puzzles(
    source: str,  # "generated", a .parquet, .jsonl or .json file, or a data set on the hub
    split: str,  # of generated puzzles or of the hub's data set; a file is a split of its own
    num_people: Sequence[int] | None = None,  # sizes to keep; None keeps all
    num_puzzles: int | None = None,  # per size, or as many as there are; None keeps all
    seed: int = 0,
    tokenizer=None,  # renders the prompts to text; None leaves them conversational
) -> "Dataset":
    """Puzzles ready to train on. Columns: prompt, names, solution, num_people, and quiz if known.

    Raises FileNotFoundError for a missing file, ValueError for bad rows or if no puzzle is left.
    """
    from datasets import Dataset, concatenate_datasets

    if source != "generated":
        others = "the name of a data set on the hub, or 'generated'"
        dataset = load_source(source, split, others=others)
    elif num_people and num_puzzles:
        counts = {size: min(num_puzzles, _MOST.get((size, split), math.inf)) for size in num_people}
        parts = [generate_puzzles(size, count, seed, split) for size, count in counts.items()]
        dataset = concatenate_datasets(parts)
    else:
        raise ValueError(
            f"generated puzzles need num_people and num_puzzles, found {num_people} and "
            f"{num_puzzles}. Set them, for example to [3, 4, 5, 6, 7] and 900."
        )
    known = ("prompt", "quiz", "names", "solution", "num_people")
    rows = dataset.select_columns([c for c in dataset.column_names if c in known]).to_list()
    validate_rows(rows)
    sizes = [row.get("num_people") or len(row["names"]) for row in rows]
    kept, taken = [], Counter()
    for row, size in zip(rows, sizes, strict=True):
        wanted = num_people is None or size in num_people
        if wanted and (num_puzzles is None or taken[size] < num_puzzles):
            taken[size] += 1
            kept.append({**row, "prompt": _prompt(row, tokenizer), "num_people": size})
    if not kept:
        raise ValueError(
            f"no puzzle is left: {source} has num_people in {sorted(set(sizes))}, asked for were "
            f"num_people={num_people} and num_puzzles={num_puzzles}. Ask for a size it has."
        )
    return Dataset.from_list(kept)
