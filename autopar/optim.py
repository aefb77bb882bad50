"""`AdamW` on the shards of a parallel model: states of single precision, clipping and the step in one pass.

    optimizer = autopar.optim.AdamW(model.parameters(), lr=3e-4, max_norm=1.0)

It makes the step of `torch.optim.AdamW`, whose checkpoints it reads and which reads its own. On a GPU with Triton one
kernel goes over each shard and makes nothing beside; elsewhere ops do, a piece at a time. `plan(optimizer=)` takes it,
the class or an instance, and counts no temporaries.

Parameters whose states a plan has on the host are stepped there (`runtime/host_step.py`), with `during_backward` while
backward still goes on (`runtime/backward_steps.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.kernels import adamw
from autopar.letters import NotServed
from autopar.runtime.backward_steps import BackwardSteps
from autopar.runtime.host import HOST
from autopar.runtime.host_step import HostSteps, Piece, is_stepped_on_host, lent_like, may_step_in_backward
from autopar.runtime.private import like_part
from autopar.sharding.costs import DURING_BACKWARD

_MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names in checkpoints
_MASTER = "master"
_SMALL = 1e-6  # added to a norm before dividing by it, as in torch's clip_grad_norm_


class AdamW(torch.optim.Optimizer):
    """AdamW whose states are in single precision, whatever the parameters' dtype.

    A parameter of sixteen bits has a master copy in single precision, and holds its rounded value. `max_norm` is the
    largest norm that all gradients together may have: the step itself scales larger ones, and `grad` stays as it is.
    `norm` is the norm at the last step, before scaling; None where nothing is clipped.

    With `during_backward` the host steps a parameter as soon as its gradient is final, by the rates of that moment, and
    all of its parameters have their new values when backward returns; `step` steps the others. Their `grad` is an error
    to read until then, and None: what would need it, such as clipping, has to step behind backward.
    """

    steps_on_host = True  # parameters whose states a plan has there

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_norm: float | None = None,
        during_backward: bool = False,
    ) -> None:
        wrong = [name for name, number in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)) if number < 0]
        if wrong or not all(0 <= beta < 1 for beta in betas) or (max_norm is not None and not max_norm > 0):
            raise NotServed(
                f"AdamW cannot step by lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}, "
                f"max_norm={max_norm}",
                advice="rates from 0 on, betas from 0 to less than 1, and a norm over 0 or None",
            )
        if during_backward and max_norm is not None:
            raise NotServed(
                f"max_norm={max_norm}, and the norm of all gradients is known when backward has ended alone",
                advice="during_backward=False, or no max_norm",
            )
        self.max_norm = max_norm
        self.norm: Tensor | None = None
        self.during_backward = during_backward
        self._in_backward = BackwardSteps(self._begun, self._rates_of)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"] if self.during_backward else ():
            if is_stepped_on_host(parameter):
                if not may_step_in_backward(parameter):
                    raise NotServed(
                        "during_backward=True, and the plan has the host step its parameters behind backward",
                        advice=f'plan(optimizer="{DURING_BACKWARD}"), or during_backward=False',
                    )
                self._in_backward.take(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; returns what the closure returns, None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = self._in_backward.taken_over()
        scale = self._scale()
        hosted = list[Tensor]()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter in stepped:
                    continue
                self._prepare(parameter)
                if is_stepped_on_host(parameter):
                    hosted.append(parameter)
                else:
                    self._step(group, parameter, scale)
        if hosted:
            on_host = None if scale is None else scale.to("cpu")
            HostSteps().run(self._piece(p, _local(_lying_like(p)), on_host) for p in hosted)
        return loss

    def _rates_of(self, parameter: Tensor) -> adamw.Rates:
        """The hyperparameters of a parameter, at the step that its states are at."""
        group = next(group for group in self.param_groups if any(p is parameter for p in group["params"]))
        return _rates(group, self.state[parameter])

    def _begun(self, parameter: Tensor, gradient: Tensor) -> Piece:
        """A parameter that backward steps by its local gradient."""
        self._prepare(parameter)
        return self._piece(parameter, gradient, None)

    def _prepare(self, parameter: Tensor) -> None:
        """Let a parameter have its states, where they belong, and count a step."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for name in _MOMENTS:
            if name not in state:
                state[name] = _zeros(parameter)
        if parameter.dtype.itemsize < 4 and _MASTER not in state:
            state[_MASTER] = parameter.detach().to(torch.float32)
        if is_stepped_on_host(parameter):  # A state that was loaded may lie elsewhere.
            for name in (*_MOMENTS, _MASTER):
                if name in state and not HOST.holds(_local(state[name])):
                    there = _zeros(parameter)
                    _local(there).copy_(_local(state[name]))
                    state[name] = there
        state["step"] += 1

    def _piece(self, parameter: Tensor, gradient: Tensor, scale: Tensor | None) -> Piece:
        """A parameter as the host steps it by its local gradient, and its step."""
        state = self.state[parameter]
        rates = self._rates_of(parameter)
        is_fused = _device_of(parameter) == "cuda"  # else as on the device, which is a CPU too, bit for bit

        def step(exact: Tensor, gradient: Tensor, states: tuple[Tensor, ...]) -> None:
            average, squares = states
            if is_fused:
                adamw.fused(exact, gradient, average, squares, scale, rates)
            else:
                adamw.step(exact, gradient, average, squares, None, scale, rates)

        moments = tuple(_local(state[name]) for name in _MOMENTS)
        master = _local(state[_MASTER]) if _MASTER in state else None
        return Piece(_local(parameter), gradient, moments, master, step)

    def _step(self, group: dict[str, Any], parameter: Tensor, scale: Tensor | None) -> None:
        state = self.state[parameter]
        average, squares = (_local(state[name]) for name in _MOMENTS)
        master = _local(state[_MASTER]) if _MASTER in state else None
        gradient = _local(_lying_like(parameter))
        adamw.step(_local(parameter), gradient, average, squares, master, scale, _rates(group, state))

    def _scale(self) -> Tensor | None:
        """The factor, at most 1, that clips the norm of all gradients to `max_norm`; None without clipping."""
        if self.max_norm is None:
            return None
        all_ = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not all_:
            return None
        alike: dict[tuple[bool, str], list[Tensor]] = {}  # Those of DTensors come first.
        for g in sorted(all_, key=lambda g: not isinstance(g, DTensor)):
            alike.setdefault((isinstance(g, DTensor), g.device.type), []).append(g)
        found = (_whole(torch.nn.utils.get_total_norm(some)) for some in alike.values())
        norms = [norm.to(all_[0].device, torch.float32) for norm in found]
        self.norm = torch.linalg.vector_norm(torch.stack(norms))
        return (self.max_norm / (self.norm + _SMALL)).clamp(max=1.0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of this optimizer or of torch's; they stay in single precision.

        Where a master copy is missing, as in torch's checkpoints, the next step makes it from the parameter.
        """
        super().load_state_dict({**state_dict, "state": {}})  # torch's would round the states of sixteen-bit parameters
        places = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, parameter in zip(places, parameters, strict=True):
            given = state_dict["state"].get(i, {})
            where = torch.device("cpu") if is_stepped_on_host(parameter) else parameter.device
            for name in (*_MOMENTS, _MASTER):
                if name in given:
                    self.state[parameter][name] = given[name].detach().to(where, torch.float32, copy=True)
            if "step" in given:
                self.state[parameter]["step"] = torch.as_tensor(
                    given["step"], dtype=torch.float32, device="cpu"
                ).clone()


def _rates(group: dict[str, Any], state: dict[str, Any]) -> adamw.Rates:
    """The hyperparameters of a group, at the step that a parameter's states are at."""
    decay = float(group["weight_decay"])
    return adamw.Rates(float(group["lr"]), group["betas"], group["eps"], decay, int(state["step"]))


def _zeros(parameter: Tensor) -> Tensor:
    """A state of zeros in single precision, on the host where the parameter is stepped there."""
    if not is_stepped_on_host(parameter):
        return torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)
    lent = lent_like(_local(parameter))
    return like_part(lent, parameter) if isinstance(parameter, DTensor) else lent


def _lying_like(parameter: Tensor) -> Tensor:
    """The gradient of a parameter, stored as it is."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise NotServed("AdamW cannot step by a sparse gradient", advice="an embedding with sparse=False")
    is_cut = isinstance(parameter, DTensor) and isinstance(gradient, DTensor)
    if is_cut and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def _device_of(parameter: Tensor) -> str:
    """The kind of device that a parameter is of, wherever it lies."""
    return str(parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
