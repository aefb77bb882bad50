"""Experts' plans as constraints: points of the same space, priced by the same model.

    dp            rows of the batch on every axis, parameters whole
    zero1         the same, parameters stored cut and gathered once a step; their gradients are scattered, at the end of
                  several micro-batches
    zero2         the same, in each of them
    zero3         the same, parameters gathered again in backward, and a block at a time
    hsdp          zero3 on the last axis, the same parameters on the others: their gradients are added up once more
    hsdp-zero1, hsdp-zero2    the same with these stages: optimizer states, and gradients, cut inside a node alone
    megatron      on one axis: every linear layer cut by its output, the next by its input; embedding and head by
                  vocabulary; sums are made whole, or with sequence=True scattered along the sequence
    2d            on two axes: rows by the first, features by the second; a weight is stored cut by both and gathered
                  along the first (SUMMA, outputs stay)
    2.5d          on three: as 2d, and rows by the third too
    3d            on three (a, b, c): rows by a, a weight's inputs by c and its outputs by b, so that outputs are sums
                  over c, scattered over rows; b and c change roles at the next layer

    dtensor       megatron with sequence=True where each layer gathers its rows by itself, as DTensor does whose
                  ColwiseParallel is given rows that are cut along the sequence: q, k, v, gate and up gather five times

Besides shardings, a preset has habits: what is made of the batch stays cut along the axes that cut its rows, and
Megatron's sums are made whole (or scattered along the sequence). A plan that would compute the first layers on every
device, to reduce fewer gradients, may be faster, but is not what the name says. Where a model does not allow a habit
(of each row beside every other, say), the plan says so.

Names that other tools have are taken too: ddp is dp, fsdp is zero3, tp is megatron; of FSDP1's strategies full_shard is
zero3, shard_grad_op zero2, no_shard dp, and hybrid_shard and hybrid_shard_zero2 are hsdp and hsdp-zero2.
`parallel="megatron"` puts Megatron on the last axis and dp on the others; the others want as many axes as they name.
`parallel=dict(tensor=dict(size=4, mode="2d"), data=dict(size=2, zero=3))` says it in full: data is on the first axes,
tensor on the last; without a size data has the devices that the others leave. `tensor=dict(size=4, sequence=True,
apart=True)` gathers as dtensor. `data=dict(size=8, zero=3, replicas=2)` is hsdp: the first axes hold copies. In place
of a mode, `tensor=dict(size=4, styles={"layers.*.up": "colwise", "layers.*.down": "rowwise"})` says how each layer is
cut, in transformers' words: what is not named is whole.

`parallel=dict(data=dict(size=2, zero=3), context=4)` cuts the sequence of inputs, and of all that is made of them,
along the axes behind those of data. Attentions are divided there by a ring of keys, by gathered keys or by heads
(Ulysses), as is cheapest or as `context=dict(size=4, how="ring")` says. To parameters these axes are axes of data:
gradients are sums over them, and a ZeRO stage cuts along both. "context" (or "cp"), "ring" and "ulysses" are without
ZeRO, on the whole mesh.

`parallel=dict(data=dict(size=8, zero=3), experts=4)` gives each device along the last axes of data, here of 4 devices,
experts of its own, to which rows travel; a ZeRO stage cuts them along the other axes of data. Axes of context count as
axes of data here. `parallel=dict(data=4, tensor=8, experts=32)` takes the axes of tensor too: experts are whole there,
and other layers are cut.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.graph.graph import Graph, TensorType, rows_of_batch, type_of
from autopar.letters import BadPreset, among
from autopar.sharding.attention_ways import RING, ULYSSES, WAYS
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Sharding, every_part_holds_something
from autopar.space.constraints import Preset
from autopar.space.context import cuts_of_sequences, sequences_of
from autopar.space.tensor_modes import MODES, STYLES, ParameterCut, by_experts, by_styles
from autopar.space.windows import BLOCK, BUCKET

DATA = {"dp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
TENSOR = {"megatron": 1, "2d": 2, "2.5d": 3, "3d": 3}  # the number of axes of each
APART = "dtensor"
CONTEXT = {"context": (), RING: (RING,), ULYSSES: (ULYSSES,)}  # how each divides attentions
HYBRID = {"hsdp": 3, "hsdp-zero1": 1, "hsdp-zero2": 2}
_ALSO_CALLED = {"ddp": "dp", "fsdp": "zero3", "fsdp2": "zero3", "tp": "megatron", "cp": "context"}
_ALSO_CALLED |= {"no_shard": "dp", "shard_grad_op": "zero2", "full_shard": "zero3"}  # FSDP1's strategies
_ALSO_CALLED["1d"] = "megatron"  # Colossal-AI's name beside 2d, 2.5d and 3d
_ALSO_CALLED |= {"hybrid_shard": "hsdp", "hybrid_shard_zero2": "hsdp-zero2"}
_POLICIES = {1: "; kept; end", 2: "; kept; each", 3: "; regathered; each"}  # pins of each ZeRO stage


@dataclass(frozen=True, slots=True)
class AxisRoles:
    """Which axes carry data, with a ZeRO stage, which carry context, and which carry a tensor mode."""

    data: tuple[int, ...]
    zero: int = 0
    mode: str = ""
    tensor: tuple[int, ...] = ()
    sequence: bool = False
    apart: bool = False  # whether each reader gathers what is cut along the sequence by itself
    stored: tuple[int, ...] | None = None  # data axes over which a ZeRO stage cuts parameters; None: all
    styles: Mapping[str, str] | None = None  # how layers are cut along the tensor axis, in place of a mode's own way
    experts: tuple[int, ...] = ()  # data axes along which each device has experts of its own
    context: tuple[int, ...] = ()  # axes that cut the sequence
    how: tuple[str, ...] = ()  # how each of these divides attentions; none: as is cheapest

    @property
    def cuts(self) -> tuple[int, ...]:
        """The axes that cut stored parameters under a ZeRO stage."""
        return (*(self.data if self.stored is None else self.stored), *self.context)

    @property
    def rows(self) -> tuple[int, ...]:
        """The axes that cut the rows of inputs."""
        if self.mode == "2.5d" and len(self.tensor) == 3:
            return (*self.data, self.tensor[0], self.tensor[2])
        return (*self.data, *self.tensor[:1]) if self.mode in ("2d", "3d") else self.data


def preset_of(parallel: Any, graph: Graph, mesh: DeviceMesh) -> Preset:
    """The pins and habits that `parallel` stands for, on this graph and mesh."""
    roles = _roles(parallel, mesh)
    pins = _rows(graph, mesh, roles)
    sequences = cuts_of_sequences(graph, mesh, roles.context) if roles.context else {}
    wishes = {name: ", ".join(filter(None, [pins.get(name, ""), cut])) for name, cut in sequences.items()}
    cuts: Mapping[str, ParameterCut] = {}
    if roles.mode and roles.styles is not None:
        cuts = by_styles(graph, mesh, roles.tensor, roles.styles)
    elif roles.mode:
        cuts = MODES[roles.mode](graph, mesh, roles.tensor)
    travelling = by_experts(graph, mesh, roles.experts) if roles.experts else {}
    for name, node in graph.parameters.items():
        cut = cuts.get(name, ParameterCut((), ()))
        cut = cut.beside(travelling.get(name, ()))
        by_data = _stored(type_of(node), mesh, roles, cut) if roles.zero and roles.cuts else []
        policy = _POLICIES.get(roles.zero, "; regathered" if cut.regathered else "")
        pins[name] = f"{', '.join([*by_data, *cut.stored]) or 'R'}; {', '.join(cut.used) or 'R'}{policy}"
    between = "sequence" if roles.sequence else "whole"
    tensor = roles.tensor if roles.mode == "megatron" else ()
    habits = (between, "apart") if roles.apart else (between,)
    of_inputs = itertools.chain(itertools.product(roles.rows, ["rows"]), itertools.product(roles.context, ["context"]))
    ways = tuple(zip(roles.context, roles.how or ("",) * len(roles.context), strict=True))
    return Preset(pins, (*of_inputs, *itertools.product(tensor, habits)), wishes, ways)


def window_of(parallel: Any, mesh: DeviceMesh) -> int:
    """The least bytes of parameters in a window under a preset: ZeRO-3 gathers each block by itself."""
    return BLOCK if _roles(parallel, mesh).zero == 3 else BUCKET


def of_rows_and_context(rows: int, mesh: DeviceMesh) -> dict[str, Any]:
    """ZeRO-3 on all devices: the first axes share the rows as far as they can, the others a sequence."""
    sizes = [math.prod(mesh.shape[:count]) for count in range(len(mesh.shape) + 1)]
    of_rows = max(size for size in sizes if rows % size == 0)
    return {"data": {"size": of_rows, "zero": 3}, "context": mesh.size // of_rows}


def cuts_axes_alike(parallel: Any, mesh: DeviceMesh) -> bool:
    """Whether a preset does the same along all axes of a mesh."""
    try:
        roles = _roles(parallel, mesh)
    except BadPreset:
        return False
    return not roles.tensor and not roles.context and roles.stored is None


def _roles(parallel: Any, mesh: DeviceMesh) -> AxisRoles:
    real = [a for a, n in enumerate(mesh.shape) if n > 1]
    if isinstance(parallel, str):
        return _named(parallel, mesh, real)
    data, tensor, context = _parts(parallel, mesh)
    given = tensor.get("mode", "megatron")
    mode = _ALSO_CALLED.get(given, given) if isinstance(given, str) else given
    sequence, apart = _along_the_sequence(parallel, tensor)
    if not isinstance(mode, str) or mode not in TENSOR or data.get("zero", 0) not in (0, 1, 2, 3):
        raise BadPreset(f"parallel={parallel!r}", seen=f"modes of tensor: {', '.join(TENSOR)}; zero: 0 to 3")
    sizes = [part["size"] for part in (data, context, tensor) if part is not context or part["size"] > 1]
    if math.prod(sizes) != mesh.size:
        said = " x ".join(map(str, sizes))
        raise BadPreset(
            f"parallel speaks of {said} devices, the mesh has {mesh.size}",
            seen=f"mesh {mesh}",
            advice=f"sizes whose product is {mesh.size}; data without a size has the devices that the others leave",
        )
    styles = tensor.get("styles")
    if styles is not None:
        _check_styles(styles, mode, sequence)
    axes = tuple(real[-TENSOR[mode] :]) if tensor["size"] > 1 else ()
    has_size = math.prod(mesh.shape[a] for a in axes) == tensor["size"]
    has_axes = len(axes) == TENSOR[mode] or mode == "megatron"
    if axes and not (has_size and has_axes):
        raise BadPreset(
            f"tensor of size {tensor['size']} in mode {mode} is not the last {TENSOR[mode]} axes of mesh {mesh}",
            advice=f"mesh=({data['size']}, {tensor['size']})" if mode == "megatron" else "",
        )
    rest = tuple(a for a in real if a not in axes)
    of_context = _last_of(rest, context["size"], mesh, "the sequence")
    of_data = rest[: len(rest) - len(of_context)]
    experts = _last_of(rest, parallel.get("experts", 1), mesh, "experts", axes)
    return AxisRoles(
        of_data,
        data.get("zero", 0),
        mode if axes else "",
        axes,
        sequence,
        apart,
        _stored_along(of_data, mesh, data),
        styles,
        experts,
        of_context,
        _ways(context, of_context, mesh),
    )


def _ways(context: Mapping[str, Any], axes: Sequence[int], mesh: DeviceMesh) -> tuple[str, ...]:
    """The way in which each axis of context divides attentions; none where nothing is said."""
    said = context.get("how", ())
    ways = (said,) * len(axes) if isinstance(said, str) else tuple(said)
    if ways and len(ways) != len(axes):
        names = ", ".join(f"{mesh.axes[a]}={mesh.shape[a]}" for a in axes)
        raise BadPreset(f"parallel says how={said!r} of {len(axes)} axes of context", seen=f"context: {names}")
    return ways


def _last_of(
    axes: Sequence[int], parts: int, mesh: DeviceMesh, what: str, beside: Sequence[int] = ()
) -> tuple[int, ...]:
    """The last of these axes, those of data, along which something is divided into so many parts.

    With the axes `beside` them where data alone has not so many.
    """
    able: dict[int, tuple[int, ...]] = {}  # number of parts -> the axes
    for also in ((), tuple(beside)):
        for first in range(len(axes), -1, -1):
            taken = (*axes[first:], *also)
            able.setdefault(math.prod(mesh.shape[a] for a in taken), taken)
    if parts not in able:
        raise BadPreset(
            f"parallel divides {what} into {parts}, and the last axes of data of mesh {mesh} have not so many devices",
            seen=f"numbers that are served on this mesh: {', '.join(map(str, sorted(able)))}",
            advice=f"one of these, or mesh=(..., {parts}), whose other axes carry data and the tensor mode",
        )
    return able[parts]


def _along_the_sequence(parallel: Any, tensor: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether sums are scattered along the sequence, and whether each layer gathers its rows by itself."""
    sequence = tensor.get("sequence", False)
    apart = tensor.get("apart", False)
    if not isinstance(sequence, bool) or (sequence and tensor.get("mode", "megatron") != "megatron"):
        raise BadPreset(f"parallel={parallel!r}", seen="sequence is True or False, and a word about megatron")
    if not isinstance(apart, bool) or (apart and not sequence):
        raise BadPreset(f"parallel={parallel!r}", seen="apart is True or False, and a word about sequence=True")
    return sequence, apart


def _stored_along(axes: Sequence[int], mesh: DeviceMesh, data: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The data axes over which parameters are cut, where the first axes hold replicas; None: all of them."""
    replicas = data.get("replicas", 1)
    if replicas == 1:
        return None
    sizes = list(itertools.accumulate((mesh.shape[a] for a in axes), operator.mul, initial=1))
    if replicas not in sizes or data.get("zero", 0) == 0:
        raise BadPreset(
            f"parallel speaks of {replicas} replicas, and the first axes of data of mesh {mesh} are not so many"
            if replicas not in sizes
            else f"parallel speaks of {replicas} replicas of parameters that zero=0 does not cut",
            advice=f"mesh=({replicas}, ...), and zero=3",
        )
    return tuple(axes[sizes.index(replicas) :])


def _check_styles(styles: Any, mode: str, sequence: bool) -> None:
    if not isinstance(styles, Mapping) or mode != "megatron" or sequence:
        raise BadPreset(
            f"styles={styles!r} are a dictionary of names of modules, in place of a mode",
            advice='tensor=dict(size=4, styles={"layers.*.up": "colwise", "layers.*.down": "rowwise"})',
        )
    if unknown := [f"{style!r} of {name!r}" for name, style in styles.items() if style not in STYLES]:
        raise BadPreset(f"the style {unknown[0]} is not served", seen=f"styles: {', '.join(STYLES)}")


def _named(name: str, mesh: DeviceMesh, real: Sequence[int]) -> AxisRoles:
    """The roles of axes under a preset's name: a tensor mode takes the last axes, data the others."""
    name = _ALSO_CALLED.get(name, name)
    if name in DATA:
        return AxisRoles(tuple(real), DATA[name])
    if name in HYBRID:
        return AxisRoles(tuple(real), HYBRID[name], stored=tuple(real[-1:]))
    if name in CONTEXT:
        return AxisRoles((), context=tuple(real), how=CONTEXT[name] * len(real))
    if name not in (*TENSOR, APART):
        known = (*DATA, *HYBRID, *CONTEXT, *TENSOR, APART, *_ALSO_CALLED)
        raise BadPreset(f"no preset is called {name!r}", seen=among(known, name))
    is_apart = name == APART
    name = "megatron" if is_apart else name
    count = TENSOR[name]
    if count > 1 and len(real) != count:
        raise BadPreset(
            f"{name} is laid out on {count} axes, and mesh {mesh} has {len(real)} of more than one device",
            advice=f"mesh={(2,) * count}",
        )
    mode = name if real else ""
    return AxisRoles(tuple(real[:-count]), 0, mode, tuple(real[-count:]), sequence=is_apart, apart=is_apart)


# The words of each part of a dictionary.
_WORDS = {
    "data": ("size", "zero", "replicas"),
    "context": ("size", "how"),
    "tensor": ("size", "mode", "sequence", "apart", "styles"),
}


def _parts(parallel: Any, mesh: DeviceMesh) -> list[Mapping[str, Any]]:
    """The parts of a dictionary that are about data, tensor and context, each with its size.

    Where none is said of data, it has the devices that the others leave.
    """
    experts = parallel.get("experts", 1) if isinstance(parallel, Mapping) else 1
    is_number = isinstance(experts, int) and not isinstance(experts, bool) and experts > 0
    if not isinstance(parallel, Mapping) or not is_number or set(parallel) - {*_WORDS, "experts"}:
        raise BadPreset(
            f"parallel={parallel!r} is neither a preset's name nor a dictionary of data, context, tensor and experts",
            advice='parallel="zero3", or dict(tensor=dict(size=4, mode="megatron"), data=2, context=2, experts=2)',
        )
    parallel = {key: value for key, value in parallel.items() if key != "experts"}
    if not parallel and experts == 1:
        raise BadPreset("parallel={} says nothing", advice='parallel="zero3"')
    parts = {key: (value if isinstance(value, Mapping) else {"size": value}) for key, value in parallel.items()}
    for key, part in parts.items():
        _check_words(key, part, parallel[key])
    tensor, context = (parts.get(key, {"size": 1}) for key in ("tensor", "context"))
    rest = max(1, mesh.size // (tensor["size"] * context["size"]))
    return [{"size": rest, **parts.get("data", {})}, tensor, context]


def _check_words(key: str, part: Mapping[str, Any], said: Any) -> None:
    numbers = [part.get("size", 1 if key == "data" else 0), part.get("zero", 1), part.get("replicas", 1)]
    is_wrong = any(isinstance(n, bool) or not isinstance(n, int) for n in numbers) or numbers[0] < 1
    how = part.get("how", RING)
    is_known = isinstance(how, (str, tuple, list)) and set([how] if isinstance(how, str) else how) <= set(WAYS)
    if is_wrong or set(part) - set(_WORDS[key]) or not is_known:
        raise BadPreset(
            f"parallel says {key}={said!r}",
            advice=(
                'data=2, data=dict(size=2, zero=3), tensor=4, tensor=dict(size=4, mode="megatron", sequence=True), '
                'context=4 or context=dict(size=4, how="ring"), "gather" or "ulysses", or one for each of its axes'
            ),
        )


def _rows(graph: Graph, mesh: DeviceMesh, roles: AxisRoles) -> dict[str, str]:
    """Pins that cut inputs by rows, if they have a multiple of the batch's rows; others are left free.

    A letter is raised where devices cannot share the rows equally.
    """
    parts = math.prod(mesh.shape[a] for a in roles.rows)
    found = {}
    rows = rows_of_batch(graph)
    each = f" in each of {graph.turns} micro-batches" if graph.turns > 1 else ""
    for name, node in graph.inputs.items():
        shape = type_of(node).shape
        if parts > 1 and shape and not shape[0] % max(1, rows):
            if shape[0] % parts:
                raise BadPreset(
                    f"{parts} devices cannot share the {shape[0]} rows of input {name}{each}",
                    seen=f"mesh {mesh}",
                    advice=_for_few_rows(graph, mesh, roles),
                )
            found[name] = ", ".join(f"S(0)@{mesh.axes[a]}" for a in roles.rows)
    return found


def _for_few_rows(graph: Graph, mesh: DeviceMesh, roles: AxisRoles) -> str:
    """Advice where devices cannot share the rows of a batch."""
    fewer = "fewer micro-batches, " if graph.turns > 1 else ""
    advice = f"{fewer}a batch that divides, or fewer devices for data"
    if roles.mode or roles.context or not sequences_of(graph):
        return advice
    zero = f"dict(size=1, zero={roles.zero})" if roles.zero else "1"
    return f"{advice}, or parts of the sequence on devices: parallel=dict(data={zero}, context={mesh.size})"


def _stored(type_: TensorType, mesh: DeviceMesh, roles: AxisRoles, cut: ParameterCut) -> list[str]:
    """The placements that cut a parameter in storage over the data axes, beside the cuts of a tensor mode.

    The first dim that the axes divide is taken, else the first of which every device gets a part; dims that the mode
    gathers for use come last. There are none if no dim can be cut: the mode's cuts stay.
    """

    of_mode = {mesh.axis(text.rpartition("@")[2]): int(text[2]) for text in cut.stored}
    axes = [a for a in roles.cuts if a not in of_mode]

    def sizes(dim: int) -> list[int]:
        also = [a for a, of in of_mode.items() if of == dim]
        return [mesh.shape[a] for a in (*axes, *also)]

    def divides(dim: int) -> bool:
        return type_.shape[dim] % math.prod(sizes(dim)) == 0

    for dims in ([d for d in range(len(type_.shape)) if d not in cut.dims()], sorted(cut.shared())):
        able = [d for d in dims if every_part_holds_something(type_.shape[d], sizes(d))]
        if able:
            dim = next(filter(divides, able), able[0])
            return [f"S({dim})@{mesh.axes[a]}" for a in axes]
    return []


def _is_whole(sharding: Sharding, axes: Sequence[int]) -> bool:
    return not any(sharding.placements[a].is_shard for a in axes)


def warnings_of_habits(habits: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """A line about the habits that are priced, and not what the emitted program does; none without such."""
    if not any(habit == "apart" for _, habit in habits):
        return ()
    return (
        "each layer is priced as if it gathered its rows by itself, as DTensor's do; the program that autopar emits "
        "gathers them once",
    )


def warnings_of(
    parallel: Any, mesh: DeviceMesh, parameters: Mapping[str, Sharding], sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """A line about the parameters that a ZeRO plan stores whole along the data axes; none if it cuts all.

    `parameters` and `sizes` are the shardings of the plan's parameters and their bytes.
    """
    roles = _roles(parallel, mesh)
    if not roles.zero or not roles.cuts:
        return ()
    whole = [name for name, sharding in parameters.items() if _is_whole(sharding, roles.cuts)]
    if not whole:
        return ()
    names = ", ".join(whole[:3]) + (f" and {len(whole) - 3} more" if len(whole) > 3 else "")
    share = sum(sizes[name] for name in whole) / max(1, sum(sizes.values()))
    along = ", ".join(f"{mesh.axes[a]}={mesh.shape[a]}" for a in roles.cuts)
    return (
        f"{len(whole)} of {len(parameters)} parameters ({share:.2%} of their bytes) are stored whole along {along}, "
        f"where no dim that is left has a part for every device, or a constraint says so: {names}",
    )
