"""Capture a module on example inputs as a Graph: run it once on fake tensors, and record every torch function.

    fake tensors     shapes and dtypes, nothing allocated; the module's tensors are swapped for the run and swapped back
    `recorder.py`    sees every torch function and what runs below
    `regions.py`     what of torch behaves otherwise meanwhile
    `refusals.py`    what cannot be held in a graph: a letter with the user's own line
    `passes.py`      the canonical vocabulary

Capture patches nothing for good, and holds a lock: it reads process-wide state of torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.graph.calls import Call, as_call, leaf_names, learn_dataclasses, output_names, without_caches
from autopar.graph.carried import carried_in, pairs_of, places_in
from autopar.graph.graph import Assume, Graph, Leaf, TensorType, info
from autopar.letters import AutoparError, NotCaptured
from autopar.ops.experts import assumed_imbalance
from autopar.runtime.brief_patches import fake_errors_told_once
from autopar.runtime.private import TRACING, clean_room
from autopar.tracer.fakes import Fakes, sharing
from autopar.tracer.functions import FunctionMode
from autopar.tracer.left import Captured, steady
from autopar.tracer.passes import canonicalise
from autopar.tracer.place import defined, source_of
from autopar.tracer.precision import Precision, computing_in, sink
from autopar.tracer.recorder import Recorder
from autopar.tracer.refusals import (
    refuse_block_masks,
    refuse_detached,
    refuse_hooks,
    refuse_layouts,
    refuse_lazy,
    refuse_opaque,
    refuse_other_arguments,
    refuse_shared_memory,
    refuse_survivors,
    refuse_trained_values_under_a_mask,
    refusing_higher_order_ops,
    telling_whose_error,
)
from autopar.tracer.regions import captured, keeping_defaults, no_collection


@dataclasses.dataclass(frozen=True, slots=True)
class ModelCall:
    """A model, and the call of it to capture."""

    root: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., Any] | None
    precision: Precision | None


class ColoTracer(fx.Tracer):
    """Captures modules as Graphs."""

    def trace(
        self,
        root: torch.nn.Module,
        meta_inputs: Any,
        assume: Assume | None = None,
        loss: Callable[..., Any] | None = None,
        precision: Precision | None = None,
    ) -> Graph:
        """Trace `root` on inputs of these shapes.

        With `loss`, trace `loss(outputs, inputs)` too and return (loss, outputs); with `precision`, trace the model on
        casts of its parameters and inputs.
        """
        if not isinstance(root, torch.nn.Module):
            raise NotCaptured(
                f"the model is a {type(root).__name__}, and no torch.nn.Module",
                advice="a module whose forward is what you would parallelise",
            )
        with telling_whose_error():
            call = ModelCall(root, *as_call(meta_inputs), loss, precision)
            _check(call, is_parallel=isinstance(meta_inputs, Call))
            found = _capture(call, assume or Assume())
            if found.left:
                found = steady(root, found, functools.partial(_capture, call, assume or Assume()))
        refuse_survivors(found.made)
        found.refuse_kept()
        return found.graph


def _check(call: ModelCall, is_parallel: bool) -> None:
    """Raise a letter for a model or a call that cannot be captured."""
    refuse_other_arguments(call.root, call.args, call.kwargs)
    refuse_block_masks(call.args, call.kwargs)
    refuse_hooks(call.root, is_parallel)
    refuse_lazy(call.root)
    refuse_layouts(call.root, call.args, call.kwargs)
    refuse_shared_memory(call.root)


def _capture(call: ModelCall, assume: Assume, keeps: frozenset[str] = frozenset()) -> Captured:
    """Run the model once on fake tensors; attributes that it `keeps` are updates."""
    learn_dataclasses((call.args, call.kwargs))
    with _quiet():
        recorder = Recorder(call.root, assume, call.precision, keeps)
        try:
            with recorder.below:
                graph = _run(call, recorder)
        except AutoparError as e:  # A function of autopar that the model calls does not know its line.
            if e.at or not (line := source_of(e)):
                raise
            raise e.but(at=line) from e
        finally:
            made = recorder.close()
        with assumed_imbalance(assume.imbalance):
            graph = canonicalise(graph)
        graph = dataclasses.replace(graph, unread=unread_by(graph, call.root), idle=tuple(recorder.hooks.idle))
        refuse_detached(recorder)
        refuse_trained_values_under_a_mask(graph)
        recorder.assumptions.refuse_unasked()
        return Captured(graph, made, recorder.hooks.refuse_kept, recorder.changes.left)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Set process-wide state as a capture needs it; the caller's own is restored afterwards."""
    on_cpu = contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with (
        TRACING,
        fake_errors_told_once(),
        clean_room(),
        keeping_defaults(),
        on_cpu,  # the caller may build under torch.device("meta")
        torch.enable_grad(),
        no_collection(),
    ):
        yield


def _run(call: ModelCall, recorder: Recorder) -> Graph:
    """The graph as recorded while the model ran on fake tensors, not yet canonical."""
    leaves, input_spec = pytree.tree_flatten((call.args, call.kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # one tensor given twice is two inputs
    leaves = [Fakes(recorder.below)(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    names = leaf_names(call.root.forward, call.args, call.kwargs)
    input_leaves = [
        recorder.add_input(leaf, name) if isinstance(leaf, Tensor) else leaf
        for leaf, name in zip(leaves, names, strict=True)
    ]
    args, kwargs = pytree.tree_unflatten(leaves, input_spec)
    recorder.names.sharing |= sharing(given, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
    with Fakes(recorder.below).swapped_into(call.root, recorder):
        recorder.hooks.watch(call.root)
        with refusing_higher_order_ops(recorder), captured(recorder), recorder.place.followed(), FunctionMode(recorder):
            with computing_in(call.precision, recorder) as casts:
                outputs = recorder.program.stack.follow(_forward, dataclasses.replace(call, args=args, kwargs=kwargs))
            recorder.changes.notice()
        outputs, dropped = without_caches(outputs)
        learn_dataclasses(outputs)
        output_leaves, output_spec = pytree.tree_flatten(outputs)
        refuse_opaque(output_leaves)
        tensors = [leaf for leaf in output_leaves if isinstance(leaf, Tensor)]
        handed_on = set(map(id, pytree.tree_leaves(carried_in(outputs))))  # their new values are outputs
        updates = [u for u in recorder.changes.updates(leaves) if u[0] != "input" or id(u[2]) not in handed_on]
        recorder.values.chosen.refuse(tensors, "the model returns the chosen rows", at_their_line=True)
        recorder.add_output([*tensors, *(t for _, _, t in updates)])
        recorder.values.chosen.rounds.check()
    recorder.program.arrange()
    sink(casts)
    names = output_names(outputs, call.loss is not None)
    named = [n for n, leaf in zip(names, output_leaves, strict=True) if isinstance(leaf, Tensor)]
    places = iter(range(len(tensors)))
    outputs_called = [recorder.names.apart("output", name, "out.") for name in named]
    of_inputs = zip(input_leaves, places_in((call.args, call.kwargs)), strict=True)
    inputs_called = {str(node.target): info(node).key for node in recorder.program.inputs()}
    of_outputs = [p for p, leaf in zip(places_in(outputs), output_leaves, strict=True) if isinstance(leaf, Tensor)]
    carried = pairs_of(
        [(inputs_called[str(leaf)], place) for leaf, place in of_inputs if place],
        list(zip(outputs_called, of_outputs, strict=True)),
    )
    return Graph(
        recorder.program.graph,
        input_spec,
        tuple(input_leaves),
        output_spec,
        tuple(Leaf(next(places)) if isinstance(leaf, Tensor) else leaf for leaf in output_leaves),
        tuple(outputs_called),
        carried=carried,
        updates=tuple((kind, name) for kind, name, _ in updates),
        assumptions=tuple(dict.fromkeys((*dropped, *recorder.assumptions.lines))),
        training=call.root.training,
        model=type(call.root).__name__,
    )


def _forward(call: ModelCall) -> Any:
    """Outputs of the model, behind the loss where there is one."""
    args, kwargs = call.args, call.kwargs
    if call.precision is not None:
        args, kwargs = pytree.tree_map_only(Tensor, call.precision.cast, (args, kwargs))
    outputs = call.root(*args, **kwargs)
    if call.loss is None:
        return outputs
    value = _loss_of(call.loss, outputs, call.kwargs or call.args)
    if not isinstance(value, Tensor):
        raise NotCaptured(f"loss= returned {value!r}", advice="a tensor that is computed from the outputs")
    if value.numel() != 1:
        raise NotCaptured(
            f"loss= returned a tensor of shape {tuple(value.shape)}, not one number",
            at=defined(call.loss),
            advice="its mean() or sum()",
        )
    return value, outputs


def _loss_of(loss: Callable[..., Any], outputs: Any, inputs: Any) -> Any:
    """The value of a caller's loss; its errors are letters about it."""
    advice = (
        'a function of the model\'s outputs and its inputs: loss=lambda out, inputs: F.cross_entropy(out, inputs["y"])'
    )
    try:
        inspect.signature(loss).bind(outputs, inputs)
    except TypeError as e:
        raise NotCaptured(
            f"loss= does not take the outputs and the inputs: {e}", at=defined(loss), advice=advice
        ) from e
    except ValueError:
        pass  # A function of C has no signature to check, and raises its own error.
    with telling_whose_error("loss=", advice):
        return loss(outputs, inputs)


def unread_by(graph: Graph, root: torch.nn.Module) -> tuple[tuple[str, TensorType], ...]:
    """Parameters and buffers that are in memory, but that no output or update needs."""
    read = {
        name
        for node in graph.nodes
        for name in (info(node).key, *info(node).names)
        if info(node).kind in ("parameter", "buffer")
    }
    held = (("parameter", root.named_parameters()), ("buffer", root.named_buffers()))
    return tuple(
        (f"{kind} {name}", TensorType.of(tensor))
        for kind, tensors in held
        for name, tensor in tensors
        if name not in read
    )
