"""A job under torchrun whose rank raises, is killed or hangs: it goes on, and its losses are those of one device."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from autopar.cli import _parser
from autopar.commands import launching
from autopar.commands.launching import run
from tests.docs.blocks import HERE

TRAIN = str(HERE / "examples" / "ops" / "train.py")
FAULTS = {
    "raises": 'raise ValueError("mine")',
    "is killed": "os.kill(os.getpid(), 9)",
    "hangs": "__import__('time').sleep(600)",  # until the others have lost it
}
# torchrun waits half a minute for a rank that catches SIGTERM and waits for a lost one: by day none catches it.
IGNORED = "signal.signal = lambda number, handler: None"
# Rank 1 fails in the third step of the job's first start.
FAULTY = """
import os, runpy, signal, sys, torch
{signals}
step, steps = torch.optim.AdamW.step, iter(range(100))
def failing(*given, **how):
    if next(steps) == 2 and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        {fault}
    return step(*given, **how)
torch.optim.AdamW.step = failing
sys.argv[0] = {train!r}
runpy.run_path({train!r}, run_name="__main__")
for _ in range(10):  # of which threads of gloo let go when the script has ended
    torch.distributed.all_reduce(torch.ones(1000), async_op=True)
"""


def losses(said):
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): (\S+)", said)]


@pytest.mark.machines
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "fault, ranks, signals",
    [
        pytest.param("raises", 2, IGNORED, id="raises-2", marks=pytest.mark.nightly),
        *(pytest.param(fault, ranks, "", marks=pytest.mark.nightly) for ranks in (2, 4) for fault in FAULTS),
    ],
)
def test_a_job_goes_on_where_it_was(fault, ranks, signals, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [TRAIN, "--folder", str(tmp_path / "whole"), "--steps", "4"])
    runpy.run_path(TRAIN, run_name="__main__")
    whole = losses(capsys.readouterr().out)
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.format(fault=FAULTS[fault], signals=signals, train=TRAIN))
    logs = tmp_path / "logs"
    command = f"-m autopar run --ranks {ranks} --max-restarts 1 --log-dir {logs}"
    command += f" {script} --folder {tmp_path / 'run'} --steps 4"
    done = subprocess.run(
        [sys.executable, *command.split()],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
    )
    said = losses("".join(path.read_text() for path in sorted(logs.glob("*/attempt_*/0/stdout.log"))))
    assert done.returncode == 0 and [step for step, _ in said] == [0, 1, 2, 2, 3], done.stderr
    for step, loss in said:
        assert loss == pytest.approx(whole[step][1], abs=2e-6), step  # six digits are printed
    kept = sorted(path.suffix for path in (tmp_path / "run" / "plans").iterdir())
    assert kept == [".graph", ".halves", ".json"]  # traced, lowered and planned once
    errors = [json.loads(path.read_text())["message"]["message"] for path in logs.glob("*/attempt_0/1/error.json")]
    assert errors == (["ValueError: mine"] if fault == "raises" else [])  # one that is killed writes nothing
    assert "mine" not in done.stdout and "[default0]:" in done.stdout  # the terminal has the first rank


def failure(folder, rank, exitcode, error="", second=7):
    """A rank's failure as torchrun tells of it, with the file that the rank wrote."""
    path = folder / f"{rank}.json"
    trace = f"Traceback (most recent call last):\n  File 'x.py'\n{error}\n"
    message = {"message": error, "extraInfo": {"py_callstack": trace, "timestamp": str(second)}}
    if error:
        path.write_text(json.dumps({"message": message}))
    return ProcessFailure(rank, 100 + rank, exitcode, str(path))


def test_what_ended_a_job_is_one_block(tmp_path, monkeypatch, capsys):
    """It is about the rank that failed, not about those which lost it a moment earlier by their clocks."""
    gloo = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:33984"
    lost = "Lost: rank 2 has raised ValueError: mine"
    asked = _parser().parse_args(["run", "--ranks", "4", "--log-dir", "logs", TRAIN])

    def ends(**failures):
        def torchrun(arguments):
            raise ChildFailedError("train.py", {int(name[1:]): of for name, of in failures.items()})

        monkeypatch.setattr(launching, "torchrun", torchrun)
        assert run(asked) == 1
        return capsys.readouterr().err.splitlines()

    three = {"_0": failure(tmp_path, 0, 1, gloo, 6), "_1": failure(tmp_path, 1, 1, lost, 6)}
    assert ends(**three, _2=failure(tmp_path, 2, 1, "ValueError: mine"), _3=failure(tmp_path, 3, -15)) == [
        "autopar: rank 2 failed: ValueError: mine",
        "    Traceback (most recent call last):",
        "      File 'x.py'",
        "    ValueError: mine",
        "    and after it 0, 1, 3",
        "    what all ranks said is in logs",
    ]
    (first, *_) = ends(**three, _3=failure(tmp_path, 3, -9))
    assert first == "autopar: rank 3 failed: Signal 9 (SIGKILL) received by PID 103"
    assert ends(_5=failure(tmp_path, 5, 3))[0] == "autopar: rank 5 failed: it exited with 3"
