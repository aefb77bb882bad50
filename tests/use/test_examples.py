"""Examples at their smallest size: each runs, and says what it is about."""

from __future__ import annotations

import itertools
import re
import runpy
import subprocess
import sys
import time

import pytest

from tests.docs.blocks import HERE
from tests.shares import by_day

# of each: arguments, and what it has to say
SMALL = {
    "gpt2_finetune.py": (["--steps", "2", "--layers", "1", "--width", "32", "--length", "16"], "step 0:"),
    "images.py": (["vit", "--steps", "2", "--rows", "8"], "right"),
    "images.py resnet": (["resnet", "--steps", "2", "--rows", "8"], "right"),
    "llama_budgets.py": (
        "--layers 1 --width 128 --length 32 --rows 4 --mesh 2 --budgets 3 --page b.html".split(),
        "b.html has the curve",
    ),
    "resume.py": (["--steps", "2", "--parallel", "dp"], "step 1:"),
    "peft_lora.py": (["adapters"], "LlamaForCausalLM"),
    "research/rule.py": ([], "without a rule: ('/ops.research.swish_gate.default',)"),
    "research/strategy.py": ([], "choices; the quickest"),
    "research/cost.py": ([], "64 times slower"),
    "research/search.py": ([], "proven best"),
    "research/policy.py": ([], "mine"),
    "offload.py": ([], "values waited on the host"),
    "generate_and_train.py": (["2"], "mean score"),
}
NIGHTLY = {"offload.py", "generate_and_train.py"}


def run(name, arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(HERE / "examples" / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("name", by_day(SMALL, *(name for name in SMALL if name not in NIGHTLY)))
@pytest.mark.filterwarnings("ignore")
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments, says = SMALL[name]
    assert says in run(name.partition(" ")[0], arguments, monkeypatch, capsys)


def test_a_run_is_resumed_where_it_was(tmp_path, monkeypatch, capsys):
    """Bit for bit, dropout too."""
    monkeypatch.chdir(tmp_path)
    whole = run("resume.py", ["--steps", "4", "--folder", "whole"], monkeypatch, capsys).splitlines()
    first = run("resume.py", ["--steps", "2", "--folder", "half"], monkeypatch, capsys).splitlines()
    rest = run("resume.py", ["--steps", "4", "--folder", "half"], monkeypatch, capsys).splitlines()
    assert first + rest == whole and len(rest) == 2


def test_a_space_is_solved_elsewhere(tmp_path, monkeypatch, capsys):
    """Its tables are those of the plan, and no descent goes under what is proven."""
    monkeypatch.chdir(tmp_path)
    assert "123 sites" in run("research/dump_space.py", [], monkeypatch, capsys)
    monkeypatch.delitem(sys.modules, "torch")  # it asserts that it needs none
    said = run("research/solve_space.py", [], monkeypatch, capsys)
    best, bound, proven = (float(line.split(" ms")[0].split()[-1]) for line in said.replace("; ", "\n").splitlines())
    assert bound <= proven <= best + 1e-9


@pytest.mark.nightly
def test_the_demo_is_never_silent(tmp_path):
    """A line every five seconds, within 100 columns; at the end the losses, and where to look next."""
    command = [sys.executable, "-u", str(HERE / "examples" / "demo.py")]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    lines, times = [], [time.monotonic()]
    with demo:
        for line in demo.stdout:
            lines.append(line.rstrip())
            times.append(time.monotonic())
    times.append(time.monotonic())
    assert demo.returncode == 0 and (tmp_path / "plan.json").is_file()
    assert max(map(len, lines)) <= 100
    assert max(after - before for before, after in itertools.pairwise(times)) < 5
    table = [line.split() for line in lines if re.match(r" +\d+( +[\d.e-]+){3}$", line)]
    assert len(table) == 6 and all(float(difference) < 1e-5 for *_, difference in table)
    assert "Where to look next" in lines[-4]


ON_FOUR = {  # examples that train on four processes as on one device, and what their plans say
    "experts": "expert parallel over 2 (axis model) (rows travel)",
    "long_sequences": "context parallel over 4 devices",
    "pipelines": "2 stages of 2, 2 blocks, 1F1B, 4 micro-batches",
}


@pytest.mark.machines
@pytest.mark.nightly  # by day tests/equality trains such models on four ranks
@pytest.mark.parametrize("example", ON_FOUR)
def test_four_processes_train_as_one_device(example, tmp_path):
    command = [sys.executable, str(HERE / "examples" / f"{example}.py")]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert said.returncode == 0, said.stderr
    assert ON_FOUR[example] in said.stdout and "   4   " in said.stdout


def test_examples_are_short_and_all_are_run():
    of_ranks = ("accelerate_loop", "fabric_loop", "huggingface_trainer", "lightning_trainer", "timm_loop", "demo")
    of_ranks = (*of_ranks, "experts", "long_sequences", "pipelines", "ops/train", "ops/ray_train")
    elsewhere = {f"{name}.py" for name in of_ranks} | {"research/dump_space.py", "research/solve_space.py"}
    there = {str(p.relative_to(HERE / "examples")) for p in (HERE / "examples").rglob("*.py")}
    assert there == elsewhere | {name.partition(" ")[0] for name in SMALL}
    for name in there - {"demo.py"}:
        assert len((HERE / "examples" / name).read_text().splitlines()) <= 80, name
