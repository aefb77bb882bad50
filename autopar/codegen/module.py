"""`ParallelModule`: the user's own model, whose forward runs the emitted program and whose one autograd node runs its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from autopar.codegen.joint import Joint, bind
from autopar.codegen.local import LocalProgram
from autopar.letters import BadInput, Consumed, NotServed
from autopar.runtime.collectives import bind_axes
from autopar.runtime.random import RandomState
from autopar.runtime.storage import Storage, dtensor_of
from autopar.runtime.world import all_ranks_hold, from_rank_0
from autopar.solver.plan import Plan
from autopar.tracer.graph import Graph, TensorType, build_outputs, in_traced_order, info, tensor_of, type_of, write_buffer


class Lowered:
    """What a rank needs to run one traced program: pure code, no process group."""

    __slots__ = ("graph", "joint", "plan", "program")

    def __init__(self, graph: Graph, plan: Plan, program: LocalProgram, joint: Joint) -> None:
        self.graph, self.plan, self.program, self.joint = graph, plan, program, joint


class Step(torch.autograd.Function):
    """The one autograd node: emitted forward, emitted backward."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, *primals: Tensor) -> tuple[Tensor, ...]:
        results = runner.forward(*(p.to_local() if isinstance(p, DTensor) else p for p in primals))
        count = runner.joint.outputs
        ctx.runner = runner
        ctx.save_for_backward(*results[count:])
        ctx.set_materialize_grads(False)
        outputs: list[Tensor] = []
        for o in results[:count]:                              # autograd tells outputs apart by identity
            outputs.append(o.clone() if any(o is other for other in (*primals, *outputs)) else o)
        types = [*info(runner.graph.output).outputs[:len(runner.graph.output_names)], *(TensorType((), "bool") for _ in runner.graph.updates)]
        ctx.mark_non_differentiable(*(o for o, t in zip(outputs, types, strict=True) if not t.requires_grad))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        runner: Runner = ctx.runner
        joint = runner.joint
        for i, tangent in enumerate(tangents):
            if tangent is not None and i not in joint.differentiable:
                raise NotServed(f"a gradient arrives at the output {runner.graph.output_names[i]!r}, and backward was lowered for the loss",
                                advice="compute with that output inside the model, or pass loss= to autoparallelize")
        given = [tangents[i] for i in joint.differentiable]
        if all(t is None for t in given):
            return (None,) * (1 + runner.primal_count)
        filled = [torch.zeros(shape, dtype=dtype, device=runner.device) if t is None else t for t, (shape, dtype) in zip(given, runner.tangent_types, strict=True)]
        results = runner.backward(*ctx.saved_tensors, *filled)
        gradients: list[Any] = [None] * runner.primal_count
        for i, gradient in zip(joint.gradients, results, strict=True):
            gradients[i] = runner.as_gradient(i, gradient)
        return (None, *gradients)


class Runner:
    """One lowered program on this rank: its two halves bound to process groups, and the tensors it takes."""

    def __init__(self, lowered: Lowered, mesh: Any, storage: dict[str, Storage], device: torch.device) -> None:
        self.graph, self.joint, self.program, self.device = lowered.graph, lowered.joint, lowered.program, device
        axes = bind_axes(mesh)
        self.forward_module, self.backward_module = bind(lowered.joint.forward, axes), bind(lowered.joint.backward, axes)
        self.forward, self.backward = self.forward_module.forward, self.backward_module.forward
        self.primal_count = len(lowered.program.inputs) + len(lowered.program.parameters) + len(lowered.program.buffers) + lowered.program.is_random
        self.storages = [None] * len(lowered.program.inputs) + [storage[n] for n in lowered.program.parameters] + [None] * (len(lowered.program.buffers) + 1)
        results = list(lowered.joint.forward.output_node().args[0])   # type: ignore[arg-type]
        self.tangent_types = [(results[i].meta["val"].shape, results[i].meta["val"].dtype) for i in lowered.joint.differentiable]   # type: ignore[union-attr]
        self.mesh = mesh

    def as_gradient(self, primal: int, gradient: Tensor) -> Tensor:
        """A parameter's gradient lies as the parameter does; an input's is plain."""
        storage = self.storages[primal]
        return gradient if storage is None else storage.wrap(gradient)

    def __call__(self, inputs: list[Tensor], parameters: list[Tensor], buffers: list[Tensor], random: RandomState) -> tuple[list[Any], tuple[Tensor, ...]]:
        """The outputs, and the new values of the buffers that change."""
        key = [torch.tensor(random.next_key(), device=self.device)] if self.program.is_random else []
        outputs = Step.apply(self, *inputs, *parameters, *buffers, *key)
        kept = []
        count = len(self.graph.output_names)
        for i, (output, sharding) in enumerate(zip(outputs[:count], self.program.outputs[:count], strict=True)):
            whole = info(self.graph.output).outputs[i]
            if any(not p.is_replicated for p in sharding.placements):
                output = dtensor_of(output.detach(), self.mesh, sharding, whole.shape)
            kept.append(output)
        return kept, outputs[count:]


class ParallelModule(nn.Module):
    """Mixed into the model's own class by `parallelise`. Parameters are DTensors under their own names."""

    _autopar: _State

    @property
    def plan(self) -> Plan:
        """The plan that this model runs."""
        return self._autopar.lowered.plan

    @property
    def graph(self) -> Graph:
        return self._autopar.lowered.graph

    @property
    def code(self) -> str:
        """The forward of this rank, as Python."""
        return str(self._autopar.lowered.program)

    @property
    def joint(self) -> Joint:
        """Forward and backward as emitted."""
        return self._autopar.lowered.joint

    @property
    def random_state(self) -> RandomState:
        """Seed and step of its random numbers: keep them in a checkpoint, set them to repeat a run."""
        return self._autopar.random

    @property
    def input_specs(self) -> dict[str, str]:
        """What every rank passes for each input."""
        return dict.fromkeys(self.graph.inputs, "global")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._autopar
        inputs = _bound(state.lowered.graph, args, kwargs)
        state.check_as_traced(self)
        if state.calls < _CHECKED_CALLS:                       # every rank passes the same global batch: looked at while it is new
            all_ranks_hold("input values", inputs)
        state.calls += 1
        graph, program = state.lowered.graph, state.lowered.program
        changing = {name for _, name in graph.updates}         # what autograd keeps must not be what is written below
        outputs, changed = state.runner(inputs, [self.get_parameter(n) for n in program.parameters], [b.clone() if n in changing else b for n, b in ((n, tensor_of(self, n)) for n in program.buffers)], state.random)
        for (_, name), value in zip(graph.updates, changed, strict=True):
            write_buffer(self, name, value)
        return build_outputs(graph, outputs)


_CHECKED_CALLS = 2


class _State:
    """What a ParallelModule holds besides its parameters."""

    def __init__(self, model: nn.Module, lowered: Lowered, runner: Runner, random: RandomState) -> None:
        self.lowered, self.runner, self.random, self.calls = lowered, runner, random, 0
        self.modes = [m.training for m in model.modules()]
        self.trained = [p.requires_grad for p in model.parameters()]

    def check_as_traced(self, model: nn.Module) -> None:
        """What the program was made for must still hold."""
        if [m.training for m in model.modules()] != self.modes:
            name = next(n or "the model" for (n, m), mode in zip(model.named_modules(), self.modes, strict=True) if m.training != mode)
            mode = "train" if self.lowered.graph.training else "eval"
            raise NotServed(f"the model was traced in {mode} mode, and {name} now runs in another", advice="the modes of tracing, or tracing again")
        if [p.requires_grad for p in model.parameters()] != self.trained:
            name = next(n for (n, p), trained in zip(model.named_parameters(), self.trained, strict=True) if p.requires_grad != trained)
            raise NotServed(f"requires_grad of {name} has changed since tracing", advice="set it before autoparallelize")

    def __deepcopy__(self, memo: Any) -> _State:
        return self


def parallelise(model: nn.Module, lowered: Lowered, mesh: Any, sync: bool = True) -> nn.Module:
    """Turn `model` into the parallel one, in place: its class gains `ParallelModule`, its parameters become local shards."""
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    old = list(model.parameters())
    if not sync:                                               # nothing is sent, so it must be there already
        all_ranks_hold("parameter values", [*old, *model.buffers()])
    storage = _store(model, lowered.plan, mesh, device, sync)
    _refuse_steps_on(old)
    cls = type(model)
    model.__class__ = type(f"Parallel{cls.__name__}", (ParallelModule, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    random = RandomState(from_rank_0(lambda: int(torch.randint(0, 2**62, ()))) if lowered.program.is_random else 0)
    model._autopar = _State(model, lowered, Runner(lowered, mesh, storage, device), random)   # type: ignore[assignment]
    return model


def _store(model: nn.Module, plan: Plan, mesh: Any, device: torch.device, sync: bool) -> dict[str, Storage]:
    """Replace every parameter by its shard of rank 0's values, ties kept; buffers are copied whole."""
    made: dict[int, nn.Parameter] = {}
    storage: dict[str, Storage] = {}
    shardings = plan.parameters
    names = {id(p): n for n, p in model.named_parameters()}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                full = names[id(parameter)]
                if parameter.is_meta:
                    raise NotServed(f"the parameter {full} is on meta, and building parameters there is not served yet", advice="a model with values")
                store = Storage.of(parameter, shardings.get(full), mesh)
                if full in shardings:
                    storage[full] = store
                made[id(parameter)] = nn.Parameter(store.take(parameter.detach().to(device), sync), requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = Storage.of(buffer, None, mesh).spread(buffer.to(device), sync)
        for name, held in list(vars(module).items()):          # a plain attribute is a buffer too
            if isinstance(held, Tensor):
                vars(module)[name] = Storage.of(held, None, mesh).spread(held.to(device), sync)
    return storage


_hooked = False


def _refuse_steps_on(parameters: list[nn.Parameter]) -> None:
    """An optimizer built before `autoparallelize` holds parameters that nobody trains any more: its step is a letter."""
    global _hooked
    for parameter in parameters:
        parameter._autopar_consumed = True                     # type: ignore[attr-defined]
    if not _hooked:
        register_optimizer_step_pre_hook(_check_step)
        _hooked = True


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if any(getattr(p, "_autopar_consumed", False) for group in optimizer.param_groups for p in group["params"]):
        raise Consumed("this optimizer holds parameters of the model from before autoparallelize", advice="build the optimizer from the parallel model's parameters()")


def _bound(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The input tensors of a call, in placeholder order. What differs from the traced call is a letter."""
    leaves, spec = pytree.tree_flatten((args, in_traced_order(graph, kwargs)))
    if spec != graph.input_spec:
        expected, got = _structure(graph.input_spec), _structure(spec)
        raise BadInput("the call does not have the structure that was traced", seen=f"traced {expected}\ncalled {got}", advice="the same arguments as meta_inputs, positional or by keyword as there")
    given = dict(zip(graph.input_leaves, leaves, strict=True))
    tensors = []
    for node in graph.inputs.values():
        type_, tensor = type_of(node), given[node.target]
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != type_.shape or tensor.dtype != type_.torch_dtype:
            seen = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else repr(tensor)
            raise BadInput(f"the input {info(node).key} differs from what the model was lowered for", seen=f"{seen}; traced {type_}",
                           advice="inputs of the traced shape and dtype: new shapes are not served yet")
        tensors.append(tensor)
    for leaf, value in given.items():
        if not isinstance(value, Tensor) and leaf != value:
            raise BadInput(f"a constant argument differs from the traced one: {value!r}, traced {leaf!r}", advice="trace with this value")
    return tensors


def _structure(spec: pytree.TreeSpec) -> str:
    args, kwargs = pytree.tree_unflatten(["."] * spec.num_leaves, spec)
    return f"({', '.join([*map(str, args), *(f'{k}={v}' for k, v in kwargs.items())])})"

