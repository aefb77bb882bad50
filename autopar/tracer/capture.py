"""Module and example inputs -> Graph: run once on fake tensors, write down what is called, put everything back.

    fake tensors     shapes and dtypes, nothing allocated; the module's tensors are swapped for the run and swapped back
    `recorder.py`    sees every torch function and what runs below
    `regions.py`     what of torch behaves otherwise meanwhile
    `passes.py`      the canonical vocabulary

What cannot be held in a graph is a letter with the user's own line. Capture patches nothing for good, and holds a lock:
it reads process-wide state of torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import itertools
import logging
import os
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.graph.graph import Assume, Graph, Leaf, TensorType, info
from autopar.letters import Letter, NotCaptured
from autopar.runtime.private import clean_room
from autopar.tracer.hooks import Hooks
from autopar.tracer.passes import canonicalise
from autopar.tracer.precision import Precision, computing_in, sink
from autopar.tracer.recorder import Recorder, is_ours
from autopar.tracer.regions import captured

LOCK = threading.RLock()  # one capture or joint trace at a time in a process


class ColoTracer(fx.Tracer):
    """Module and example inputs -> Graph."""

    def trace(
        self,
        root: torch.nn.Module,
        meta_inputs: Any,
        assume: Assume | None = None,
        loss: Callable[..., Any] | None = None,
        precision: Precision | None = None,
    ) -> Graph:
        """Trace `root` on inputs of these shapes.

        With `loss`, trace `loss(outputs, inputs)` too and return (loss, outputs); with `precision`, as it computes on
        casts of its parameters and inputs.
        """
        if not isinstance(root, torch.nn.Module):
            raise NotCaptured(
                f"the model is a {type(root).__name__}, and no torch.nn.Module",
                advice="a module whose forward is what you would parallelise",
            )
        with telling_whose_error():
            graph, made, hooks = self._capture(root, meta_inputs, assume, loss, precision)
        refuse_survivors(made)
        hooks.refuse_kept()
        return graph

    def _capture(
        self,
        root: torch.nn.Module,
        meta_inputs: Any,
        assume: Assume | None,
        loss: Callable[..., Any] | None,
        precision: Precision | None,
    ) -> tuple[Graph, list[weakref.ref[Tensor]], Hooks]:
        """The graph, every tensor that was made on the way, and what hooks did."""
        args, kwargs = as_call(meta_inputs)
        refuse_other_arguments(root, args, kwargs)
        refuse_hooks(root, is_parallel=isinstance(meta_inputs, Call))
        refuse_lazy(root)
        refuse_shared_memory(root)
        learn_dataclasses((args, kwargs))
        elsewhere = torch.get_default_device().type != "cpu"  # the caller builds under torch.device("meta"), say
        with (
            LOCK,
            told_once(),
            clean_room(),
            keeping_defaults(),
            torch.device("cpu") if elsewhere else contextlib.nullcontext(),
            torch.enable_grad(),
            no_collection(),
        ):
            recorder = Recorder(root, assume or Assume())
            inputs_before = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            with contextlib.closing(recorder), recorder.below as fake_mode:
                leaves, input_spec = pytree.tree_flatten((args, kwargs))
                leaves = [
                    Fakes(fake_mode)(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
                ]  # one tensor given twice is two inputs
                names = [
                    recorder.add_input(leaf, name) if isinstance(leaf, Tensor) else leaf
                    for leaf, name in zip(leaves, leaf_names(args, kwargs), strict=True)
                ]
                args, kwargs = pytree.tree_unflatten(leaves, input_spec)
                recorder.sharing |= sharing(inputs_before, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
                with Fakes(fake_mode).swapped_into(root, recorder):
                    recorder.hooks.watch(root)
                    with refusing_higher_order_ops(recorder), captured(recorder), recorder.watching():
                        with computing_in(precision, recorder) as casts:
                            given = (
                                pytree.tree_map_only(Tensor, precision.cast, (args, kwargs))
                                if precision
                                else (args, kwargs)
                            )
                            outputs = root(*given[0], **given[1])
                            if loss is not None:
                                value = loss(outputs, kwargs or args)
                                if not isinstance(value, Tensor):
                                    raise NotCaptured(
                                        f"loss= returned {value!r}", advice="a tensor that is computed from the outputs"
                                    )
                                outputs = (value, outputs)
                        recorder.notice_changes()
                    outputs, dropped = without_caches(outputs)
                    learn_dataclasses(outputs)
                    out_leaves, output_spec = pytree.tree_flatten(outputs)
                    refuse_opaque(out_leaves)
                    tensors = [leaf for leaf in out_leaves if isinstance(leaf, Tensor)]
                    updates = recorder.updates(leaves)
                    recorder.add_output([*tensors, *(t for _, _, t in updates)])
            positions = iter(range(len(tensors)))
            graph = Graph(
                recorder.graph,
                input_spec,
                tuple(names),
                output_spec,
                tuple(Leaf(next(positions)) if isinstance(leaf, Tensor) else leaf for leaf in out_leaves),
                tuple(
                    recorder.apart("output", n, "out.")
                    for n, leaf in zip(output_names(outputs, loss is not None), out_leaves, strict=True)
                    if isinstance(leaf, Tensor)
                ),
                updates=tuple((kind, name) for kind, name, _ in updates),
                assumptions=tuple(dict.fromkeys((*dropped, *recorder.assumptions))),
                training=root.training,
            )
            sink(casts)
            graph = canonicalise(graph)
            graph = dataclasses.replace(graph, unread=unread_by(graph, root), idle=tuple(recorder.hooks.idle))
            refuse_detached(recorder)
            for where, _ in recorder.assume.branches:
                if where not in recorder.asked:
                    raise NotCaptured(
                        f"the declared branch {where} was never asked for",
                        advice="the file and line of graph.assumptions or of a letter",
                    )
            return graph, recorder.made, recorder.hooks


def refuse_other_arguments(root: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """Inputs that the model's forward does not take, or lacks."""
    try:
        signature = inspect.signature(root.forward)
    except (TypeError, ValueError):  # a forward that does not tell
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        raise NotCaptured(
            f"{type(root).__name__}.forward does not take these inputs: {e}",
            seen=f"forward{signature}",
            advice="meta_inputs as the model is called: a dictionary of its arguments, or a tuple",
        ) from e


@contextlib.contextmanager
def telling_whose_error() -> Iterator[None]:
    """What the model's own code, or torch on its behalf, raises on inputs of these shapes is told as the model's, with
    its place. What is raised in autopar stays as it is.
    """
    try:
        yield
    except Letter:
        raise
    except Exception as e:
        frames = traceback.extract_tb(e.__traceback__)
        ours = [f.name for f in frames if f.filename.startswith(_HERE)]
        if (
            frames[-1].filename.startswith(_HERE) or ours[-1] not in _RUN_WHAT_THE_MODEL_RUNS
        ):  # the last of us that it passed does something of ours
            raise
        at = next((f for f in reversed(frames) if not is_ours(f.filename)), None) or next(
            (f for f in reversed(frames) if f.name == "forward"), frames[-1]
        )
        raise NotCaptured(
            f"the model raises {type(e).__name__} on these inputs: {e}",
            at=f"{os.path.basename(at.filename)}:{at.lineno}, in {at.name}",
            advice=(
                "inputs of the shapes and dtypes that it is called with; it was run on shapes alone: an op that "
                "cannot be needs torch.library.register_fake"
            ),
        ) from e


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """What an op raises on fake tensors torch also logs, with its whole stack.

    Whoever needs to know is told by the error.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_RUN_WHAT_THE_MODEL_RUNS = ("_capture", "execute", "fake", "__torch_dispatch__", "__torch_function__")


def unread_by(graph: Graph, root: torch.nn.Module) -> tuple[tuple[str, TensorType], ...]:
    """Parameters and buffers that lie in memory, and that no output or update needs."""
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


def refuse_survivors(made: list[weakref.ref[Tensor]]) -> None:
    """Whatever tensor of the capture is still held when nothing of it is left is in a cache of the model's, and would
    be found there by the next call.
    """
    if not any(ref() is not None for ref in made):
        return
    gc.collect()
    survivors = [tensor for ref in made if (tensor := ref()) is not None]
    holders = gc.get_referrers(*survivors) if survivors else []  # each look goes through every object there is
    for holder in holders:
        if isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()  # the next call fills it again
    dicts = [holder for holder in holders if isinstance(holder, dict)]
    for owner in gc.get_referrers(*dicts) if dicts else []:
        if isinstance(owner, (type, types.ModuleType)):
            for name, value in vars(owner).items():
                if any(value is tensor for tensor in survivors):
                    raise NotCaptured(
                        f"forward keeps a tensor as {owner.__name__}.{name}, where the next call would find that "
                        "of the capture",
                        advice="a buffer, or setting it outside forward",
                    )


def refuse_detached(recorder: Recorder) -> None:
    """Once a TorchScript function has run with gradients, torch's own autodiff runs it on detached values."""
    for node in recorder.detached_below:
        if not node._erased:
            raise NotCaptured(
                "TorchScript detaches a value: its own autodiff does so once a function has run, and the gradient "
                "would be lost",
                at=node.meta["info"].source,
                advice="the Python function, or tracing before it has run",
            )


@contextlib.contextmanager
def keeping_defaults() -> Iterator[None]:
    """What forward changes of torch's defaults is put back."""
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


def refuse_lazy(root: torch.nn.Module) -> None:
    lazy = [
        n
        for n, p in [*root.named_parameters(), *root.named_buffers()]
        if isinstance(p, torch.nn.parameter.UninitializedTensorMixin)
    ]
    if lazy:
        raise NotCaptured(f"{lazy[0]} has no shape yet", advice="one eager call, which gives lazy modules their shapes")


def sharing(tensors: list[Tensor], fakes: list[Tensor]) -> set[int]:
    """Ids of the fakes of tensors whose memory another one looks at."""
    by_storage: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(i)
    return {id(fakes[i]) for group in by_storage.values() if len(group) > 1 for i in group}


@contextlib.contextmanager
def refusing_higher_order_ops(recorder: Recorder) -> Iterator[None]:
    """torch.cond, flex_attention and their like hold graphs of their own."""
    try:
        yield
    except (NotImplementedError, RuntimeError, SystemError) as e:
        if (
            recorder.last_letter is not None
            and not isinstance(e, NotCaptured)
            and ("TorchScript" in str(e) or "exception set" in str(e))
        ):
            raise recorder.last_letter from e  # TorchScript has swallowed it
        if "HigherOrderOperator" not in str(e):
            raise
        frames = [f for f in traceback.extract_tb(e.__traceback__) if not is_ours(f.filename)]
        at = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
        raise NotCaptured(
            "a higher-order op (torch.cond, flex_attention, a loop) is not captured",
            at=at,
            seen=str(e).partition("HigherOrderOperator")[2].split(" and ")[0].strip(),
            advice="torch.where, scaled_dot_product_attention, or a Python loop",
        ) from e


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """The garbage collector would walk every node again and again, and find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def refuse_hooks(root: torch.nn.Module, is_parallel: bool = False) -> None:
    """Forward hooks run while tracing (hooks.py).

    Backward hooks would be lost, but those of a parallel model itself and of the parameters that it trains.
    """
    held = [
        n or "the model"
        for n, m in root.named_modules()
        if (m._backward_hooks or m._backward_pre_hooks) and not (is_parallel and m is root)
    ]
    held += [
        n
        for n, p in root.named_parameters()
        if (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)) and not is_parallel
    ]
    if held:
        raise NotCaptured(
            f"backward hooks are set on {', '.join(held[:5])}, and would be lost",
            advice="set them on the parallel model's parameters",
        )


def refuse_shared_memory(root: torch.nn.Module) -> None:
    """Two parameters on one memory are one to eager's optimizer and two to a plan; so are a parameter and a buffer."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    trained = {p.untyped_storage()._cdata for p in root.parameters()}
    for name, parameter in [
        *root.named_parameters(),
        *((n, b) for n, b in root.named_buffers() if b.untyped_storage()._cdata in trained),
    ]:
        reach = (
            sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True)) + 1
            if parameter.numel()
            else 0
        )
        spans.setdefault(parameter.untyped_storage()._cdata, []).append(
            (parameter.storage_offset(), parameter.storage_offset() + reach, name)
        )
    for shared in spans.values():
        shared.sort()
        for (_, end, one), (start, _, other) in itertools.pairwise(shared):
            if start < end:
                raise NotCaptured(
                    f"{one} and {other} are two on the same memory", advice="one Parameter under both names"
                )


def refuse_opaque(leaves: list[Any]) -> None:
    """An output that holds tensors where nobody can find them."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and any(isinstance(v, Tensor) for v in getattr(leaf, "__dict__", {}).values()):
            raise NotCaptured(
                f"the output {type(leaf).__name__} holds tensors, and cannot be taken apart",
                advice="a dict, tuple or dataclass, or torch.utils._pytree.register_pytree_node",
            )


def learn_dataclasses(value: Any) -> None:
    """A dataclass among inputs or outputs is a structure like any other."""
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value) not in pytree.SUPPORTED_NODES and not type(value).__name__.endswith("Cache"):
            pytree.register_dataclass(
                type(value), serialized_type_name=f"{type(value).__module__}.{type(value).__qualname__}"
            )
        children = [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    else:
        return
    for child in children:
        learn_dataclasses(child)


def without_caches(outputs: Any) -> tuple[Any, tuple[str, ...]]:
    """Key-value caches are no result of a training step: None stands in their place, and the graph says so."""
    dropped: list[str] = []

    def is_cache(value: Any) -> bool:
        return type(value).__name__.endswith("Cache")

    def drop(value: Any) -> Any:
        if is_cache(value):
            dropped.append(f"the output {type(value).__name__} is dropped: caches serve generation, not training")
            return None
        return value

    return pytree.tree_map(drop, outputs, is_leaf=is_cache), tuple(dict.fromkeys(dropped))


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Inputs as a model was called with them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def as_call(meta_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """args and kwargs from what a caller may pass: a dict (or mapping), a tuple, one tensor, or a `Call`."""
    if isinstance(meta_inputs, Call):
        return meta_inputs.args, meta_inputs.kwargs
    if isinstance(meta_inputs, Tensor):
        return (meta_inputs,), {}
    if hasattr(meta_inputs, "keys"):
        return (), dict(meta_inputs)
    if isinstance(meta_inputs, (tuple, list)):
        return tuple(meta_inputs), {}
    raise NotCaptured(
        f"meta_inputs is a {type(meta_inputs).__name__}",
        advice="a dict of keyword arguments, or a tuple of positional ones",
    )


def leaf_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A name for every leaf of the inputs: its keyword, or its position."""
    return [
        pytree.keystr(path[1:]).strip("[]'").replace("']['", ".").replace("][", ".").replace("'", "")
        for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]
    ]


def output_names(outputs: Any, has_loss: bool) -> list[str]:
    names = [
        pytree.keystr(path).lstrip(".").strip("[]'").replace("'", "").replace("][", ".") or "out"
        for path, _ in pytree.tree_flatten_with_path(outputs)[0]
    ]
    return ["loss", *names[1:]] if has_loss else names


class Fakes:
    """One fake for each tensor, by identity, so that ties stay ties."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode, self._made = mode, {}  # type: ignore[var-annotated]

    def __call__(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._made:
            with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            fake = FakeTensor(self.mode, meta, torch.device("cpu"))
            if tensor.requires_grad:
                fake.requires_grad_()
            if isinstance(tensor, torch.nn.Parameter):
                fake._is_param = True
            self._made[id(tensor)] = fake, tensor
        return self._made[id(tensor)][0]

    def _faked(self, value: Any) -> Any:
        """The value with its tensors, also those in lists and dicts, swapped; the value itself if there are none."""
        if isinstance(value, Tensor):
            return self(value)
        if type(value) in (list, tuple) and any(isinstance(v, Tensor) for v in value):
            return type(value)(self._faked(v) for v in value)
        if type(value) is dict and any(isinstance(v, Tensor) for v in value.values()):
            return {k: self._faked(v) for k, v in value.items()}
        return value

    @contextlib.contextmanager
    def swapped_into(self, root: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
        """The module's tensors are fakes inside, themselves again outside.

        Whatever forward sets on its modules is put back too.
        """
        before = [
            (m, path, dict(vars(m)), {k: v.copy() for k, v in vars(m).items() if isinstance(v, (list, dict, set))})
            for path, m in root.named_modules()
        ]
        swapped: list[tuple[Any, str, Any]] = []
        try:
            for module, *_ in before:
                for held in (module._parameters, module._buffers, vars(module)):
                    for name, value in list(held.items()):
                        faked = self._faked(value) if name not in ("_parameters", "_buffers", "_modules") else value
                        if faked is not value:
                            held[name] = faked
                            swapped.append((held, name, value))
                recorder.parameters_before[id(module)] = dict(module._parameters.items())
            recorder.learn_names([fake for fake, _ in self._made.values()])
            recorder.sharing |= sharing([real for _, real in self._made.values()], recorder.held)
            recorder.modules_before = [
                (m, path, dict(vars(m)), dict(m._buffers), contents) for m, path, _, contents in before
            ]
            yield
        finally:
            for held, name, value in swapped:  # a ScriptModule keeps its tensors where vars() does not see them
                held[name] = value
            for module, _, attributes, contents in before:
                for name, content in contents.items():  # hooks, submodules, lists: what they held
                    held = attributes[name]
                    held.clear()
                    (held.extend if isinstance(held, list) else held.update)(content)
                vars(module).clear()
                vars(module).update(attributes)
