"""Every kernel compiles for GPUs that are not there, and keeps what it holds in registers.

By day some variants of each kernel for one of the GPUs in one dtype, nightly all for all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.ahead_of_time import SHARED


@pytest.mark.timeout(300)
@pytest.mark.parametrize("share", ["once", pytest.param("all", marks=pytest.mark.nightly)])
def test_kernels_compile_without_spills(share, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.ahead_of_time", share]
    made = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert made.returncode == 0, made.stderr
    rows = [json.loads(line) for line in made.stdout.splitlines()]
    assert {row["capability"] for row in rows} == set(SHARED) and len({row["kernel"] for row in rows}) == 22
    for row in rows:
        assert row["spilled"] == 0 and row["doubles"] == 0 and row["shared"] <= SHARED[row["capability"]], row
