"""Refuse models, inputs and outputs that a graph cannot hold, each by a letter, before or after forward runs."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import os
import sys
import traceback
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.graph.calls import leaf_names
from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.letters import Letter, NotCaptured, NotServed
from autopar.runtime import patches
from autopar.tracer.place import is_ours
from autopar.tracer.recorder import Recorder

_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_RUN_ON_SHAPES = (
    "inputs of the shapes and dtypes that it is called with; it was run on shapes alone: an op that cannot be needs "
    "torch.library.register_fake"
)
_RUN_WHAT_THE_MODEL_RUNS = (
    "_run",
    "follow",
    "_forward",
    "_loss_of",
    "execute",
    "fake",
    "dispatch",
    "grouped_mm_on_fakes",
    "assertion",
    "original",
    "__torch_dispatch__",
    "__torch_function__",
)
# functions that call what the model calls, with nothing between, or stand for it
_CALL_TORCH = ("execute", "fake", "dispatch", "grouped_mm_on_fakes", "assertion")

_IN_FORWARD_MODE = "elem.device.type must be 'meta'"  # torch says so of a tangent


@contextlib.contextmanager
def telling_whose_error(who: str = "the model", advice: str = _RUN_ON_SHAPES) -> Iterator[None]:
    """Turn errors of the code of `who`, run in the block, into letters; autopar's own errors stay."""
    try:
        yield
    except Letter:
        raise
    except Exception as e:
        # methods that stand for torch's while models run in parallel are as good as torch's
        frames = [f for f in traceback.extract_tb(e.__traceback__) if f.filename != patches.__file__]
        ours = [f.name for f in frames if f.filename.startswith(_HERE)]
        is_raised_here = frames[-1].filename.startswith(_HERE) and frames[-1].name not in _CALL_TORCH
        if is_raised_here or ours[-1] not in _RUN_WHAT_THE_MODEL_RUNS:  # The error is autopar's.
            raise
        at = next((f for f in reversed(frames) if not is_ours(f.filename)), None) or next(
            (f for f in reversed(frames) if f.name == "forward"), frames[-1]
        )
        place = f"{os.path.basename(at.filename)}:{at.lineno}, in {at.name}"
        if isinstance(e, AssertionError) and _IN_FORWARD_MODE in str(e):
            raise NotCaptured(
                "a derivative is taken in forward mode, which cannot run on shapes alone",
                at=place,
                advice="torch.func.grad, vjp or jacrev, which go backward; torch.func.jvp, jacfwd and hessian do not",
            ) from e
        raise NotCaptured(
            f"{who} raises {type(e).__name__} on these inputs{_words_of(e)}", at=place, advice=advice
        ) from e


def _words_of(error: Exception) -> str:
    """The text of an error behind a colon; empty where the error cannot be printed."""
    try:
        return f": {error}"
    except Exception:  # A user's __str__ may fail.
        return ""


@contextlib.contextmanager
def refusing_higher_order_ops(recorder: Recorder) -> Iterator[None]:
    """Refuse torch.cond and the like, which hold graphs of their own."""
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
            "a higher-order op (torch.cond, a loop) is not captured",
            at=at,
            seen=str(e).partition("HigherOrderOperator")[2].split(" and ")[0].strip(),
            advice="torch.where, scaled_dot_product_attention, or a Python loop",
        ) from e


def refuse_other_arguments(root: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse inputs that the model's forward does not accept."""
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


def refuse_block_masks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse block masks of flex_attention as inputs, of which a graph holds neither blocks nor function."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    for name, value in (*enumerate(args), *kwargs.items()):
        if module is not None and isinstance(value, module.BlockMask):
            raise NotServed(
                f"the input {name} is a block mask",
                advice="create_block_mask inside forward, which costs nothing there, from an input of document numbers",
            )


def refuse_hooks(root: torch.nn.Module, is_parallel: bool = False) -> None:
    """Refuse backward hooks, which would be lost, except on a parallel model and its trained parameters.

    Forward hooks are allowed, and run while tracing (hooks.py).
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


def refuse_lazy(root: torch.nn.Module) -> None:
    lazy = [
        n
        for n, p in [*root.named_parameters(), *root.named_buffers()]
        if isinstance(p, torch.nn.parameter.UninitializedTensorMixin)
    ]
    if lazy:
        raise NotCaptured(f"{lazy[0]} has no shape yet", advice="one eager call, which gives lazy modules their shapes")


def refuse_layouts(root: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse parameters, buffers and inputs that are not strided: sparse or nested."""
    held = [*root.named_parameters(), *root.named_buffers()]
    given = [(name, x) for name, x in zip(leaf_names(root.forward, args, kwargs), pytree.tree_leaves((args, kwargs)))]
    for name, tensor in (*held, *given):
        if isinstance(tensor, Tensor) and tensor.layout != torch.strided:
            raise NotCaptured(
                f"{name} is of layout {str(tensor.layout).removeprefix('torch.')}, which a plan cannot cut",
                advice="a dense tensor, x.to_dense(); of a sparse product index_add or scatter_add over its places",
            )


def refuse_shared_memory(root: torch.nn.Module) -> None:
    """Refuse two parameters, or a parameter and a buffer, that overlap in memory.

    Eager's optimizer would update the memory of both, a plan would keep them apart.
    """
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
    """Refuse an output that holds tensors and is not a pytree."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and any(isinstance(v, Tensor) for v in getattr(leaf, "__dict__", {}).values()):
            raise NotCaptured(
                f"the output {type(leaf).__name__} holds tensors, and cannot be taken apart",
                advice="a dict, tuple or dataclass, or torch.utils._pytree.register_pytree_node",
            )


def refuse_survivors(made: list[weakref.ref[Tensor]]) -> None:
    """Refuse captured tensors that the model keeps on a class or module, where the next call finds them.

    Caches of functions that hold such tensors are cleared instead.
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


def refuse_trained_values_under_a_mask(graph: Graph) -> None:
    """Refuse x[mask] = trained values: the shape of x.grad[mask] depends on the mask's values."""
    for node in graph.nodes:
        places = _WRITTEN_AT.get(op_name(node)) if info(node).kind == "op" else None
        if places is None or not type_of(node).requires_grad:
            continue
        index, values = (node.kwargs[name] for name in places)
        masks = [i for i in pytree.tree_leaves(index) if isinstance(i, fx.Node) and type_of(i).dtype == "bool"]
        if masks and isinstance(values, fx.Node) and type_of(values).requires_grad:
            raise NotCaptured(
                "the gradient of values that are written where a mask is true has a shape that only the mask says",
                at=info(node).source,
                seen=f"{type_of(masks[0])}, values {type_of(values)}",
                advice="x.masked_scatter(mask, values), or torch.where(mask, values of the shape of x, x)",
            )


_WRITTEN_AT = {"setitem": ("index", "value"), "index_put": ("indices", "values")}


def refuse_detached(recorder: Recorder) -> None:
    """Refuse values that TorchScript has detached.

    TorchScript's own autodiff detaches them once a function has run with gradients.
    """
    for node in recorder.detached_below:
        if not node._erased:
            raise NotCaptured(
                "TorchScript detaches a value: its own autodiff does so once a function has run, and the gradient "
                "would be lost",
                at=node.meta["info"].source,
                advice="the Python function, or tracing before it has run",
            )
