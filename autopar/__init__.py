"""autopar: an automatic-parallelism compiler for PyTorch.

    trace -> shardings -> solve -> lower
    Module -> Graph -> Space -> Plan -> ParallelModule

Importing this package starts no device, no process group, and (until a name that needs it is used) not even torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Type checkers and editors read these; a program gets a name from `_HOME` when it asks for one.
    from autopar import codegen as codegen
    from autopar import graph as graph
    from autopar import letters as letters
    from autopar import module as module
    from autopar import ops as ops
    from autopar import optim as optim
    from autopar import runtime as runtime
    from autopar import sharding as sharding
    from autopar import solver as solver
    from autopar import space as space
    from autopar import testing as testing
    from autopar import tracer as tracer
    from autopar.api import autoparallelize as autoparallelize
    from autopar.api import plan as plan
    from autopar.commands.distributing import distributed_config as distributed_config
    from autopar.graph.graph import Assume as Assume
    from autopar.integrations.pretrained import from_pretrained as from_pretrained
    from autopar.letters import AutoparError as AutoparError
    from autopar.letters import Infeasible as Infeasible
    from autopar.letters import Letter as Letter
    from autopar.letters import NoRule as NoRule
    from autopar.letters import NotCaptured as NotCaptured
    from autopar.letters import NotServed as NotServed
    from autopar.module.gathered import gather as gather
    from autopar.module.loading import load as load
    from autopar.module.saving import save as save
    from autopar.module.step_log import log as log
    from autopar.module.watch import watch as watch
    from autopar.ops.declare import rule as rule
    from autopar.ops.experts import experts as experts
    from autopar.sharding.cluster import Cluster as Cluster
    from autopar.sharding.mesh import DeviceMesh as DeviceMesh
    from autopar.sharding.placement import P as P
    from autopar.sharding.placement import R as R
    from autopar.sharding.placement import S as S
    from autopar.solver.plan import Plan as Plan
    from autopar.tracer.precision import Precision as Precision

__version__ = "0.1.0"

_HOME = {  # public name -> the module that holds it
    "autoparallelize": "autopar.api",
    "plan": "autopar.api",
    "from_pretrained": "autopar.integrations.pretrained",
    "distributed_config": "autopar.commands.distributing",
    "gather": "autopar.module.gathered",
    "watch": "autopar.module.watch",
    "log": "autopar.module.step_log",
    "save": "autopar.module.saving",
    "load": "autopar.module.loading",
    "Plan": "autopar.api",
    "DeviceMesh": "autopar.sharding.mesh",
    "Cluster": "autopar.sharding.cluster",
    "Precision": "autopar.tracer.precision",
    "Assume": "autopar.graph.graph",
    "rule": "autopar.ops.declare",
    "experts": "autopar.ops.experts",
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


if not TYPE_CHECKING:  # A type checker would believe that it gives any name.

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(importlib.import_module(_HOME[name]), name)
        if name in _FOLDERS:
            return importlib.import_module(f"autopar.{name}")
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
