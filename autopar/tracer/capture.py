"""Run the module once on fake tensors and write down every torch function that it calls.

    fake tensors             shapes and dtypes, nothing allocated; parameters are swapped for the run and swapped back
    a function mode          sees every torch function, before autograd: one node each
    a dispatch mode below    sees what escapes the function mode, writes in place, or draws random numbers

What cannot be held in a graph is a letter with the user's own line. Capture patches nothing for good, and holds a lock:
it reads process-wide state of torch.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.letters import NotCaptured
from autopar.runtime.private import clean_room
from autopar.tracer.graph import Assume, Graph, Info, Leaf, TensorType
from autopar.tracer.passes import canonicalise
from autopar.tracer.vocabulary import RANDOM, SPELLINGS, is_in_place, lookup

LOCK = threading.RLock()                                       # one capture or joint trace at a time in a process

_T = Tensor
_QUERIES = {_T.size, _T.dim, _T.numel, _T.stride, _T.is_floating_point, _T.is_complex, _T.is_contiguous, _T.element_size, _T.__len__,
            _T.storage_offset, torch.is_floating_point, torch.is_complex, torch.numel, _T.ndimension, _T.get_device, _T.__hash__, _T.__repr__,
            _T.__format__, torch.is_tensor, _T.nelement, _T.requires_grad.__get__, _T.__contains__}
_VALUES = {_T.item, _T.tolist, _T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.nonzero, torch.nonzero, _T.numpy}
_HOOKS = frozenset({"register_hook", "retain_grad", "register_post_accumulate_grad_hook"})
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), str(Path(contextlib.__file__)))


class ColoTracer(fx.Tracer):
    """Module and example inputs -> Graph."""

    def trace(self, root: torch.nn.Module, meta_inputs: Any, assume: Assume | None = None, loss: Callable[..., Any] | None = None) -> Graph:  # type: ignore[override]
        """Trace `root` on inputs of these shapes; with `loss`, trace `loss(outputs, inputs)` too and return (loss, outputs)."""
        if assume is not None and assume != Assume():
            raise NotCaptured("no assumption is served yet", seen=f"assume={assume}")
        args, kwargs = as_call(meta_inputs)
        refuse_hooks(root)
        with LOCK, clean_room(), FakeTensorMode() as fake_mode, torch.enable_grad():
            fake = _Fakes(fake_mode)
            leaves, input_spec = pytree.tree_flatten((args, kwargs))
            leaves = [_Fakes(fake_mode)(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]    # one tensor given twice is two inputs
            recorder = _Recorder(root)
            with fake.swapped_into(root):
                names = [recorder.add_input(leaf, name) if isinstance(leaf, Tensor) else leaf for leaf, name in zip(leaves, leaf_names(args, kwargs), strict=True)]
                recorder.learn_names()
                args, kwargs = pytree.tree_unflatten(leaves, input_spec)
                with recorder.watching():
                    outputs = root(*args, **kwargs)
                    if loss is not None:
                        outputs = (loss(outputs, kwargs or args), outputs)
            outputs, dropped = without_caches(outputs)
            out_leaves, output_spec = pytree.tree_flatten(outputs)
            tensors = [leaf for leaf in out_leaves if isinstance(leaf, Tensor)]
            recorder.add_output(tensors)
            positions = iter(range(len(tensors)))
            graph = Graph(
                recorder.graph, input_spec, tuple(names), output_spec,
                tuple(Leaf(next(positions)) if isinstance(leaf, Tensor) else leaf for leaf in out_leaves),
                tuple(n for n, leaf in zip(output_names(outputs, loss is not None), out_leaves, strict=True) if isinstance(leaf, Tensor)),
                assumptions=dropped, training=root.training,
            )
            graph = canonicalise(graph)
        for node in graph.nodes:
            node.meta.pop("fake", None)
        return graph


def refuse_hooks(root: torch.nn.Module) -> None:
    """Forward hooks run while tracing and are captured; backward hooks would be lost."""
    held = [n or "the model" for n, m in root.named_modules() if m._backward_hooks or m._backward_pre_hooks]
    held += [n for n, p in root.named_parameters() if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]
    if held:
        raise NotCaptured(f"backward hooks are set on {', '.join(held[:5])}, and would be lost", advice="set them on the parallel model's parameters")


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


def _canonical_name(function: Callable[..., Any]) -> str:
    return SPELLINGS[function][0].name if function in SPELLINGS else ""


def as_call(meta_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """args and kwargs from what a caller may pass: a dict (or mapping), a tuple, or one tensor."""
    if isinstance(meta_inputs, Tensor):
        return (meta_inputs,), {}
    if hasattr(meta_inputs, "keys"):
        return (), dict(meta_inputs)
    if isinstance(meta_inputs, (tuple, list)):
        return tuple(meta_inputs), {}
    raise NotCaptured(f"meta_inputs is a {type(meta_inputs).__name__}", advice="a dict of keyword arguments, or a tuple of positional ones")


def leaf_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A name for every leaf of the inputs: its keyword, or its position."""
    return [pytree.keystr(path[1:]).strip("[]'").replace("']['", ".").replace("][", ".").replace("'", "") for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]


def output_names(outputs: Any, has_loss: bool) -> list[str]:
    names = [pytree.keystr(path).lstrip(".").strip("[]'").replace("'", "").replace("][", ".") or "out" for path, _ in pytree.tree_flatten_with_path(outputs)[0]]
    return ["loss", *names[1:]] if has_loss else names


class _Fakes:
    """One fake for each tensor, by identity, so that ties stay ties."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode, self._made = mode, {}                       # type: ignore[var-annotated]

    def __call__(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._made:
            with torch.no_grad():
                meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            fake = FakeTensor(self.mode, meta, torch.device("cpu"))
            if isinstance(tensor, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                fake.requires_grad_()
            self._made[id(tensor)] = fake, tensor
        return self._made[id(tensor)][0]

    @contextlib.contextmanager
    def swapped_into(self, root: torch.nn.Module) -> Iterator[None]:
        """The model's parameters, buffers and tensor attributes are fakes inside, themselves again outside."""
        undo: list[tuple[dict[str, Any], str, Tensor]] = []
        try:
            for module in root.modules():
                for held in (module._parameters, module._buffers, module.__dict__):
                    for name, value in list(held.items()):
                        if isinstance(value, Tensor):
                            undo.append((held, name, value))   # type: ignore[arg-type]
                            held[name] = self(value)           # type: ignore[index]
            yield
        finally:
            for held, name, value in undo:
                held[name] = value


class _Recorder(TorchFunctionMode):
    """Sees every torch function and writes one node for each that makes a tensor."""

    def __init__(self, root: torch.nn.Module) -> None:
        super().__init__()
        self.root, self.graph = root, fx.Graph()
        self.nodes: dict[int, fx.Node] = {}                    # id(tensor) -> the node that made it
        self.alive: list[Any] = []                             # ids stay unique while their tensors live
        self.attributes: dict[int, tuple[str, ...]] = {}
        self.kinds: dict[int, str] = {}
        self.modules: list[str] = []
        self.counts: dict[str, int] = {}
        self.inside = ""                                       # the torch function being executed
        self.drew_random = self.wrote_in_place = ""

    # -- what enters and leaves

    def add_input(self, tensor: Tensor, name: str) -> str:
        node = self.graph.placeholder(_identifier(name))
        self._bind(tensor, node, Info(name, "input", (TensorType.of(tensor),)))
        return str(node.target)

    def learn_names(self) -> None:
        """Every name of every parameter and buffer, by the identity of the fake that stands for it."""
        for kind, named in (("parameter", self.root.named_parameters(remove_duplicate=False)), ("buffer", self.root.named_buffers(remove_duplicate=False))):
            for name, tensor in named:
                self.attributes[id(tensor)] = (*self.attributes.get(id(tensor), ()), name)
                self.kinds[id(tensor)] = kind
        self.paths = {id(m): n for n, m in self.root.named_modules()}

    def add_output(self, tensors: list[Tensor]) -> None:
        node = self.graph.output(tuple(self._node(t) for t in tensors))
        node.meta["info"] = Info("out", "output", tuple(TensorType.of(t) for t in tensors))
        node.meta["fake"] = tensors

    # -- what happens between

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        hooks = torch.nn.modules.module
        thread = threading.get_ident()

        def enter(module: torch.nn.Module, _: Any) -> None:
            if threading.get_ident() == thread:
                self.modules.append(self.paths.get(id(module), self.modules[-1] if self.modules else ""))

        def leave(module: torch.nn.Module, *_: Any) -> None:
            if threading.get_ident() == thread:
                self.modules.pop()

        handles = hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave, always_call=True)
        try:
            with _Watch(self), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", str(function))
        if function in _QUERIES:
            return function(*args, **kwargs)
        if function in _VALUES:
            raise NotCaptured(f"the model asks for the value of a tensor ({name}), which a graph cannot hold", at=self.source(), seen=self._seen(args))
        if name in _HOOKS:
            raise NotCaptured(f"{name} on a tensor inside the model would be lost", at=self.source(), seen=self._seen(args), advice="hooks on parameters of the parallel model")
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise NotCaptured("a region under autocast is not captured yet", at=self.source(), seen=self._seen(args), advice="casts written out")
        if is_in_place(function, kwargs):
            raise NotCaptured(f"{name} writes to a tensor in place, which is not captured yet", at=self.source(), seen=self._seen(args), advice="the form that returns a new tensor")
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
                raise self._outsider(leaf)
        outer, self.inside = self.inside, resolve_name(function) or name
        self.drew_random = self.wrote_in_place = ""
        try:
            result = function(*args, **kwargs)
        except Exception as e:
            if type(e).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
                raise NotCaptured(f"{name} depends on the values of a tensor, which a graph cannot hold", at=self.source(), seen=self._seen(args)) from e
            raise
        finally:
            self.inside = outer
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not outputs:
            return result
        if self.drew_random and _canonical_name(function) not in RANDOM:
            raise NotCaptured(f"{name} draws random numbers, which are not captured yet", at=self.source(), advice="dropout, or attention with dropout")
        if self.wrote_in_place:
            raise NotCaptured(f"{name} writes to a tensor in place ({self.wrote_in_place}), which is not captured yet", at=self.source(), seen=self._seen(args))
        if any(id(leaf) in self.nodes for leaf in outputs) and outputs == [result]:
            return result                                      # the operand itself: nothing was computed
        try:
            self._record(function, args, kwargs, result)
        except KeyError as e:
            raise NotCaptured(f"the tensor attribute {e} is not captured", at=self.source(), seen=self._seen(args)) from e
        return result

    def _record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        op, arguments = lookup(function, args, kwargs, result)
        node = self.graph.create_node("call_function", op, (), self._arguments(arguments), name=_identifier(f"{self.module}.{op.name}"))
        outputs = tuple(TensorType.of(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
        node.meta["info"] = Info(self.key(op.name), "op", outputs, self.module, self.source())
        self._bind_all(result, node)

    def _bind_all(self, result: Any, node: fx.Node) -> None:
        node.meta["fake"] = result
        if isinstance(result, Tensor):
            self.nodes[id(result)] = node
            self.alive.append(result)
            return
        if not isinstance(result, (list, tuple)) or not all(isinstance(leaf, Tensor) for leaf in result):
            raise NotCaptured(f"{node.target} gives a structure that is not captured yet", at=self.source(), seen=str(type(result)))
        about = node.meta["info"]
        for i, leaf in enumerate(result):
            part = self.graph.create_node("call_function", operator.getitem, (node, i), name=f"{node.name}_{i}")
            self._bind(leaf, part, replace(about, key=f"{about.key}[{i}]", kind="part", outputs=(about.outputs[i],)))

    def _bind(self, tensor: Tensor, node: fx.Node, about: Info) -> None:
        node.meta["info"], node.meta["fake"] = about, tensor
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)

    def _arguments(self, value: Any) -> Any:
        """Tensors become the nodes that made them."""
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._arguments(v) for v in value)
        if isinstance(value, dict):
            return {k: self._arguments(v) for k, v in value.items()}
        return value

    def _node(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self.nodes:
            if id(tensor) not in self.attributes:
                raise self._outsider(tensor)
            names = self.attributes[id(tensor)]
            last = next((n for n in reversed(self.graph.nodes) if n.op in ("placeholder", "get_attr")), None)
            with self.graph.inserting_after(last) if last else contextlib.nullcontext():
                node = self.graph.create_node("get_attr", names[0], name=_identifier(names[0]))
            self._bind(tensor, node, Info(names[0], self.kinds[id(tensor)], (TensorType.of(tensor),), names=names))
        return self.nodes[id(tensor)]

    def _outsider(self, tensor: Tensor) -> NotCaptured:
        return NotCaptured("a tensor from outside the model and its inputs would become a constant", at=self.source(), seen=str(TensorType.of(tensor)),
                           advice="register it as a buffer, or pass it as an input")

    # -- where it happens

    @property
    def module(self) -> str:
        return self.modules[-1] if self.modules else ""

    def key(self, op: str) -> str:
        """A node's name in plans: module path and op, numbered where the same op comes again there."""
        base = f"{self.module}/{op}"
        self.counts[base] = self.counts.get(base, -1) + 1
        return base if not self.counts[base] else f"{base}.{self.counts[base]}"

    def source(self) -> str:
        """The nearest line that is neither torch's nor ours."""
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(_NOT_THE_USERS):
                return f"{Path(code.co_filename).name}:{frame.f_lineno}, in {getattr(code, 'co_qualname', code.co_name)}"
            frame = frame.f_back                               # type: ignore[assignment]
        return ""

    def _seen(self, args: Any) -> str:
        return ", ".join(str(TensorType.of(leaf)) for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor))


class _Watch(TorchDispatchMode):
    """Below the function mode: what it cannot see, and what the op itself says it does."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        recorder = self.recorder
        if not recorder.inside and function is not torch.ops.aten.detach.default:
            raise NotCaptured(f"{function} runs below torch's function level, where it would be lost", at=recorder.source())
        if torch.Tag.nondeterministic_seeded in function.tags and not _is_without_chance(function, args):
            recorder.drew_random = str(function)
        if function._schema.is_mutable and any(id(a) in recorder.nodes for a, of in zip(args, function._schema.arguments) if of.alias_info and of.alias_info.is_write):
            recorder.wrote_in_place = str(function)            # a composite op may write to what it has just made
        return function(*args, **(kwargs or {}))


def _is_without_chance(function: Any, args: tuple[Any, ...]) -> bool:
    """Random ops called so that they draw nothing, such as attention with a dropout probability of 0."""
    arguments = dict(zip((a.name for a in function._schema.arguments), args, strict=False))
    return "dropout_p" in {a.name for a in function._schema.arguments} and not arguments.get("dropout_p")


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name).strip("_") or "value"
