"""Dialogues: transcripts as messages, and a reward model that GRPOTrainer runs."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    set_seed,
)

from lopti_trl.tasks.dialogue import load_dialogues, load_reward_model, parse_transcript
from lopti_trl.train import PACKAGE

DIALOGUES = Path(__file__).parent / "data" / "dialogues.jsonl"
TINY = PACKAGE / "assets" / "kk-tiny"


@pytest.fixture
def write(tmp_path):
    def write(*rows: dict) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def roles_and_texts(messages) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_a_transcript_becomes_messages():
    text = "\n\nHuman: Hi\n\nthere: Human: x\n\nAssistant: Hello. \n\nHuman:\n\nAssistant: What?"
    assert roles_and_texts(parse_transcript(text)) == [
        ("user", "Hi\n\nthere: Human: x"),
        ("assistant", "Hello."),
        ("user", ""),
        ("assistant", "What?"),
    ]
    assert parse_transcript("no turns") == []


def test_the_prompt_ends_before_the_chosen_answer():
    dialogues = load_dialogues(str(DIALOGUES))
    assert dialogues.column_names == ["prompt"]
    assert roles_and_texts(dialogues[0]["prompt"]) == [
        ("user", "My bread never rises. What could I do?"),
        ("assistant", "How old is your yeast?"),
        ("user", "About two years."),
    ]
    assert [len(prompt) for prompt in dialogues["prompt"]] == [3, 1, 1, 3]


def test_the_same_prompt_from_every_form(write):
    turns = [{"role": "user", "content": "Hi"}]
    answered = [*turns, {"role": "assistant", "content": "Hello"}]
    for row in (
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello"},
        {"chosen": "\n\nHuman: Hi"},
        {"chosen": answered, "rejected": turns},
        {"prompt": turns},
        {"prompt": "Hi"},
        {"prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": "something else"},
    ):
        assert load_dialogues(write(row))[0]["prompt"] == turns


def test_empty_and_repeated_turns_are_merged(write):
    text = "\n\nHuman: a\n\nHuman: b\n\nAssistant:\n\nAssistant: c\n\nHuman: d\n\nAssistant: e"
    prompt = load_dialogues(write({"chosen": text}))[0]["prompt"]
    assert roles_and_texts(prompt) == [("user", "a\n\nb"), ("assistant", "c"), ("user", "d")]


def test_long_dialogues_are_left_out():
    dialogues = load_dialogues(str(DIALOGUES))
    lengths = [sum(len(m["content"]) for m in prompt) for prompt in dialogues["prompt"]]
    limit = sorted(lengths)[1]
    kept = load_dialogues(str(DIALOGUES), max_characters=limit)
    assert kept["prompt"] == [
        d["prompt"] for d, n in zip(dialogues, lengths, strict=True) if n <= limit
    ]
    assert len(kept) == 2
    with pytest.raises(ValueError, match=r"shortest has \d+ characters, allowed are 5"):
        load_dialogues(str(DIALOGUES), max_characters=5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": None}, r"row 1, column 'chosen': found None; give a .*transcript"),
        ({"chosen": ""}, r"row 1, column 'chosen': .*a turn of the user"),
        ({"chosen": "\n\nAssistant: Hi"}, r"row 1, column 'chosen': .*a turn of the user"),
    ],
)
def test_a_bad_row_is_named(write, row, message):
    good = {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello"}
    with pytest.raises(ValueError, match=message):
        load_dialogues(write(good, row))


def test_messages_need_roles_and_texts(write):
    bad = {"prompt": [{"role": "human", "content": "Hi"}]}
    with pytest.raises(ValueError, match=r"row 0, column 'prompt': .*or messages"):
        load_dialogues(write(bad))


# The reward model


def save_reward_model(path: Path, model_class=Qwen2ForSequenceClassification) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=1,
        initializer_range=0.5,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    set_seed(0)
    model_class(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_a_model_without_a_trained_head_is_refused(tmp_path):
    save_reward_model(tmp_path, Qwen2ForCausalLM)
    with pytest.raises(ValueError, match=r"lacks score.weight, which would be random"):
        load_reward_model(str(tmp_path))


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    save_reward_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"has no chat template"):
        load_reward_model(str(tmp_path))


def test_the_reward_model_is_the_saved_one(tmp_path):
    save_reward_model(tmp_path)
    model, tokenizer = load_reward_model(str(tmp_path))
    ids = tokenizer("a knight", return_tensors="pt")
    again = Qwen2ForSequenceClassification.from_pretrained(tmp_path)
    assert model(**ids).logits.shape == (1, 1)
    torch.testing.assert_close(model(**ids).logits, again(**ids).logits)
