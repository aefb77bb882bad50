"""Which ops need a local form, and what it takes: one function an op, `None` where the op itself will do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autopar.graph.graph import info, type_of
from autopar.letters import NotServed
from autopar.ops.vocabulary import SHAPE, SIZES
from autopar.runtime import forms
from autopar.runtime.attention import causal_attention_part
from autopar.runtime.private import plays_all_ranks
from autopar.sharding.placement import R, Sharding, local_shape, part

if TYPE_CHECKING:
    import torch.fx as fx

    from autopar.codegen.local import Localiser

Form = tuple[Callable[..., Any], dict[str, Any]] | None


def form_of(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What computes `node` on this device, and its arguments: shapes become local, and some ops another function."""
    op = node.target
    for marker, local in ((SHAPE, _local_shape), (SIZES, _local_sizes)):
        if (name := op.local(marker)) is not None:
            kwargs = {**kwargs, name: local(at, node)}
    form = FORMS.get(op.name)
    if info(node).random >= 0 and op.name not in _BY_POSITION:
        raise NotServed(
            f"{op.name} draws random numbers, and has no form yet that draws the same under every plan",
            at=info(node).source,
            advice=_INSTEAD.get(op.name, _OTHERS),
        )
    return (form(at, node, kwargs) if form else None) or (op, kwargs)


def _local_shape(at: Localiser, node: fx.Node) -> tuple[int, ...]:
    return local_shape(info(node).outputs[0].shape, at.output(node), at.mesh, at.coordinate)


def _local_sizes(at: Localiser, node: fx.Node) -> tuple[int, ...]:
    outputs = info(node).outputs
    return tuple(
        local_shape(t.shape, at.output(node, i), at.mesh, at.coordinate)[node.kwargs.get("dim", 0)]
        for i, t in enumerate(outputs)
    )


def cuts(at: Localiser, shape: tuple[int, ...], sharding: Sharding, dim: int) -> tuple[tuple[str, int], ...]:
    """The axes that cut a dim, major first, each with the size that the dim has on this device before it."""
    found, order = [], sharding.cuts.get(dim, [])
    for i, axis in enumerate(order):
        outer = Sharding(tuple(p if a in order[:i] else R for a, p in enumerate(sharding.placements)), sharding.order)
        found.append((at.mesh.axes[axis], local_shape(shape, outer, at.mesh, at.coordinate)[dim]))
    return tuple(found)


def start_here(at: Localiser, shape: tuple[int, ...], sharding: Sharding, dim: int) -> int:
    """Where this device's part of a dim begins in the whole."""
    start, size = 0, shape[dim]
    for axis in sharding.cuts.get(dim, []):
        before, size = part(size, at.mesh.shape[axis], at.coordinate[axis])
        start += before
    return start


def _embedding(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    """Where the vocabulary is cut."""
    lies = at.operand(node, 1)
    if 0 not in lies.cuts:
        return None
    shape = type_of(node.kwargs["weight"]).shape
    how = {k: v for k, v in kwargs.items() if k in ("input", "weight")}
    if kwargs.get("padding_idx") is not None:
        how["padding_idx"] = kwargs["padding_idx"] % shape[0]
    return forms.embedding_part, {**how, "cuts": cuts(at, shape, lies, 0)}


def _cross_entropy(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    """Where the classes are cut."""
    lies = at.operand(node, 0)
    if 1 not in lies.cuts:
        return None
    shape = type_of(node.kwargs["input"]).shape
    how = {k: v for k, v in kwargs.items() if k in ("input", "target", "weight", "ignore_index", "label_smoothing")}
    return forms.cross_entropy_part, {**how, "cuts": cuts(at, shape, lies, 1), "classes": shape[1]}


def _reduced(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    """Where what is reduced is cut."""
    lies, rank, dim = at.operand(node, 0), len(type_of(node.kwargs["input"]).shape), kwargs.get("dim")
    gone = set(range(rank)) if dim is None else {d % rank for d in ((dim,) if isinstance(dim, int) else dim)}
    axes = [at.mesh.axes[a] for d, order in lies.cuts.items() if d in gone for a in order]
    if not axes:
        return None
    if node.target.name == "logsumexp":
        return forms.logsumexp_part, {**kwargs, "axes": axes}
    return forms.amax_part, {**kwargs, "axes": axes, "least": node.target.name == "amin"}


def _places(at: Localiser, node: fx.Node, sharding: Sharding, shape: tuple[int, ...]) -> dict[str, Any]:
    """What a form that draws by position is told.

    The key of the step, which op it is, and where this device's part lies in a tensor of this shape.
    """
    return {
        "key": at.random_key,
        "op": info(node).random,
        "shape": shape,
        "cuts": tuple(cuts(at, shape, sharding, d) for d in range(len(shape))),
    }


def _dropout(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    return forms.dropout_by_position, {
        "input": kwargs["input"],
        **_places(at, node, at.output(node), info(node).outputs[0].shape),
        "p": kwargs.get("p", 0.5),
    }


def _channel_dropout(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    """One draw a channel; without a batch dim, and there torch has rules of its own, channels are the first."""
    shape, name = info(node).outputs[0].shape, node.target.name
    leading = (
        len(shape)
        if name == "alpha_dropout"
        else 1
        if (name, len(shape)) in (("dropout1d", 2), ("dropout3d", 4))
        else 2
    )
    form = forms.alpha_dropout_by_position if "alpha" in name else forms.channel_dropout_by_position
    return form, {
        "input": kwargs["input"],
        **_places(at, node, at.output(node), shape[:leading]),
        "p": kwargs.get("p", 0.5),
    }


def _drawn(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    kind, made = node.target.name, info(node).outputs[0]
    kind = {"rand": "uniform", "randn": "normal", "normal_filled": "normal", "randint": "random"}.get(
        kind.removesuffix("_like"), kind.removesuffix("_like")
    )
    local = local_shape(made.shape, at.output(node), at.mesh, at.coordinate)
    numbers = {_NUMBERS.get(k, k): v for k, v in kwargs.items() if k in ("a", "b") or k in _NUMBERS}
    return forms.drawn_by_position, {
        "kind": kind,
        **_places(at, node, at.output(node), made.shape),
        "local": local,
        "dtype": made.torch_dtype,
        **numbers,
    }


def _normal(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    made = info(node).outputs[0]
    local = local_shape(made.shape, at.output(node), at.mesh, at.coordinate)
    return forms.normal_by_position, {
        **kwargs,
        **_places(at, node, at.output(node), made.shape),
        "local": local,
        "dtype": made.torch_dtype,
    }


def _permutation(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    return forms.permutation_by_position, {
        "n": kwargs["n"],
        "key": at.random_key,
        "op": info(node).random,
        "dtype": info(node).outputs[0].torch_dtype,
    }


def _of_each(form: Callable[..., Any]) -> Callable[..., Form]:
    """A form that draws for each element of its operand."""

    def made(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
        numbers = {k: v for k, v in kwargs.items() if k not in ("training", "inplace")}
        return form, {**numbers, **_places(at, node, at.output(node), info(node).outputs[0].shape)}

    return made


def _bernoulli(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    return forms.bernoulli_by_position, {**kwargs, **_places(at, node, at.output(node), info(node).outputs[0].shape)}


def _multinomial(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    return forms.multinomial_by_position, {
        **kwargs,
        **_places(at, node, at.operand(node, 0), type_of(node.kwargs["input"]).shape),
    }


def _arange(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    """Where the count is cut."""
    made, lies = info(node).outputs[0], at.output(node)
    if 0 not in lies.cuts:
        return None
    length = local_shape(made.shape, lies, at.mesh, at.coordinate)[0]
    return forms.arange_part, {
        "start": kwargs["start"],
        "step": kwargs.get("step", 1),
        "length": length,
        "cuts": cuts(at, made.shape, lies, 0),
        "dtype": made.torch_dtype,
    }


def _attention(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    """Where probabilities are dropped, or a causal mask counts queries of which this device has a part."""
    lies, causal = at.operand(node, 0), node.kwargs.get("is_causal")
    rank = len(type_of(node.kwargs["query"]).shape)
    if info(node).random < 0:
        if not causal or rank - 2 not in lies.cuts:
            return None
        if plays_all_ranks():
            raise NotServed(
                "causal attention of cut queries reads other keys on every rank, and LocalTensors run one program "
                "for all",
                at=info(node).source,
                advice="autopar.testing.on_threads or on_processes",
            )
        how = {k: v for k, v in kwargs.items() if k in ("query", "key", "value", "scale", "enable_gqa")}
        return causal_attention_part, {
            **how,
            "start": start_here(at, type_of(node.kwargs["query"]).shape, lies, rank - 2),
        }
    out, key, leaves = info(node).outputs[0].shape, type_of(node.kwargs["key"]).shape, at.output(node)
    where = (*(cuts(at, out, leaves, d) for d in range(len(out) - 1)), ())
    return forms.attention_by_position, {
        **kwargs,
        "random_key": at.random_key,
        "op": info(node).random,
        "shape": (*out[:-1], key[-2]),
        "cuts": where,
    }


def _batch_norm(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    """Where the batch, or positions, are cut, sums are exchanged."""
    lies = at.operand(node, 0)
    axes = [at.mesh.axes[a] for d, order in lies.cuts.items() if d != 1 for a in order]
    if not axes or not node.kwargs.get("training"):
        return None
    given = type_of(node.kwargs["input"]).shape
    how = {k: v for k, v in kwargs.items() if k != "training"}
    return forms.batch_norm_part, {
        **how,
        "axes": axes,
        "count": math.prod(given) // given[1],
        "updates": len(info(node).outputs) > 1,
    }


def _grouped(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> Form:
    """Where groups of channels are cut, a device has fewer of them."""
    name = "groups" if "groups" in node.kwargs else "num_groups"
    groups = node.kwargs.get(name, 1)
    given = type_of(node.kwargs["input"]).shape
    here = local_shape(given, at.operand(node, 0), at.mesh, at.coordinate)
    channels = 1
    if name == "groups":  # an image without a batch dim has its channels first
        channels = len(given) - len(type_of(node.kwargs["weight"]).shape) + 1
    if groups == 1 or here[channels] == given[channels]:
        return None
    return node.target, {**kwargs, name: groups * here[channels] // given[channels]}


_LIKE = (
    "uniform_like",
    "normal_like",
    "exponential_like",
    "log_normal_like",
    "cauchy_like",
    "random_like",
    "geometric_like",
    "rand_like",
    "randn_like",
)
_INSTEAD = {
    "binomial": "torch.bernoulli of the probability, expanded by a dim of trials, and its sum",
    "feature_dropout": "torch.nn.functional.dropout2d or dropout3d",
    **dict.fromkeys(
        ("lstm'", "gru'", "rnn_tanh'", "rnn_relu'"), "dropout=0 where sequences are packed, or padded sequences"
    ),
}
_OTHERS = (
    "what draws from torch.rand, randn, normal, randint, randperm, bernoulli, multinomial, poisson or a method that "
    "fills a tensor (x.uniform_(), ...)"
)
_NUMBERS = {"low": "a", "high": "b", "mean": "a", "std": "b"}
_BY_POSITION: dict[str, Callable[..., Form]] = {
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
    "bernoulli": _bernoulli,
    "multinomial": _multinomial,
    **dict.fromkeys(
        ("dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"), _channel_dropout
    ),
    **dict.fromkeys(("rand", "randn", "randint", "normal_filled", *_LIKE), _drawn),
    "normal": _normal,
    "randperm": _permutation,
    "poisson": _of_each(forms.poisson_by_position),
    "standard_gamma": _of_each(forms.gamma_by_position),
    "dirichlet": _of_each(forms.dirichlet_by_position),
    "rrelu": _of_each(forms.rrelu_by_position),
}
FORMS: dict[str, Callable[..., Form]] = {
    **_BY_POSITION,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "batch_norm": _batch_norm,
    "batch_norm_updating": _batch_norm,
    "arange": _arange,
    "amax": _reduced,
    "amin": _reduced,
    "logsumexp": _reduced,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "group_norm"), _grouped),
}
