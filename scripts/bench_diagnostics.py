"""Cost of the diagnostics: their share of the processor time of a run of a recipe.

Times what they do inside the run, and the pi_old pass once more with the stock head:

    python scripts/bench_diagnostics.py --config kk_tiny_cpu.yaml --max_steps 16
"""

import functools
import sys
import tempfile
import time

from lopti_trl.diagnostics import Diagnostics
from lopti_trl.train import build_trainer, load_datasets, load_tokenizer, parse_args

clock = time.process_time
seconds = {}


def metered(name: str, function):
    """The function, with its processor time added up under the name."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        start = clock()
        result = function(*args, **kwargs)
        seconds[name] = seconds.get(name, 0.0) + clock() - start
        return result

    return run


def scored_twice(score):
    """`Diagnostics.score`, then TRL's own scoring: what the sums of squares cost."""

    def run(self, trl_score, *args, **kwargs):
        result = metered("scoring with", score)(self, trl_score, *args, **kwargs)
        metered("scoring without", trl_score)(*args, **kwargs)
        return result

    return run


def main() -> None:
    for name in ("log_rollout", "watch", "add_update", "on_step_end"):
        setattr(Diagnostics, name, metered(name, getattr(Diagnostics, name)))
    Diagnostics.score = scored_twice(Diagnostics.score)
    with tempfile.TemporaryDirectory() as folder:
        options = ["--output_dir", folder, "--diagnostics", "true", "--test_puzzles", "0"]
        task, args, model = parse_args([*sys.argv[1:], *options])
        tokenizer = load_tokenizer(model)
        train_set, _ = load_datasets(task, tokenizer)
        trainer = build_trainer(task, args, model, tokenizer, train_set)
        start = clock()
        trainer.train()
        total = clock() - start - seconds["scoring without"]
    squares = seconds.pop("scoring with") - seconds.pop("scoring without")
    for name, value in (seconds | {"sums of squares": squares}).items():
        print(f"{name:16} {100 * value / total:6.2f} %")
    print(f"{'all':16} {100 * (sum(seconds.values()) + squares) / total:6.2f} % of {total:.0f} s")


if __name__ == "__main__":
    main()
