"""Write down every torch function that a module calls, as a list of pure ops.

    a function mode          sees every torch function, before autograd: one node each
    the fake mode below      sees what the function mode cannot: ops inside TorchScript and transforms, writes, random
    draws

Writes in place become new values (`values.py`); answers to questions about values come from `branches.py`.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.graph.graph import Assume, Info, TensorType
from autopar.letters import NotCaptured
from autopar.ops.entry import OPS, SPELLINGS, WRITES, Apply
from autopar.ops.lookup import functional, lookup
from autopar.runtime.private import clean_room
from autopar.tracer import branches
from autopar.tracer.casts import Casts
from autopar.tracer.hooks import Hooks
from autopar.tracer.respelled import RESPELLED
from autopar.tracer.values import Values

_T = Tensor
QUERIES = frozenset(
    {
        _T.size,
        _T.dim,
        _T.numel,
        _T.stride,
        _T.is_floating_point,
        _T.is_complex,
        _T.is_contiguous,
        _T.element_size,
        _T.__len__,
        _T.storage_offset,
        _T.ndimension,
        _T.get_device,
        _T.__hash__,
        _T.nelement,
        _T.is_signed,
        _T.is_same_size,
        _T.is_inference,
        _T.dim_order,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        torch.is_tensor,
        torch.is_same_size,
        torch.is_grad_enabled,
        torch.get_default_dtype,
        torch.result_type,
        torch.can_cast,
        torch.promote_types,
        torch.iinfo,
        torch.finfo,
    }
)
REFUSED = {
    **dict.fromkeys(
        (_T.register_hook, _T.retain_grad, _T.register_post_accumulate_grad_hook),
        ("a hook on a tensor inside the model would be lost", "hooks on parameters of the parallel model"),
    ),
    **dict.fromkeys(
        (_T.backward, torch.autograd.grad, torch.autograd.backward),
        ("a derivative is taken inside the model, which a graph of its forward cannot hold", "the loss as an output"),
    ),
    **dict.fromkeys(
        (_T.set_, _T.resize_, _T.resize_as_, _T.detach_, _T.as_strided_, _T.data.__set__, _T.grad.__set__),
        ("a tensor is given another shape or storage in place", "the form that returns a new tensor"),
    ),
    **dict.fromkeys(
        (_T.apply_, _T.map_, _T.map2_), ("a Python function is called for each element", "torch functions")
    ),
    **dict.fromkeys(
        (_T.as_strided, torch.as_strided),
        ("as_strided reads a tensor by its memory layout, which a plan may change", "narrow, view or index"),
    ),
    **dict.fromkeys(
        (_T.numpy, _T.__array__, _T.data_ptr, _T.untyped_storage, _T.storage),
        ("the model leaves torch with a tensor's memory", "torch functions"),
    ),
}
TRUTHS = frozenset("eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf isfinite".split())
OVERWRITES = frozenset(
    "full_like bernoulli uniform_like normal_like exponential_like log_normal_like cauchy_like "
    "geometric_like random_like".split()
)
DRAWN = OVERWRITES - {"full_like"}
TURNED = frozenset(
    {_T.swapaxes_, _T.swapdims_, _T.transpose_, _T.t_, _T.squeeze_, _T.unsqueeze_}
)  # another shape in place, the same numbers
VALUES = frozenset({_T.item, _T.tolist, _T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.__complex__})
SHAPES = frozenset(
    {
        _T.nonzero,
        torch.nonzero,
        torch.argwhere,
        _T.argwhere,
        torch.masked_select,
        _T.masked_select,
        torch.unique,
        _T.unique,
        torch.unique_consecutive,
        _T.unique_consecutive,
        torch.bincount,
        _T.bincount,
    }
)
SAYS_ITS_SHAPE = {  # the call with the same result whose shape numbers say
    "one_hot": "one_hot(x, num_classes=n)",
    "tensor_split": "tensor_split(x, [i, j, ...]), with a list of numbers",
    "repeat_interleave": "repeat_interleave(x, counts, output_size=n), or one count for all",
    "bincount": "one_hot(x, num_classes=n).sum(0)",
}
_IN_PLACE = frozenset(
    f"__{n}__"
    for n in (
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "ipow",
        "imod",
        "iand",
        "ior",
        "ixor",
        "ilshift",
        "irshift",
        "setitem",
        "idiv",
    )
)
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), str(Path(contextlib.__file__)))
_CONTAINERS = (list, tuple, dict)

_OF_ONE_DTYPE = frozenset(
    {
        "linear",
        "mm",
        "matmul",
        "addmm",
        "baddbmm",
        "bilinear",
        "mv",
        "dot",
        *(f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3)),
    }
)


class Recorder(TorchFunctionMode):
    """Sees every torch function and writes one node for each that makes a tensor."""

    def __init__(self, root: torch.nn.Module, assume: Assume) -> None:
        super().__init__()
        self.root, self.assume, self.graph, self.below = root, assume, fx.Graph(), Below(self)
        self.values = Values(self)
        self.casts = Casts(self)
        self.hooks = Hooks(self)
        self.top: fx.Node | None = None  # the last input or attribute: they stand together on top
        self.attributes: dict[int, tuple[str, ...]] = {}
        self.kinds: dict[int, str] = {}
        self.made: list[weakref.ref[Tensor]] = []
        self.modules: list[str] = []
        self.regions: list[int] = []  # checkpoint regions that are open
        self.region_count = 0
        self.open: list[Any] = []  # composite functions whose bodies are running
        self.counts: dict[str, int] = {}
        self.thread = threading.get_ident()
        self.assumptions: list[str] = []
        self.inside: Any = None  # the torch function being executed
        self.drew: Any = None  # the random ATen op that it came to
        self.wrote: list[tuple[Any, Tensor]] = []  # the ATen ops that wrote, and to what
        self.closed: set[int] | None = None  # inside an autograd.Function: the tensors it was given
        self.watched = False  # the model is running
        self.transforming = False  # inside vmap, grad, jvp
        self.origins: dict[int, fx.Node] = {}  # id(tensor) -> the node that it entered as
        self.sharing: set[int] = set()  # ids of the tensors whose memory has another name
        self.last_letter: NotCaptured | None = None  # TorchScript swallows what is raised inside it
        self.detached_below: list[fx.Node] = []
        self.taken: set[str] = set()  # names that plans know
        self.held: list[Tensor] = []  # the fakes of the module's tensors
        self.modules_before: list[
            tuple[torch.nn.Module, str, dict[str, Any], dict[str, Tensor | None], dict[str, Any]]
        ] = []  # what modules held at the start
        self.parameters_before: dict[int, dict[str, Any]] = {}
        self.asked: set[str] = set()  # the declared branches that were asked for
        self.reassigned: list[tuple[str, Tensor]] = []  # buffers that forward has set to another tensor

    # -- what enters and leaves

    def add_input(self, tensor: Tensor, name: str) -> str:
        node = self.top = self.origins[id(tensor)] = self.graph.placeholder(identifier(name))
        self.values.bind(tensor, node, Info(name, "input", (TensorType.of(tensor),)))
        return str(node.target)

    def learn_names(self, held: list[Tensor]) -> None:
        """Every name of every tensor that the module holds, by the identity of the fake that stands for it."""
        named = [("parameter", n, p) for n, p in self.root.named_parameters(remove_duplicate=False)] + [
            ("buffer", n, b) for n, b in self.root.named_buffers(remove_duplicate=False)
        ]
        for path, module in self.root.named_modules():  # a plain attribute is a buffer too, in a list or a dict as well
            for n, v in vars(module).items():
                if n not in ("_parameters", "_buffers", "_modules"):
                    inside = enumerate(v) if isinstance(v, (list, tuple)) else v.items() if isinstance(v, dict) else ()
                    named += [
                        ("buffer", ".".join(filter(None, (path, n, *rest))), t)
                        for rest, t in (((), v), *(((str(k),), e) for k, e in inside))
                        if isinstance(t, Tensor)
                    ]
        for kind, name, tensor in named:
            self.attributes[id(tensor)] = (*self.attributes.get(id(tensor), ()), name)
            self.kinds.setdefault(id(tensor), kind)
        self.paths = {id(m): n for n, m in self.root.named_modules()}
        self.held = held
        self.taken = {name for names in self.attributes.values() for name in names}
        for node in self.graph.find_nodes(op="placeholder"):
            about: Info = node.meta["info"]
            node.meta["info"] = replace(about, key=self.apart("input", about.key))

    def apart(self, kind: str, name: str, prefix: str = "") -> str:
        """A name for an input or output that no tensor of the model and no other input has in plans.

        "input mask" where a buffer is called mask.
        """
        while prefix + name in self.taken:
            name = f"{kind} {name}"
        self.taken.add(prefix + name)
        return name

    def notice_changes(self) -> None:
        """What forward has set on its modules: buffers become outputs.

        Other attributes are not kept, and the graph says so.
        """
        for module, path, attributes, buffers, contents in self.modules_before:
            for name, new in module._buffers.items():
                old = buffers.get(name)
                if new is not old and isinstance(new, Tensor):
                    full = f"{path}.{name}" if path else name
                    if (
                        old is not None
                        and (old.shape != new.shape or old.dtype != new.dtype)
                        and self.values.node(old) is not None
                    ):
                        raise self.letter(
                            f"forward reads the buffer {full} and then gives it another shape or dtype",
                            (new,),
                            "a buffer of fixed shape, written in place",
                        )
                    self.reassigned.append((full, new))
            parameters, kept = dict(module._parameters.items()), dict(module._buffers.items())
            for name, old in buffers.items():
                if old is not None and kept.get(name) is None:
                    raise self.letter(
                        f"forward takes the buffer {path}.{name} away".replace(" .", " "), (), "a buffer that stays"
                    )
            for name, old in self.parameters_before[id(module)].items():
                if parameters.get(name) is not old:
                    raise self.letter(
                        f"forward replaces the parameter {path}.{name}".replace(" .", " "), (), "parameters that stay"
                    )
            if dict(module._modules.items()) != dict(contents.get("_modules", module._modules).items()):
                self.assumptions.append(f"the submodules that forward sets on {path or 'the model'} are not kept")
            for name, value in vars(module).items():
                old = attributes.get(name, attributes)
                is_same = value is old or (
                    isinstance(value, (bool, int, float, str)) and type(value) is type(old) and value == old
                )
                if not is_same or (name in contents and not name.startswith("_") and len(value) != len(contents[name])):
                    self.assumptions.append(
                        f"the attribute {name} that forward sets on {path or 'the model'} is not kept"
                    )

    def updates(self, inputs: list[Any]) -> list[tuple[str, str, Tensor]]:
        """The buffers and inputs that stand for another value than at the start."""
        found = [
            ("buffer", names[0], t)
            for t in self.held
            if (names := self.attributes.get(id(t))) and self.kinds[id(t)] == "buffer" and self._has_changed(t)
        ]
        given = [n.meta["info"].key for n in self.graph.nodes if n.op == "placeholder"]
        found += [
            ("input", name, t)
            for name, t in zip(given, (leaf for leaf in inputs if isinstance(leaf, Tensor)), strict=True)
            if self._has_changed(t)
        ]
        return [*found, *(("buffer", name, t) for name, t in self.reassigned)]

    def _has_changed(self, tensor: Tensor) -> bool:
        node = self.values.node(tensor)
        return node is not None and node is not self.origins.get(id(tensor))

    def add_output(self, tensors: list[Tensor]) -> None:
        nodes = tuple(self.node(t) for t in tensors)
        node = self.graph.output(nodes)
        kinds = (
            replace(TensorType.of(t), requires_grad=t.requires_grad and n.meta["info"].outputs[0].requires_grad)
            for t, n in zip(tensors, nodes, strict=True)
        )
        node.meta["info"] = Info("out", "output", tuple(kinds))

    def close(self) -> None:
        """Fakes hold their mode, the mode the recorder, the recorder the fakes, and autograd holds them where no
        collector sees: the ring is opened here.
        """
        self.made = [weakref.ref(t) for t in self.values.alive]
        for held in (
            self.values.alive,
            self.values.recipes,
            self.values._sharing,
            self.held,
            self.reassigned,
            self.modules_before,
            self.parameters_before,
            self.casts.cached,
            self.below.remembered,
        ):
            held.clear()
        del self.root

    # -- what happens between

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        hooks = torch.nn.modules.module

        def enter(module: torch.nn.Module, _: Any) -> None:
            if threading.get_ident() == self.thread:
                self.modules.append(self.paths.get(id(module), self.module))

        def leave(module: torch.nn.Module, *_: Any) -> None:
            if threading.get_ident() == self.thread:
                self.modules.pop()

        handles = (
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        )
        self.watched = True
        try:
            with self:
                yield
        finally:
            self.watched = False
            for handle in handles:
                handle.remove()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        trait = TRAITS.get(function) or _trait(function)
        if self.inside is not None or trait is _query:
            return function(*args, **kwargs)
        if torch._C._are_functorch_transforms_active():  # its tensors are wrapped: what is inside comes by below
            self.transforming = True
            try:
                return function(*args, **kwargs)
            finally:
                self.transforming = False
        if trait is _op and function in _INPLACE_AT and _is_asked(function, args, kwargs):
            trait = _in_place
        if trait is _op and self.casts.on():
            return self.casts.call(function, args, kwargs)
        return trait(self, function, args, kwargs)

    def depends_on_values(self, function: Callable[..., Any], args: tuple[Any, ...]) -> NotCaptured:
        """The letter for a function whose result has a shape that only the values of a tensor say."""
        name = name_of(function)
        what = f"the shape of {name}'s result depends on the values of a tensor, which a graph cannot hold"
        return self.letter(what, args, SAYS_ITS_SHAPE.get(name, "torch.where, or a mask of fixed shape"))

    def execute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function on the fakes, and note what it does below."""
        for tensor in tensors_in(args, kwargs):
            if not isinstance(tensor, FakeTensor):
                raise self.outsider(tensor)
        self.inside, self.drew, self.wrote = function, None, []
        try:
            return function(*args, **kwargs)
        except Exception as e:
            is_told = type(e).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException")
            if is_told or "data is not allocated yet" in str(e):  # a kernel that reads values where others read shapes
                raise self.depends_on_values(function, args) from e
            if isinstance(e, AssertionError) and "FakeTensor" in str(e):
                raise self.letter(
                    f"{name_of(function)} uses a tensor from outside the model and its inputs", args
                ) from e
            raise
        finally:
            self.inside = None

    def record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Write a node for a call that gave `result`."""
        outputs = tensors_in((result,), {})
        if (
            self.wrote
            and any(self.values.shares_storage(t) for _, t in self.wrote)
            and (function not in SPELLINGS or SPELLINGS[function][0].name not in WRITES)
        ):
            raise self.letter(
                f"{name_of(function)} writes to a tensor that it was given ({self.wrote[0][0]})",
                args,
                "the form that returns a new tensor",
            )
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
        made, arguments = lookup(function, args, kwargs, result)
        if (
            made.name in _OF_ONE_DTYPE
            and len(
                dtypes := {
                    str(t.dtype).removeprefix("torch.") for t in tensors_in((arguments,), {}) if t.is_floating_point()
                }
            )
            > 1
        ):
            raise self.letter(
                f"{made.name} of {' and '.join(sorted(dtypes))}: on real tensors torch refuses to mix them, on "
                "fakes it does not",
                args,
                "inputs of the model's own dtype",
            )
        if made.name in WRITES and self.writes(
            made, arguments
        ):  # torch's schema of batch_norm does not say that it writes
            made, written_to, _ = WRITES[made.name]
            node = self.emit(made, arguments, (*outputs, *(arguments[n] for n in written_to)), self.drew is not None)
            parts = self.split(node)
            self.values.bind(outputs[0], parts[0])
            for part, target in zip(parts[1:], written_to, strict=True):
                self.values.write(arguments[target], part)
            return
        self.values.bind_all(result, self.emit(made, arguments, outputs, self.drew is not None), (made, arguments))

    def writes(self, op: Any, arguments: dict[str, Any]) -> bool:
        """Does this call write to its arguments?"""
        _, written, flag = WRITES[op.name]
        return arguments.get(flag, op.signature.parameters[flag].default) and all(
            arguments.get(n) is not None for n in written
        )

    def record_below(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, writes: bool
    ) -> None:
        """An ATen op that ran outside any torch function: in TorchScript, under vmap, in a transform.

        It stands below autograd, which works it out anew at replay.
        """
        if (
            self.transforming and function is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor)
        ):  # torch.tensor(...) inside a transform
            with clean_room():
                data = args[0].tolist()
            self.values.bind_all(
                result, self.emit(OPS["tensor"], {"data": data, "dtype": args[0].dtype}, (result,)), (OPS["tensor"], {})
            )
            return
        for tensor in tensors_in(args, kwargs):
            if not isinstance(tensor, FakeTensor) and tensor.dim():
                raise self.outsider(tensor)
        args, kwargs = pytree.tree_map(
            lambda v: v.item() if isinstance(v, Tensor) and not isinstance(v, FakeTensor) else v, (args, kwargs)
        )  # a Python number on its way
        flows = (
            torch.is_grad_enabled()
            and function is not torch.ops.aten.detach.default
            and any(self.node(t).meta["info"].outputs[0].requires_grad for t in tensors_in(args, kwargs))
        )

        def type_of(tensor: Tensor) -> TensorType:
            type_ = TensorType.of(tensor)
            return replace(type_, requires_grad=flows and type_.may_have_gradient)

        if writes:
            self.values.refuse_write(args[0], str(function))
            made, arguments = functional(function, args, kwargs)
            if made is None:
                made, arguments = OPS["copy"], {"input": args[0], **arguments}
            if any(t is not args[0] for f, t in self.wrote if f is function):
                raise self.letter(
                    f"{function} writes to another operand than its first", args, "the form that returns new tensors"
                )
            self.values.write(args[0], self.emit(made, arguments, (type_of(args[0]),), self.drew is not None))
        elif not (isinstance(result, Tensor) and self.knows(result)):
            made, arguments = lookup(function, args, kwargs, result)
            outputs = tensors_in((result,), {})
            if outputs:
                node = self.emit(made, arguments, tuple(map(type_of, outputs)), self.drew is not None)
                if made.name == "detach" and not self.transforming and torch.is_grad_enabled():
                    self.detached_below.append(node)
                self.values.bind_all(result, node, (made, arguments))
        self.drew, self.wrote = None, []

    def apply(self, cls: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An autograd.Function is one node, kept with its backward; what is inside is its own affair."""
        if self.casts.on():
            raise self.letter(
                f"the autograd.Function {cls.__name__} runs under autocast",
                args,
                "torch.autocast(..., enabled=False) around it, and casts written out",
            )
        self.closed = {id(t) for t in tensors_in(args, kwargs)}
        try:
            with torch._C.DisableTorchFunction():
                result = self.execute(original, args, kwargs)
                self.record(Apply(cls), args, kwargs, result)
        finally:
            self.closed = None
        return result

    def check_closed(self, args: Any) -> None:
        """What an autograd.Function reads it must have been given, or its gradient is lost."""
        for tensor in tensors_in(args, {}):
            if self.knows(tensor) and id(tensor) not in self.closed:  # type: ignore[operator]
                raise self.letter(
                    "an autograd.Function reads a tensor that it was not given", (tensor,), "passing it as an argument"
                )

    def type_of_run(self, op: Any, arguments: dict[str, Any]) -> TensorType:
        """The type that an op gives, by running it on the fakes."""
        watched, self.watched = self.watched, False
        try:
            return TensorType.of(op.run(arguments))
        finally:
            self.watched = watched

    def emit(self, op: Any, arguments: dict[str, Any], outputs: Any, draws: bool = False) -> fx.Node:
        """A new op node, with its place in the program and in the source."""
        node = self.graph.create_node(
            "call_function", op, (), self.resolved(arguments), name=identifier(f"{self.module}.{op.name}")
        )
        kinds = tuple(o if isinstance(o, TensorType) else TensorType.of(o) for o in outputs)
        if not torch.is_grad_enabled():  # a view taken under no_grad says that it wants a gradient, and gives none
            kinds = tuple(replace(k, requires_grad=False) for k in kinds)
        node.meta["info"] = Info(
            self.key(op.name),
            "op",
            kinds,
            self.module,
            self.source(),
            random=0 if draws else -1,
            checkpoint=tuple(self.regions),
        )
        return node

    def split(self, node: fx.Node) -> list[fx.Node]:
        """The parts of an op with several outputs."""
        about, parts = node.meta["info"], []
        for i, type_ in enumerate(about.outputs):
            part = self.graph.create_node("call_function", operator.getitem, (node, i), name=f"{node.name}_{i}")
            part.meta["info"] = replace(about, key=f"{about.key}[{i}]", kind="part", outputs=(type_,), random=-1)
            parts.append(part)
        return parts

    def resolved(self, value: Any) -> Any:
        """Tensors become the nodes that stand for them now."""
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
        """The node that stands for a tensor now."""
        found = self.values.node(tensor)
        if found is not None:
            return found
        if id(tensor) not in self.attributes:
            raise self.outsider(tensor)
        names = self.attributes[id(tensor)]
        with self.graph.inserting_after(self.top) if self.top is not None else self.graph.inserting_before():
            node = self.top = self.origins[id(tensor)] = self.graph.create_node(
                "get_attr", names[0], name=identifier(names[0])
            )
        self.values.bind(tensor, node, Info(names[0], self.kinds[id(tensor)], (TensorType.of(tensor),), names=names))
        return node

    def knows(self, tensor: Tensor) -> bool:
        return id(tensor) in self.values.nodes or id(tensor) in self.attributes

    # -- letters, and where it happens

    def letter(self, what: str, args: Any, advice: str = "") -> NotCaptured:
        self.last_letter = NotCaptured(
            what,
            at=self.source(),
            seen=", ".join(str(TensorType.of(t)) for t in tensors_in((args,), {})),
            advice=advice,
        )
        return self.last_letter

    def outsider(self, tensor: Tensor) -> NotCaptured:
        return NotCaptured(
            "a tensor from outside the model and its inputs would become a constant",
            at=self.source(),
            seen=str(TensorType.of(tensor)),
            advice="register it as a buffer, or pass it as an input",
        )

    def assumed(self, what: str) -> None:
        """A line of `graph.assumptions`, with the user's line."""
        self.assumptions.append(f"{what}, at {self.source()}")

    @property
    def module(self) -> str:
        return self.modules[-1] if self.modules else ""

    @contextlib.contextmanager
    def within(self, path: str) -> Iterator[None]:
        """What is recorded inside belongs to that module."""
        self.modules.append(path)
        try:
            yield
        finally:
            self.modules.pop()

    def key(self, op: str) -> str:
        """A node's name in plans: module path and op, numbered where the same op comes again there."""
        base = f"{self.module}/{op}"
        self.counts[base] = self.counts.get(base, -1) + 1
        return base if not self.counts[base] else f"{base}.{self.counts[base]}"

    def source(self) -> str:
        """The nearest line that is neither torch's nor ours."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if not is_ours(code.co_filename):
                return (
                    f"{os.path.basename(code.co_filename)}:{frame.f_lineno}, in "
                    f"{getattr(code, 'co_qualname', code.co_name)}"
                )
            frame = frame.f_back
        return ""


_OURS: dict[str, bool] = {}


def is_ours(filename: str) -> bool:
    if filename not in _OURS:
        _OURS[filename] = filename.startswith(_NOT_THE_USERS) or filename.startswith("<")
    return _OURS[filename]


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute has another value inside."""
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", str(function))


def tensors_in(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among arguments, in order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _CONTAINERS):
            found += tensors_in(value.values() if isinstance(value, dict) else value, {})
    return found


# -- what a torch function is to the tracer: a handler each, looked up once


def _query(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _refused(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    what, advice = REFUSED[function]
    raise recorder.letter(f"{what} ({name_of(function)})", args, advice)


def _value(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return branches.answer(recorder, function, args[0])


def _shown(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """print(x) shows a tensor's form; a hook that does so looks for values."""
    if recorder.hooks.running:
        raise recorder.letter(
            f"a hook ({recorder.hooks.running[-1]}) shows a tensor, which has no values while a model is captured",
            args,
            "an output of the model, shown outside",
        )
    return function(*args, **kwargs)


def _shape(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise recorder.depends_on_values(function, args)


def _attribute(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = recorder.execute(function, args, kwargs)
    if isinstance(result, Tensor):
        try:
            recorder.record(function, args, kwargs, result)
        except KeyError as e:
            raise recorder.letter(f"the tensor attribute {e} is not captured", args) from e
    return result


def _op(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _refuse_generator(recorder, args, kwargs)
    if isinstance(kwargs.get("out"), Tensor):
        return _into(recorder, function, args, kwargs)
    result = recorder.execute(function, args, kwargs)
    recorder.record(function, args, kwargs, result)
    return result


def _into(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.mul(x, y, out=z): z stands for the product from here on."""
    target = kwargs["out"]
    recorder.values.refuse_write(target, f"{name_of(function)} to out=")
    before = TensorType.of(target)
    result = recorder.execute(function, args, kwargs)
    after = TensorType.of(target)
    if before.shape != after.shape:
        raise recorder.letter(
            f"{name_of(function)} gives out= another shape", args, "the form that returns a new tensor"
        )
    made, arguments = lookup(function, args, {k: v for k, v in kwargs.items() if k != "out"}, target)
    node = recorder.emit(made, arguments, (after,), recorder.drew is not None)
    if (made_type := recorder.type_of_run(made, arguments)).dtype != after.dtype:
        node.meta["info"] = replace(node.meta["info"], outputs=(made_type,))
        node = recorder.emit(OPS["to"], {"input": node, "dtype": target.dtype}, (after,))
    recorder.values.write(target, node)
    return result


def _in_place(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x.add_(y): x stands for a new value from here on."""
    target = args[0] if args else kwargs["input"]
    _refuse_generator(recorder, args, kwargs)
    recorder.values.refuse_write(target, name_of(function))
    made, arguments = functional(function, args, kwargs)
    if (
        function is _T.__setitem__
        and isinstance(args[2], Tensor)
        and recorder.values.is_that_view(args[0], args[1], args[2])
    ):
        return recorder.execute(function, args, kwargs)  # z[1:] += y puts back what is there already
    for other in tensors_in((), arguments):
        if other is not target and recorder.values.overlaps(other, target):
            raise recorder.letter(
                f"{name_of(function)} reads memory that it writes, through another view",
                args,
                "a copy of what it reads: .clone()",
            )
    if made is not None and made.name in DRAWN and not target.is_contiguous():
        raise recorder.letter(
            f"{name_of(function)} fills a view with draws, whose order depends on its memory",
            args,
            "draws in a tensor of its own",
        )
    may_promote = (
        len({t.dtype for t in tensors_in((), arguments)}) > 1
        or not target.is_floating_point()
        or (made is not None and made.name in TRUTHS)
    )
    before, old = recorder.resolved(arguments), recorder.node(target)  # the operands as they are before the write
    result = recorder.execute(function, args, kwargs)
    after = TensorType.of(target)
    if made is not None:
        node = recorder.emit(made, arguments, (after,), recorder.drew is not None)
        if (
            may_promote and (made_type := recorder.type_of_run(made, arguments)).dtype != after.dtype
        ):  # what promotes is cast back to the target's dtype
            node.meta["info"] = replace(node.meta["info"], outputs=(made_type,))
            node = recorder.emit(OPS["to"], {"input": node, "dtype": target.dtype}, (after,))
    else:  # a copy: the value itself, broadcast and cast
        node = before["source"]
        source = arguments["source"]
        if tuple(source.shape) != tuple(target.shape):
            node = recorder.emit(
                OPS["expand"],
                {"input": node, "size": tuple(target.shape)},
                (replace(TensorType.of(source), shape=tuple(target.shape)),),
            )
        if source.dtype != target.dtype:
            node = recorder.emit(OPS["to"], {"input": node, "dtype": target.dtype}, (after,))
    if (
        after.requires_grad and made is not None and made.name in OVERWRITES and torch.is_grad_enabled()
    ):  # what is overwritten has a gradient still: zeros
        never = recorder.emit(
            OPS["full"], {"size": (), "fill_value": False, "dtype": torch.bool}, (TensorType((), "bool"),)
        )
        node = recorder.emit(OPS["where"], {"condition": never, "input": old, "other": node}, (after,))
    recorder.values.write(target, node)
    return result


def _turned(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x.unsqueeze_(0): x stands for the view from here on.

    Nothing may look at its memory by another name, for then there are two shapes of one value.
    """
    target = args[0]
    if recorder.values.is_shared(target):
        raise recorder.letter(
            f"{name_of(function)} gives another shape to a tensor that others are views of",
            args,
            f"{name_of(function)[:-1]}",
        )
    before = recorder.node(target)
    result = recorder.execute(function, args, kwargs)
    made, arguments = lookup(getattr(_T, name_of(function)[:-1]), args, kwargs, target)
    recorder.values.rename(target, recorder.emit(made, {**arguments, "input": before}, (TensorType.of(target),)))
    return result


def _wants_gradient(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x.requires_grad = True on a tensor of forward's own gives it a .grad that nobody outside sees.

    On others it is a letter.
    """
    tensor, wanted = args[0], args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if tensor.requires_grad != wanted and (
        id(tensor) in recorder.attributes or recorder.node(tensor).op == "placeholder" or not wanted
    ):
        raise recorder.letter(
            "requires_grad of a tensor is changed inside the model", args, "setting it before tracing"
        )
    recorder.hooks.effects += tensor.requires_grad != wanted
    return recorder.execute(function, args, kwargs)


def _opened(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A composite Python function: its body is recorded instead."""
    if function in recorder.open:  # it asks torch again about its own call: no composite after all
        return _op(recorder, function, args, kwargs)
    recorder.open.append(function)
    checks = contextlib.ExitStack()
    try:
        if "overrides" in function.__code__.co_names:  # torch.nn.init asks torch.overrides itself
            for check in _CHECKS:
                checks.enter_context(patched(torch.overrides, check, lambda *_: False))
        with checks, recorder:
            return _OPEN[function](*args, **kwargs)
    finally:
        recorder.open.pop()


def _respelled(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that asks for values, or draws inside: what it comes to is recorded instead."""
    spelled, is_asked = RESPELLED[function]
    if not is_asked(args, kwargs):
        return (
            recorder.casts.call(function, args, kwargs)
            if recorder.casts.on()
            else _op(recorder, function, args, kwargs)
        )
    with recorder:
        return spelled(*args, **kwargs)


def _assertion(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An assertion about values changes none; one about shapes is checked here."""
    if not isinstance(args[0], Tensor):
        assert args[0], args[1] if len(args) > 1 else kwargs.get("message", "")


def _refuse_generator(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("generator") is not None:
        raise recorder.letter(
            "random numbers from a generator of the model's own are not captured",
            args,
            "torch's default generator, seeded by torch.manual_seed",
        )
    if isinstance(kwargs.get("out"), (tuple, list)):
        raise recorder.letter("results are written to out=", args, "the form that returns new tensors")


TRAITS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(QUERIES, _query),
    **dict.fromkeys(REFUSED, _refused),
    **dict.fromkeys(VALUES, _value),
    **dict.fromkeys(SHAPES, _shape),
    **dict.fromkeys(TURNED, _turned),
    **dict.fromkeys(RESPELLED, _respelled),
    **dict.fromkeys((torch._assert, torch._assert_async), _assertion),
    **dict.fromkeys((_T.__repr__, _T.__format__), _shown),
    **dict.fromkeys((_T.requires_grad_, _T.requires_grad.__set__), _wants_gradient),
}
_INPLACE_AT: dict[Any, int] = {}
_OPEN: dict[Any, Callable[..., Any]] = {}
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _trait(function: Any) -> Callable[..., Any]:
    """Which handler a function has, found once."""
    TRAITS[function] = found = _find_trait(function)
    return found


def _is_asked(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Is this call asked to write in place, by keyword or by position?"""
    position = _INPLACE_AT[function]
    return bool(kwargs.get("inplace", args[position] if len(args) > position else False))


def _find_trait(function: Any) -> Callable[..., Any]:
    name = name_of(function)
    if name == "__get__":
        return _attribute
    if (
        name == "__set__" and function.__self__.__name__ == "_backward_hooks"
    ):  # autograd clears them itself after a write
        return _query
    if name == "__set__":
        REFUSED[function] = (f"the attribute {function.__self__.__name__} of a tensor is set", "")
        return _refused
    if isinstance(function, types.FunctionType):
        parameters = list(function.__code__.co_varnames[: function.__code__.co_argcount])
        if function not in SPELLINGS and any(check in function.__code__.co_names for check in _CHECKS):
            namespace = {**function.__globals__, **dict.fromkeys(_CHECKS, lambda *_: False)}
            _OPEN[function] = types.FunctionType(
                function.__code__, namespace, name, function.__defaults__, function.__closure__
            )
            _OPEN[function].__kwdefaults__ = function.__kwdefaults__
            return _opened
        if "inplace" in parameters:
            _INPLACE_AT[function] = parameters.index("inplace")
    if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return _in_place
    return _op


class Below(FakeTensorMode):
    """The fake mode, which also tells the recorder what it cannot see from above."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder, self.deep = recorder, False
        self.remembered: dict[Any, Any] = {}  # (op, operands' shapes, ...) -> shape, stride and dtype of its result

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:
            return torch.device("meta") if self.in_kernel_invocation else args[0].fake_device
        recorder = self.recorder
        if self.deep or threading.get_ident() != recorder.thread:
            return self.dispatch(function, types, args, kwargs or {})
        self.deep, above = True, recorder.inside
        recorder.inside = above or function  # nothing from here on is the model's own call
        try:
            writes, draws, _ = _NATURE.get(function) or _nature(function)
            if "c10d" in function.namespace:
                raise recorder.letter(
                    f"the model communicates itself ({function})",
                    args,
                    "the single-device program: the plan brings the collectives",
                )
            if draws and not _is_without_chance(function, args, kwargs or {}):
                recorder.drew = function
            if writes:
                recorder.wrote += [
                    (function, a)
                    for a, of in zip(args, function._schema.arguments)
                    if of.alias_info and of.alias_info.is_write and isinstance(a, Tensor)
                ]
            if recorder.closed is not None:
                recorder.check_closed(args)
            if self.recorder.casts.noted is not None and _NATURE[function][2] != "view":  # views and casts commute
                recorder.casts.note(function, args)
            result = self.fake(function, types, args, kwargs or {})
            if above is None and recorder.watched:
                recorder.record_below(function, args, kwargs or {}, result, writes)
            return result
        except Exception as e:
            if above is None and type(e).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
                raise recorder.depends_on_values(function, args) from e
            raise
        finally:
            self.deep, recorder.inside = False, above

    def fake(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op on fakes.

        Torch's own way through takes most of the time of a capture, so plain cases are short-cut: a view is taken of
        the
        meta tensor inside, and what an op made of operands like these is remembered."""
        if function in _LENIENT:
            return _LENIENT[function](*args, **kwargs)
        kind = _NATURE[function][2]
        if kind == "view" and type(args[0]) is FakeTensor:
            with in_kernel_invocation_manager(self):
                made = function(*args, **kwargs)
            return FakeTensor(self, made, torch.device("cpu"))
        key = None if kind != "fresh" else _described((function, args, *kwargs.items()) if kwargs else (function, args))
        if key is None:
            return self.dispatch(function, types, args, kwargs)
        known = self.remembered.get(key)
        if known is not None:
            shape, stride, dtype = known
            return FakeTensor(self, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), torch.device("cpu"))
        result = self.dispatch(function, types, args, kwargs)
        if type(result) is FakeTensor and result.constant is None and result.fake_device.type == "cpu":
            self.remembered[key] = result.shape, result.stride(), result.dtype
        return result


def _described(value: Any) -> Any:
    """What an op's result can depend on, hashable; None: look closer."""
    if type(value) is FakeTensor:
        return (
            None
            if value.constant is not None or value.fake_device.type != "cpu"
            else (value.shape, value.stride(), value.dtype)
        )
    if isinstance(value, (tuple, list)):
        parts = tuple([_described(v) for v in value])
        return None if None in parts else parts
    if isinstance(value, Tensor):
        return None
    return (type(value), value)


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The shape of a grouped product: torch's own rule takes bfloat16 only, its kernel takes more."""
    shape: tuple[int, ...]
    if a.dim() == 2 and b.dim() == 3:
        shape = (a.shape[0], b.shape[-1])
    elif a.dim() == 3:
        shape = (*b.shape[:-2], a.shape[-2], b.shape[-1])
    else:
        assert offs is not None
        shape = (offs.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


_LENIENT: dict[Any, Callable[..., Tensor]] = {torch.ops.aten._grouped_mm.default: _grouped_mm}


_NATURE: dict[Any, tuple[bool, bool, str]] = {}


def _nature(function: Any) -> tuple[bool, bool, str]:
    """Does it write, does it draw, and what is its result.

    A view of its operand, a fresh tensor of its operands' shapes, or something else?
    """
    schema = function._schema
    single = (
        len(schema.returns) == 1
        and isinstance(schema.returns[0].type, torch.TensorType)
        and function.namespace == "aten"
    )
    kind = (
        ""
        if schema.is_mutable or not single
        else "view"
        if function.is_view
        else "fresh"
        if not schema.returns[0].alias_info
        else ""
    )
    if (
        torch.Tag.dynamic_output_shape in function.tags
        or torch.Tag.data_dependent_output in function.tags
        or "lift" in schema.name
        or not any(isinstance(a.type, torch.TensorType) or str(a.type) == "List[Tensor]" for a in schema.arguments)
    ):
        kind = ""
    _NATURE[function] = found = schema.is_mutable, torch.Tag.nondeterministic_seeded in function.tags, kind
    return found


def _is_without_chance(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Random ops called so that they draw nothing, such as attention with a dropout probability of 0, or what draws in
    training only.
    """
    names = [a.name for a in function._schema.arguments]
    said = {**dict(zip(names, args, strict=False)), **kwargs}
    return any(n in names and not said.get(n) for n in ("dropout_p", "training"))


def identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name).strip("_") or "value"
