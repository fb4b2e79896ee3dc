"""Knights and Knaves: puzzles against brute force and the official files, rewards by hand."""

import ast
import itertools
import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopti_trl.tasks.kk import (
    NAMES,
    SPEECH_FORMS,
    build_prompt,
    canonical_form,
    generate_puzzles,
    judge,
    kk_reward,
    load_puzzles,
    parse_puzzle,
    solve,
    split_of,
    validate_rows,
)

SHARED = Path(__file__).resolve().parents[2] / "shared"
KNIGHT, KNAVE = "telling-truth", "lying"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the official files are not here")
REPEATABLE = settings(deadline=None, derandomize=True, database=None)


def parse(quiz_middle: str):
    return parse_puzzle(
        "A very special island is inhabited only by knights and knaves. Knights always tell the "
        f"truth, and knaves always lie. You meet {quiz_middle} "
        "So who is a knight and who is a knave?"
    )


def rename(statement, people, rng=None):
    """Apply `people[old] = new`; with a generator also shuffle operands whose order is free."""
    kind, *parts = statement
    if kind in (KNIGHT, KNAVE):
        return kind, people[parts[0]]
    parts = [rename(part, people, rng) for part in parts]
    if kind in ("and", "or", "<=>"):
        parts = rng.sample(parts, len(parts)) if rng else sorted(parts)
    return kind, *parts


def permute(statements, people, rng=None):
    moved = {new: rename(statements[old], people, rng) for old, new in enumerate(people)}
    return tuple(moved[person] for person in range(len(statements)))


def brute_force_form(statements):
    return min(permute(statements, p) for p in itertools.permutations(range(len(statements))))


def random_puzzle(rng, num_people, kinds=("single", "not", "and", "or", "->", "<=>")):
    def single():
        return rng.choice((KNIGHT, KNAVE)), rng.randrange(num_people)

    def statement():
        kind = rng.choice(kinds)
        if kind == "single":
            return single()
        return kind, *(single() for _ in range(1 if kind == "not" else 2))

    return tuple(statement() for _ in range(num_people))


@pytest.fixture(scope="module")
def official():
    import pandas as pd

    folder = SHARED / "data" / "kk"
    return pd.concat([pd.read_parquet(folder / f"{split}.parquet") for split in ("train", "test")])


@pytest.fixture(scope="module")
def golden():
    text = (SHARED / "golden" / "kk_reward.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def generated():
    return generate_puzzles(7, 600, seed=0).to_list()


# Solving and parsing


def test_solve_finds_hand_worked_solutions():
    # "I am a knight" never decides; "you are a knave" from both needs one of each
    assert solve([(KNIGHT, 0)]) == [(True,), (False,)]
    assert solve([(KNAVE, 0)]) == []
    assert solve([(KNAVE, 1), (KNAVE, 0)]) == [(True, False), (False, True)]
    # "we are both knaves" is a lie, so the other one is a knight; he says nothing of use
    assert solve([("and", (KNAVE, 0), (KNAVE, 1)), (KNIGHT, 1)]) == [(False, True)]
    # a false premise makes any implication true, so its speaker cannot be a knave
    assert solve([("->", (KNIGHT, 0), (KNIGHT, 1)), (KNIGHT, 1)]) == [(True, True)]
    # "one of us is a knave" cannot be a lie, and makes the second right and the third a liar
    one_of_us = ("or", (KNAVE, 0), (KNAVE, 1), (KNAVE, 2))
    assert solve([one_of_us, (KNIGHT, 0), ("and", (KNAVE, 0), (KNIGHT, 1))]) == [
        (True, True, False)
    ]


def test_solve_agrees_with_reasoning_gym():
    solver = pytest.importorskip("reasoning_gym.logic.knights_knaves").KnightsKnavesDataset
    rng = random.Random(0)
    puzzles = [random_puzzle(rng, num_people) for num_people in (2, 3, 4, 5) for _ in range(50)]
    assert [solve(puzzle) for puzzle in puzzles] == [solver.find_solution(p) for p in puzzles]


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        (("xor", (KNIGHT, 0), (KNIGHT, 0)), "unknown operator"),
        (("and", (KNIGHT, 0)), "number of operands"),
        (("not", (KNIGHT, 1)), "no person 1 among 1"),
        ((KNAVE, -1), "no person -1 among 1"),
    ],
)
def test_solve_rejects_malformed_statements(statement, complaint):
    with pytest.raises(ValueError, match=complaint):
        solve([statement])


@needs_shared
def test_official_puzzles_parse_and_have_the_stored_solution(official):
    assert len(official) == 5000
    for row in official.itertuples():
        names, statements = parse_puzzle(row.quiz)
        assert names == list(row.names)
        assert statements == ast.literal_eval(row.statements)
        assert solve(statements) == [tuple(row.solution)]


def test_two_people_are_listed_with_or_without_a_comma():
    speeches = (
        'Ann said, "If Bo is a knave then Ann is a knight." "Ann is not a knave," Bo claimed.'
    )
    expected = (["Ann", "Bo"], (("->", (KNAVE, 1), (KNIGHT, 0)), ("not", (KNAVE, 0))))
    assert parse(f"2 inhabitants: Ann and Bo. {speeches}") == expected
    assert parse(f"2 inhabitants: Ann, and Bo. {speeches}") == expected


@pytest.mark.parametrize(
    ("middle", "piece"),
    [
        ("2 inhabitants: Ann and Bo. Ann said that Bo is a spy. Bo said that x.", "Bo is a spy"),
        ("2 inhabitants: Ann and Bo. Ann said that Cy is a knight.", "Cy is a knight"),
        ("2 inhabitants: Ann and Bo. Ann sang that Bo is a knight.", "Ann sang that"),
        ("2 inhabitants: Ann and Bo. Ann said that Bo is a knight.", "1 statements by 2 people"),
        ("nobody.", "meet nobody"),
    ],
)
def test_parse_quotes_what_it_cannot_read(middle, piece):
    with pytest.raises(ValueError, match=piece):
        parse(middle)


# Canonical form and split


def test_canonical_form_partitions_puzzles_as_brute_force_does():
    rng = random.Random(1)
    # few kinds of statement, so that many puzzles fall into one class
    pool = [random_puzzle(rng, 3, kinds=("single", "not")) for _ in range(1500)]
    pool += [random_puzzle(rng, 4, kinds=("single",)) for _ in range(1000)]
    pool += [random_puzzle(rng, 4) for _ in range(100)]
    pairs = {(canonical_form(puzzle), brute_force_form(puzzle)) for puzzle in pool}
    assert len({ours for ours, _ in pairs}) == len({theirs for _, theirs in pairs}) == len(pairs)
    assert len(pairs) < len(pool) / 2


def test_canonical_form_ignores_names_order_and_operand_order():
    rng = random.Random(2)
    for num_people in (2, 5, 8):
        for _ in range(30):
            puzzle = random_puzzle(rng, num_people)
            people = rng.sample(range(num_people), num_people)
            assert canonical_form(permute(puzzle, people, rng)) == canonical_form(puzzle)


def test_canonical_form_reads_nested_statements():
    nested = ("and", (KNIGHT, 0), ("or", (KNAVE, 1), ("not", (KNIGHT, 0))), (KNIGHT, 1))
    shuffled = ("and", (KNIGHT, 0), (KNIGHT, 1), ("or", ("not", (KNIGHT, 1)), (KNAVE, 0)))
    assert canonical_form([nested, (KNIGHT, 0)]) == canonical_form([(KNIGHT, 1), shuffled])
    assert canonical_form([nested, (KNIGHT, 0)]) != canonical_form([(KNIGHT, 0), shuffled])


def test_implication_is_not_commutative():
    forth = (("->", (KNIGHT, 0), (KNIGHT, 1)), (KNIGHT, 0))
    back = (("->", (KNIGHT, 1), (KNIGHT, 0)), (KNIGHT, 0))
    assert canonical_form(forth) != canonical_form(back)


def test_canonical_form_separates_symmetric_puzzles_of_eight():
    """Everyone looks alike to colour refinement in each of these."""

    def pointing(successor):
        return tuple((KNIGHT, successor(person)) for person in range(8))

    puzzles = [
        pointing(lambda p: p),
        pointing(lambda p: p ^ 1),
        pointing(lambda p: (p + 1) % 8),
        pointing(lambda p: p // 4 * 4 + (p + 1) % 4),
    ]
    start = time.perf_counter()
    forms = [canonical_form(puzzle) for puzzle in puzzles]
    rng = random.Random(3)
    for puzzle, form in zip(puzzles, forms, strict=True):
        assert canonical_form(permute(puzzle, rng.sample(range(8), 8))) == form
    assert len(set(forms)) == 4
    assert time.perf_counter() - start < 2


def test_one_puzzle_in_five_is_test_and_renaming_keeps_the_split():
    rng = random.Random(4)
    puzzles = [random_puzzle(rng, 4) for _ in range(1000)]
    splits = [split_of(puzzle) for puzzle in puzzles]
    assert 150 < splits.count("test") < 250
    assert splits == [split_of(permute(puzzle, (2, 0, 3, 1), rng)) for puzzle in puzzles]


# Generation


def test_generated_puzzles_have_the_stored_solution_alone(generated):
    solver = pytest.importorskip("reasoning_gym.logic.knights_knaves").KnightsKnavesDataset
    for row in generated[:60]:
        statements = ast.literal_eval(row["statements"])
        assert solver.find_solution(statements) == [tuple(row["solution"])]


def test_generated_text_parses_back_to_its_statements(generated):
    for num_people in range(2, 9):
        for row in [*generate_puzzles(num_people, 20, seed=5), *generated]:
            names, statements = parse_puzzle(row["quiz"])
            assert (names, repr(statements)) == (row["names"], row["statements"])
            assert len(set(names)) == row["num_people"] == len(row["solution"])


def test_generated_puzzles_differ_even_up_to_renaming(generated):
    forms = {canonical_form(ast.literal_eval(row["statements"])) for row in generated}
    assert len(forms) == len(generated) == 600


def test_no_train_set_shares_a_puzzle_with_a_test_set():
    def forms(seed, split):
        rows = generate_puzzles(3, 150, seed, split)
        return {brute_force_form(ast.literal_eval(text)) for text in rows["statements"]}

    train, test = forms(0, "train") | forms(1, "train"), forms(0, "test") | forms(2, "test")
    assert train.isdisjoint(test)
    assert len(train) > 150
    assert len(test) > 150


def test_generation_is_reproducible_and_a_smaller_request_is_a_prefix():
    first, again = generate_puzzles(4, 30, seed=7).to_list(), generate_puzzles(4, 30, seed=7)
    assert first == again.to_list()
    assert first[:10] == generate_puzzles(4, 10, seed=7).to_list()
    assert first != generate_puzzles(4, 30, seed=8).to_list()
    assert first != generate_puzzles(4, 30, seed=7, split="test").to_list()


def test_statement_kinds_are_about_equally_frequent(generated):
    """Having one solution favours some kinds a little: 15 to 18 % each in the official files."""
    statements = [s for row in generated for s in ast.literal_eval(row["statements"])]
    kinds = Counter("single" if s[0] in (KNIGHT, KNAVE) else s[0] for s in statements)
    assert set(kinds) == {"single", "not", "and", "or", "->", "<=>"}
    assert all(0.13 < count / len(statements) < 0.20 for count in kinds.values())
    assert all(s[1] != s[2] for s in statements if len(s) == 3)


def test_nobody_says_that_they_are_a_knave(generated):
    for row in generated:
        for speaker, statement in enumerate(ast.literal_eval(row["statements"])):
            assert repr((KNAVE, speaker)) not in repr(statement)


def test_all_speech_forms_occur(generated):
    quizzes = " ".join(row["quiz"] for row in generated)
    listed = (
        "said that|told you that|expressed that|said, |stated, |remarked, |commented, |noted, |"
        "was heard saying, |asserted: |According to |As |In |In a statement by |declared.|"
        'mentioned.|claimed.|" - '
    )
    pieces = listed.split("|")
    assert len(SPEECH_FORMS) == len(pieces) == 18
    assert all(quizzes.count(piece) > 100 for piece in pieces)


@needs_shared
def test_the_official_wording_is_made_of_our_forms(official):
    claims = ('X is a knight"', "X is a knave.", "X is not a knight,", "If X is a knave then X is")
    quizzes = " ".join(official["quiz"])
    for name in NAMES:
        quizzes = quizzes.replace(f" {name}", " X").replace(f'"{name}', '"X')
    assert all(claim in quizzes for claim in claims)
    for form in SPEECH_FORMS:
        sample = form.format(name="X", claim="X is a knave")
        assert quizzes.count(sample) > 50, form


def test_two_people_have_95_puzzles_and_asking_for_more_says_so():
    """Counted by brute force over everything that two people can say."""

    def sayings(speaker):
        singles = [s for s in itertools.product((KNIGHT, KNAVE), (0, 1)) if s != (KNAVE, speaker)]
        yield from singles
        yield from (("not", single) for single in singles)
        for first, second in itertools.permutations(singles, 2):
            yield from ((kind, first, second) for kind in ("and", "or", "->", "<=>"))

    puzzles = itertools.product(sayings(0), sayings(1))
    expected = {brute_force_form(puzzle) for puzzle in puzzles if len(solve(puzzle)) == 1}
    rows = [*generate_puzzles(2, 75, 0), *generate_puzzles(2, 20, 0, "test")]
    assert len(expected) == 95
    assert {brute_force_form(ast.literal_eval(row["statements"])) for row in rows} == expected
    with pytest.raises(ValueError, match="only 20 distinct puzzles with 2 people"):
        generate_puzzles(2, 21, 0, "test")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_people": 1}, "num_people=1, but puzzles have 2 to 8 people"),
        ({"num_people": 9}, "num_people=9, but puzzles have 2 to 8 people"),
        ({"num_people": 3, "split": "validation"}, "split='validation' is unknown. Set it to"),
        ({"num_people": 3, "num_puzzles": 0}, "num_puzzles=0, but at least one is needed"),
    ],
)
def test_generation_rejects_what_it_cannot_make(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        generate_puzzles(**{"num_puzzles": 1, "seed": 0, **arguments})


# Prompt


class BosTokenizer:
    """A chat template that writes the BOS token, and a tokenizer that may add it again."""

    bos_token, bos_token_id = "<s>", 1

    def __init__(self, adds_bos=True, opening=""):
        self.adds_bos, self.opening = adds_bos, opening

    def __call__(self, text):
        return {"input_ids": [1] if self.adds_bos else []}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        turns = "".join(f"[{m['role']}]{m['content']}" for m in messages)
        return f"<s>{turns}[assistant]{self.opening}"


def test_prompt_is_conversational_without_a_tokenizer():
    system, user = build_prompt("Who is who?")
    assert user == {"role": "user", "content": "Who is who?"}
    assert system["role"] == "system"
    for piece in ("<think>", "</think>", "<answer>", "</answer>", "(1) NAME is a knight\n(2)"):
        assert piece in system["content"]


def test_rendered_prompt_opens_the_reasoning_once():
    assert build_prompt("Q", BosTokenizer()).endswith("[user]Q[assistant]<think>")
    assert build_prompt("Q", BosTokenizer(opening="<think>\n")).endswith("Q[assistant]<think>\n")


def test_rendered_prompt_leaves_out_a_bos_that_tokenizing_adds():
    assert build_prompt("Q", BosTokenizer()).startswith("[system]")
    assert build_prompt("Q", BosTokenizer(adds_bos=False)).startswith("<s>[system]")


# Reward

ZOEY = {"names": ["Zoey", "Max", "Ann"], "solution": [True, False, True]}
RIGHT = "hm</think><answer>(1) Zoey is a knight\n(2) Max is a knave\n(3) Ann is a knight</answer>"


def reward(completion, mode="strict", **kwargs):
    return kk_reward([completion], [ZOEY["names"]], [ZOEY["solution"]], mode=mode, **kwargs)[0]


@needs_shared
def test_strict_scores_equal_the_golden_ones_and_lenient_never_pays_less(golden):
    completions, names, solution, scores = (
        [row[column] for row in golden] for column in ("completion", "names", "solution", "score")
    )
    assert len(golden) == 1136
    assert kk_reward(completions, names, solution) == scores
    messages = [[{"role": "assistant", "content": completion}] for completion in completions]
    assert kk_reward(messages, names, solution) == scores
    lenient = kk_reward(completions, names, solution, mode="lenient")
    assert all(new >= old for new, old in zip(lenient, scores, strict=True))
    assert lenient.count(3.0) > scores.count(3.0)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (RIGHT, 3.0),
        (
            RIGHT.replace("\n", ", ").upper().replace("THINK", "think").replace("ANSWER", "answer"),
            3,
        ),
        (RIGHT.replace("Max is a knave", "Max is a knight"), -0.5),
        (RIGHT.replace("(2) Max is a knave\n", ""), -1.0),
        (RIGHT.replace("Max is a", "Max is the"), -1.0),
        (RIGHT.replace("Zoey", "Zoeyx"), -1.0),
        (RIGHT.replace("<answer>", "<answer>The knights: "), -1.0),
        (RIGHT.replace("</answer>", ""), -3.0),
        (RIGHT.replace("</think>", ""), -3.0),
        (RIGHT + "</answer>", -3.0),
        ("Assistant: " + RIGHT, -3.0),
        ("<answer>x</answer></think>", -3.0),
        ("", -3.0),
    ],
)
def test_strict_scores_by_hand(completion, score):
    assert reward(completion) == score


ACCEPTED = [
    "Zoey is a knight, Max is a knave, and Ann is a knight.",
    "Zoey is a knight and Max is a knave and Ann is a knight",
    "**Zoey** is a **knight**\n**Max** is a **knave**\n**Ann** is a **knight**",
    "- __Zoey__: *Knight*\n- __Max__: *Knave*\n- __Ann__: *Knight*",
    "1. **Zoey**: Knight\n2. **Max**: Knave\n3. **Ann**: Knight",
    "Zoey - knight\nMax - knave\nAnn - knight",
    "Zoey \u2014 knight; Max \u2013 knave; Ann \u2192 knight",
    "Zoey = knight, Max = knave, Ann = knight",
    "(1) Zoey is the knight\n(2) Max is the knave\n(3) Ann is the knight",
    "Zoey is not a knave. Max is not a knight. Ann isn't a knave.",
    "Zoey is knight, Max is knave, Ann is knight",
    "zoey: KNIGHT, max: KNAVE, ann: KNIGHT",
    "Zoey and Ann are knights, Max is a knave.",
    "Max is a knave. Zoey, Ann are both knights!",
    "Zoey is a knights\nMax is a knaves\nAnn is a knights",
    "Zoey (knight), Max (knave), Ann (knight)",
    "| Name | Role |\n|---|---|\n| Zoey | knight |\n| Max | knave |\n| Ann | knight |",
    "The knights are listed first.\nZoey is a knight\nAnn is a knight\nMax is a knave",
    "Here is who is a knight and who is a knave:\nZoey: knight\nMax: knave\nAnn: knight",
    "Zoey is a knight (tells the truth), Max is a knave (lies), Ann is a knight (tells the truth)",
    "Zoey is a knight. Zoey is a knight. Max is a knave. Ann is a knight.",
    "So, Zoey must be a knight, Max is therefore a knave, thus Ann is indeed a knight.",
    "Zoey: knight\nMax: knave\nAnn: knight\nKnights tell the truth.",
    "Zoey's a knight, Max's a knave, Ann's a knight",
    "\u2022 Zoey: knight \u2705\n\u2022 Max: knave \u2705\n\u2022 Ann: knight \u2705",
]
REJECTED = [
    "",
    "Zoey",
    "Zoey: knight, Max: knave",
    "Zoey is the knight, Max is the knave",
    "Zoey is a knight, Max is a knave, Ann is a knight, Zoey is a knave",
    "Zoey: knight, Max: knave, Ann: knight, Ann: knave",
    "Zoey is a knight or a knave, Max is a knave, Ann is a knight",
    "Zoey is a knight and a knave, Max is a knave, Ann is a knight",
    "Zoey: knight/knave, Max: knave, Ann: knight",
    "Zoey is not a knight and not a knave, Max: knave, Ann: knight",
    "Zoey is neither a knight nor a knave, Max: knave, Ann: knight",
    "Zoey is either the knight or Max is, Max is the knave, Ann is the knight",
    "Maybe Zoey is the knight, Max is the knave, Ann is the knight",
    "Zoey: knight (probably), Max: knave, Ann: knight",
    "Zoey might be the knight, Max: knave, Ann: knight",
    "I am not sure, but: Zoey: knight, Max: knave, Ann: knight",
    "Zoey: knight? Max: knave. Ann: knight",
    "Zoey: 90% knight, Max: knave, Ann: knight",
    "Zoey: knight if Max: knave, Ann: knight",
    "Zoe: knight, Max: knave, Ann: knight",
    "Zoeys: knight, Max: knave, Ann: knight",
    "Bob: knight, Max: knave, Ann: knight",
    "Zoey-Lou: knight, Max: knave, Ann: knight",
    "Zoey: knight, Max: knave, Ann: knight, Bob: knight",
    "Zoey: knight. No wait, a knave. Max: knave, Ann: knight",
    "Zoey: knight, Max: knave, Ann: knight. Actually the reverse.",
    "Zoey: knight, Max: knave, Ann: knight. They are all knaves.",
    "Zoey: knight, Max: knave, Ann: knight. The last two: knaves.",
    "It is not the case that Zoey: knight, Max: knave, Ann: knight",
    "Zoey is not not a knight, Max: knave, Ann: knight",
    "Zoey is a non-knight, Max: knave, Ann: knight",
    "Zoey is a ~~knave~~ knight, Max: knave, Ann: knight",
    "Zoey \u2260 knave, Max: knave, Ann: knight, Zoey \u2260 knight",
    "Zoey says Max is the knave. Zoey: knight, Ann: knight",
    "Zoey's friend is the knight, Max: knave, Ann: knight",
    "Zoey or Ann are knights, Max: knave, Ann: knight",
    "Zoey, Max, Ann: knight, knave, knight",
    "Zoey, Ann is the knight, Max: knave",
    "All but Max are knaves. Zoey: knight, Ann: knight",
    "That Zoey is the knight is a lie. Max: knave, Ann: knight",
    "Knight: Zoey\nKnave: Max\nKnight: Ann",
    "knight, knave, knight",
    "NAME is a knight",
]


@pytest.mark.parametrize("answer", ACCEPTED)
def test_lenient_reads_what_a_person_would(answer):
    assert judge(f"</think><answer>{answer}</answer>", **ZOEY, mode="lenient").score == 3.0


@pytest.mark.parametrize("answer", REJECTED)
def test_lenient_pays_no_evasive_answer(answer):
    verdict = judge(f"</think><answer>{answer}</answer>", **ZOEY, mode="lenient")
    assert (verdict.format_ok, verdict.parsed, verdict.score) == (True, False, -1.0)


def test_lenient_calls_a_readable_wrong_answer_wrong():
    verdict = judge("<answer>Zoey: knave, Max: knave, Ann: knight</answer>", **ZOEY, mode="lenient")
    assert (verdict.parsed, verdict.correct, verdict.score) == (True, False, -0.5)


LISTED = "Zoey: knight, Max: knave, Ann: knight"


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (f"no tags around the reasoning <answer>{LISTED}</answer>", 3.0),
        (f"<think>twice</think></think><answer>{LISTED}</answer>", 3.0),
        (f"<answer><answer>{LISTED}</answer></answer>", 3.0),
        (f"I use <answer> tags</think><answer>{LISTED}</answer>", 3.0),
        (f"<answer></answer></think><answer>{LISTED}</answer>", 3.0),
        (f"<answer>{LISTED}</answer></think><answer>{LISTED}</answer>", 3.0),
        (f"</THINK>< Answer >{LISTED}</ ANSWER>", 3.0),
        (f"<answer>{LISTED}</answer><answer>Zoey: knave</answer>", -1.0),
        ("<answer>Zoey: knight</answer><answer>Max: knave</answer>", -1.0),
        (f"</think><answer>{LISTED}", -3.0),
        (f"<answer>{LISTED}</answer><answer>Zoey: kna", -3.0),
        (f"{LISTED}</answer>", -3.0),
        (LISTED, -3.0),
    ],
)
def test_lenient_forgives_tags_unless_the_answer_is_open_or_ambiguous(completion, score):
    assert reward(completion, "lenient") == score


@pytest.mark.parametrize("mode", ["strict", "lenient"])
def test_names_are_safe_in_patterns(mode):
    names, solution = ["Ann", "Anna", "C++", "J.R.", "(.*"], [True, False, True, False, True]
    roles = ["knight" if is_knight else "knave" for is_knight in solution]

    def answer(*claimed):
        lines = (f"{name} is a {role}" for name, role in zip(names, claimed, strict=True))
        return "</think><answer>" + "\n".join(lines) + "</answer>"

    assert judge(answer(*roles), names, solution, mode).score == 3.0
    assert judge(answer(*roles).replace("is a", "is the"), names, solution, "lenient").score == 3.0
    assert judge(answer(*reversed(roles)), names, [not s for s in solution], mode).score == -0.5
    assert judge(answer(*roles).replace("Ann ", "Anne "), names, solution, mode).score == -1.0


def test_who_opened_the_reasoning_follows_from_the_prompt():
    opened = "<think>" + RIGHT
    assert reward(RIGHT, prompts=["puzzle <think>\n"]) == 3.0
    assert reward(opened, prompts=["puzzle <think>\n"]) == -3.0
    assert reward(RIGHT, prompts=["puzzle"]) == -3.0
    assert reward(opened, prompts=["puzzle"]) == 3.0
    conversation = [[{"role": "user", "content": "puzzle"}]]
    assert reward(RIGHT, prompts=conversation) == 3.0
    assert reward(opened, prompts=conversation) == 3.0
    assert reward(RIGHT) == 3.0
    assert reward(opened) == -3.0


def test_message_content_may_be_blocks_or_missing():
    blocks = [{"type": "text", "text": RIGHT[:20]}, {"type": "image"}, {"type": "text"}]
    blocks.append({"type": "text", "text": RIGHT[20:]})
    assert reward([{"role": "assistant", "content": blocks}]) == 3.0
    assert reward([{"role": "user", "content": "x"}, {"role": "assistant", "content": RIGHT}]) == 3
    assert reward([{"role": "assistant", "content": None}]) == -3.0
    assert reward([]) == -3.0


def test_metrics_are_shares_of_the_batch():
    completions = [RIGHT, RIGHT.replace("knave", "knight"), "</think><answer>x</answer>", "x"]
    logged = {}
    scores = kk_reward(
        completions, [ZOEY["names"]] * 4, [ZOEY["solution"]] * 4, log_metric=logged.__setitem__
    )
    assert scores == [3.0, -0.5, -1.0, -3.0]
    assert logged == {"kk/format_ok": 0.75, "kk/parsed": 0.5, "kk/correct": 0.25}


def test_unknown_mode_is_an_error():
    with pytest.raises(ValueError, match="mode='loose' is unknown"):
        reward(RIGHT, mode="loose")


NOISE = (
    "<think>|</think>|<answer>|</answer>|< ANSWER >|Assistant:|Zoey|Max|Ann|zoey|Annie| is | a | is"
    " a knight| is a knave|knight|knave|knights|: knight\n| not |n't| or | and |, |\n|. |**|maybe|"
    "\u2260|\u0131\u017f|\u212anight|\U0001f600|\ud800|\0|(1) |?|<|/|[|\\|<answer>Zoey is a "
    "knight\nMax is a knave\n|Ann is a knight</answer>"
)
FRAGMENTS = NOISE.split("|")


@settings(REPEATABLE, max_examples=10_000)
@given(st.binary(max_size=16), st.booleans())
def test_any_completion_is_scored_and_lenient_never_pays_less(picks, prefilled):
    completion = "".join(FRAGMENTS[pick % len(FRAGMENTS)] for pick in picks)
    strict = judge(completion, **ZOEY, prefilled=prefilled)
    lenient = judge(completion, **ZOEY, mode="lenient", prefilled=prefilled)
    for verdict in (strict, lenient):
        assert verdict.score in (-3.0, -1.0, -0.5, 3.0)
        assert verdict.format_ok >= verdict.parsed >= verdict.correct
    assert all(new >= old for new, old in zip(lenient, strict, strict=True))


@REPEATABLE
@given(
    st.permutations(
        ["Zoey: knight", "Max is a knave", "**Ann** is not a knave", "Zoey is a knave"]
    ),
    st.sampled_from(["\n", ", ", " and ", ". So ", "; "]),
    st.text(max_size=3),
)
def test_lenient_never_pays_a_double_claim(claims, joint, noise):
    answer = f"</think><answer>{joint.join(claims)}{noise}</answer>"
    assert judge(answer, **ZOEY, mode="lenient").score < 0


@pytest.mark.parametrize("mode", ["strict", "lenient"])
@pytest.mark.parametrize(
    "unit",
    ["<answer>", "<  ", "Zoey is ", "Zoey, ", "Zoey is a knight ", "n't", "is ", ", ", "\n"],
)
def test_hostile_completions_are_scored_in_linear_time(unit, mode):
    body = unit * (100_000 // len(unit))
    start = time.process_time()
    for completion in (body, f"</think><answer>{body}</answer>", f"</think><answer>Zoey{body}"):
        judge(completion, **ZOEY, mode=mode)
    assert time.process_time() - start < 2


# Data sets

ROW = {"quiz": "Q", "names": ["Zoey", "Max"], "solution": [True, False]}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"quiz": None}, "row 1, column 'prompt': found None; give a prompt, or a quiz"),
        ({"names": []}, r"row 1, column 'names': found \[\]; list the people's names"),
        ({"names": ["Zoey", " "]}, "row 1, column 'names'.*none of them empty"),
        ({"names": ["Zoey", "ZOEY"]}, "row 1, column 'names'.*a name of their own"),
        ({"solution": None}, "row 1, column 'solution': found None; list one bool per person"),
        ({"solution": [1, 0]}, r"row 1, column 'solution': found \[1, 0\]; list one bool"),
        (
            {"solution": [True]},
            r"column 'solution': found \[True\]; make it as long as names \(2\)",
        ),
    ],
)
def test_bad_rows_are_named_with_the_remedy(change, complaint):
    validate_rows([ROW])
    with pytest.raises(ValueError, match=complaint):
        validate_rows([ROW, {**ROW, **change}])


def test_an_empty_data_set_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        validate_rows([])


def test_load_generated_puzzles_of_every_size():
    puzzles = load_puzzles("generated", "test", [3, 5], 4, seed=1, tokenizer=BosTokenizer())
    assert puzzles["num_people"] == [3] * 4 + [5] * 4
    expected = generate_puzzles(5, 4, seed=1, split="test")
    assert puzzles["quiz"][4:] == expected["quiz"][:]
    assert puzzles["prompt"][4:] == [build_prompt(q, BosTokenizer()) for q in expected["quiz"]]
    with pytest.raises(ValueError, match="need num_people and num_puzzles, found None and 4"):
        load_puzzles("generated", "train", None, 4)


@needs_shared
def test_official_prompts_are_unwrapped_and_not_rendered_again(official):
    path = str(SHARED / "data" / "kk" / "test.parquet")
    puzzles = load_puzzles(path, "test", [4, 7], 30, tokenizer=BosTokenizer())
    assert Counter(puzzles["num_people"]) == {4: 30, 7: 30}
    rows = official[4500:]
    rows = [row for row in rows.itertuples() if len(row.names) == 4][:30]
    assert puzzles["prompt"][:30] == [row.prompt[0]["content"] for row in rows]
    assert puzzles["solution"][:30] == [list(row.solution) for row in rows]
    assert all(prompt.endswith("<|im_start|>assistant\n<think>") for prompt in puzzles["prompt"])


@pytest.fixture
def write_jsonl(tmp_path):
    def write(*rows):
        path = tmp_path / "puzzles.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        return str(path)

    return write


def test_load_renders_quizzes_and_conversations_once(write_jsonl):
    tokenizer = BosTokenizer()
    prompt = [{"role": "user", "content": "P"}]
    path = write_jsonl({**ROW, "prompt": prompt}, {**ROW, "prompt": None})
    puzzles = load_puzzles(path, "train", tokenizer=tokenizer)
    assert puzzles["prompt"][:] == ["[user]P[assistant]<think>", build_prompt("Q", tokenizer)]
    assert load_puzzles(path, "train")["prompt"][:] == [prompt, build_prompt("Q")]
    text = write_jsonl({**ROW, "prompt": "ready <think>"})
    assert load_puzzles(text, "train", tokenizer=tokenizer)["prompt"][:] == ["ready <think>"]


def test_load_filters_and_caps_by_size_in_file_order(write_jsonl):
    three = {**ROW, "names": ["Zoey", "Max", "Ann"], "solution": [True, False, True]}
    path = write_jsonl(*({**row, "quiz": f"Q{i}"} for i, row in enumerate([ROW, three, ROW, ROW])))
    assert load_puzzles(path, "train", [2], 2)["quiz"][:] == ["Q0", "Q2"]
    assert load_puzzles(path, "train", num_puzzles=1)["num_people"][:] == [2, 3]
    with pytest.raises(ValueError, match=r"has num_people in \[2, 3\].*num_people=\[7\]"):
        load_puzzles(path, "train", [7])


def test_missing_file_is_named_with_the_accepted_kinds(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl.*\.parquet, \.jsonl, \.json"):
        load_puzzles(str(tmp_path / "none.jsonl"), "train")
