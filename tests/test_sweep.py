"""Sweeps: what a YAML expands to, what is never done again, and the table over seeds."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
import yaml
from scipy import stats

from lopti_trl.compare import interval, paired, summarise
from lopti_trl.report import write_report
from lopti_trl.sweep import is_finished, load_sweep, locked, main, results, run, words
from lopti_trl.train import PACKAGE

METHODS = {
    "GRPO": {"ar_alpha": 0, "lopti_eta": None},
    "AR": {"ar_alpha": {"each": [0.1, 0.3]}},
    "band": {"prob_band": [0, 0.25], "lopti_schedule": {"each": ["batch", "minibatch"]}},
}


def write(path, **changes) -> str:
    content = {
        "config": "kk_tiny_cpu.yaml",
        "output_dir": str(path / "sweep"),
        "seeds": [1, 2],
        "methods": METHODS,
        "options": {"max_steps": 2, "ar_alpha": 0.5},
        **changes,
    }
    file = path / "sweep.yaml"
    file.write_text(yaml.safe_dump({k: v for k, v in content.items() if v}, sort_keys=False))
    return str(file)


def finish(sweep, method, seed, accuracy=0.5, reward=1.0):
    """What a finished run leaves, without training it."""
    folder = sweep.folder(method, seed)
    folder.mkdir(parents=True, exist_ok=True)
    evaluation = {
        "before": {"greedy": {"average": 0.1}},
        "after": {"greedy": {"average": accuracy}},
    }
    log = [{"reward": 0.0}] * 18 + [{"reward": reward - 1}, {"reward": reward + 1}, {"loss": 0.0}]
    (folder / "metrics.json").write_text(json.dumps({"evaluation": evaluation, "log": log}))


def test_each_makes_a_method_of_every_value_and_options_are_shared(tmp_path):
    sweep = load_sweep(write(tmp_path))
    assert list(sweep.methods) == [
        "GRPO",
        "AR, ar_alpha 0.1",
        "AR, ar_alpha 0.3",
        "band, lopti_schedule batch",
        "band, lopti_schedule minibatch",
    ]
    assert sweep.methods["AR, ar_alpha 0.3"] == {"max_steps": 2, "ar_alpha": 0.3}
    line = "--max_steps 2 --ar_alpha 0.5 --prob_band 0 0.25 --lopti_schedule batch"
    assert words(sweep.methods["band, lopti_schedule batch"]) == line.split()
    assert words({"lopti_eta": None}) == ["--lopti_eta", "none"]
    assert sweep.runs[:2] == [("GRPO", 1), ("AR, ar_alpha 0.1", 1)]
    assert len(sweep.runs) == 10
    assert sweep.baseline == "GRPO"
    assert len({sweep.folder(*case) for case in sweep.runs}) == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": None}, "has no seeds. A sweep needs"),
        ({"sedes": [1]}, "unknown key 'sedes'. Use config, output_dir, seeds"),
        ({"baseline": "PPO"}, "baseline='PPO' is no method. Use one of"),
        ({"methods": {"AR": {"ar_alpha": {"values": [1]}}}}, "is no value. Write one, or"),
        ({"seeds": [1, 1]}, "two runs have the same folder"),
    ],
)
def test_a_mistake_in_the_yaml_is_named_with_the_fix(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_sweep(write(tmp_path, **changes))


def test_what_is_done_is_not_done_again_and_other_options_are_refused(tmp_path, monkeypatch):
    sweep = load_sweep(write(tmp_path))
    finish(sweep, "GRPO", 1)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("trained again"))
    assert run(sweep, "GRPO", 1) == sweep.folder("GRPO", 1)
    options = {"config": "kk_tiny_cpu.yaml", **sweep.methods["GRPO"], "seed": 1}
    record = sweep.folder("GRPO", 1) / "sweep.json"
    record.write_text(json.dumps({"method": "GRPO", "seed": 1, "options": options}, indent=1))
    run(sweep, "GRPO", 1)
    other = load_sweep(write(tmp_path, options={"max_steps": 3}))
    with pytest.raises(ValueError, match="run with other options"):
        run(other, "GRPO", 1)


def test_finished_means_trained_to_the_end_and_evaluated(tmp_path):
    def is_done(text: str) -> bool:
        (tmp_path / "metrics.json").write_text(text)
        return is_finished(tmp_path)

    assert not is_finished(tmp_path)
    assert not is_done('{"evaluation": {"before": {}')  # cut short
    assert not is_done('{"evaluation": {"before": 1, "after": 1}}')
    assert not is_done('{"evaluation": {"before": 1}, "log": []}')
    assert is_done('{"evaluation": {"before": 1, "after": 1}, "log": []}')
    assert is_done('{"evaluation": {}, "log": []}')  # test_puzzles 0


def test_a_lock_outlives_the_sweep_with_its_run(tmp_path):
    holder = "import sys, time; print('up', flush=True); time.sleep(1.5)"
    with locked(tmp_path) as lock:
        orphan = subprocess.Popen(
            [sys.executable, "-c", holder], pass_fds=[lock], stdout=subprocess.PIPE
        )
        orphan.stdout.readline()
    with locked(tmp_path):  # we let go of it, the orphan has it still
        assert orphan.wait(5) == 0
    orphan.stdout.close()


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path):
    methods = {"broken": {"ar_alpha": 3, "use_cpu": True}, "GRPO": {"ar_alpha": 0}}
    path = write(tmp_path, methods=methods, seeds=[1], options=None)
    sweep = load_sweep(path)
    finish(sweep, "GRPO", 1, accuracy=0.75)
    with pytest.raises(SystemExit, match=r"broken, seed 1, ended with status 1: .*ar_alpha=3"):
        main([path])
    table = pd.read_parquet(sweep.output_dir / "results.parquet")
    assert table[table.metric == "greedy after"][["method", "mean"]].values.tolist() == [
        ["GRPO", 0.75]
    ]


def test_the_table_by_hand(tmp_path):
    sweep = load_sweep(write(tmp_path, methods={"GRPO": None, "AR": None}, seeds=[1, 2, 3]))
    marks = {"GRPO": [0.4, 0.5, 0.6], "AR": [0.5, 0.7, 0.6]}
    for method, values in marks.items():
        for seed, value in enumerate(values, start=1):
            finish(sweep, method, seed, accuracy=value, reward=10 * value)
    table = results(sweep)
    assert len(table) == 2 * 3 * 3
    last = table[table.metric == "reward, last tenth"]
    assert last["value"].tolist() == [4, 5, 5, 7, 6, 6]  # in order of the runs: seeds, methods
    rows = summarise(table, "GRPO").set_index(["method", "metric"])
    row = rows.loc[("AR", "greedy after")]
    half = 4.302652729911275 * 0.1 / math.sqrt(3)  # Student, 2 degrees of freedom
    assert [row.seeds, row["mean"], row["std"]] == pytest.approx([3, 0.6, 0.1])
    assert [row.low, row.high] == pytest.approx([0.6 - half, 0.6 + half])
    expected = stats.ttest_rel(marks["AR"], marks["GRPO"])
    assert [row.pairs, row.difference, row.p] == pytest.approx([3, 0.1, expected.pvalue])
    ends = expected.confidence_interval(0.95)
    assert [row.difference_low, row.difference_high] == pytest.approx([ends.low, ends.high])
    assert math.isnan(rows.loc[("GRPO", "greedy after")].p)


def test_statistics_over_too_few_seeds_say_nothing():
    assert interval([2.0])[0] == 2.0
    assert all(math.isnan(x) for x in interval([2.0])[1:])
    one = paired({1: 3.0, 2: 5.0}, {2: 4.0, 7: 0.0})
    assert (one["pairs"], one["difference"]) == (1, 1.0)
    assert math.isnan(one["p"])
    assert math.isnan(paired({1: 1.0, 2: 2.0}, {1: 0.0, 2: 1.0})["p"])  # no spread
    assert paired({1: 1.0}, {2: 1.0})["pairs"] == 0


SMALL = {
    "train_puzzles": 16,
    "test_puzzles": 8,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 96,
    "max_steps": 3,
    "save_strategy": "steps",
    "save_steps": 1,
}


@pytest.mark.slow
def test_a_sweep_killed_twice_ends_with_the_same_table(tmp_path):
    if not (PACKAGE / "assets" / "kk-tiny").is_dir():
        pytest.skip("the tiny model is not here")
    methods = {"GRPO": {"ar_alpha": 0, "lopti_eta": None}, "AR": {"lopti_eta": None}}
    paths = {}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        paths[name] = write(tmp_path / name, methods=methods, options=SMALL)
    main([paths["whole"]])

    sweep = load_sweep(paths["killed"])
    first, second = (sweep.folder(*case) for case in sweep.runs[:2])
    kill_when(paths["killed"], first / "output.txt", with_children=False)
    kill_when(paths["killed"], second / "metrics.jsonl", with_children=True)
    assert is_finished(first)
    assert not is_finished(second)
    done = (first / "metrics.json").stat().st_mtime_ns
    main([paths["killed"]])
    assert (first / "metrics.json").stat().st_mtime_ns == done
    for name in ("runs", "results"):
        whole, killed = (
            pd.read_parquet(load_sweep(path).output_dir / f"{name}.parquet")
            for path in paths.values()
        )
        pd.testing.assert_frame_equal(whole, killed, check_exact=True)
        assert len(whole) == {"runs": 4 * 5, "results": 2 * 5}[name]
        assert whole[{"runs": "value", "results": "mean"}[name]].nunique() > 3
    folders = [str(sweep.folder(*case)) for case in sweep.runs]
    page = write_report(folders, tmp_path / "report.html", "x", figures=False).read_text()
    assert '<h2 id="diagnostics_ar">' in page  # AR has them without being asked, GRPO has not
    assert "in GRPO-1, GRPO-2: diagnostics per band" in page


def kill_when(path: str, file, with_children: bool) -> None:
    """Start a sweep, and kill -9 it soon after the file is there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lopti_trl.cli", "sweep", path],
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 600
    while not file.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    (os.killpg if with_children else os.kill)(process.pid, signal.SIGKILL)
    process.wait()
