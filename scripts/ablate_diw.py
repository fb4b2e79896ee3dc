"""Ablate dynamic importance weighting on the laptop recipe: equal data, several seeds.

Finished runs are kept, so that an ablation cut short goes on where it stopped. Options are those of
compare_methods.py, which does the work:

    python scripts/ablate_diw.py --seeds 1 2 3 --jobs 2
"""

import sys

import compare_methods

ABLATIONS = {
    "GRPO": ["--diw", "false"],
    "DIW": [],
    "DIW, static weights": ["--diw_policy", "rollout"],
    "DIW, no reference": ["--diw_reference", "rollout"],
    "DIW, fixed tau": ["--diw_learn_tau", "false"],
    "DIW, no softmax": ["--diw_softmax", "off", "--diw_learn_tau", "false"],
    "DIW, no warm-up": ["--diw_warmup", "false"],
    "GRPO, KL": ["--diw", "false", "--beta", "0.001"],
    "RAFT": ["--diw", "false", "--raft", "true"],
}

if __name__ == "__main__":
    compare_methods.METHODS = ABLATIONS
    defaults = ["--config", "kk_tiny_diw.yaml", "--output", "outputs/ablate_diw"]
    sys.argv[1:] = [*defaults, *sys.argv[1:]]
    compare_methods.main()
