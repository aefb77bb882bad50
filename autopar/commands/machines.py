"""`autopar check` and `bench`: inspect this machine, and time kernels on it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pulp
import torch

import autopar
from autopar.commands.checking import check_memory
from autopar.kernels import can_run
from autopar.kernels.measured import path
from autopar.solver.figures import aligned, size

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


def bench(asked: argparse.Namespace) -> int:
    """Time kernels beside the ops that they replace."""
    return subprocess.call([sys.executable, "-m", "autopar.bench", *asked.arguments])
