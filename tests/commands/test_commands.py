"""Every command, what it prints and exits with, and what it says of wrong uses."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import socket
import subprocess
import sys

import pytest
import torch

import autopar
from autopar.cli import _parser, main
from autopar.commands.models import Named, shipped
from autopar.needs import Needs
from autopar.request import Request
from tests.models import mlp_case
from tests.shares import one_in

HERE = "tests/use/made.py"
PLAN = ("plan", f"{HERE}:with_inputs", "--mesh", "2", "--quiet")


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Two plans that were saved, under dp and zero3."""
    folder = tmp_path_factory.mktemp("plans")
    for name in ("ddp", "fsdp"):
        assert main([*PLAN, "--parallel", name, "--out", str(folder / f"{name}.json")]) == 0
    return folder


def run(*arguments, **how):
    """The command itself, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.run(
        [sys.executable, "-m", "autopar", *arguments], capture_output=True, text=True, timeout=120, env=env, **how
    )


def test_a_plan_is_made_shown_and_compared(plans, capsys):
    one, other = str(plans / "ddp.json"), str(plans / "fsdp.json")
    capsys.readouterr()
    assert main(["show", one]) == 0
    shown = capsys.readouterr().out
    assert shown.strip() == str(autopar.Plan.load(one)) and "data parallel over 2 devices" in shown
    assert main(["show", one, "--table"]) == 0 and "operands -> output" in capsys.readouterr().out
    assert main(["show", one, "--json"]) == 0
    assert autopar.Plan.from_dict(json.loads(capsys.readouterr().out)) == autopar.Plan.load(one)
    assert main(["explain", one, "blocks.*.up"]) == 0 and "blocks.0.up/linear" in capsys.readouterr().out
    assert main(["diff", one, one]) == 0 and "the same" in capsys.readouterr().out
    assert main(["diff", one, other]) == 1 and "blocks.*.up.weight (x2)" in capsys.readouterr().out
    assert main(["diff", one, other, "--json"]) == 1 and json.loads(capsys.readouterr().out)["alike"] is False


def test_what_a_command_line_says_is_what_plan_is_told(capsys, tmp_path):
    out = str(tmp_path / "plan.json")
    asked = ["--cluster", "h100-8x1", "--budget", "60KiB", "--precision", "bf16", "--optimizer", "sgd", "--no-padding"]
    assert main([*PLAN, *asked, "--constrain", "head.weight=S(0)@0", "--accumulation", "2", "--out", out]) == 0
    plan = autopar.Plan.load(out)
    assert plan.budget == 60 * 1024 and plan.precision == ("bfloat16", "float32") and plan.optimizer == "sgd"
    assert plan.accumulation == 2 and plan.parameters["head.weight"].text(("0",)) == "S(0)" and "h100" in plan.cluster
    capsys.readouterr()
    assert main([*PLAN, "--beside", "--json"]) == 0 and json.loads(capsys.readouterr().out)["mesh"]


def test_progress_goes_to_the_standard_error():
    made = run("plan", f"{HERE}:build", "--mesh", "2x2", "--inputs", "x=8x16,labels=8:int64")
    assert made.returncode == 0 and made.stdout.startswith("model     Stack, 4.32K parameters")
    said = made.stderr.splitlines()
    assert any("traced" in line for line in said) and any("planned on mesh" in line for line in said)
    assert all(line.startswith("autopar: ") for line in said)


@pytest.mark.parametrize("builder", one_in(3, ["with_inputs", "dropping", "attending"], first=2))
def test_a_program_is_held_against_one_device(builder, tmp_path, capsys):
    out = str(tmp_path / "plan.json")
    model = f"{HERE}:{builder}"
    assert main(["plan", model, "--mesh", "2", "--parallel", "fsdp", "--quiet", "--out", out]) == 0
    assert main(["verify", out, model]) == 0
    assert "computes what one device does" in capsys.readouterr().out
    assert main(["verify", out, model, "--near", "1e-30", "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert set(found["errors"]) >= {"loss", "head.weight"} and max(found["errors"].values()) < 1e-5


def test_a_difference_is_told(monkeypatch, plans, capsys):
    from autopar.commands import verifying

    monkeypatch.setattr(verifying, "_step", doubled(verifying._step))
    assert main(["verify", str(plans / "ddp.json"), f"{HERE}:with_inputs"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def doubled(step):
    """A step whose gradients on this process are twice what they are."""

    def run(*given):
        loss, gradients = step(*given)
        return loss, {name: 2 * g for name, g in gradients.items()}

    return run


@pytest.mark.parametrize("optimizer", ["adamw", "autopar-adamw", 8.0], ids=str)
def test_states_of_parameters_of_sixteen_bits_count_as_they_are_kept(optimizer):
    """Beside the optimizer's own states after a step; bytes for each parameter count as they are given."""
    torch.manual_seed(0)
    model, batch = mlp_case()
    model = model.bfloat16()
    request = Request(mesh=1, optimizer=optimizer)
    with torch.device("meta"):
        graph = request.trace(model, {"x": batch["x"].bfloat16(), "y": batch["y"].bfloat16()})
    count = sum(p.numel() for p in model.parameters())
    kept = {"adamw": 2 * 2, "autopar-adamw": 3 * 4, 8.0: 8}[optimizer]
    assert Needs.of(graph, request).states == count * (2 + 2 + kept)


def test_a_batch_that_nobody_named_is_told(caplog):
    with caplog.at_level("INFO", logger="autopar"):
        Named("gpt2", "batch=4").made()
        Named("vit-base").made()
        Named("gpt2", "batch=4,seq=8").made()
    assert [record.getMessage() for record in caplog.records] == [
        "--inputs leaves out seq: the batch is input_ids 4x512, labels 4x512",
        "--inputs leaves out batch: the batch is pixel_values 8x3x224x224, labels 8",
    ]


def test_configurations_that_are_shipped_can_be_made():
    sizes = {"gpt2": 124.4, "llama-3-8b": 8030.3, "qwen3-8b": 8190.7, "bert-base": 109.5, "llama-3.2-1b": 1235.8}
    for name in shipped():
        model, inputs = Named(name).made()
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        assert model.training and len(inputs) == 2
        assert name not in sizes or millions == pytest.approx(sizes[name], abs=0.06), (name, millions)


def test_a_config_json_names_a_model(tmp_path):
    entry = shipped()["gpt2"]
    data = {**entry["config"], "architectures": [entry["architecture"]], "n_layer": 1}
    (tmp_path / "config.json").write_text(json.dumps(data))
    model, _ = Named(str(tmp_path), "batch=2,seq=8").made()
    assert type(model).__name__ == "GPT2LMHeadModel" and model.config.n_layer == 1


def test_a_script_runs_on_ranks(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        # one write: two ranks share a pipe
        "sys.stdout.write(f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n\")\n"
    )
    made = run("run", "--ranks", "2", str(script), "--lr", "0.1")
    assert made.returncode == 0, made.stderr
    assert sorted(made.stdout.split("\n"))[-2:] == [f"rank {r} of 2 ['--lr', '0.1']" for r in (0, 1)]
    assert main(["run", "--ranks", "2", str(tmp_path / "nothing.py")]) == 1
    assert main(["run", str(script), "--ranks", "2"]) == 1
    assert "stands behind" in capsys.readouterr().err


def test_nodes_make_one_job(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nsys.stdout.write(f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n\")\n"
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    asked = ("run", "--nodes", "2", "--ranks", "1", "--endpoint", endpoint, str(script))
    command, env = [sys.executable, "-m", "autopar", *asked], {**os.environ, "PYTHONPATH": os.getcwd()}
    nodes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        said = sorted(node.communicate(timeout=90)[0].strip() for node in nodes)
    finally:
        for node in nodes:
            node.kill()
    assert said == ["rank 0 of 2", "rank 1 of 2"]


def test_a_machine_is_looked_at(capfd):
    assert main(["check"]) == 0 and "solvers" in capfd.readouterr().out
    assert main(["check", "--json"]) == 0 and json.loads(capfd.readouterr().out)["ready"] is True
    made = run("--version")
    assert made.returncode == 0 and made.stdout.strip() == f"autopar {autopar.__version__}"
    assert main(["bench", "kernels", "--device", "cpu", "--small", "--only", "gated"]) == 0
    assert "| gated |" in capfd.readouterr().out


UNREADABLE = [
    (),
    ("plan",),
    ("plann", "gpt2"),
    ("plan", "gpt2", "--meshes", "2"),
    ("plan", "gpt2", "--accumulation", "two"),
    ("show",),
    ("explain", "plan.json"),
    ("diff", "plan.json"),
    ("run",),
    ("calibrate", "--ranks", "two"),
    ("export", "plan.json"),
    ("export", "plan.json", "--to", "deepspeed"),
    ("timeline", "--mesh", "2"),
]


@pytest.mark.parametrize("arguments", UNREADABLE, ids=" ".join)
def test_what_cannot_be_read_exits_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    said = capsys.readouterr()
    assert ended.value.code == 2 and "usage: autopar" in said.err and not said.out


@pytest.mark.parametrize(
    "arguments", [pytest.param(a, marks=[pytest.mark.nightly] if a[1:] else []) for a in UNREADABLE], ids=" ".join
)
def test_what_cannot_be_read_exits_with_two_in_a_process_of_its_own(arguments):
    made = run(*arguments)
    assert made.returncode == 2 and "usage: autopar" in made.stderr and not made.stdout


LETTERS = {
    "a file that cannot be imported": (("plan", "pyproject.toml.py:build", "--mesh", "2"), "does not exist"),
    "a builder that wants something": (("plan", f"{HERE}:of_width", "--mesh", "2"), "raised TypeError"),
    "three things": (("plan", f"{HERE}:three", "--mesh", "2"), "returned a tuple, no model"),
    "no devices in a cluster": ((*PLAN, "--cluster", "h100-0x2"), "no cluster is called"),
    "more positions than there are": (("fit", "gpt2", "--inputs", "seq=9999"), "has no place for seq=9999"),
    "a batch of no rows": (("plan", f"{HERE}:build", "--mesh", "2", "--inputs", "x=0x16,labels=0:int64"), "names no"),
    "no script": (("run", "nowhere.py"), "the script nowhere.py does not exist"),
    "words of images": (
        ("plan", "vit-base", "--mesh", "2", "--inputs", "batch=4,seq=7"),
        "a model of images has no seq",
    ),
    "no such model": (("plan", "llama-4-8b", "--mesh", "2"), "did you mean 'llama-3-8b'"),
    "no such file": (("plan", "nowhere.py:build", "--mesh", "2"), "the file nowhere.py does not exist"),
    "no such function": (("plan", f"{HERE}:nothing", "--mesh", "2"), "has no function nothing"),
    "no model": (("plan", f"{HERE}:no_model", "--mesh", "2"), "returned a int, no model"),
    "no inputs": (("plan", f"{HERE}:build", "--mesh", "2"), "returned no inputs"),
    "odd inputs": (("plan", f"{HERE}:build", "--mesh", "2", "--inputs", "x=8by16"), "names no tensor"),
    "odd sizes": (("plan", "gpt2", "--mesh", "2", "--inputs", "batch=8,length=3"), "is not batch=N or seq=N"),
    "no mesh": (("plan", f"{HERE}:with_inputs"), "nothing says how many devices"),
    "an odd mesh": ((*PLAN[:2], "--mesh", "2by2"), "is not a mesh"),
    "no such cluster": ((*PLAN, "--cluster", "h101-8x1"), "did you mean 'h100'"),
    "too small a cluster": ((*PLAN[:2], "--mesh", "16", "--cluster", "h100-8x1"), 'cluster="h100-8x2"'),
    "an odd budget": ((*PLAN, "--budget", "40"), 'memory_budget="40GiB"'),
    "a budget that nothing fits": ((*PLAN, "--budget", "2KiB"), "no plan of 2.00 KiB"),
    "an odd precision": ((*PLAN, "--precision", "bf15"), "did you mean 'bf16'"),
    "no such preset": ((*PLAN, "--parallel", "fsdp3"), "did you mean 'fsdp'"),
    "no such policy": ((*PLAN, "--recompute", "ful"), "did you mean 'full'"),
    "an odd constraint": ((*PLAN, "--constrain", "head.weight"), "is not a constraint"),
    "a constraint of nothing": ((*PLAN, "--constrain", "heat.weight=S(0)@0"), "heat.weight"),
    "no folder": ((*PLAN, "--out", "/nowhere/at/all.json"), "the folder of"),
    "no folder for a trace": (("timeline", *PLAN[1:], "--out", "/nowhere/at/all.json"), "the folder of"),
    "more ranks than a machine has": (
        ("timeline", f"{HERE}:with_inputs", "--mesh", "32x1", "--measure", "--out", "/tmp/step.json"),
        "starts a local process for each",
    ),
    "no plan to write for others": (("export", "pyproject.toml", "--to", "hf", "-o", "/tmp/hf.json"), "cannot be read"),
    "no plan": (("show", "nowhere.json"), "cannot be read"),
    "not a plan": (("show", "pyproject.toml"), "cannot be read"),
    "a plan of another model": (("verify", "{plan}", f"{HERE}:other"), "made for another model"),
    "inputs of no numbers": (("verify", "{plan}", f"{HERE}:of_no_numbers"), "an input has NaN or infinite values"),
    "a plan of other inputs": (
        ("verify", "{plan}", f"{HERE}:build", "--inputs", "x=4x16,labels=4:int64"),
        "made for another graph",
    ),
    "a page over its plan": (("report", "{plan}", "-o", "{plan}"), "would be written over"),
    "budgets of no page": ((*PLAN, "--budgets", "5"), "--report plan.html"),
    "no such place": (("explain", "{plan}", "block.*.up"), "has no site called"),
    "no ranks": (("calibrate", "--ranks", "0"), "not a number of ranks"),
    "an odd fabric": ((*PLAN, "--fabric", "fast"), "--fabric 400G"),
    "an odd number of tokens": (("fit", "gpt2", "--tokens", "many"), "1T, 300B or 1e12"),
    "days of nothing": (("fit", "gpt2", "--days", "3"), "--tokens 1T"),
    "a price of nothing": (("fit", "gpt2", "--tokens", "1T", "--price", "0"), "is not more than 0"),
    "a batch that a file makes": ((*PLAN, "--inputs", "batch=auto"), "a file.py gives its own inputs"),
    "a batch to be found elsewhere": (("fit", "gpt2", "--inputs", "batch=auto"), "which autopar plan makes"),
    "no mesh to check": (("check", "gpt2"), "check gpt2 8"),
    "no such kind": (("fit", f"{HERE}:with_inputs", "--clusters", "h1000"), "did you mean 'h100'"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", LETTERS)
def test_a_wrong_use_of_the_command_itself_is_a_letter(name, plans):
    arguments, says = LETTERS[name]
    made = run(*[str(plans / "ddp.json") if a == "{plan}" else a for a in arguments])
    assert made.returncode == 1 and says in made.stderr and "Traceback" not in made.stderr and not made.stdout


def right(plans, folder):
    """A right use of each command, and what it says or writes."""
    one, other, model = str(plans / "ddp.json"), str(plans / "fsdp.json"), f"{HERE}:with_inputs"
    script = folder / "train.py"
    script.write_text("print('trained')\n")
    return {
        "plan": (["plan", model, "--mesh", "2"], "plan      for 2 devices"),
        "fit": (["fit", model, "--clusters", "l4"], "l4"),
        "show": (["show", one], "plan      for 2 devices"),
        "explain": (["explain", one, "blocks.*.up"], "blocks.0.up/linear"),
        "diff": (["diff", one, one], "the same"),
        "report": (["report", one, "-o", str(folder / "plan.html")], "plan.html"),
        "timeline": (["timeline", model, "--mesh", "2", "-o", str(folder / "step.json")], "step.json"),
        "export": (["export", other, "--to", "fsdp2", "-o", str(folder / "fsdp2.py")], "fsdp2.py"),
        "verify": (["verify", one, model], "computes what one device does"),
        "run": (["run", "--ranks", "2", str(script)], "trained"),
        "check": (["check"], "torch"),
        "calibrate": (["calibrate", "--without-ops", "--largest", "4096", "-o", str(folder / "p.json")], ""),
        "bench": (["bench", "kernels", "--device", "cpu", "--small", "--only", "gated"], ""),
    }


@pytest.mark.nightly
def test_every_command_runs_in_a_process_of_its_own(plans, tmp_path):
    from autopar.cli import _HOME

    uses = right(plans, tmp_path)
    assert uses.keys() == _HOME.keys()
    for name, (arguments, says) in uses.items():
        made = run(*arguments)
        assert made.returncode == 0 and says in made.stdout, (name, made.stdout, made.stderr)


@pytest.mark.parametrize("name", LETTERS)
def test_a_wrong_use_is_a_letter(name, plans, capsys):
    arguments, says = LETTERS[name]
    given = [str(plans / "ddp.json") if a == "{plan}" else a for a in arguments]
    capsys.readouterr()
    assert main(given) == 1
    said = capsys.readouterr()
    assert says in said.err and "Traceback" not in said.err and not said.out


def test_letters_of_processes_exit_with_one():
    made = run("calibrate", "--ranks", "0")
    assert made.returncode == 1 and made.stderr.startswith("--ranks 0 is not") and not made.stdout


def test_commands_of_the_pages_can_be_read():
    found = 0
    for page in ("README.md", "docs/commands.md", "docs/index.md", "docs/nodes.md", "docs/trainers.md"):
        for block in re.findall(r"```bash\n(.*?)```", pathlib.Path(page).read_text(), re.DOTALL):
            for line in block.splitlines():
                if line.startswith("autopar "):
                    _parser().parse_args(shlex.split(line.partition("  #")[0])[1:])
                    found += 1
    assert found >= 10


def test_what_is_no_number_is_not_right():
    from autopar.commands.verifying import _errors

    right = (1.0, {"a": torch.ones(3), "b": torch.ones(3)})
    errors = _errors(right, (1.0, {"a": torch.ones(3), "b": torch.full((3,), float("nan")), "c": torch.ones(1)}))
    assert errors["a"] == 0 and errors["c"] == float("inf") and errors["b"] != errors["b"]
