"""Train on one YAML: `accelerate launch scripts/train.py --config kk_tiny_cpu.yaml`."""

import sys

from lopti_trl.cli import train

if __name__ == "__main__":
    train(sys.argv[1:])
