"""Inputs of `inputs="local"`: every rank passes its own rows of the batch, as its data loader gives them.

The plan says once which rows; ranks only have to agree on how many there are.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.letters import BadInput, Disagreement, NotServed
from autopar.runtime.world import exchanged, numbers_of, world_size
from autopar.sharding.convert import Step
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import R, S, Sharding, local_shape
from autopar.solver.plan import Plan


class OwnRows(NamedTuple):
    """The inputs of which every rank passes its own rows, and the mesh axes that cut these rows, major first."""

    axes: tuple[int, ...] = ()
    inputs: frozenset[str] = frozenset()


NO_ROWS = OwnRows()  # every rank passes whole inputs


def rows_of(graph: Graph, plan: Plan) -> OwnRows:
    """The axes by which the plan cuts rows of inputs, major first, and the names of these inputs."""
    axes: tuple[int, ...] = ()
    rows = None
    for name, node in graph.inputs.items():
        paths = [cut_rows(c.forward) for c in plan.conversions if c.source == info(node).key]
        alike = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*paths, strict=False))
        common = tuple(a for a, *_ in alike)
        if paths and len(common) > len(axes):
            axes = common
            rows = type_of(graph.inputs[name]).shape[0]
    having = [name for name, node in graph.inputs.items() if rows is not None and type_of(node).shape[:1] == (rows,)]
    # With micro-batches, one target may stand for two inputs: the rows of one turn, and all rows.
    targets = {graph.inputs[name].target for name in having}
    also = [name for name, node in graph.inputs.items() if having and node.target in targets]
    if axes and graph.turns > 1:
        _check_turns(graph, math.prod(plan.mesh.shape[a] for a in axes), rows or 0)
    return OwnRows(axes, frozenset((*having, *also)))


def _check_turns(graph: Graph, parts: int, rows: int) -> None:
    """Raise `NotServed` where micro-batches of the ranks' own rows would differ from those of the batch.

    A micro-batch takes some rows of every rank, so an op that depends on the places of rows in the batch would see
    others.
    """
    counted = [n for n in graph.nodes if info(n).in_time[0] or op_name(n) == "turn"]
    if counted:
        raise NotServed(
            f'inputs="local" and micro-batches: {info(counted[0]).key} goes by the places of rows in the batch, and '
            "a micro-batch has some rows of every rank",
            at=info(counted[0]).source,
            advice='inputs="global", or microbatches=1',
        )
    if rows % parts:
        raise NotServed(
            f'inputs="local" and micro-batches: {parts} devices do not share the {rows} rows of a turn evenly',
            advice='inputs="global", or other microbatches=',
        )


def cut_rows(steps: Sequence[Step]) -> tuple[int, ...]:
    """The axes by which a conversion of a whole value slices its rows before it communicates."""
    local = itertools.takewhile(lambda s: s.kind == "slice", steps)
    return tuple(s.axis for s in local if s.dim == 0 and not s.blocks)


def from_rows(axes: Sequence[int], steps: Sequence[Step]) -> tuple[Step, ...]:
    """Conversion steps with the same end as `steps`, but that start from rows which `axes` cut already.

    before    slice(1)@tp; slice(0)@dp                 # of the whole
    after     slice(1)@tp                              # of the rows of dp
    """
    there = cut_rows(steps)
    agree = next((i for i, (a, b) in enumerate(zip(axes, there, strict=False)) if a != b), min(len(axes), len(there)))
    rest = list(steps)
    done = 0
    while done < agree:
        rest.remove(next(s for s in rest if s.kind == "slice" and s.dim == 0 and s.axis == axes[done]))
        done += 1
    return (*(Step("all_gather", a, 0) for a in reversed(axes[agree:])), *rest)


def sharding_of_rows(axes: Sequence[int], mesh: DeviceMesh) -> Sharding:
    """The sharding of rows that these axes cut, the first as the major one."""
    return Sharding(
        tuple(S(0) if a in axes else R for a in range(len(mesh.shape))),
        (*axes, *(a for a in range(len(mesh.shape)) if a not in axes)),
    )


def least_and_most(
    shapes: Mapping[str, tuple[int, ...]], device: torch.device
) -> tuple[Mapping[str, tuple[int, ...]], Mapping[str, tuple[int, ...]]]:
    """The shapes of a call with each dim but the rows at its minimum, and at its maximum, over all ranks.

    Raises `Disagreement` where ranks pass inputs of other names, or of other numbers of dims.
    """
    sizes = [n for shape in shapes.values() for n in shape[1:]]
    kinds = _digest([(n, len(shape)) for n, shape in shapes.items()])
    answers = exchanged([kinds], device)
    if others := [r for r, theirs in enumerate(answers) if theirs != answers[0]]:
        raise Disagreement(
            f"ranks call the model with different inputs: {others} differ from rank 0",
            seen=f"here {dict(shapes)}",
            advice="the same inputs on every rank",
        )
    of_all = list(zip(*exchanged(sizes, device), strict=True)) if sizes else []

    def each(choose: Callable[[tuple[int, ...]], int]) -> dict[str, tuple[int, ...]]:
        chosen = iter([choose(of_one) for of_one in of_all])
        return {n: (*shape[:1], *itertools.islice(chosen, len(shape[1:]))) for n, shape in shapes.items()}

    return each(min), each(max)


def _digest(value: object) -> int:
    """First seven bytes of a hash of the value's repr, as an integer."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def _refuse_counted_items(named: Mapping[str, Any]) -> None:
    """Raise if Hugging Face's Trainer passes `num_items_in_batch`.

    The Trainer would then multiply the loss by the number of ranks.
    """
    is_counted = any(n.endswith("['num_items_in_batch']") and value is not None for n, value in named.items())
    if is_counted and world_size() > 1:
        raise NotServed(
            "num_items_in_batch is passed, as Hugging Face's Trainer does, which multiplies the loss by the "
            "number of processes: a rank's loss would be its share",
            seen=(
                f'inputs="local": the loss of a parallel model is that of the batch of all {world_size()} ranks '
                f"already, and would be {world_size()} times too large"
            ),
            advice=(
                "trainer.model_accepts_loss_kwargs = False, so that the Trainer takes the loss as it is; in a "
                "loop of your own divide outside the model"
            ),
        )


class Parts:
    """Which rows of the inputs each rank passes, and the call on the whole batch that follows from one rank's call."""

    def __init__(
        self, plan: Plan, device: torch.device, axes: Sequence[int], known: Sequence[str], cut: Collection[str]
    ) -> None:
        self.mesh = plan.mesh
        self.coordinate = plan.coordinate
        self.device = device
        self.axes = tuple(axes)
        self.known = frozenset(known)  # names of the leaves of the first call
        self.names = frozenset(cut)  # names of the leaves that have rows
        self.sharding = sharding_of_rows(axes, plan.mesh)

    @property
    def text(self) -> str:
        return self.sharding.text(self.mesh.axes)

    @property
    def count(self) -> int:
        """Number of parts into which rows are cut."""
        return math.prod(self.mesh.shape[a] for a in self.axes)

    def index(self, rank: int) -> int:
        """Number of the part of the rows that a rank passes."""
        here = self.coordinate(rank)
        found = 0
        for a in self.axes:
            found = found * self.mesh.shape[a] + here[a]
        return found

    def whole(self, named: Mapping[str, Any], structure: pytree.TreeSpec) -> tuple[dict[str, Any], frozenset[str]]:
        """The whole batch's inputs as meta tensors, made from this rank's, and the names of those with rows.

        Raises an error on every rank where the ranks' inputs do not fit together.
        """
        _refuse_counted_items(named)
        tensors = {n: t for n, t in named.items() if isinstance(t, Tensor) and t.dim()}
        rows = self._rows_of(tensors)
        has_rows = self.names
        # An input that the first call did not have is taken to have rows if its size says so.
        if self.axes:
            has_rows |= {n for n, t in tensors.items() if n not in self.known and len(t) == rows}
        cut = frozenset(n for n in tensors if n in has_rows)
        wants = frozenset(n for n, t in tensors.items() if t.requires_grad and torch.is_grad_enabled())
        said = [
            (n, t.shape[n in cut :], t.dtype, n in wants) if isinstance(t, Tensor) else (n, type(t))
            for n, t in named.items()
        ]
        answers = exchanged([rows, _digest((said, structure))], self.device)
        if others := [r for r, (_, theirs) in enumerate(answers) if theirs != answers[0][1]]:
            raise Disagreement(
                f"ranks call the model with different inputs: {others} differ from rank 0",
                seen=f"here {said}",
                advice="the same inputs on every rank, of equal sizes but for the rows",
            )
        if wants & cut:
            raise NotServed(
                f'inputs="local", and the input {min(wants & cut)} wants a gradient', advice='inputs="global"'
            )
        counts = [n for n, _ in answers]
        if min(counts) < 0:
            raise BadInput(
                f"inputs of rank {counts.index(-1)} have different numbers of rows",
                seen=f"here {said}",
                advice="the same rows of every input",
            )
        total = self._total(counts)
        whole = dict(named)
        for n in cut:
            whole[n] = torch.empty((total, *tensors[n].shape[1:]), dtype=tensors[n].dtype, device="meta")
        return whole, cut

    def _rows_of(self, tensors: Mapping[str, Tensor]) -> int:
        """Number of rows that this rank passes; -1 where its inputs have different ones, 0 where none is cut."""
        mine = {len(t) for n, t in tensors.items() if n in self.names}
        mine = mine or {len(t) for n, t in tensors.items() if n not in self.known}
        if not self.axes:
            return 0
        return mine.pop() if len(mine) == 1 else -1

    def _total(self, counts: Sequence[int]) -> int:
        """Number of rows of the whole batch; raises `BadInput` if the ranks' rows do not make up one batch."""
        total = sum({self.index(r): n for r, n in enumerate(counts)}.values())
        due = [local_shape((total,), self.sharding, self.mesh, self.coordinate(r))[0] for r in range(len(counts))]
        if self.axes and (list(counts) != due or 0 in counts):
            raise BadInput(
                f"ranks pass {counts} rows, which do not make up one batch",
                seen=f"{self.text} of {total} rows",
                advice="some for every rank" if 0 in due else f"{due}, as torch.chunk and model.sampler give them",
            )
        return total

    def all_hold(self, named: Mapping[str, Any], cut: Collection[str]) -> None:
        """Compare hashes of input values over all ranks, and raise `Disagreement` where they differ.

        Ranks of one part must hold the same rows, and all ranks the same values of inputs that are whole.
        """
        tensors = {n: t for n, t in named.items() if isinstance(t, Tensor)}
        of_rows = numbers_of([t for n, t in tensors.items() if n in cut])
        of_rest = numbers_of([t for n, t in tensors.items() if n not in cut])
        everyone = [
            (theirs[: len(of_rows)], theirs[len(of_rows) :]) for theirs in exchanged([*of_rows, *of_rest], self.device)
        ]
        first = {self.index(r): r for r in reversed(range(len(everyone)))}
        if others := [
            r
            for r, (rows, rest) in enumerate(everyone)
            if rows != everyone[first[self.index(r)]][0] or rest != everyone[0][1]
        ]:
            raise Disagreement(
                f"ranks hold different input values: {others} differ from others of the same part",
                seen=f"rows are {self.text}",
                advice="model.sampler(dataset), which gives ranks of one part the same rows",
            )
