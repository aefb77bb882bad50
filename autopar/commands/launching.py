"""`autopar run`: start a script on the ranks of this machine, or of several."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun

from autopar.letters import NotServed
from autopar.runtime.signs import tells_of_another

_SIGNALLED = 128  # An exit status beyond it tells the signal that ended a job, as in a shell.


def _refuse_behind(script: str, arguments: list[str]) -> None:
    """Raise where an option of this command stands behind the script, which would get it."""
    for option in (
        ("--ranks", "--nodes", "--endpoint", "--max-restarts", "--log-dir") if arguments[:1] != ["--"] else ()
    ):
        if any(text == option or text.startswith(f"{option}=") for text in arguments):
            raise NotServed(
                f"{option} stands behind {script}, which would get it",
                advice=f"autopar run {option} ... {script}; or, if it is the script's own, {script} -- {option} ...",
            )


def run(asked: argparse.Namespace) -> int:
    """Start a script on local ranks by torchrun; returns its exit status."""
    if not os.path.isfile(asked.script):
        raise NotServed(f"the script {asked.script} does not exist", advice="autopar run --ranks 8 train.py")
    _refuse_behind(asked.script, asked.arguments)
    ranks = asked.ranks or (torch.cuda.device_count() if torch.cuda.is_available() else 2)
    given = asked.arguments[asked.arguments[:1] == ["--"] :]
    together = [f"--nnodes={asked.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={asked.endpoint}"]
    nodes = ["--standalone"] if asked.nodes == 1 else [*together, f"--rdzv-id={asked.endpoint}"]
    # Every rank writes its own files; the terminal shows the first rank of the node.
    logs = [f"--log-dir={asked.log_dir}", "--tee=3", "--local-ranks-filter=0"] if asked.log_dir else []
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    options = [f"--nproc-per-node={ranks}", *nodes, f"--max-restarts={asked.max_restarts}", *logs]
    if asked.max_restarts:
        # A store that the launcher shares with its ranks keeps addresses of the start before, and ranks that start
        # again read them now and then (pytorch issue 135712).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        torchrun([*options, "--", asked.script, *given])
    except ChildFailedError as e:
        print(_cause(e, asked.log_dir), file=sys.stderr)
        return 1
    except SignalException as e:
        return _SIGNALLED + int(e.sigval)
    return 0


def _cause(failed: ChildFailedError, log_dir: str) -> str:
    """One block about the rank whose failure made the others fail, with its traceback where it wrote one."""
    said = {rank: _said(failure) for rank, failure in failed.failures.items()}

    def order(rank: int) -> tuple[bool, int]:  # Times are whole seconds: one that lost another may come first.
        failure = failed.failures[rank]
        was_stopped = failure.exitcode == -signal.SIGTERM  # torchrun stops the ranks that are left.
        return was_stopped or said[rank][0].startswith("Lost:") or tells_of_another(said[rank][0]), failure.timestamp

    rank, *others = sorted(said, key=order)
    what, trace = said[rank]
    block = [f"autopar: rank {rank} failed: {what}", *(f"    {line}" for line in trace.splitlines())]
    block += [f"    and after it {', '.join(map(str, sorted(others)))}"] if others else []
    block += [f"    what all ranks said is in {log_dir}"] if log_dir else []
    return "\n".join(block)


def _said(failure: ProcessFailure) -> tuple[str, str]:
    """The error of a rank in a line, and its traceback; "" where it ended without writing one."""
    about: Any = failure.message
    if isinstance(about, dict):
        return str(about.get("message", "")).partition("\n")[0], str(about.get("extraInfo", {}).get("py_callstack", ""))
    if failure.exitcode < 0:
        return str(about), ""
    return f"it exited with {failure.exitcode}", ""
