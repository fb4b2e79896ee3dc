"""Summaries: data, and a reward that is the library's ROUGE-L."""

import json
from pathlib import Path

import pytest

from lopti_trl.tasks.summarize import INSTRUCTION, load_articles, rouge_reward

rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")

ARTICLES = Path(__file__).parent / "data" / "articles.jsonl"
ROWS = [json.loads(line) for line in ARTICLES.read_text().splitlines()]


def test_rows_become_messages_with_their_reference():
    articles = load_articles(str(ARTICLES))
    for row, example in zip(ROWS, articles, strict=True):
        content = INSTRUCTION + row["article"]
        assert example["prompt"] == [{"role": "user", "content": content}]
        assert example["highlights"] == row["highlights"]


def test_a_long_article_is_cut_at_a_space():
    articles = load_articles(str(ARTICLES), max_characters=30)
    start = articles[0]["prompt"][0]["content"].removeprefix(INSTRUCTION)
    assert ROWS[0]["article"].startswith("The harbour ferry stopped for three")
    assert start == "The harbour ferry stopped for"
    exact = load_articles(str(ARTICLES), max_characters=29)
    assert exact[0]["prompt"][0]["content"].removeprefix(INSTRUCTION) == start


def test_a_bad_row_is_named(tmp_path):
    for column, value in (("article", " "), ("highlights", None)):
        path = tmp_path / f"{column}.jsonl"
        rows = [ROWS[0], {**ROWS[1], column: value}]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(ValueError, match=rf"row 1, column '{column}': found .*; give a text"):
            load_articles(str(path))


def test_the_reward_matches_hand_computation():
    # longest common subsequence "the cat a": 3 of 4 words and of 6, so 2 * 3/4 * 3/6 / (5/4)
    assert rouge_reward(["the cat a mat"], ["the cat sat on a big"]) == pytest.approx([0.6])
    logged = {}
    rewards = rouge_reward(
        ["ferries stop", "", "Ferry, STOPPED!"],
        ["ferry stopped today", "ferry", "ferry stopped"],
        log_metric=logged.__setitem__,
    )
    assert rewards == pytest.approx([0.8, 0, 1])  # stems; case and punctuation do not count
    assert logged["summarize/precision"] == pytest.approx(2 / 3)
    assert logged["summarize/recall"] == pytest.approx((2 / 3 + 0 + 1) / 3)


def test_the_reward_equals_the_librarys():
    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
    references = [row["highlights"] for row in ROWS for _ in ROWS]
    texts = [row["article"][: 20 * i + 5] for i, _ in enumerate(ROWS) for row in ROWS]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    expected = [
        scorer.score(reference, text)["rougeL"].fmeasure
        for reference, text in zip(references, texts, strict=True)
    ]
    assert len(set(expected)) == 8
    assert rouge_reward(texts, references) == expected
    assert rouge_reward(messages, references) == expected
