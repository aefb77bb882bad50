"""Which ops need a local form, and what it takes: one function an op, `None` where the op itself will do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autopar.letters import NotServed
from autopar.runtime import forms
from autopar.sharding.placement import R, Sharding, local_shape
from autopar.tracer.graph import info, type_of
from autopar.tracer.vocabulary import SHAPE, SIZES

if TYPE_CHECKING:
    import torch.fx as fx

    from autopar.codegen.local import Localiser

Form = tuple[Callable[..., Any], dict[str, Any]] | None


def form_of(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What computes `node` on this device, and its arguments: shapes become local, and some ops another function."""
    op = node.target
    for marker, local in ((SHAPE, _local_shape), (SIZES, _local_sizes)):
        if (name := op.local(marker)) is not None:             # type: ignore[union-attr]
            kwargs = {**kwargs, name: local(at, node)}
    form = FORMS.get(op.name)                                  # type: ignore[union-attr]
    if info(node).random >= 0 and op.name not in _BY_POSITION:   # type: ignore[union-attr]
        raise NotServed(f"{op.name} draws random numbers, and has no form yet that draws the same under every plan", at=info(node).source, advice="dropout")   # type: ignore[union-attr]
    return (form(at, node, kwargs) if form else None) or (op, kwargs)   # type: ignore[return-value]


def _local_shape(at: Localiser, node: fx.Node) -> tuple[int, ...]:
    return local_shape(info(node).outputs[0].shape, at.output(node), at.mesh, at.coordinate)


def _local_sizes(at: Localiser, node: fx.Node) -> tuple[int, ...]:
    outputs = info(node).outputs
    return tuple(local_shape(t.shape, at.output(node, i), at.mesh, at.coordinate)[node.kwargs.get("dim", 0)] for i, t in enumerate(outputs))   # type: ignore[call-overload, misc]


def cuts(at: Localiser, shape: tuple[int, ...], sharding: Sharding, dim: int) -> tuple[tuple[str, int], ...]:
    """The axes that cut a dim, major first, each with the size that the dim has on this device before it."""
    found, order = [], sharding.cuts.get(dim, [])
    for i, axis in enumerate(order):
        outer = Sharding(tuple(p if a in order[:i] else R for a, p in enumerate(sharding.placements)), sharding.order)
        found.append((at.mesh.axes[axis], local_shape(shape, outer, at.mesh, at.coordinate)[dim]))
    return tuple(found)


def _embedding(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    """Where the vocabulary is cut."""
    lies = at.operand(node, 1)
    if 0 not in lies.cuts:
        return None
    shape = type_of(node.kwargs["weight"]).shape                                                             # type: ignore[arg-type]
    how = {k: v for k, v in kwargs.items() if k in ("input", "weight")}
    if kwargs.get("padding_idx") is not None:
        how["padding_idx"] = kwargs["padding_idx"] % shape[0]
    return forms.embedding_part, {**how, "cuts": cuts(at, shape, lies, 0)}


def _cross_entropy(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    """Where the classes are cut."""
    lies = at.operand(node, 0)
    if 1 not in lies.cuts:
        return None
    how = {k: v for k, v in kwargs.items() if k in ("input", "target", "ignore_index")}
    return forms.cross_entropy_part, {**how, "cuts": cuts(at, type_of(node.kwargs["input"]).shape, lies, 1)}    # type: ignore[arg-type]


def _dropout(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    shape = info(node).outputs[0].shape
    where = tuple(cuts(at, shape, at.output(node), d) for d in range(len(shape)))
    return forms.dropout_by_position, {"input": kwargs["input"], "key": at.random_key, "op": info(node).random, "shape": shape, "cuts": where, "p": kwargs.get("p", 0.5)}


def _attention(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    """Where probabilities are dropped."""
    if info(node).random < 0:
        return None
    query, key = type_of(node.kwargs["query"]).shape, type_of(node.kwargs["key"]).shape                       # type: ignore[arg-type]
    lies = at.operand(node, 0)
    where = (*(cuts(at, query, lies, d) for d in range(len(query) - 1)), ())
    return forms.attention_by_position, {**kwargs, "random_key": at.random_key, "op": info(node).random, "shape": (*query[:-1], key[-2]), "cuts": where}


def _batch_norm(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    """Where the batch, or positions, are cut, sums are exchanged."""
    lies = at.operand(node, 0)
    axes = [at.mesh.axes[a] for d, order in lies.cuts.items() if d != 1 for a in order]
    if not axes or not node.kwargs.get("training"):
        return None
    given = type_of(node.kwargs["input"]).shape                                                              # type: ignore[arg-type]
    how = {k: v for k, v in kwargs.items() if k != "training"}
    return forms.batch_norm_part, {**how, "axes": axes, "count": math.prod(given) // given[1], "updates": len(info(node).outputs) > 1}


def _grouped(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    """Where groups of channels are cut, a device has fewer of them."""
    name = "groups" if "groups" in node.kwargs else "num_groups"
    groups = node.kwargs.get(name, 1)
    given = type_of(node.kwargs["input"]).shape                                                              # type: ignore[arg-type]
    here = local_shape(given, at.operand(node, 0), at.mesh, at.coordinate)
    if groups == 1 or here[1] == given[1]:
        return None
    return node.target, {**kwargs, name: groups * here[1] // given[1]}                                       # type: ignore[operator, return-value]


_BY_POSITION = ("dropout", "scaled_dot_product_attention")
FORMS: dict[str, Callable[..., Form]] = {"embedding": _embedding, "cross_entropy": _cross_entropy, "dropout": _dropout, "scaled_dot_product_attention": _attention,
                                         "batch_norm": _batch_norm, "batch_norm_updating": _batch_norm,
                                         **dict.fromkeys(("conv1d", "conv2d", "conv3d", "group_norm"), _grouped)}
