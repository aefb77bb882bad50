"""A script in a process of its own that has imported torch and autopar, which takes longer than most scripts."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
from pathlib import Path


def _script(code: str, folder: str, said: str) -> None:
    os.chdir(folder)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})


def run(code: str, folder: Path, said: Path, timeout_s: float = 150.0) -> tuple[int | None, str]:
    """The exit status of a script that runs in a folder, and what it wrote to stderr, which goes to the file `said`."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["autopar.testing.preload"])
    process = context.Process(target=_script, args=(code, str(folder), str(said)))
    process.start()
    process.join(timeout_s)
    process.kill()
    process.join()
    return process.exitcode, said.read_text()
