"""Lines of progress: on rank 0, once, where logging is configured and where it is not.

What is said on two ranks by default is said by one under each configuration.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import fresh

SCRIPT = """
import logging, sys, torch, autopar
{logging}
torch.manual_seed(0)
x = torch.randn(8, 8)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
model = autopar.autoparallelize(model, (x,), parallel="dp")
model(x).sum().backward()
with torch.no_grad():
    model.eval()(x)
"""
LINES = ("traced ", "planned on mesh", "started in", "its first forward", "first call without gradients, in this mode")


ON_TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.machines
@pytest.mark.parametrize(
    "launch, logging, begins",
    [
        (ON_TWO, "", "autopar: "),
        ((), "logging.basicConfig(level=logging.INFO, format='MINE %(message)s', stream=sys.stderr)", "MINE "),
        ((), "logging.getLogger('autopar').setLevel(logging.WARNING)", None),
        pytest.param((), "logging.basicConfig()", None, marks=pytest.mark.nightly),
    ],
    ids=["by default", "configured", "silenced", "configured without INFO"],
)
def test_rank_0_says_what_it_does_once(launch, logging, begins, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(logging=logging))
    if launch:
        run = [sys.executable, *launch, str(script)]
        said = subprocess.run(run, capture_output=True, text=True, timeout=150, check=True).stderr.splitlines()
    else:
        status, text = fresh.run(script.read_text(), tmp_path, tmp_path / "stderr")
        assert status == 0, text
        said = text.splitlines()
    mine = [line for line in said if begins and line.startswith(begins)]
    for text in LINES:
        # Another call is traced and planned again, which those see who ask for INFO.
        most = 2 if begins == "MINE " and text in LINES[:2] else 1
        found = sum(text in line for line in mine)
        assert found == (most if begins else 0), (text, said)
    if begins is None:
        assert not any("traced" in line or "planned" in line for line in said)
