"""Summaries of news articles (CNN/DailyMail): data, prompt and ROUGE-L reward."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lopti_trl.tasks.kk import message_text
from lopti_trl.tasks.rows import check_text, read_rows

if TYPE_CHECKING:
    from datasets import Dataset

Message = dict

CONFIGS = {"abisee/cnn_dailymail": "3.0.0"}
INSTRUCTION = "Summarize this article in two to four short sentences.\n\n"


def load_articles(
    source: str,  # a .parquet, .jsonl or .json file, or a data set on the hub
    split: str = "train",
    num_rows: int | None = None,
    seed: int = 0,
    max_characters: int | None = None,  # of an article: the rest is cut off, at a space
) -> "Dataset":
    """Columns: prompt (messages) and highlights (the reference), from article and highlights.

    Raises FileNotFoundError for a missing file, ValueError for a row that is no such pair.
    """
    from datasets import Dataset

    _scorer()  # or its absence would show only after the model has loaded
    examples = []
    for index, row in read_rows(source, split, CONFIGS.get(source), num_rows, seed):
        check_text(index, row, "article", "highlights")
        article = row["article"].strip()
        if max_characters is not None and len(article) > max_characters:
            article = article[: max_characters + 1].rpartition(" ")[0] or article[:max_characters]
        prompt = [{"role": "user", "content": INSTRUCTION + article}]
        examples.append({"prompt": prompt, "highlights": row["highlights"].strip()})
    return Dataset.from_list(examples)


@functools.cache
def _scorer():
    if importlib.util.find_spec("rouge_score") is None:
        raise ImportError(
            "the summarize task needs rouge-score. Run: pip install 'lopti-trl[summarize]'."
        )
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)


def rouge_reward(
    completions: Sequence[str | list[Message]],
    highlights: Sequence[str],
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs,
) -> list[float]:
    """TRL reward: the ROUGE-L F-measure, in [0, 1], of rouge-score with its stemmer.

    Logs the batch's mean precision and recall: a policy that gains by length alone loses the first.
    """
    scores = [
        _scorer().score(target=reference, prediction=message_text(completion))["rougeL"]
        for completion, reference in zip(completions, highlights, strict=True)
    ]
    if log_metric and scores:
        for name in ("precision", "recall"):
            mean = sum(getattr(score, name) for score in scores) / len(scores)
            log_metric(f"summarize/{name}", mean)
    return [score.fmeasure for score in scores]
