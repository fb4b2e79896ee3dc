"""Helpful and harmless dialogue (Anthropic HH): data, and the model whose logit is the reward."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lopti_trl.tasks.rows import BadRow, read_rows

if TYPE_CHECKING:
    from datasets import Dataset

Message = dict

_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def parse_transcript(text: str) -> list[Message]:
    r"""Messages of a transcript: turns that begin with "\n\nHuman:" or "\n\nAssistant:"."""
    _, *parts = _TURN.split(text)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _ROLES[speaker], "content": content.strip()} for speaker, content in pairs]


def to_prompt(messages: Sequence[Message]) -> list[Message]:
    """The dialogue up to the answer that is sought: without the last turn, if an assistant's.

    Empty turns are left out, and turns of one role in a row become one: the data set has both, and
    chat templates refuse them.
    """
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            content = f"{merged[-1]['content']}\n\n{message['content']}".strip()
            merged[-1] = {**merged[-1], "content": content}
        elif message["content"]:
            merged.append({"role": message["role"], "content": message["content"]})
    return merged[:-1] if merged and merged[-1]["role"] == "assistant" else merged


def _is_messages(value) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict)
        and message.get("role") in ("system", "user", "assistant")
        and isinstance(message.get("content"), str)
        for message in value
    )


def read_prompt(index: int, row: dict) -> list[Message]:
    """The prompt of a row. ValueError names the row if it has none that ends with a user's turn."""
    column = "prompt" if row.get("prompt") is not None else "chosen"
    value = row.get(column)
    if isinstance(value, str):
        value = parse_transcript(value) or [{"role": "user", "content": value.strip()}]
    if not _is_messages(value):
        fix = 'give a "\\n\\nHuman: ...\\n\\nAssistant:" transcript, or messages'
        raise BadRow(index, row, column, fix)
    prompt = to_prompt(value)
    if not prompt or prompt[-1]["role"] != "user":
        raise BadRow(index, row, column, "let a turn of the user come before the answer")
    return prompt


def load_dialogues(
    source: str,  # a .parquet, .jsonl or .json file, or a data set on the hub
    split: str = "train",
    num_rows: int | None = None,
    seed: int = 0,
    max_characters: int | None = None,  # of all turns of a prompt: longer ones are left out
) -> "Dataset":
    """Column: prompt (messages), from a column prompt, or chosen without its last answer.

    Raises FileNotFoundError for a missing file, ValueError for a row without a prompt, or if none
    is left.
    """
    from datasets import Dataset

    rows = read_rows(source, split, None, num_rows, seed)
    prompts = [read_prompt(index, row) for index, row in rows]
    lengths = [sum(len(message["content"]) for message in prompt) for prompt in prompts]
    limit = max(lengths) if max_characters is None else max_characters
    kept = [{"prompt": p} for p, length in zip(prompts, lengths, strict=True) if length <= limit]
    if not kept:
        raise ValueError(
            f"no dialogue is left: the shortest has {min(lengths)} characters, allowed are {limit}."
            " Raise max_prompt_characters."
        )
    return Dataset.from_list(kept)


# Reward


def load_reward_model(name: str, trust_remote_code: bool = False):
    """Model and tokenizer of a reward model with one output: what GRPOTrainer takes as a reward.

    Raises ValueError if it has no trained head, or no chat template to render a dialogue with.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"reward_model={name} has no chat template to render a dialogue with. Use one that has."
        )
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        name,
        num_labels=1,
        dtype="auto",
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    if loading["missing_keys"]:
        raise ValueError(
            f"reward_model={name} lacks {', '.join(sorted(loading['missing_keys']))}, which would "
            "be random. Give a model trained for sequence classification with one output."
        )
    return model, tokenizer
