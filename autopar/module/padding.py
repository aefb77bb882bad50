"""`pad_to`: pad sequences to the next multiple and cut outputs back, so that a few programs serve all lengths.

A call goes through these stages:

    lengths     every dim but the first whose size differs from that in meta_inputs; where ranks pass their own rows,
                the longest of all ranks
    filled      with 0: ids, masks, numbers; targets of a cross entropy with the index that it ignores
    cut         outputs, where they follow a length
    reached     what an output could see of the padding, op by op, whatever is in a batch (`reach/`): the first op
                that mixes padding with the rest is refused by a letter
    tried       the first call of a kind also runs unpadded, and with more padding than any later call, and must give
                the same outputs and gradients: this finds infinities in backward, and what the analysis assumed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.graph import walks
from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.letters import NotServed
from autopar.module.attributes import Sight
from autopar.module.limits import LIMITS
from autopar.ops.entry import facts_of

Shapes = Mapping[str, tuple[int, ...]]
# relative tolerance by bytes of the coarsest dtype: sums over other lengths are added in another order
ROUNDING = {8: 1e-10, 4: 3e-4, 2: 0.05, 1: 0.3}


@dataclass(frozen=True, slots=True)
class Follows:
    """A dim of an output whose size is that of an input's dim, plus a constant."""

    output: str
    dim: int
    lengths: frozenset[tuple[str, int, int]]  # candidates: the input, its dim, and the constant

    def size(self, shapes: Shapes) -> int | None:
        """Size of the dim in a call; None where its candidates disagree."""
        sizes = {shapes[name][dim] + more for name, dim, more in self.lengths}
        return sizes.pop() if len(sizes) == 1 else None


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of calls: the number that pads each input, and the dims of outputs to cut."""

    fills: Mapping[str, float]
    cuts: tuple[Follows, ...]
    sight: Sight | None = None  # state of the modules when it was tried


@dataclass(slots=True, eq=False)
class Bucket:
    """A call, and the lengths to which it is padded."""

    here: Shapes  # unpadded, the longest of all ranks
    shapes: Shapes  # padded, as it runs
    longer: Shapes  # padded further, for a trial, wherever any rank pads
    moved: frozenset[tuple[str, int]]  # inputs and dims that some rank pads
    key: Any
    kind: Kind

    @property
    def cuts(self) -> tuple[Follows, ...]:
        return self.kind.cuts

    @property
    def is_ambiguous(self) -> bool:
        return any(cut.size(self.here) is None for cut in self.cuts)


class Padding:
    """The lengths and kinds of calls that `pad_to` has met in one model."""

    def __init__(self, to: int, named: Mapping[str, Any]) -> None:
        self.to = to
        self.given = shapes_of(named)
        self.known: dict[Any, Kind] = {}  # kinds of calls so far, by the key of their buckets

    def bucket(self, least: Shapes, here: Shapes, how: Any) -> Bucket:
        """The bucket of a call of these shapes; `least` are the shortest of all ranks."""
        lengths: set[int] = set()  # lengths other than those of meta_inputs
        for name, shape in here.items():
            if name in self.given:
                lengths |= {size for size, before in self._beside_given(name, shape)[1:] if size != before}
        shapes: dict[str, tuple[int, ...]] = {}
        longer: dict[str, tuple[int, ...]] = {}
        moved: set[tuple[str, int]] = set()
        for name, shape in here.items():
            sizes, more = list(shape), list(shape)
            for d, (size, before) in list(enumerate(self._beside_given(name, shape)))[1:]:
                if size in lengths and size != before:
                    sizes[d] = -(-size // self.to) * self.to
                is_moved = sizes[d] != least[name][d]
                if is_moved:
                    moved.add((name, d))
                more[d] = sizes[d] + self.to * is_moved
            shapes[name], longer[name] = tuple(sizes), tuple(more)
        key = how, frozenset(moved)
        return Bucket(here, shapes, longer, frozenset(moved), key, self.known.get(key, Kind({}, ())))

    def _beside_given(self, name: str, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """Each size of an input with its size in meta_inputs, or -1 where the number of dims differs."""
        given = self.given.get(name, ())
        return list(zip(shape, given if len(given) == len(shape) else (-1,) * len(shape), strict=True))


def shapes_of(named: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {n: tuple(t.shape) for n, t in named.items() if isinstance(t, Tensor)}


def filled(named: Mapping[str, Any], shapes: Shapes, fills: Mapping[str, float]) -> list[Any]:
    """The leaves of a call, padded to `shapes`."""

    def put(name: str, leaf: Any) -> Any:
        if name not in shapes or all(a >= b for a, b in zip(leaf.shape[1:], shapes[name][1:], strict=True)):
            return leaf
        more = [b - a for a, b in zip(leaf.shape[1:], shapes[name][1:], strict=True)]
        return F.pad(leaf, [n for m in reversed(more) for n in (0, m)], value=fills.get(name, 0))

    return [put(name, leaf) for name, leaf in named.items()]


def cut_back(graph: Graph, outputs: Sequence[Any], cuts: Sequence[Follows], shapes: Shapes) -> list[Any]:
    """A graph's outputs with padding cut off; `cuts` of outputs that it does not keep are skipped."""
    found = dict(zip(graph.output_names, outputs, strict=True))
    for cut in cuts:
        if cut.output in found:
            found[cut.output] = found[cut.output].narrow(cut.dim, 0, cut.size(shapes))
    return list(found.values())


def fills_of(graph: Graph, names: Mapping[str, str]) -> dict[str, float]:
    """The ignored index for each input that is a cross entropy's target and that no embedding reads.

    All other inputs are padded with 0. `names` maps the graph's names of inputs to those of the call.
    """
    found = {}
    ops = [n for n in graph.nodes if n.op == "call_function"]
    losses = [n for n in ops if op_name(n) in ("cross_entropy", "nll_loss")]
    tables = [n for n in ops if op_name(n) == "embedding"]
    for key, node in graph.inputs.items():
        read = [loss for loss in losses if node in walks.ancestors([loss.kwargs["target"]])]
        ignored = {loss.kwargs.get("ignore_index", -100) for loss in read}
        looked_up = any(walks.origin(table.kwargs["input"], _is_moved) is node for table in tables)
        if ignored and not looked_up and "int" in type_of(node).dtype and key in names:
            found[names[key]] = float(min(ignored))
    return found


def _is_moved(value: fx.Node) -> bool:
    """Whether the op only rearranges its operand."""
    return value.op == "call_function" and facts_of(op_name(value)).moved


def cuts_of(exact: Graph, padded: Graph, bucket: Bucket) -> tuple[Follows, ...]:
    """The dims of outputs that follow lengths, found by comparing a call with the same call padded.

    Candidates that an earlier call has excluded stay excluded.
    """
    here = bucket.here
    longer = bucket.longer
    found = []
    known = {(f.output, f.dim): f.lengths for f in bucket.cuts}
    for i, name in enumerate(exact.output_names):
        for d, (size, more) in enumerate(
            zip(info(exact.output).outputs[i].shape, info(padded.output).outputs[i].shape, strict=True)
        ):
            if size != more:
                lengths = frozenset(
                    (n, k, size - here[n][k]) for n, k in bucket.moved if size - here[n][k] == more - longer[n][k]
                )
                lengths = frozenset(at for at in lengths if not at[2]) or lengths
                if not lengths:
                    raise NotServed(
                        f"with pad_to, output {name!r} has a dim of {size} where the sequences are as they are "
                        f"and of {more} where they are padded, which is not the length of an input",
                        advice="pad_to=None, or that output is left out",
                    )
                found.append(Follows(name, d, lengths & known.get((name, d), lengths) or lengths))
    return tuple(found)


def gradients_of(outputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a sum of outputs in which each element has a different weight."""
    sums = []
    for output in outputs:
        weights = torch.cos(torch.arange(output.numel(), device=output.device, dtype=torch.float64))
        sums.append((output * weights.view(output.shape).to(output.dtype)).sum())
    if not sums or not parameters or not any(s.requires_grad for s in sums):
        return {}
    found = torch.autograd.grad(sums, list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}


Results = tuple[Sequence[Any], Mapping[str, Tensor]]  # outputs, and gradients of parameters


def check(graph: Graph, exact: Results, padded: Results, device: torch.device) -> None:
    """Raise, on all ranks alike, where the model gives other results for padded sequences."""
    # outputs in full: two plans may lay one out in two ways
    pairs = {
        f"output {name!r}": (_in_full(one), _in_full(other))
        for name, one, other in zip(graph.output_names, exact[0], padded[0], strict=True)
    }
    count = len(pairs)
    for name, one in exact[1].items():
        other = padded[1].get(name, torch.zeros_like(one))
        pairs[f"the gradient of {name}"] = _local(one), _local(other)
    numbers = torch.stack([_apart(one.detach(), other.detach()) for one, other in pairs.values()]).to(device)
    if dist.get_world_size() > 1 and dist.get_backend() != "fake":
        dist.all_reduce(numbers)
    rows = numbers.sqrt().tolist()
    of_all = sum(all_of_it**2 for *_, all_of_it in rows[count:]) ** 0.5
    allowed = ROUNDING[coarsest(graph)]
    for i, (what, (apart, beside, _)) in enumerate(zip(pairs, rows, strict=True)):
        least = 0.0 if i < count else LIMITS.noise * of_all
        if not apart <= allowed * max(beside, least):
            raise NotServed(
                f"with pad_to the model would compute something else: {what} depends on the padding",
                advice=(
                    "a mask among the inputs whose 0 means hidden, and targets beside them that are ignored where "
                    "nothing is; or pad_to=None"
                ),
            )


def coarsest(graph: Graph) -> int:
    """Bytes of the coarsest floating-point dtype in the graph; 8 where there is none."""
    outputs = [t for n in graph.nodes for t in info(n).outputs]
    return min((t.itemsize for t in outputs if t.torch_dtype.is_floating_point), default=8)


def _in_full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Sums of squares: of the differences, of the elements that differ, and of all finite elements."""
    a, b = one.double(), other.double()
    differ = (a != b) & ~(a.isnan() & b.isnan())
    return torch.stack(
        [
            torch.where(differ, a - b, 0.0).square().sum(),
            torch.where(differ, a, 0.0).square().sum(),
            torch.where(a.isfinite(), a, 0.0).square().sum(),
        ]
    )
