"""The report: what it shows, what it says is missing, and that it opens without a network."""

import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lopti_trl.figures import bar_chart, line_chart
from lopti_trl.report import (
    Run,
    analysis_charts,
    build,
    by_method,
    load_run,
    main,
    name_methods,
    results_of,
    spread,
    write_report,
)
from lopti_trl.train import parse_args, run_config

BANDS = ["0-0.25", "0.25-0.5", "0.5-0.75", "0.75-1"]
SVG = "{http://www.w3.org/2000/svg}"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
METHODS = {"GRPO": 1.0, "GRPO + AR (alpha 0.3)": 2.0}


def log_of(level: float, seed: int) -> list[dict]:
    rows = []
    for batch in range(1, 11):
        row = {"step": batch, "rollout_batches": batch, "reward": level * batch + seed}
        row |= {"kk/correct": 0.05 * batch, "entropy": 1 / batch, "completions/mean_length": 100.0}
        for i, band in enumerate(BANDS):
            for quantity in ("grad_share", "rose"):
                row[f"prob/{quantity}/{band}"] = (i + 1) / 10
        rows.append(row)
    return [*rows, {"train_runtime": 1.0, "step": 10}]


def write_run(folder, method: str, seed: int, level: float = 1.0, after: float = 0.5, steps=1):
    """A run's folder as `train` leaves it."""
    folder.mkdir(parents=True)
    accuracy = {"2": after, "3": after / 2, "average": 0.75 * after}
    evaluation = {
        moment: {"greedy": accuracy, "sampled": accuracy} for moment in ("before", "after")
    }
    log = log_of(level, seed)
    metrics = {
        "plan": {
            "method": method,
            "optimizer_steps_per_rollout_batch": steps,
            "optimizer_steps": 9,
        },
        "config": {"seed": seed, "ar_alpha": 0.3 * level},
        "evaluation": evaluation,
        "versions": {"trl": "1.16.0"},
        "log": log,
    }
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    return str(folder)


def write_analysis(folder):
    rows = []

    def add(figure, series, values):
        rows.extend(
            (figure, series, x, batch, v * (1 + batch)) for batch in (0, 1) for x, v in values
        )

    sets = [*BANDS, "low", "high", "all"]
    add("tokens", "share", [(b, 0.25) for b in BANDS])
    add("advantage", "mean", [(b, 0.1) for b in BANDS])
    for series in [*BANDS, "all"]:
        add("change", series, [(b, 0.01) for b in BANDS])
    add("gradient norm", "norm", [(s, 0.5) for s in sets])
    for method in ("GRPO", "AR", "Lopti", "AR + Lopti"):
        add("rose", method, [(b, 0.4) for b in BANDS])
        add("tied", method, [(b, 0.1) for b in BANDS])
    for s in sets:
        add("cosine", s, [(t, 0.3) for t in sets])
    for s in ("low", "high", "all"):
        add("layers", s, [("embed_tokens", 0.1), ("layer 0", 0.2)])
    add("bound", "found", [("lowest", 1.01), ("highest", 1.3), ("share within", 1.0)])
    add("bound", "theory", [("lowest", 1.0), ("highest", 1.414)])
    add("sum error", "bands", [("relative", 1e-7)])
    add("gain", "embeddings", [("5 %", 0.5), ("median", 1.0), ("95 %", 2.0)])
    add("gain", "layer 0", [("5 %", 0.5), ("median", 1.0), ("95 %", 2.0)])
    folder.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(rows, columns=["figure", "series", "x", "batch", "value"])
    frame.to_parquet(folder / "analysis.parquet")
    facts = {
        "settings": {"probe_lr": 0.001},
        "bands": BANDS,
        "language": {
            "Causal": {"per_1000_tokens": 2.0, "r": {"value": 0.5, "low": 0.2, "high": 0.7}},
            "Analysis": {"per_1000_tokens": 0.0, "r": None},
        },
        "samples": [
            {
                "prompt": "<script>alert(1)</script> & so",
                "reward": 3.0,
                "advantage": 1.5,
                "tokens": ["<think>", " so", "\n", "knight"],
                "probs": [0.9, 0.25, 1.0, 0.5],
                "grad_shares": [0.0, 0.02, 0.0, 0.01],
            }
        ],
    }
    (folder / "analysis.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[str]:
    """Two methods with three seeds; the first run has an analysis."""
    tmp_path, folders = tmp_path_factory.mktemp("runs"), []
    for number, (method, level) in enumerate(METHODS.items()):
        for seed in (1, 2, 3):
            after = 0.4 + 0.2 * number + 0.04 * seed * (1 - number)
            folders.append(write_run(tmp_path / f"m{number}-{seed}", method, seed, level, after))
    write_analysis(tmp_path / "m0-1" / "analysis")
    return folders


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory) -> Path:
    """The report on them, by the command."""
    output = tmp_path_factory.mktemp("out") / "new" / "report.html"
    assert main([*runs, "--output", str(output), "--title", "A title & more"]) == output
    return output


def test_curves_are_means_and_spread_over_seeds(runs):
    [grpo, ar] = by_method(named([load_run(r) for r in runs])).values()
    assert [run.seed for run in grpo] == [1, 2, 3]
    table = spread([run.curve("reward") for run in ar])
    assert table["mean"].tolist() == [2.0 * b + 2 for b in range(1, 11)]
    assert (table["high"] - table["mean"]).tolist() == pytest.approx([1.0] * 10)
    assert grpo[0].missing == []
    assert [m.split(":")[0] for m in grpo[1].missing] == ["figures 1, 3, 5 and samples"]


def named(runs):
    name_methods(runs)
    return runs


def test_the_comparison_is_paired_by_seed(runs):
    rows = build([load_run(r) for r in runs], "x")["table_rows"]
    [row] = [
        r for r in rows if r["metric"] == "accuracy, greedy, after (%)" and "AR" in r["method"]
    ]
    # 75 * (.6 - (.4 + .04 seed)) for seeds 1, 2, 3
    differences = [75 * (0.2 - 0.04 * seed) for seed in (1, 2, 3)]
    assert row["difference"] == pytest.approx(np.mean(differences))
    t = np.mean(differences) / (np.std(differences, ddof=1) / math.sqrt(3))
    # Student's survival function with two degrees of freedom
    assert row["p"] == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert row["mean"] == pytest.approx(45)


def test_runs_of_one_method_are_told_apart_by_their_steps(tmp_path):
    folders = [
        write_run(tmp_path / "a-1", "GRPO", 1, steps=1),
        write_run(tmp_path / "b-1", "GRPO", 1, steps=2),
    ]
    runs = named([load_run(f) for f in folders])
    assert [run.label for run in runs] == ["GRPO", "GRPO, 2 steps a batch"]
    assert list(by_method(runs)) == ["GRPO", "GRPO, 2 steps a batch"]
    (tmp_path / "b-1" / "sweep.json").write_text('{"method": "control"}')
    assert [run.label for run in named([load_run(f) for f in folders])] == ["GRPO", "control"]


def test_a_page_has_every_chart_with_title_axes_units_and_alternative_text(runs, report):
    page, figures = report.read_text(), report.parent / "report_figures"
    svgs = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    charts = [c for _, cs in build([load_run(r) for r in runs], "x")["sections"] for c in cs]
    assert len(svgs) == len(charts) == 4 + 2 + 2 * 2 + 12
    for svg, chart in zip(svgs, charts, strict=True):
        tree = ET.fromstring(svg)
        assert tree.get("role") == "img"
        assert tree.get("aria-label").startswith(chart.title)
        assert len(chart.alt) > 40
        texts = {"".join(e.itertext()) for e in tree.iter(f"{SVG}text")}
        [axes, *_] = chart.figure.axes
        assert {chart.title, axes.get_xlabel(), axes.get_ylabel()} <= texts
        assert not re.search(r"#010203|#0072b2(?!\))", svg)  # colours are the page's
        assert (figures / f"{chart.name}.png").stat().st_size > 3000
        assert (figures / f"{chart.name}.pdf").read_bytes()[:4] == b"%PDF"
    identifiers = re.findall(r'\bid="([^"]+)"', page)
    assert len({s for svg in svgs for s in set(re.findall(r'id="(m[0-9a-f]{8,})"', svg))}) == len(
        re.findall(r'id="m[0-9a-f]{8,}"', page)
    )
    assert {"comparison", "settings", "samples", "content"} <= set(identifiers)
    assert "A title &amp; more" in page
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; so" in page
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)


def test_tokens_are_shaded_by_probability_and_gradient(report):
    page = report.read_text()
    found = re.findall(r'<span style="--r:(\S+);--g:(\S+)" title="([^"]+)">([^<]+)</span>', page)
    assert [(r, g, text) for r, g, _, text in found] == [
        ("0.10", "0.00", "&lt;think&gt;"),
        ("0.75", "1.00", " so"),
        ("0.00", "0.00", "\n"),
        ("0.50", "0.50", "knight"),
    ]
    assert found[1][2] == "probability 0.250, 2.000 % of the gradient"


def test_markdown_holds_the_table_and_every_charts_text(report):
    text = report.with_suffix(".md").read_text()
    line = next(
        x for x in text.splitlines() if x.startswith("| GRPO + AR") and "greedy, after" in x
    )
    assert line.count("|") == 8
    assert "45.00 [45.00, 45.00]" in line
    assert "**1 d. Gradient of one band's tokens** (Analysis: m0-1)." in text
    assert "trl 1.16.0" in text


@pytest.mark.parametrize("damage", ["no folder", "empty", "killed", "cut json", "no evaluation"])
def test_a_run_with_missing_pieces_gives_a_report_that_says_so(tmp_path, damage):
    folder = tmp_path / "lame-7"
    if damage != "no folder":
        write_run(folder, "GRPO", 7)
    metrics = folder / "metrics.json"
    if damage == "empty":
        metrics.unlink()
        (folder / "metrics.jsonl").unlink()
    if damage == "cut json":
        metrics.write_text(metrics.read_text()[:200])
    if damage in ("killed", "no evaluation"):
        content = json.loads(metrics.read_text())
        if damage == "killed":
            del content["log"]
            rows = (folder / "metrics.jsonl").read_text().splitlines()
            (folder / "metrics.jsonl").write_text("\n".join([*rows[:4], rows[4][:30]]))
        content["evaluation"] = {}
        metrics.write_text(json.dumps(content))
    page = write_report([str(folder)], tmp_path / "r.html", "x", figures=False).read_text()
    expected = {
        "no folder": "everything: there is no such folder",
        "empty": "metrics.json (plan, versions, evaluation)",
        "killed": "the log stops after 4 rollout batches",
        "cut json": "a readable metrics.json",
        "no evaluation": "the evaluation after training",
    }
    assert re.search(f"<li>in lame-7: [^<]*{re.escape(expected[damage])}", page)
    assert "a second seed of any method" in page
    has_curve = damage in ("killed", "cut json", "no evaluation")
    assert ('aria-label="Reward.' in page) == has_curve
    if damage == "killed":
        assert "from 1 to 4" in page


def test_what_every_run_lacks_is_said_once(tmp_path):
    folders = [write_run(tmp_path / f"a-{seed}", "GRPO", seed) for seed in (1, 2)]
    (tmp_path / "a-1" / "metrics.json").unlink()
    notes = build([load_run(f) for f in folders], "x")["notes"]
    assert "in every run: figures 1, 3, 5 and samples: lopti-trl analyze RUN" in notes
    assert "in a-1: metrics.json (plan, versions, evaluation)" in notes


def test_no_runs_is_a_mistake_with_a_fix():
    with pytest.raises(ValueError, match="Give the folders of runs"):
        build([], "x")


def test_charts_say_in_words_what_they_show():
    data = pd.DataFrame(
        {"mean": [1.0, 2.5], "low": [np.nan] * 2, "high": [np.nan] * 2}, index=[1, 9]
    )
    chart = line_chart("n", "T", "batch", "reward", {"GRPO": data})
    assert chart.alt == "Lines of reward against batch, from 1 to 9. GRPO from 1 to 2.5."
    points = bar_chart("n", "T", "band", "share (%)", pd.DataFrame({"AR": {"a": 1.0, "b": np.nan}}))
    assert points.alt == "Points of share (%) by band. AR: a 1, b no value."


def test_results_need_no_evaluation():
    run = Run(Path("x"), log=[{"rollout_batches": 1, "reward": 2.0}], label="GRPO")
    run.metrics = {"config": {"seed": 3}}
    assert results_of([run]).empty  # cut short: its rewards are not those of the end
    run.metrics["log"] = run.log
    assert results_of([run]).values.tolist() == [["GRPO", 3, "reward, last tenth of training", 2.0]]


def test_analysis_bars_are_the_standard_deviation_over_batches(runs):
    run = load_run(runs[0])
    [chart] = [c for c in analysis_charts(run.analysis, run.facts) if c.name == "tokens"]
    # .25 and .5 in the two batches
    assert chart.table["share"].tolist() == pytest.approx([37.5] * 4)
    assert "standard deviation over 2 rollout batches" in chart.note


# In a browser


def browse(page, folder, width: int) -> tuple[list[str], list[str], str]:
    """Console lines, requests that the page made, and its document, in headless Chromium."""
    log = folder / "net.json"
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900"]
    command += ["--enable-logging=stderr", "--v=0", f"--log-net-log={log}", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    events = json.loads(log.read_text())["events"]
    starts = (e["params"] for e in events if "initiator" in e.get("params", {}))
    # the browser's own requests have no origin
    requests = [p["url"] for p in starts if p["initiator"] != "not an origin"]
    return console, requests, done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_opens_without_an_error_and_without_a_request(report, tmp_path, width):
    fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    script = f"<script>document.body.dataset.fits = {fits}</script>"
    probe = tmp_path / "probe.html"  # the policy of the page itself lets no script run
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report.read_text())
    probe.write_text(text.replace("</body>", f"{script}</body>"))
    console, requests, _ = browse(report, tmp_path, width)
    assert console == []
    assert requests == []
    assert 'data-fits="true"' in browse(probe, tmp_path, width)[2]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_the_browser_check_is_able_to_fail(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>nothing()</script>')
    console, requests, _ = browse(page, tmp_path, 390)
    assert "nothing is not defined" in console[0]
    assert requests == ["http://127.0.0.1:9/x.png"]


def test_the_command_writes_no_figures_if_told_so(runs, tmp_path):
    output = main([runs[1], "--output", str(tmp_path / "a.html"), "--no_figures"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.md"]
    assert "<h1>Training report</h1>" in output.read_text()


def test_a_run_records_the_options_that_are_not_default(tmp_path):
    options = ["--config", "kk_tiny_cpu.yaml", "--output_dir", str(tmp_path), "--ar_alpha", "0.2"]
    config = run_config(*parse_args([*options, "--seed", "42", "--num_people", "2"]))
    expected = {"ar_alpha": 0.2, "lopti_eta": 0.5, "seed": 42, "num_people": [2], "beta": None}
    assert {key: config.get(key) for key in expected} == expected  # beta is TRL's default
    json.dumps(config)
