"""Readers of the arguments of `autopar.plan`: each gives what a caller means, or raises a letter."""

from __future__ import annotations

import functools
import math
import numbers
import os
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from autopar.kernels import NAMES
from autopar.letters import BadBudget, BadCluster, BadSharding, NotServed, among
from autopar.runtime.world import world_size
from autopar.sharding.cluster import Cluster
from autopar.sharding.costs import DURING_BACKWARD, OPTIMIZERS, STEPS_ON_HOST
from autopar.solver.figures import several
from autopar.solver.offload import Room
from autopar.tracer import Assume
from autopar.tracer.precision import DTYPES, Precision

RESERVE = 0.1  # share of a device's memory that plans leave free: the allocator's gaps, the libraries
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{u}iB": 2 ** (10 * (i + 1)) for i, u in enumerate("KMGT")},
    **{f"{u}B": 10 ** (3 * (i + 1)) for i, u in enumerate("KMGT")},
}
_MOST_BYTES = 2**62
_MOST_OPTIMIZER_BYTES = 1e6  # most bytes of states for each parameter
_STATE_BYTES = {"Adagrad": 4, "Adadelta": 8, "Adamax": 8, "NAdam": 8, "RAdam": 8, "Rprop": 8, "ASGD": 4, "Muon": 4}
_LEAST_BYTES = 1024  # A smaller budget was meant as GiB.


def refuse_unserved(**arguments: tuple[Any, tuple[Any, ...]]) -> None:
    """Raise a letter for an argument that is not among the served values; each is (given, served)."""
    for name, (given, served) in arguments.items():
        if given not in served:
            known = ", ".join(map(repr, served))
            raise NotServed(f"{name}={given!r} is not known", seen=f"known: {known}", advice="one of these")


def kernels_of(given: Any) -> bool | tuple[str, ...]:
    """Families of kernels that may replace ops; True means those measured to be faster, False none."""
    if isinstance(given, bool):
        return given
    names = (given,) if isinstance(given, str) else given
    unknown = [name for name in names if name not in NAMES] if isinstance(names, Collection) else [given]
    if unknown:
        raise NotServed(
            f"kernels={given!r} names no kernels",
            seen=among(NAMES, unknown[0]),
            advice="True, those that were measured to be faster on the device; False; or some of these",
        )
    return tuple(name for name in NAMES if name in names)


def check_gap(gap: Any) -> None:
    if not isinstance(gap, (int, float)) or not 0 <= gap < 1:
        raise NotServed(f"gap={gap!r} is not a share of the step time", advice="gap=0.01")


def check_recompute(policy: Any, known: Collection[str]) -> None:
    """Raise a letter unless the policy is "auto", one that is known by name, or a function."""
    if not callable(policy) and not (isinstance(policy, str) and policy in ("auto", *known)):
        raise NotServed(
            f"recompute={policy!r} is not a policy",
            seen=among(("auto", *known), policy),
            advice="one of these, or a function of a line and a budget that returns names of its runs",
        )


def check_kinds(solver: Any, strict: Any, loss: Any, assume: Any) -> None:
    """Raise a letter unless each of these arguments is of a type that it may have."""
    for name, given, is_right, advice in (
        ("solver", solver, isinstance(solver, str), 'solver="cbc"'),
        ("strict", strict, isinstance(strict, bool), "strict=True"),
        ("loss", loss, loss is None or callable(loss), "loss=a function of the model's outputs and its inputs"),
        ("assume", assume, assume is None or isinstance(assume, Assume), "assume=autopar.Assume(...)"),
    ):
        if not is_right:
            raise NotServed(f"{name}={given!r} is of another kind than it may be", advice=advice)


def optimizer_of(given: Any) -> str | float:
    """The name of a known optimizer, or the bytes of its states for each parameter.

    `given` is such a name or number, or a class or an instance of torch.optim.
    """
    if isinstance(given, str) and given.lower() in (*OPTIMIZERS, DURING_BACKWARD):
        return given.lower()
    if _is_number(given) and 0 <= given < _MOST_OPTIMIZER_BYTES:
        return float(given) if isinstance(given, float) else given
    is_partial = isinstance(given, functools.partial)
    options = given.keywords if is_partial else vars(given) if hasattr(given, "param_groups") else {}
    of_class = given.func if is_partial else given
    kind = of_class if isinstance(of_class, type) else type(of_class)
    groups = getattr(given, "param_groups", [{}])
    if kind.__module__ == "autopar.optim":
        return DURING_BACKWARD if options.get("during_backward") else STEPS_ON_HOST[0]
    if kind.__module__.startswith("torch.optim") and (found := _states_of(kind.__name__, groups)) is not None:
        return found
    raise NotServed(
        f"optimizer={kind.__name__ if hasattr(given, 'param_groups') else given!r} is not known",
        seen=among((*OPTIMIZERS, "autopar.optim.AdamW, torch.optim.AdamW and others of torch.optim"), given),
        advice="one of these, or the bytes of its states for each parameter: 8 for AdamW in float32",
    )


def _states_of(name: str, groups: Sequence[Any]) -> str | float | None:
    """The name of a torch.optim optimizer, or its states' bytes per parameter element; None if unknown."""
    has_momentum = any(group.get("momentum") for group in groups)
    if name in ("Adam", "AdamW"):
        return 12 if any(group.get("amsgrad") for group in groups) else "adamw"
    if name == "SGD":
        return "sgd-momentum" if has_momentum else "sgd"
    if name == "RMSprop":
        return 4 * (1 + has_momentum + any(group.get("centered") for group in groups))
    return _STATE_BYTES.get(name)


def check_outputs(outputs: Any) -> None:
    """Raise a letter unless `outputs` is a way in which outputs leave, or names of outputs."""
    if isinstance(outputs, str):
        is_known = outputs in ("auto", "full", "sharded", "local")
    else:
        is_known = isinstance(outputs, (tuple, list)) and all(isinstance(name, str) for name in outputs)
    if not is_known:
        raise NotServed(
            f"outputs={outputs!r} is not known",
            advice=(
                '"auto", "full", "sharded", "local", or the names of outputs that come whole and may be given '
                'gradients: outputs=("logits",)'
            ),
        )


def check_accumulation(accumulation: Any) -> None:
    is_whole = isinstance(accumulation, int) and not isinstance(accumulation, bool)
    if not is_whole or not 1 <= accumulation < 2**20:
        raise NotServed(
            f"accumulation={accumulation!r} is not a number of micro-batches",
            advice="accumulation=4; meta_inputs are one micro-batch",
        )


def check_number(name: str, given: Any) -> None:
    """Raise a letter unless `given` is "auto", or a number of parts in which a batch or its rows may pass."""
    is_whole = isinstance(given, int) and not isinstance(given, bool)
    if given != "auto" and not (is_whole and 1 <= given < 2**20):
        raise NotServed(
            f"{name}={given!r} is not a number of parts",
            advice=f'{name}=4, a divisor of the rows; or "auto", as many as the budget asks for',
        )


def check_time_limit(time_limit: Any) -> None:
    if time_limit is not None and not (_is_number(time_limit) and time_limit > 0):
        raise NotServed(
            f"time_limit={time_limit!r} is not a number of seconds",
            advice="time_limit=10.0; without one the same inputs give the same plan",
        )


def precision_of(given: Any) -> Precision | None:
    """The Precision that a caller means: one, None, a name such as "bf16", or a dtype of torch."""
    if given is None or isinstance(given, Precision):
        return given
    name = str(given).removeprefix("torch.").lower()
    if name == "no":  # The model keeps its dtypes.
        return None
    if name not in DTYPES:
        raise NotServed(
            f"precision={given!r} is not a Precision",
            seen=among(DTYPES, given),
            advice='autopar.Precision(param="bfloat16", reduce="float32"), or "bf16" for that',
        )
    return Precision(name, "float32")


def check_pad_to(pad_to: Any) -> None:
    if pad_to is not None and (isinstance(pad_to, bool) or not isinstance(pad_to, int) or pad_to < 1):
        raise NotServed(
            f"pad_to={pad_to!r} is not a length", advice="pad_to=64: sequences are padded to the next multiple of it"
        )


def check_timeout(name: str, seconds: Any) -> None:
    if not _is_number(seconds) or not 0 < seconds < 1e7:
        raise NotServed(f"{name}={seconds!r} is not a number of seconds", advice=f"{name}=600.0")


def backend_name(compile: Any, known: Callable[[], Sequence[str]]) -> str | None:
    """The torch.compile backend that `compile=` names, one of `known`; None where code runs as emitted."""
    if compile is False:
        return None
    backend = "inductor" if compile is True else compile
    if not isinstance(backend, str) or backend not in known():
        raise NotServed(
            f"compile={compile!r} is not a backend of torch.compile", seen=", ".join(known()), advice="compile=True"
        )
    return backend


def budget_of(given: Any, cluster: Cluster) -> float:
    """The budget that a caller gives, in bytes a device, where inf is no limit.

    None is the device's memory less a reserve.
    """
    if given is None:
        return cluster.device.memory_bytes * (1 - RESERVE)
    return _bytes_of("memory_budget", given)


def room_of(given: Any, cluster: Cluster) -> Room | None:
    """The host as a device may use it: what the caller gives, at most its share of the node; None for 0."""
    if given is None or (not isinstance(given, bool) and given == 0):
        return None
    budget = _bytes_of("host_budget", given)
    if cluster.host is None:
        raise BadBudget(
            f"host_budget={given!r}, and nobody says how devices of {cluster.name} reach their host",
            advice="a cluster with a host, such as one that autopar calibrate has measured; or no host_budget",
        )
    return Room(cluster.host, min(budget, cluster.host.bytes / cluster.devices_per_node))


def check_room(recompute: Any) -> None:
    """Raise a letter where a search that is asked for does not know the host."""
    if recompute not in ("auto", "none"):
        raise NotServed(
            f"host_budget= and recompute={recompute!r}: values travel beside what the search makes again, or nothing",
            advice='recompute="auto", or "none"',
        )


def _bytes_of(name: str, given: Any) -> float:
    """The bytes that a caller gives as a number or as text."""
    number = given
    if isinstance(given, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|inf)\s*([A-Za-z]*)\s*", given)
        number = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else None
    is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
    is_absurd = is_number and _MOST_BYTES <= number < math.inf  # an int might not be a float
    if not is_number or is_absurd or not float(number) >= 1:
        raise BadBudget(
            f"{name}={given!r} is not a number of bytes",
            advice='bytes, or text such as "16GiB"; float("inf") for no limit',
        )
    if isinstance(number, float) and number < _LEAST_BYTES:
        raise BadBudget(f"{name}={given!r} is {float(number):g} bytes", advice=f'{name}="{float(number):g}GiB"')
    return float(number)


def check_fits(devices: int, cluster: Cluster) -> None:
    """Raise a letter where the cluster's name says how many devices it has, and more are asked for."""
    has = cluster.devices_per_node * cluster.nodes
    if devices > has and re.search(r"-\d+x\d+$", cluster.name):
        nodes = -(-devices // cluster.devices_per_node)
        kind = cluster.name.rpartition("-")[0]
        raise BadCluster(
            f"{devices} devices are asked for, and cluster {cluster.name} has {has}",
            seen=f"{several(cluster.nodes, 'node')} of {cluster.devices_per_node} devices",
            advice=f'cluster="{kind}-{cluster.devices_per_node}x{nodes}", or a mesh of {has}',
        )


def device_count(mesh: int | None, cluster: Cluster) -> int:
    """The number of devices whose meshes are searched: as given, of the job, or of the named cluster."""
    if mesh is not None:
        return mesh
    if world_size() > 1 or "WORLD_SIZE" in os.environ:
        return max(world_size(), int(os.environ.get("WORLD_SIZE", "1")))
    if re.search(r"-\d+x\d+$", cluster.name):
        return cluster.devices_per_node * cluster.nodes
    raise BadSharding(
        "mesh=None, and nothing says how many devices there are", advice='mesh=8, cluster="h100-8x4", or torchrun'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
