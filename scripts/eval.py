"""Evaluate on one YAML, on several GPUs: `accelerate launch scripts/eval.py --config kk.yaml`."""

import sys

from lopti_trl.cli import evaluate

if __name__ == "__main__":
    evaluate(sys.argv[1:])
