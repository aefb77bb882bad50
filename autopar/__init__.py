"""autopar: an automatic-parallelism compiler for PyTorch.

    trace -> shardings -> solve -> lower
    Module -> Graph -> Space -> Plan -> ParallelModule

Importing this package starts no device, no process group, and (until a name that needs it is used) not even torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {  # public name -> the module that holds it
    "autoparallelize": "autopar.api",
    "plan": "autopar.api",
    "gather": "autopar.module.gathered",
    "watch": "autopar.module.watch",
    "save": "autopar.module.saving",
    "load": "autopar.module.loading",
    "Plan": "autopar.api",
    "DeviceMesh": "autopar.sharding.mesh",
    "Cluster": "autopar.sharding.cluster",
    "Precision": "autopar.tracer.precision",
    "Assume": "autopar.graph.graph",
    "rule": "autopar.ops.declare",
    "R": "autopar.sharding.placement",
    "S": "autopar.sharding.placement",
    "P": "autopar.sharding.placement",
    "AutoparError": "autopar.letters",
    "Letter": "autopar.letters",
    "NoRule": "autopar.letters",
    "Infeasible": "autopar.letters",
    "NotCaptured": "autopar.letters",
    "NotServed": "autopar.letters",
}
_FOLDERS = frozenset("tracer graph ops sharding space solver codegen module runtime testing letters optim".split())
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _FOLDERS:
        return importlib.import_module(f"autopar.{name}")
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
