"""From what was recorded to the canonical vocabulary: passes with a before and an after."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from autopar.graph.graph import Graph, Info, TensorType, fresh_key, info, op_name, run, type_of
from autopar.ops.entry import OPS
from autopar.passes import run_passes
from autopar.tracer.composites import composites_are_opened


def emit(near: fx.Node, op: str, out: TensorType | None = None, **arguments: Any) -> fx.Node:
    """A new op node before `near`, with its place in the source.

    Its type is `out`, or what running it on meta tensors says.
    """
    about, graph = info(near), near.graph
    node = graph.create_node(
        "call_function", OPS[op], (), arguments, name=f"{about.module}_{op}".replace(".", "_").strip("_") or op
    )
    if out is None:
        ran = run(
            node,
            {
                n: torch.empty(type_of(n).shape, dtype=type_of(n).torch_dtype, device="meta")
                for n in node.all_input_nodes
            },
        )
        out = TensorType.of(ran)
    flows = (
        out.may_have_gradient
        and (about.kind != "op" or about.outputs[0].requires_grad or op == "identity")
        and any(type_of(n).requires_grad for n in node.all_input_nodes)
    )
    node.meta["info"] = Info(
        fresh_key(graph, f"{about.module}/{op}"),
        "op",
        (replace(out, requires_grad=flows),),
        about.module,
        about.source,
        checkpoint=about.checkpoint,
    )
    return node


@contextlib.contextmanager
def rewriting(graph: Graph, *ops: str) -> Iterator[list[fx.Node]]:
    """The nodes of these ops; those that lose their last user are gone afterwards."""
    nodes = [
        n
        for op in ops
        if op in OPS
        for n in graph.fx.find_nodes(op="call_function", target=OPS[op], sort=len(ops) == 1)
    ]
    nodes = sorted(nodes) if len(ops) > 1 else nodes
    yield nodes
    for node in reversed(nodes):
        if not node.users and info(node).random < 0:
            graph.fx.erase_node(node)


LOSSES = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
)


def losses_are_means(graph: Graph) -> None:
    """Take the reduction out of a pointwise loss.

    before    loss = mse_loss(x, y)
    after     e = mse_loss(x, y, reduction="none");  loss = mean(e)
    """
    with rewriting(graph, *LOSSES) as nodes:
        for node in nodes:
            reduction, old = (
                node.kwargs.get("reduction", "mean"),
                any(node.kwargs.get(k) is not None for k in ("size_average", "reduce")),
            )
            weighted = (
                op_name(node) in ("mse_loss", "l1_loss", "huber_loss") and node.kwargs.get("weight") is not None
            )  # their mean is over the weights
            if reduction == "none" or old or weighted:
                continue
            with graph.fx.inserting_before(node):
                error = emit(node, op_name(node), **{**node.kwargs, "reduction": "none"})
                if reduction == "batchmean":
                    rows = type_of(node.kwargs["input"]).shape[0]
                    node.replace_all_uses_with(emit(node, "div", input=emit(node, "sum", input=error), other=rows))
                else:
                    node.replace_all_uses_with(emit(node, reduction, input=error))


def means_are_sums(graph: Graph) -> None:
    """A mean is a sum over the global count, so that a cut dim leaves a plain P(sum); half precision sums in float32.

    before    m = mean(x, dim=1)                        # x is f32[8, 64]
    after     s = sum(x, dim=1);  m = div(s, 64)
    """
    with rewriting(graph, "mean") as nodes:
        for node in nodes:
            given: Any = node.kwargs["input"]
            shape, dim = info(given).outputs[0].shape, node.kwargs.get("dim")
            dims = range(len(shape)) if dim is None else (dim,) if isinstance(dim, int) else dim
            count = math.prod(shape[d] for d in dims if shape)
            dtype = node.kwargs.get("dtype") or type_of(given).torch_dtype
            is_half = dtype in (torch.float16, torch.bfloat16)
            how = {k: v for k, v in node.kwargs.items() if k in ("dim", "keepdim")}
            if is_half or "dtype" in node.kwargs:
                how["dtype"] = torch.float32 if is_half else dtype
            with graph.fx.inserting_before(node):
                mean = emit(node, "div", input=emit(node, "sum", input=given, **how), other=count)
                node.replace_all_uses_with(emit(node, "to", input=mean, dtype=dtype) if is_half else mean)


_IDLE = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
    "view",
    "expand",
    "to",
    "cat",
    "contiguous",
    "clone",
)


def no_ops_leave(graph: Graph) -> None:
    """What changes nothing is nothing.

    Dropout that drops nothing, a view to the same shape, a cast to the same dtype, a full slice.

    before    y = dropout(x, p=0.0);  z = view(y, [4, 16])         # y is f32[4, 16]
    after     z = x
    """
    with rewriting(graph, *_IDLE) as nodes:
        for node in nodes:
            given: Any = node.kwargs.get("input")
            if (
                op_name(node) == "cat"
            ):  # an empty cache is put in front of the first keys, an empty rest behind what is turned
                dim: Any = node.kwargs.get("dim", 0)
                tensors = [
                    t for t in node.kwargs["tensors"] if type_of(t).shape != (0,) and type_of(t).shape[dim] != 0
                ] or list(node.kwargs["tensors"])[:1]
                if len(tensors) > 1:
                    node.kwargs = {**node.kwargs, "tensors": tensors}
                    continue
                given = tensors[0]
            elif op_name(node) == "clone" and any(
                u.op == "output" for u in node.users
            ):  # a snapshot is not the thing itself
                continue
            elif (
                "dropout" in op_name(node)
                and node.kwargs.get("p", 0.5) >= 1
                and node.kwargs.get("training", "alpha" not in op_name(node))
            ):
                with graph.fx.inserting_before(node):  # nothing is drawn, and nothing is left
                    node.replace_all_uses_with(emit(node, "mul", type_of(node), input=given, other=0.0))
                continue
            elif info(node).random >= 0 or (
                op_name(node) in ("view", "to", "expand")
                and replace(type_of(given), requires_grad=True) != replace(type_of(node), requires_grad=True)
            ):
                continue
            if type_of(given).requires_grad and not type_of(node).requires_grad:  # under no_grad
                continue
            node.replace_all_uses_with(given)


def _basic_index(index: Any, rank: int) -> tuple[Any, ...] | None:
    """One entry for each dim, and None for each new one; nothing, where the index holds tensors, lists or steps."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(
        isinstance(i, (int, slice, type(None), type(...)))
        and not isinstance(i, bool)
        and (not isinstance(i, slice) or i.step in (None, 1))
        for i in index
    ):
        return None
    missing = rank - sum(i is not None and i is not ... for i in index)
    where = index.index(...) if ... in index else len(index)
    return (*index[:where], *[slice(None)] * missing, *index[where + (... in index) :])


def indexing_is_spelled_out(graph: Graph) -> None:
    """Basic indexing is a chain of narrow, select and view; whole slices vanish.

    before    y = x[..., 1:]                                       # x is i64[4, 17]
    after     y = narrow(x, dim=1, start=1, length=16)
    """
    with rewriting(graph, "index") as nodes:
        for node in nodes:
            given = node.kwargs["input"]
            index = _basic_index(node.kwargs["index"], len(type_of(given).shape))
            if index is None:
                continue
            value: Any = given
            dim = 0
            with graph.fx.inserting_before(node):
                for i in index:
                    size = type_of(value).shape[dim] if i is not None else 1
                    if isinstance(i, int):
                        shape = type_of(value).shape
                        value = emit(
                            node,
                            "select",
                            replace(type_of(value), shape=(*shape[:dim], *shape[dim + 1 :])),
                            input=value,
                            dim=dim,
                            index=i % size,
                        )
                        continue
                    if isinstance(i, slice):
                        start, stop, _ = i.indices(size)
                        if (start, stop) != (0, size):
                            shape, length = type_of(value).shape, max(0, stop - start)
                            value = emit(
                                node,
                                "narrow",
                                replace(type_of(value), shape=(*shape[:dim], length, *shape[dim + 1 :])),
                                input=value,
                                dim=dim,
                                start=start,
                                length=length,
                            )
                    else:
                        shape = type_of(value).shape
                        wider = (*shape[:dim], 1, *shape[dim:])
                        value = emit(node, "view", replace(type_of(value), shape=wider), input=value, size=wider)
                    dim += 1
            node.replace_all_uses_with(value)


def assignments_are_spelled_out(graph: Graph) -> None:
    """Assignment to ranges is a scatter for each dim that is not whole; one number under a mask is masked_fill.

    before    y = setitem(x, (slice(None), slice(1, None)), v)     # x is f32[4, 16], v is f32[4, 15]
    after     y = slice_scatter(x, v, dim=1, start=1, end=16)
    """
    with rewriting(graph, "setitem") as nodes:
        for node in nodes:
            given, index, value = (node.kwargs[k] for k in ("input", "index", "value"))
            whole = type_of(given)
            with graph.fx.inserting_before(node):
                if isinstance(index, fx.Node) and type_of(index).dtype == "bool" and not isinstance(value, fx.Node):
                    mask, shape = index, type_of(index).shape
                    if len(shape) < len(whole.shape):
                        mask = emit(node, "view", input=index, size=(*shape, *[1] * (len(whole.shape) - len(shape))))
                    node.replace_all_uses_with(emit(node, "masked_fill", input=given, mask=mask, value=value))
                    continue
                if (
                    isinstance(index, fx.Node)
                    and type_of(index).dtype == "bool"
                    and isinstance(value, fx.Node)
                    and len(type_of(value).shape) <= len(whole.shape) - len(type_of(index).shape)
                ):
                    mask = emit(
                        node,
                        "view",
                        input=index,
                        size=(*type_of(index).shape, *[1] * (len(whole.shape) - len(type_of(index).shape))),
                    )
                    value = (
                        value
                        if type_of(value).dtype == whole.dtype
                        else emit(node, "to", input=value, dtype=whole.torch_dtype)
                    )
                    node.replace_all_uses_with(emit(node, "where", condition=mask, input=value, other=given))
                    continue
                basic = _basic_index(index, len(whole.shape))
                overwritten = basic is not None and all(isinstance(i, slice) and i == slice(None) for i in basic)
                if (
                    basic is None or None in basic or (overwritten and type_of(node).requires_grad)
                ):  # what is overwritten has a gradient still: zeros
                    continue
                node.replace_all_uses_with(_scattered(node, given, list(enumerate(basic)), value))


def _scattered(node: fx.Node, given: Any, index: list[tuple[int, Any]], value: Any) -> fx.Node:
    """`given` with `value` at the rest of an index, one dim at a time.

    The parts that lie inside are put back into those around them.
    """
    shape = type_of(given).shape
    while (
        index
        and isinstance(index[0][1], slice)
        and index[0][1].indices(shape[index[0][0]])[:2] == (0, shape[index[0][0]])
    ):
        index = index[1:]
    if not index:
        if not isinstance(value, fx.Node):
            return emit(node, "full_like", input=given, fill_value=value)
        if type_of(value).shape != shape:
            extra = len(type_of(value).shape) - len(shape)  # leading dims of size 1
            value = emit(node, "view", input=value, size=type_of(value).shape[extra:]) if extra > 0 else value
            value = emit(node, "expand", input=value, size=shape)
        return (
            value
            if type_of(value).dtype == type_of(given).dtype
            else emit(node, "to", input=value, dtype=type_of(given).torch_dtype)
        )
    (dim, at), rest = index[0], index[1:]
    if isinstance(at, int):
        inner = emit(node, "select", input=given, dim=dim, index=at % shape[dim])
        return emit(
            node,
            "select_scatter",
            input=given,
            src=_scattered(node, inner, [(d - 1, i) for d, i in rest], value),
            dim=dim,
            index=at % shape[dim],
        )
    start, stop, _ = at.indices(shape[dim])
    inner = emit(node, "narrow", input=given, dim=dim, start=start, length=max(0, stop - start))
    return emit(
        node,
        "slice_scatter",
        input=given,
        src=_scattered(node, inner, rest, value),
        dim=dim,
        start=start,
        end=max(start, stop),
    )


def addmm_is_linear(graph: Graph) -> None:
    """A bias plus a product is a linear with its weight turned.

    before    y = addmm(bias, x, w)
    after     wt = t(w);  y = linear(x, wt, bias)
    """
    with rewriting(graph, "addmm") as nodes:
        for node in nodes:
            bias: Any = node.kwargs["input"]
            if len(type_of(bias).shape) != 1 or node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
                continue
            with graph.fx.inserting_before(node):
                given: Any = node.kwargs["mat2"]
                turned = emit(node, "t", replace(type_of(given), shape=type_of(given).shape[::-1]), input=given)
                node.replace_all_uses_with(
                    emit(node, "linear", type_of(node), input=node.kwargs["mat1"], weight=turned, bias=bias)
                )


def linears_keep_their_batch_dims(graph: Graph) -> None:
    """A linear between a flattening and its undoing needs neither.

    before    f = view(x, [64, 32]);  l = linear(f, w, b);  y = view(l, [4, 16, 96])       # x is f32[4, 16, 32]
    after     y = linear(x, w, b)
    """
    with rewriting(graph, "view") as nodes:
        for node in nodes:
            inner: Any = node.kwargs["input"]
            if (
                inner.op != "call_function"
                or op_name(inner) != "linear"
                or op_name(inner.kwargs["input"]) != "view"
                or len(inner.users) > 1
            ):
                continue
            before = inner.kwargs["input"].kwargs["input"]
            if (
                type_of(before).shape[:-1] != type_of(node).shape[:-1]
                or type_of(before).shape[-1] != type_of(inner.kwargs["input"]).shape[-1]
            ):
                continue
            with graph.fx.inserting_before(node):
                whole = emit(inner, "linear", type_of(node), **{**inner.kwargs, "input": before})
                whole.meta["info"], inner.meta["info"] = inner.meta["info"], whole.meta["info"]
                whole.meta["info"] = replace(whole.meta["info"], outputs=inner.meta["info"].outputs)
                node.replace_all_uses_with(whole)
    drop_dead(graph)


def cross_entropy_counts_its_targets(graph: Graph) -> None:
    """The mean over targets that are not ignored is a sum over the global count of them.

    With class weights, over the sum of their weights.

    before    loss = cross_entropy(x, t)
    after     s = cross_entropy(x, t, reduction="sum");  n = sum(ne(t, -100));  loss = div(s, n)
    """
    with rewriting(graph, "cross_entropy", "nll_loss") as nodes:
        for node in nodes:
            target: Any = node.kwargs["target"]
            plain = (
                all(node.kwargs.get(k) is None for k in ("size_average", "reduce")) and "int" in type_of(target).dtype
            )
            if node.kwargs.get("reduction", "mean") != "mean" or not plain:
                continue
            given: Any = node.kwargs["input"]
            weight: Any = node.kwargs.get("weight")
            dtype = type_of(given).torch_dtype
            how = {k: v for k, v in node.kwargs.items() if k in ("weight", "ignore_index", "label_smoothing")}
            with graph.fx.inserting_before(node):
                if dtype in (torch.float16, torch.bfloat16):
                    given = emit(node, "to", input=given, dtype=torch.float32)
                    if weight is not None:
                        how["weight"] = weight = emit(node, "to", input=weight, dtype=torch.float32)
                total = emit(node, op_name(node), **{"input": given, "target": target, **how, "reduction": "sum"})
                counted = emit(node, "ne", input=target, other=node.kwargs.get("ignore_index", -100))
                if weight is None:
                    count = emit(node, "sum", input=counted, dtype=type_of(given).torch_dtype)
                else:
                    known = emit(node, "where", condition=counted, input=target, other=0)
                    count = emit(
                        node,
                        "sum",
                        input=emit(
                            node,
                            "mul",
                            input=emit(
                                node,
                                "index",
                                replace(type_of(weight), shape=type_of(known).shape),
                                input=weight,
                                index=known,
                            ),
                            other=counted,
                        ),
                    )
                mean = emit(node, "div", input=total, other=count)
                node.replace_all_uses_with(
                    mean if type_of(mean).torch_dtype == dtype else emit(node, "to", input=mean, dtype=dtype)
                )


def random_ops_are_numbered(graph: Graph) -> None:
    """Each random op gets its place in the order of the program: its draws depend on it.

    before    y = dropout(x, p=0.1)
    after     y = dropout(x, p=0.1)        # random op 0
    """
    count = 0
    for node in graph.nodes:
        if node.op == "call_function" and info(node).random >= 0:
            node.meta["info"] = replace(info(node), random=count)
            count += 1


def one_name_per_fan_out(graph: Graph) -> None:
    """A value with several consumers passes through one identity node.

    A shared conversion is priced and emitted once, and
    the gradients of its uses are added before one reduction. Every input gets one too: it says how the input is used.

    before    h = linear(x, w);  a = gelu(h);  y = add(h, a)
    after     h = linear(x, w);  i = identity(h);  a = gelu(i);  y = add(i, a)
    """
    top = next((n for n in reversed(graph.fx.nodes) if n.op in ("placeholder", "get_attr")), None)
    for node in list(graph.nodes):
        users = node.users
        if not users or (
            len(users) == 1
            and info(node).kind != "input"
            and sum(operand is node for operand in _operands(next(iter(users)))) == 1
        ):
            continue
        if node.op != "output" and len(info(node).outputs) == 1 and not any(info(u).kind == "part" for u in users):
            with graph.fx.inserting_after(
                node
                if node.op == "call_function" and info(node).kind != "part"
                else _last_part(node)
                if node.op == "call_function"
                else top
            ):
                shared = emit(node, "identity", type_of(node), input=node)
            about = info(node)
            shared.meta["info"] = replace(
                info(shared), key=f"{about.key}:shared" if about.kind != "input" else f"{about.key}:used"
            )
            node.replace_all_uses_with(shared, delete_user_cb=lambda user, shared=shared: user is not shared)


def _operands(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _last_part(part: fx.Node) -> fx.Node:
    """The parts of an op stand together."""
    return [u for u in part.args[0].users if info(u).kind == "part"][-1]


def drop_dead(graph: Graph) -> None:
    """Ops that nobody uses leave; inputs stay, used or not, and draws, which move the generator."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and info(node).random < 0:
            graph.fx.erase_node(node)


PASSES: tuple[Callable[[Graph], None], ...] = (
    drop_dead,
    composites_are_opened,
    drop_dead,
    indexing_is_spelled_out,
    assignments_are_spelled_out,
    no_ops_leave,
    addmm_is_linear,
    linears_keep_their_batch_dims,
    losses_are_means,
    cross_entropy_counts_its_targets,
    means_are_sums,
    drop_dead,
    random_ops_are_numbered,
    one_name_per_fan_out,
)


def canonicalise(graph: Graph) -> Graph:
    """Run the passes; after each, the graph is legal."""
    run_passes("graph", PASSES, graph, verify)
    graph.fx.__dict__.pop("_autopar_keys", None)
    return graph


def verify(graph: Graph, after: str) -> None:
    """A legal graph: operands before their users, every node with its info, every op canonical with its operands in the
    order of its signature, every key once.
    """
    seen: set[fx.Node] = set()
    keys: set[str] = set()
    for node in graph.fx.nodes:
        about = node.meta["info"]
        assert about.key not in keys, (after, about.key)
        assert seen.issuperset(node._input_nodes), (after, node)
        assert node.op != "call_function" or about.kind == "part" or OPS.get(node.target.name) is node.target, (
            after,
            node,
        )
        if about.kind == "op":  # lowering hands operands out in the order of the arguments
            given = [leaf for leaf in pytree.tree_leaves(list(node.kwargs.values())) if isinstance(leaf, fx.Node)]
            assert given == [n for n in node.target.operands(node.kwargs) if isinstance(n, fx.Node)], (
                after,
                node,
                list(node.kwargs),
            )
        keys.add(about.key)
        seen.add(node)
