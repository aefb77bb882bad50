"""Record every torch function that a module calls, as a list of pure ops.

    functions.py        the function mode: sees every torch function, before autograd; one node each
    below.py            the fake mode: sees ops inside TorchScript and transforms, writes and draws
    values.py           writes in place become new values
    branches.py         answers to questions about values
    program.py          the nodes themselves
    refused_calls.py    letters about calls that no graph can hold

The recorder runs a function on fakes, notes what it does below, and writes the node; it holds the parts of a capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph.graph import Assume, TensorType, info
from autopar.letters import NotCaptured
from autopar.ops.entry import WRITES, Apply
from autopar.ops.lookup import lookup
from autopar.runtime.private import FakeTensor, without_torch_functions
from autopar.tracer import refused_calls
from autopar.tracer.assumptions import Assumptions
from autopar.tracer.below import DispatchMode
from autopar.tracer.call import RunningCall, name_of, tensors_in
from autopar.tracer.casts import Casts
from autopar.tracer.changes import Changes
from autopar.tracer.hooks import Hooks
from autopar.tracer.names import Names
from autopar.tracer.place import Whereabouts, source
from autopar.tracer.precision import Precision
from autopar.tracer.program import Recording
from autopar.tracer.values import Values


class Recorder:
    """The parts of one capture, and how a call becomes a node."""

    def __init__(
        self,
        root: torch.nn.Module,
        assume: Assume,
        precision: Precision | None = None,
        keeps: frozenset[str] = frozenset(),
    ) -> None:
        self.root = root
        self.precision = precision
        self.stand_ins: dict[int, str] = {}  # id(cast of a parameter under precision=) -> name of the parameter
        self.assumptions = Assumptions(assume)
        self.place = Whereabouts(root)
        self.program = Recording(self.place)
        self.names = Names()
        self.call = RunningCall()
        self.values = Values(self)
        self.changes = Changes(self, keeps)
        self.casts = Casts(self)
        self.hooks = Hooks(self)
        self.below = DispatchMode(self)
        self.last_letter: NotCaptured | None = None  # TorchScript swallows what is raised inside it
        self.detached_below: list[fx.Node] = []

    # -- what enters and leaves

    def add_input(self, tensor: Tensor, name: str) -> str:
        """Add a placeholder for an input tensor, and return its name."""
        node = self.program.add_input(tensor, name)
        self.values.bind(tensor, node)
        return str(node.target)

    def learn_names(self, fakes: list[Tensor]) -> None:
        """Learn the names of the module's tensors, and rename inputs that have the same."""
        self.names.learn(self.root, fakes)
        for node in self.program.inputs():
            node.meta["info"] = replace(info(node), key=self.names.apart("input", info(node).key))

    def add_output(self, tensors: list[Tensor]) -> None:
        """Add the output node for these tensors."""
        self.program.add_output([self.node(t) for t in tensors], tensors)

    def close(self) -> list[weakref.ref[Tensor]]:
        """Release all tensors; the returned references show which of them something else still holds.

        Fakes hold their mode, the mode the recorder, and the recorder the fakes, through autograd where no garbage
        collector sees it: the cycle is broken here.
        """
        made = self.values.close()
        self.changes.close()
        for held in (self.names.fakes, self.names.fake_of, self.casts.cached, self.below.remembered):
            held.clear()
        del self.root
        return made

    # -- what happens between

    def execute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function on the fakes, and note what it does below."""
        for tensor in tensors_in(args, kwargs):
            if not isinstance(tensor, FakeTensor):
                raise self.outsider(tensor)
        self.call.begin(function)
        try:
            return function(*args, **kwargs)
        except Exception as e:
            letter = refused_calls.letter_about(self, e, function, args, kwargs)
            if letter is None:
                raise
            raise letter from e
        finally:
            self.call.function = None

    def record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Write a node for a call that gave `result`."""
        outputs = tensors_in((result,), {})
        refused_calls.refuse_hidden_write(self, function, args)
        if not outputs:
            return
        if isinstance(result, Tensor) and self.knows(result):
            return  # the operand itself: nothing was computed
        if any(out.device.type != "cpu" for out in outputs):  # fakes say cpu wherever the model is
            raise self.letter(
                f"{name_of(function)} gives a tensor on {outputs[0].device}: the model moves tensors between "
                "devices itself",
                args,
                "device=x.device, of a tensor at hand",
            )
        refused_calls.refuse_layouts(self, function, args, (*outputs, *tensors_in(args, kwargs)))
        made, arguments = lookup(function, args, kwargs, result)
        refused_calls.refuse_mixed_dtypes(self, made, arguments, args)
        refused_calls.refuse_sparse_gradients(self, made, arguments, args)
        draws = self.call.drew is not None
        if made.name in WRITES and self.writes(made, arguments):  # batch_norm's schema does not say that it writes
            made, written_to, _ = WRITES[made.name]
            node = self.emit(made, arguments, (*outputs, *(arguments[n] for n in written_to)), draws)
            parts = self.program.split(node)
            self.values.bind(outputs[0], parts[0])
            for part, target in zip(parts[1:], written_to, strict=True):
                self.values.write(arguments[target], part)
            return
        self.values.bind_all(result, self.emit(made, arguments, outputs, draws), (made, arguments))

    def writes(self, op: Any, arguments: dict[str, Any]) -> bool:
        """Whether this call writes to its arguments."""
        _, written, flag = WRITES[op.name]
        return arguments.get(flag, op.signature.parameters[flag].default) and all(
            arguments.get(n) is not None for n in written
        )

    def apply(self, cls: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an autograd.Function as one node, with its own backward; its body is not recorded."""
        if self.casts.on():
            raise self.letter(
                f"the autograd.Function {cls.__name__} runs under autocast",
                args,
                "torch.autocast(..., enabled=False) around it, and casts written out",
            )
        self.call.given = {id(t) for t in tensors_in(args, kwargs)}
        try:
            with without_torch_functions():
                result = self.execute(original, args, kwargs)
                self.record(Apply(cls), args, kwargs, result)
        finally:
            self.call.given = None
        return result

    def check_given(self, args: Any) -> None:
        """Raise if an autograd.Function reads a known tensor not passed to it: gradients would be lost."""
        given = self.call.given or set()
        for tensor in tensors_in(args, {}):
            if self.knows(tensor) and id(tensor) not in given:
                raise self.letter(
                    "an autograd.Function reads a tensor that it was not given", (tensor,), "passing it as an argument"
                )

    def type_of_run(self, op: Any, arguments: dict[str, Any]) -> TensorType:
        """The type of an op's result, found by running it on the fakes."""
        was_running = self.place.is_running
        self.place.is_running = False
        try:
            return TensorType.of(op.run(arguments))
        finally:
            self.place.is_running = was_running

    def emit(self, op: Any, arguments: dict[str, Any], outputs: Any, draws: bool = False) -> fx.Node:
        """Add an op node on the nodes that its arguments stand for now."""
        return self.program.add_op(op, self.resolved(arguments), outputs, draws)

    def resolved(self, value: Any) -> Any:
        """The value with each tensor replaced by the node that it stands for now."""
        if isinstance(value, Tensor):
            return self.node(value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, (list, tuple)):
            made = [self.resolved(v) for v in value]
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
        if isinstance(value, dict):
            return {k: self.resolved(v) for k, v in value.items()}
        if isinstance(value, slice) and any(isinstance(v, Tensor) for v in (value.start, value.stop, value.step)):
            raise self.letter("a slice whose bounds are tensors depends on their values", ())
        return value

    def node(self, tensor: Tensor) -> fx.Node:
        """The node that a tensor stands for now; a tensor of the module is added when it is first read."""
        found = self.values.node(tensor)
        if found is not None:
            return found
        if id(tensor) not in self.names.of:
            raise self.outsider(tensor)
        node = self.program.add_attribute(tensor, self.names.kinds[id(tensor)], self.names.of[id(tensor)])
        self.values.bind(tensor, node)
        return node

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is an input, a tensor of the module, or a result."""
        return id(tensor) in self.values.nodes or id(tensor) in self.names.of

    # -- letters

    def letter(self, what: str, args: Any, advice: str = "") -> NotCaptured:
        """A letter about the running line of source, with the types of these arguments."""
        seen = ", ".join(str(TensorType.of(t)) for t in tensors_in((args,), {}))
        self.last_letter = NotCaptured(what, at=source(), seen=seen, advice=advice)
        return self.last_letter

    def outsider(self, tensor: Tensor) -> NotCaptured:
        """The letter for a tensor that is neither the model's nor an input nor a result."""
        return NotCaptured(
            "a tensor from outside the model and its inputs would become a constant",
            at=source(),
            seen=str(TensorType.of(tensor)),
            advice="register it as a buffer, or pass it as an input",
        )
