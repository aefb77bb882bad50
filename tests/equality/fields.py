"""Models of many fields under free, preset and random plans on meshes in turn, in float64, against eager.

python -m tests.equality.fields [word ...]        every plan of every model, or of those named with a word
"""

from __future__ import annotations

import copy
import functools
import platform
import sys
import time
import warnings
import zlib

import numpy as np
import torch
from torch import Tensor, nn

import autopar
from autopar import DeviceMesh
from autopar.letters import BadPreset
from autopar.solver import Plan
from autopar.testing import Equality, on_threads
from autopar.tracer import ColoTracer
from tests.models import eager_links
from tests.oracle import ByPosition, bits
from tests.random_plans import random_plan_of
from tests.training import whole
from tests.zoo.fields import FIELDS

SEED, ALLOWED = 86420, 1e-9
MESHES = (DeviceMesh((2,)), DeviceMesh((4,)), DeviceMesh((2, 2), ("dp", "tp")))
PLANS = ("free", "dp", "zero3", "megatron", "random 0", "random 1", "random 2", "random 3")


class DrawnByPosition(ByPosition):
    """Also normal numbers, and uniform ones like another tensor."""

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        first, second = (bits(self.seed, self.step, self.op + stream, shape) / 2.0**32 for stream in (0, 1 << 24))
        self.op += 1
        return torch.from_numpy(np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second))

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.randn, torch.randn_like):
            return self.normal(tuple(args[0].shape if function is torch.randn_like else args[0]))
        if function is torch.rand_like:
            return self.uniform(args[0].shape)
        return super().__torch_function__(function, types, args, kwargs)


@functools.cache
def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and a batch, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(zlib.crc32(name.encode()))
        return FIELDS[name].build().double().train(), FIELDS[name].inputs()


def step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss of one forward and backward, each gradient that there is, and each buffer."""
    loss = model(**batch)
    loss.backward()
    gradients = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: whole(t).detach().clone() for n, t in ({"loss": loss} | gradients | dict(model.named_buffers())).items()}


@functools.cache
def expected(name: str) -> dict[str, Tensor]:
    model, batch = made(name)
    with DrawnByPosition(SEED) as numbers:
        numbers.next_step()
        return step(copy.deepcopy(model), batch)


def meshes_of(name: str, kind: str) -> list[DeviceMesh]:
    """The meshes to try for a case: models and plans begin with each in turn."""
    first = list(FIELDS).index(name) + PLANS.index(kind)
    return [MESHES[(first + i) % len(MESHES)] for i in range(len(MESHES))]


def plan_of(name: str, kind: str) -> Plan:
    """The plan of a case, on the first of its meshes that carries it: a batch of six has no rows for four."""
    model, batch = made(name)
    model, meshes = copy.deepcopy(model), meshes_of(name, kind)
    if kind.startswith("random"):
        rng = np.random.default_rng(zlib.crc32(f"{name}, {kind}".encode()))
        return random_plan_of(ColoTracer().trace(model, batch), meshes[0], rng)
    how = {"cluster": eager_links(), "parallel": None if kind == "free" else kind}
    for mesh in meshes[:-1]:
        try:
            return autopar.plan(model, batch, mesh=mesh, **how)
        except BadPreset:
            continue
    return autopar.plan(model, batch, mesh=meshes[-1], **how)


def worst(name: str, kind: str) -> tuple[DeviceMesh, float]:
    """The mesh of a case, and the largest error of any rank.

    Raises Unequal where the results are not the same.
    """
    plan = plan_of(name, kind)
    model, batch = made(name)

    def body(rank: int) -> dict[str, Tensor]:
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        mine.random_state.seed = SEED
        return step(mine, batch)

    largest = 0.0
    for rank, found in enumerate(on_threads(plan.mesh.size, body)):
        equality = Equality.in_float64(f"{name}, {kind} on {plan.mesh}, rank {rank}", found, expected(name), ALLOWED)
        largest = max(largest, equality.check().worst)
    return plan.mesh, largest


def main(words: list[str]) -> None:
    """Print the table, and end with an error where a case is not equal."""
    torch.set_num_threads(1)
    failed, cases, started = [], 0, time.process_time()
    print(f"Python {platform.python_version()}, torch {torch.__version__}\n")
    print(f"| model | {' | '.join(PLANS)} |\n|---|{'---|' * len(PLANS)}")
    for name in (n for n in FIELDS if not words or any(w in n for w in words)):
        cells = []
        for kind in PLANS:
            try:
                mesh, error = worst(name, kind)
                cells.append(f"{error:.0e} on {'x'.join(map(str, mesh.shape))}")
                cases += 1
            except Exception as e:
                failed.append(f"{name}, {kind}: {type(e).__name__}: {e}")
                cells.append("FAILED")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\n{cases} cases equal, {len(failed)} failed; {time.process_time() - started:.0f} CPU s")
    if failed:
        sys.exit("\n\n".join(failed))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
