"""`autopar check`, `calibrate`, `bench` and `run`: inspect and measure this machine, and start jobs on it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pulp
import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun

import autopar
from autopar.calibrate.command import measure
from autopar.commands.checking import check_memory
from autopar.kernels import can_run
from autopar.kernels.measured import path
from autopar.letters import NotServed
from autopar.runtime.faults import tells_of_another
from autopar.runtime.world import start_world
from autopar.solver.figures import aligned, size
from autopar.testing.ranks import on_processes

_SIGNALLED = 128  # An exit status beyond it tells the signal that ended a job, as in a shell.
_PACKAGES = ("torch", "pulp", "networkx", "sympy", "numpy", "transformers", "triton", "highspy")


def check(asked: argparse.Namespace) -> int:
    """Print versions, solvers, backends and devices, or the memory of a model's step where one is named.

    Returns 1 if something is missing for planning, or if the step does not fit.
    """
    if asked.model is not None:
        return check_memory(asked)
    solvers = pulp.listSolvers(onlyAvailable=True)
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(torch.distributed, f"is_{name}_available")()]
    devices = [_device(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    found = {
        "autopar": autopar.__version__,
        "python": sys.version.split()[0],
        **{name: _version(name) for name in _PACKAGES},
        "solvers": ", ".join(solvers) or "none",
        "backends": ", ".join(backends) or "none",
        "GPUs": ", ".join(devices) or "none: plans are made for machines that are elsewhere",
        "kernels": f"Triton is there; what was measured stands in {path()}"
        if can_run()
        else "no Triton: ops run alone",
        "cores": str(os.cpu_count()),
    }
    is_ready = bool(solvers) and "gloo" in backends
    print(json.dumps({**found, "ready": is_ready}, indent=2) if asked.json else "\n".join(aligned(*_table(found))))
    return 0 if is_ready else 1


def _table(found: dict[str, str]) -> tuple[tuple[str, str], list[tuple[str, str]]]:
    width = max(map(len, found.values()))
    return ("what", "found".ljust(width)), [(name, text.ljust(width)) for name, text in found.items()]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _device(i: int) -> str:
    about = torch.cuda.get_device_properties(i)
    return f"{about.name} ({size(about.total_memory)})"


def calibrate(asked: argparse.Namespace) -> int:
    """Measure this machine, on local processes or as a rank of a job."""
    given = (asked.mesh, asked.largest, asked.pairs, asked.out, not asked.without_ops, asked.into)
    if asked.ranks is not None and "RANK" not in os.environ:
        text = on_processes(asked.ranks, measure, *given, timeout_s=1800.0)[0]
    else:
        start_world()
        text = measure(int(os.environ.get("RANK", "0")), *given)
    if text:
        print(text)
    return 0


def bench(asked: argparse.Namespace) -> int:
    """Time kernels beside the ops that they replace."""
    return subprocess.call([sys.executable, "-m", "autopar.bench", *asked.arguments])


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
