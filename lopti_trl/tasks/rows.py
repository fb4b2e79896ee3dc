"""Data of every task: a local file or a data set on the hub, and what is said of bad rows."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

FILE_KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}


def load_source(
    source: str,  # a .parquet, .jsonl or .json file, or a data set on the hub
    split: str,  # of the hub's data set; a file is a split of its own
    config: str | None = None,  # of the hub's data set
    others: str = "or the name of a data set on the hub",  # what else a task takes
) -> "Dataset":
    """The whole data set. FileNotFoundError for a missing file, ValueError for an empty one."""
    from datasets import load_dataset

    kind = FILE_KINDS.get(Path(source).suffix)
    if kind is None:
        return load_dataset(source, config, split=split)
    if not Path(source).is_file():
        raise FileNotFoundError(
            f"no such file: {source}. Give a file ending in {', '.join(FILE_KINDS)}, {others}."
        )
    if not Path(source).stat().st_size:
        raise ValueError(f"the data set {source} is empty. Give it at least one row.")
    return load_dataset(kind, data_files=str(source), split="train")  # the name for a lone file


def choose(
    dataset: "Dataset",
    count: int | None,  # None takes all
    seed: int,
) -> list[int]:
    """Numbers of a random choice of rows, in the order of the data set."""
    indices = range(len(dataset))
    if count is None or count >= len(dataset):
        return list(indices)
    return sorted(random.Random(seed).sample(indices, count))


def read_rows(
    source: str,  # a .parquet, .jsonl or .json file, or a data set on the hub
    split: str,  # of the hub's data set; a file is a split of its own
    config: str | None = None,  # of the hub's data set
    num_rows: int | None = None,  # a random choice, in the order of the source; None takes all
    seed: int = 0,
) -> list[tuple[int, dict]]:
    """Number and content of each row. FileNotFoundError for a missing file, ValueError if empty."""
    dataset = load_source(source, split, config)
    indices = choose(dataset, num_rows, seed)
    return list(zip(indices, dataset.select(indices).to_list(), strict=True))


class BadRow(ValueError):
    """A row that cannot be used, told by its number, column, content and the remedy."""

    def __init__(self, index: int, row: Mapping, column: str, fix: str):
        super().__init__(f"row {index}, column {column!r}: found {row.get(column)!r}; {fix}.")


def check_text(index: int, row: Mapping, *columns: str) -> None:
    """Raise BadRow unless each of these columns holds a text that is not empty."""
    for column in columns:
        if not isinstance(row.get(column), str) or not row[column].strip():
            raise BadRow(index, row, column, "give a text that is not empty")
