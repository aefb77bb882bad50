"""Run an op on parts of its operands, as the devices of one axis hold them, and compare with the op on the whole.

    Trial       a call: its operands, and the function that it computes, whole and on a part
    Devices     some devices that run it, with what it computes on the whole
    Fault       what differs under a strategy, forward or backward

Discovery runs every strategy that can be written, the tests those of the table's rules, and planning those of a user's
rule before it believes them. Shards are pieces of one tensor, parts of sums are drawn. Devices run one after another;
those of a local form that communicates are threads of a rehearsal.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.ops.exchange import BACKWARD, FORWARD, Messages
from autopar.runtime.rehearsal import AXIS, Rehearsal
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import P, Placement, R, S, Sharding, part
from autopar.sharding.strategies import Strategy

DEVICES = (2, 3)
# errors that ops raise on operands they cannot take
REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
# relative to the largest number compared; dtypes that are not named compare exactly
TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}

Shape = tuple[int, ...]
Placements = tuple[Placement, ...]


class Part(NamedTuple):
    """One device and how its operands and outputs are placed: the `Here` of a local form."""

    size: int  # devices of the axis
    device: int  # the device's place on the axis
    operands: Placements
    outputs: Placements
    shapes: tuple[Shape, ...]  # local ones, of the outputs

    @property
    def mesh(self) -> DeviceMesh:
        return DeviceMesh((self.size,), (AXIS,))

    @property
    def coordinate(self) -> tuple[int, ...]:
        return (self.device,)

    @property
    def random_key(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64)

    def lies(self, operand: int) -> Sharding:
        """Sharding in which the op takes an operand."""
        return Sharding((self.operands[operand],))

    def leaves(self, output: int = 0) -> Sharding:
        """Sharding in which the op gives an output."""
        return Sharding((self.outputs[output],))


@dataclass(frozen=True, slots=True)
class Trial:
    """One op call: its tensor operands, the function it computes, and that function on a part where it is another."""

    operands: tuple[Tensor, ...]
    run: Callable[[Sequence[Tensor]], Any]
    local: Callable[[Sequence[Tensor], Part], Any] | None = None
    communicates: bool = False  # whether parts exchange messages
    tolerance: float | None = None  # relative to the largest number; None: by the dtype that is compared

    def run_on_part(self, operands: Sequence[Tensor], here: Part) -> tuple[Tensor, ...]:
        """The outputs of the call on a device's parts of its operands."""
        return tupled(self.run(operands) if self.local is None else self.local(operands, here))


class Run(NamedTuple):
    """A forward on parts: the operands of each device, and its results."""

    operands: Placements
    outputs: Placements
    local: list[list[Tensor]]  # operands by device
    results: list[tuple[Tensor, ...]]


class Fault(NamedTuple):
    """A tensor that is not what the whole op computes: `output 0`, `the gradient of operand 1`."""

    what: str
    largest: float  # difference; infinite where shapes or dtypes differ
    shapes: tuple[Shape, Shape]  # a device's part, and the whole


class CannotRun(RuntimeError):
    """An op that does not take its operands' parts; no rule is refuted by it."""


class OtherShapes(CannotRun):
    """Results on a part that have not the shapes of the outputs' parts."""

    def __init__(self, found: Sequence[Shape], expected: Sequence[Shape]) -> None:
        super().__init__(f"a part gives {list(found)} for {list(expected)}")
        self.found, self.expected = found, expected


class Devices:
    """Some devices that run a call on parts of its operands, and what the call computes on the whole ones."""

    def __init__(self, trial: Trial, n: int) -> None:
        self.trial = trial
        self.n = n
        self.messages: Messages = {}  # messages of one device in the last run, by way
        self.random = torch.Generator().manual_seed(n)
        self.whole = [t.detach().requires_grad_(t.requires_grad) for t in trial.operands]
        with torch.enable_grad():
            self.expected = tupled(trial.run(self.whole))
        # kernels do not all check the shapes of their operands, which is asked on meta tensors where it runs there
        self.asks_first = not trial.communicates and self._runs_on_meta()
        self.trained = [i for i, t in enumerate(self.whole) if t.requires_grad]
        self.flows_back = bool(self.trained) and any(e.requires_grad for e in self.expected)
        self.cotangents = [self._cotangent(e) for e in self.expected]
        self.gradients: Sequence[Tensor] = []
        if self.flows_back:
            trained = [self.whole[i] for i in self.trained]
            self.gradients = pulled_back(self.expected, trained, self.cotangents)

    def _cotangent(self, output: Tensor) -> Tensor:
        return normal(output, self.random) if _is_rounded(output) else torch.zeros_like(output)

    @property
    def is_finite(self) -> bool:
        """Whether all results and gradients are numbers; a sum of parts of others may be something else."""
        return all(bool(torch.isfinite(t.detach()).all()) for t in (*self.whole, *self.expected, *self.gradients))

    def fault(self, strategy: Strategy) -> Fault | None:
        """The first output or gradient that the parts do not make up under a strategy; None where it is right.

        Raises `CannotRun` where the op takes no such parts.
        """
        try:
            run = self.forward(tuple(f.value for f in strategy.operands), tuple(f.value for f in strategy.outputs))
        except OtherShapes as e:
            j = next(j for j, (mine, due) in enumerate(zip(e.found, e.expected, strict=True)) if mine != due)
            return Fault(f"output {j}", float("inf"), (e.found[j], tuple(self.expected[j].shape)))
        for j, (expected, flow) in enumerate(zip(self.expected, strategy.outputs, strict=True)):
            held = [r[j].detach() for r in run.results]
            if fault := self._compared(f"output {j}", held, flow.value, expected.detach()):
                return fault
        try:
            gradients = self.backward(run, tuple(f.gradient for f in strategy.outputs)) if self.flows_back else None
        except Exception as e:
            raise CannotRun(f"in backward {type(e).__name__}: {e}") from e
        for k, position in enumerate(self.trained if gradients else ()):
            placement = strategy.operands[position].gradient
            held = [local[k] for local in gradients or ()]
            if fault := self._compared(f"the gradient of operand {position}", held, placement, self.gradients[k]):
                return fault
        return None

    def _compared(self, what: str, parts: Sequence[Tensor], placement: Placement, whole: Tensor) -> Fault | None:
        if lies(parts, placement, whole, self.trial.tolerance):
            return None
        return Fault(what, difference(parts, placement, whole)[0], (tuple(parts[0].shape), tuple(whole.shape)))

    def spread(self, tensor: Tensor, placement: Placement) -> list[Tensor]:
        return spread(tensor, placement, self.n, self.random)

    def forward(self, placements: Placements, outs: Placements) -> Run:
        """Run on the parts; outputs are expected under placements `outs`, whose shapes the call may name."""
        held = [self.spread(t.detach(), p) for t, p in zip(self.whole, placements, strict=True)]
        heres = [self._here(placements, outs, i) for i in range(self.n)]
        if self.asks_first:
            shapes = _on_meta(self.trial, held, heres[0])
            if shapes is not None and shapes != list(heres[0].shapes):
                raise OtherShapes(shapes, heres[0].shapes)
        local = [[h[i].clone().requires_grad_(k in self.trained) for k, h in enumerate(held)] for i in range(self.n)]

        def of(device: int) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                return self.trial.run_on_part(local[device], heres[device])

        try:
            results, sent = self._on_all(of)
        except Exception as e:
            raise CannotRun(f"{type(e).__name__}: {e}") from e
        self.messages = {FORWARD: sent}
        return Run(placements, outs, local, results)

    def backward(self, run: Run, pulled: Placements) -> list[Sequence[Tensor]] | None:
        """The gradients that each device makes, with cotangents placed as `pulled`; None where it makes none."""
        parts = [self.spread(c, p) for c, p in zip(self.cotangents, pulled, strict=True)]
        wanted = [j for j, e in enumerate(self.expected) if e.requires_grad and run.results[0][j].requires_grad]
        if not wanted:
            return None

        def of(device: int) -> Sequence[Tensor]:
            trained = [run.local[device][k] for k in self.trained]
            results = run.results[device]
            return pulled_back([results[j] for j in wanted], trained, [parts[j][device] for j in wanted])

        gradients, sent = self._on_all(of)
        self.messages = {**self.messages, BACKWARD: sent}
        return gradients

    def _here(self, placements: Placements, outs: Placements, device: int) -> Part:
        ends = zip(self.expected, outs, strict=True)
        shapes = tuple(part_shape(tuple(e.shape), o, self.n, device) for e, o in ends)
        return Part(self.n, device, placements, outs, shapes)

    def _runs_on_meta(self) -> bool:
        """Whether the whole op runs on meta tensors, with the shapes of its results."""
        shapes = tuple(tuple(e.shape) for e in self.expected)
        here = Part(1, 0, (R,) * len(self.whole), (R,) * len(shapes), shapes)
        try:
            return _on_meta(self.trial, [[w] for w in self.whole], here) == list(shapes)
        except CannotRun:
            return False

    def _on_all(self, of: Callable[[int], Any]) -> tuple[list[Any], Counter[str]]:
        """The results of each device, and the messages that a device sends meanwhile, by kind."""
        if not self.trial.communicates:
            return [of(i) for i in range(self.n)], Counter()
        rehearsal = Rehearsal(self.n)
        made = rehearsal.run(of)
        return made, rehearsal.messages


def _on_meta(trial: Trial, held: Sequence[Sequence[Tensor]], here: Part) -> list[Shape] | None:
    """Shapes of the results on these parts, by meta tensors; None where the op does not run on those.

    Raises `CannotRun` where it does not take such parts.
    """
    try:
        with torch.no_grad():
            results = trial.run_on_part([h[0].to("meta") for h in held], here)
    except NotImplementedError:
        return None
    except REFUSALS as e:
        raise CannotRun(f"its shapes do not go together: {e}") from e
    return [tuple(r.shape) for r in results]


def pulled_back(
    outputs: Sequence[Tensor], operands: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Gradients of the operands, zeros where there is none."""
    kept = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    return torch.autograd.grad(
        [o for o, _ in kept], operands, [c for _, c in kept], retain_graph=True, materialize_grads=True
    )


def placements_of(tensor: Tensor, n: int) -> list[Placement]:
    """All placements of a tensor on n devices that leave none without a part."""
    sums: list[Placement] = [P()] if _is_rounded(tensor) else []
    return [R, *(S(d) for d, size in enumerate(tensor.shape) if size >= n and part(size, n, n - 1)[1] > 0), *sums]


def normal(like: Tensor, random: torch.Generator) -> Tensor:
    wide = torch.complex128 if like.is_complex() else torch.float64
    return torch.randn(like.shape, dtype=wide, device="cpu", generator=random).to(like.dtype)


def _is_rounded(tensor: Tensor) -> bool:
    """Whether a tensor has real or complex numbers, and no whole ones."""
    return tensor.is_floating_point() or tensor.is_complex()


def spread(tensor: Tensor, placement: Placement, n: int, random: torch.Generator) -> list[Tensor]:
    """A tensor's part on each of n devices; partial sums are drawn at random."""
    if placement.is_shard:
        blocks = tensor.split(placement.blocks or tensor.shape[placement.dim], placement.dim)
        cut = [[b.narrow(placement.dim, *part(b.shape[placement.dim], n, i)) for b in blocks] for i in range(n)]
        return [torch.cat(pieces, placement.dim) for pieces in cut]
    if placement.is_partial:
        parts = [normal(tensor, random) for _ in range(n - 1)]
        return [*parts, tensor - sum(parts)]
    return [tensor] * n


def lies(parts: Sequence[Tensor], placement: Placement, whole: Tensor, tolerance: float | None = None) -> bool:
    """Whether these are the parts of `whole` under a placement, up to rounding."""
    largest, scale = difference(parts, placement, whole)
    if tolerance is None or not _is_rounded(whole):
        tolerance = TOLERANCE.get(whole.dtype, 0.0)
    return largest <= tolerance * scale


def difference(parts: Sequence[Tensor], placement: Placement, whole: Tensor) -> tuple[float, float]:
    """The largest difference between `whole` and its parts, and the largest number compared, at least 1.

    The difference is infinite where shapes, dtypes or the places of NaNs and infinities differ.
    """
    shapes = [part_shape(tuple(whole.shape), placement, len(parts), i) for i in range(len(parts))]
    if [tuple(p.shape) for p in parts] != shapes or any(p.dtype != whole.dtype for p in parts):
        return float("inf"), 1.0
    held = list(parts)
    if placement.is_shard:
        held = [_joined(parts, placement)]
    elif placement.is_partial:
        held = [functools.reduce(torch.add, parts)]
    differs = max(_largest_difference(h, whole) for h in held)
    return differs, max(1.0, _largest(whole), *(map(_largest, parts) if placement.is_partial else ()))


def _joined(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The tensor that devices hold parts of; blocks, which are cut evenly, come back into their places."""
    if not placement.blocks:
        return torch.cat(list(parts), placement.dim)
    pieces = [p.split([b // len(parts) for b in placement.blocks], placement.dim) for p in parts]
    return torch.cat([piece[b] for b in range(len(placement.blocks)) for piece in pieces], placement.dim)


def _largest_difference(found: Tensor, whole: Tensor) -> float:
    if not whole.numel():
        return 0.0
    same = (found == whole) | (found.isnan() & whole.isnan())
    wide = torch.complex128 if whole.is_complex() else torch.float64
    apart = (found.to(wide) - whole.to(wide)).abs().masked_fill(same, 0.0)
    return float(apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def _largest(tensor: Tensor) -> float:
    """The largest absolute value among the numbers of a tensor."""
    if not tensor.numel() or not _is_rounded(tensor):
        return 0.0
    return float(tensor.abs().nan_to_num(nan=0.0, posinf=0.0).max())


def part_shape(shape: Shape, placement: Placement, n: int, i: int) -> Shape:
    """The shape of a device's part."""
    if not placement.is_shard:
        return tuple(shape)
    blocks = placement.blocks or (shape[placement.dim],)
    held = sum(part(block, n, i)[1] for block in blocks)
    return (*shape[: placement.dim], held, *shape[placement.dim + 1 :])


def tupled(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
