"""`watch`: check now and then, while a model trains, for errors that no test before the first step can find.

Devices flip bits, and user code may write to one rank's parameters. From then on ranks train different models, without
any sign. So tensors that several ranks hold are compared by the sum of their bit patterns, in which any one flipped bit
shows: it takes a pass over what a rank holds, and one message of a number per tensor.

A device may also compute wrongly, so that all copies are wrong alike. So every tenth look takes a few rows of the batch
and compares a gradient of them with that of the plain model on one device (`single_device.py`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.letters import Diverged, NotServed
from autopar.module.limits import LIMITS
from autopar.module.parallel import ParallelModule
from autopar.module.single_device import Compared, compared
from autopar.progress import caution
from autopar.runtime.agreement import agree
from autopar.runtime.world import exchanged

_LIMITS = LIMITS.watch
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watch:
    """A watch over copies, which looks every so many calls and when told to, until it is removed."""

    def __init__(self, model: ParallelModule, every: int, optimizer: torch.optim.Optimizer | None, rows: int) -> None:
        self.model = model
        self.every = every
        self.optimizer = optimizer
        self.rows = rows
        self.calls = 0  # calls of the model in training
        self.looks = 0
        self._due = 0  # looks that were due by the number of calls
        self.gradients: list[Compared] = []  # results of comparing with a single device
        self._hook = model.register_forward_pre_hook(self._before_call, with_kwargs=True)

    def __str__(self) -> str:
        text = f"{self.looks} looks at copies in {self.calls} calls"
        held = [found.parameter for found in self.gradients if not found.why_not]
        if held:
            text += f"; {len(held)} gradients beside a single device's, the last of {held[-1]}"
        reasons = Counter(found.why_not for found in self.gradients if found.why_not)
        return "; ".join([text, *(f"{n} gradients not compared: {why}" for why, n in reasons.items())])

    def _before_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model is self.model and model.training and torch.is_grad_enabled():
            if self.calls and self.calls % self.every == 0:
                is_turn = self.rows and self._due % _LIMITS.every == 0
                self._due += 1
                self.look(*args, **kwargs) if is_turn else self.look()
            self.calls += 1

    def __deepcopy__(self, memo: Any) -> Watch:
        return self  # a copy of the model is not watched

    def look(self, *args: Any, **kwargs: Any) -> None:
        """Compare copies now, on all ranks; a letter on each of them names what differs and where.

        With the arguments of a call, also compare the gradient of one parameter on a few rows of it.
        """
        with torch.inference_mode(False):
            held = list(self._held())
            agree(tuple(name for name, _ in held), "compares its copies", is_call=False)
            self.looks += 1
            if held:
                self._compare_copies(held)
            if args or kwargs:
                self._compare_gradient(args, kwargs)

    def _compare_copies(self, held: Sequence[tuple[str, Tensor]]) -> None:
        device = self.model._own.setup.device
        sums = [_checksum(_local(tensor)).to(device) for _, tensor in held]  # a count of steps may be elsewhere
        everyone = exchanged(torch.stack(sums).tolist(), device)
        differ = [
            (name, tensor, odd, others)
            for (name, tensor), theirs in zip(held, zip(*everyone, strict=True), strict=True)
            for odd, others in _minorities(theirs, _copies(tensor, len(everyone)))
        ]
        if differ:
            raise self._letter(differ)

    def _compare_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = compared(self.model, args, kwargs, self.rows or _LIMITS.rows, len(self.gradients))
        if found.why_not and not self.gradients:
            name = found.parameter or "any parameter"
            caution("autopar.watch did not compare the gradient of %s with a single device: %s", name, found.why_not)
        self.gradients.append(found)
        if wrong := found.wrong:
            ranks = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
            most = max(wrong, key=lambda rank: found.off[rank])
            raise Diverged(
                f"the gradient of {found.parameter} on {ranks} is not that of a single device, at call {self.calls}",
                seen=f"{found.off[most]:.2g} of its norm apart on rank {most}, where rounding makes "
                f"{found.allowed:.2g} at most; {found.rows} rows",
                advice="the same call after a restart, on other devices: where it is wrong there too, autopar verify "
                "and an issue; else the last checkpoint and another device",
            )

    def remove(self) -> None:
        """Stop looking."""
        self._hook.remove()

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, buffers and optimizer states, by names that are the same on every rank."""
        parameters = dict(self.model.named_parameters())
        yield from parameters.items()
        yield from self.model.named_buffers()
        states = {} if self.optimizer is None else self.optimizer.state
        for name, parameter in parameters.items():
            for key, value in sorted(states.get(parameter, {}).items()):
                is_step_count = isinstance(value, Tensor) and not value.dim()
                if isinstance(value, DTensor) or is_step_count:
                    yield f"{key} of {name}", value

    def _letter(self, differ: Sequence[tuple[str, Tensor, list[int], list[int]]]) -> Diverged:
        name, tensor, odd, others = differ[0]
        more = sorted({other for other, *_ in differ} - {name})
        few = _LIMITS.named
        rest = f"; so do {', '.join(more[:few])}{', ...' if len(more) > few else ''}" if more else ""
        ranks = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
        return Diverged(
            f"{name} on {ranks} differs from its copies on {', '.join(map(str, others))}, at call {self.calls}{rest}",
            seen=_difference(_local(tensor), odd[0], others[0]),
            advice="the last checkpoint, and another device; or look for code that writes to parameters on one rank",
        )


def watch(
    model: nn.Module, every: int = 100, optimizer: torch.optim.Optimizer | None = None, rows: int = _LIMITS.rows
) -> Watch:
    """Compare tensors that several ranks hold copies of, before every `every`-th call in training.

    A letter on every rank names the parameter or buffer (with `optimizer`, its states too), the rank and the call. The
    first look, and then every tenth, also compares the gradient of one parameter, each time of another, with that of
    the plain model on rank 0, on at most so many `rows` of the batch; with rows=0 none does. `print` says what could
    not be compared. All ranks call it, and make the same calls.
    """
    if not isinstance(model, ParallelModule):
        raise NotServed(
            f"this {type(model).__name__} is not parallel", advice="the model that autoparallelize returned"
        )
    for name, given, least, what in (("every", every, 1, "calls"), ("rows", rows, 0, "rows")):
        if isinstance(given, bool) or not isinstance(given, int) or given < least:
            raise NotServed(
                f"{name}={given!r} is not a valid number of {what}", advice=f"{name}={100 if least else _LIMITS.rows}"
            )
    return Watch(model, every, optimizer, rows)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    found: Tensor = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return found


def _checksum(tensor: Tensor) -> Tensor:
    """Sum of the bit patterns of a tensor's elements, as int64."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = plain.contiguous().flatten().view(_INTEGERS[plain.element_size()])
    return bits.sum(dtype=torch.int64)


def _copies(tensor: Tensor, ranks: int) -> list[list[int]]:
    """Groups of ranks that hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return [list(range(ranks))]
    cut = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    everyone = tensor.device_mesh.mesh  # not all ranks, where the tensor is of a stage
    found = defaultdict[Any, list[int]](list)
    for place in itertools.product(*map(range, everyone.shape)):
        found[tuple(place[axis] for axis in cut)].append(int(everyone[place]))
    return list(map(sorted, found.values()))


def _minorities(sums: Sequence[int], copies: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """For each group whose sums differ: the ranks outside the majority, and those in it."""
    for ranks in copies:
        counts = Counter(sums[rank] for rank in ranks)
        if len(counts) > 1:
            usual = max(counts, key=lambda value: (counts[value], value == sums[ranks[0]]))
            yield [r for r in ranks if sums[r] != usual], [r for r in ranks if sums[r] == usual]


def _difference(mine: Tensor, odd: int, other: int) -> str:
    """Text, made on rank `odd` and told to all, about how many elements of two copies differ, by how much."""
    box: list[Any] = [mine.cpu() if dist.get_rank() == other else None]
    dist.broadcast_object_list(box, other)
    said: list[Any] = [None]
    if dist.get_rank() == odd:
        theirs = box[0]
        here = mine.cpu()
        is_same = (here == theirs) | ((here != here) & (theirs != theirs))
        by = (here.double() - theirs.double())[~is_same].abs()
        most = float(by.max()) if by.numel() else math.nan
        said = [f"{int((~is_same).sum())} of {here.numel()} elements, by {most:.3g} at most"]
    dist.broadcast_object_list(said, odd)
    return f"{said[0]}, on rank {odd} against rank {other}"
