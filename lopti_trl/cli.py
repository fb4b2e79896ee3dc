"""`lopti-trl VERB ...`: the commands of the package."""

import sys


def train(args: list[str]) -> None:
    """Train on one YAML: --config FILE [--option value ...]."""
    from lopti_trl.train import main, parse_args

    main(*parse_args(args))


def evaluate(args: list[str]) -> None:
    """Measure a model, or the last checkpoints of a run: --config FILE [--option value ...]."""
    from lopti_trl.eval import main, parse_args

    main(*parse_args(args))


def sft(args: list[str]) -> None:
    """Fine-tune on worked solutions, as a baseline: --config FILE [--option value ...]."""
    from lopti_trl.sft import SFTArguments, main
    from lopti_trl.train import parse_args

    main(*parse_args(args, SFTArguments))


def doctor(args: list[str]) -> None:
    """Check a recipe against the machine: --config FILE [--accelerate_config FILE] [...]."""
    from lopti_trl.doctor import main

    sys.exit(main(args))


def analyze(args: list[str]) -> None:
    """Which tokens drive a model's update, from its own rollouts: MODEL [--batches N] [...]."""
    from lopti_trl.analyze import main

    print(f"analysis.json, analysis.parquet and figures are in {main(args)}.")


def report(args: list[str]) -> None:
    """One HTML file about runs: RUN... [--output FILE]."""
    from lopti_trl.report import main

    print(f"The report is {main(args)}.")


def sweep(args: list[str]) -> None:
    """Methods x seeds x values from one YAML, resumed where it stopped: FILE."""
    from lopti_trl.sweep import main

    print(main(args))


VERBS = {
    "train": train,
    "sft": sft,
    "eval": evaluate,
    "doctor": doctor,
    "analyze": analyze,
    "sweep": sweep,
    "report": report,
}


def main() -> None:
    verb, *args = sys.argv[1:] or ["--help"]
    if verb not in VERBS:
        usage = "\n".join(f"  {name:10}{function.__doc__}" for name, function in VERBS.items())
        print(f"usage: lopti-trl VERB [--help] ...\n\n{usage}")
        sys.exit(0 if verb in ("-h", "--help") else 2)
    VERBS[verb](args)


if __name__ == "__main__":  # as `accelerate launch -m lopti_trl.cli` starts it
    main()
