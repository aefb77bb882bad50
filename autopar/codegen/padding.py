"""pad_to: a call whose sequences are of another length runs as one of the next multiple, and what comes out is cut back. A few programs serve all lengths.

    lengths     every dim but the first that is of another size than in meta_inputs; where ranks pass their own rows, the longest of all ranks
    filled      with 0: ids, masks, numbers; targets of a cross entropy with the index that it ignores
    cut         outputs, where they follow a length
    checked     the first call of a kind runs as it is, too, and must give the same: whether a model sees its padding only it knows. Both run as eval() does, because padding moves the places by which dropout draws
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.letters import NotServed
from autopar.tracer.graph import Graph, info, op_name, type_of

Shapes = Mapping[str, tuple[int, ...]]
_ROUNDING, _MOST = 1e3, 0.05                                   # times what the dtype can tell: sums over another length are added in another order; and as a share of a result
_SHOWN_AS_IT_IS = frozenset({"identity", "to", "view", "narrow", "pad", "transpose", "permute", "contiguous", "select", "split", "unsqueeze", "squeeze", "clone"})


@dataclass(frozen=True, slots=True)
class Follows:
    """A dim of an output that has the size of a dim of an input, and so many more."""

    output: int
    dim: int
    lengths: frozenset[tuple[str, int, int]]                   # all that it may follow: the input, its dim, how many more

    def size(self, shapes: Shapes) -> int | None:
        """Its size in a call; None where what it may follow differs."""
        sizes = {shapes[name][dim] + more for name, dim, more in self.lengths}
        return sizes.pop() if len(sizes) == 1 else None


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of calls of one kind: what to put into the padding of each input, and which dims of outputs to cut."""

    fills: Mapping[str, float]
    cuts: tuple[Follows, ...]


@dataclass(slots=True, eq=False)
class Bucket:
    """A call, and the lengths to which it is brought."""

    here: Shapes                                               # as it is, or as the longest of all ranks is
    shapes: Shapes                                             # as it runs
    longer: Shapes                                             # the same, but longer than `here` wherever anybody's is padded
    moved: frozenset[tuple[str, int]]                          # the inputs and dims of which that is so
    key: Any
    kind: Kind

    @property
    def cuts(self) -> tuple[Follows, ...]:
        return self.kind.cuts

    @property
    def is_ambiguous(self) -> bool:
        return any(cut.size(self.here) is None for cut in self.cuts)


class Padding:
    """What `pad_to` means to one model."""

    def __init__(self, to: int, named: Mapping[str, Any]) -> None:
        self.to, self.given = to, shapes_of(named)
        self.known: dict[Any, Kind] = {}                       # by how the model is called

    def bucket(self, least: Shapes, here: Shapes, how: Any) -> Bucket:
        """Where a call belongs whose lengths are these; `least` are the shortest of all ranks."""
        own = {n: self.given[n] if len(self.given.get(n, ())) == len(shape) else (-1,) * len(shape) for n, shape in here.items()}
        lengths = {size for n, shape in here.items() if n in self.given for size, before in zip(shape[1:], own[n][1:], strict=True) if size != before}
        shapes = {n: tuple(-(-size // self.to) * self.to if d and size in lengths and size != own[n][d] else size for d, size in enumerate(shape)) for n, shape in here.items()}
        moved = frozenset((n, d) for n, shape in shapes.items() for d, size in enumerate(shape) if d and size != least[n][d])
        longer = {n: tuple(size + self.to if (n, d) in moved and size == here[n][d] else size for d, size in enumerate(shape)) for n, shape in shapes.items()}
        key = how, moved
        return Bucket(here, shapes, longer, moved, key, self.known.get(key, Kind({}, ())))


def shapes_of(named: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {n: tuple(t.shape) for n, t in named.items() if isinstance(t, Tensor)}


def filled(named: Mapping[str, Any], shapes: Shapes, fills: Mapping[str, float]) -> list[Any]:
    """The leaves of a call, brought to shapes."""
    def put(name: str, leaf: Any) -> Any:
        if name not in shapes or all(a >= b for a, b in zip(leaf.shape[1:], shapes[name][1:], strict=True)):
            return leaf
        more = [b - a for a, b in zip(leaf.shape[1:], shapes[name][1:], strict=True)]
        return F.pad(leaf, [n for m in reversed(more) for n in (0, m)], value=fills.get(name, 0))

    return [put(name, leaf) for name, leaf in named.items()]


def cut_back(outputs: Sequence[Any], cuts: Sequence[Follows], shapes: Shapes) -> list[Any]:
    """The outputs without what stands for padding."""
    found = list(outputs)
    for cut in cuts:
        found[cut.output] = found[cut.output].narrow(cut.dim, 0, cut.size(shapes))
    return found


def fills_of(graph: Graph, names: Mapping[str, str]) -> dict[str, float]:
    """What goes into the padding of each input that only a cross entropy reads, or that it reads and no table does; of the rest 0. `names` are those of the call, by those of the graph."""
    found = {}
    for key, node in graph.inputs.items():
        ignored = {v.kwargs.get("ignore_index", -100) for v in graph.nodes if v.op == "call_function" and op_name(v) in ("cross_entropy", "nll_loss") and _comes_from(v.kwargs["target"], node)}
        looked_up = any(v.op == "call_function" and op_name(v) == "embedding" and _shows(v.kwargs["input"], node) for v in graph.nodes)
        if ignored and not looked_up and "int" in type_of(node).dtype and key in names:
            found[names[key]] = float(min(ignored))            # type: ignore[type-var, arg-type]
    return found


def _comes_from(value: Any, source: Any) -> bool:
    pending, seen = [value], set()
    while pending:
        node = pending.pop()
        if node is source:
            return True
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes
    return False


def _shows(value: Any, source: Any) -> bool:
    """Is it the source, in other places?"""
    while value is not source:
        if value.op != "call_function" or op_name(value) not in _SHOWN_AS_IT_IS:
            return False
        value = value.all_input_nodes[0]
    return True


def cuts_of(exact: Graph, padded: Graph, bucket: Bucket) -> tuple[Follows, ...]:
    """Which dims of outputs follow which lengths, from the same call as it is and as it is longer; of what was known before, what still may be."""
    here, longer, found = bucket.here, bucket.longer, []
    known = {(f.output, f.dim): f.lengths for f in bucket.cuts}
    for i, name in enumerate(exact.output_names):
        for d, (size, more) in enumerate(zip(info(exact.output).outputs[i].shape, info(padded.output).outputs[i].shape, strict=True)):
            if size != more:
                lengths = frozenset((n, k, size - here[n][k]) for n, k in bucket.moved if size - here[n][k] == more - longer[n][k])
                lengths = frozenset(at for at in lengths if not at[2]) or lengths
                if not lengths:
                    raise NotServed(f"with pad_to, output {name!r} has a dim of {size} where the sequences are as they are and of {more} where they are padded, which is no length of an input",
                                    advice="pad_to=None, or that output is left out")
                found.append(Follows(i, d, lengths & known.get((i, d), lengths) or lengths))
    return tuple(found)


def check(names: Sequence[str], exact: Sequence[Any], cut: Sequence[Any]) -> None:
    """Does the model compute the same of padded sequences? Raises a letter that names the output which differs."""
    for name, one, other in zip(names, exact, cut, strict=True):
        a, b = (t.full_tensor() if isinstance(t, DTensor) else t for t in (one, other))
        x, y = (t.detach().double().nan_to_num() for t in (a, b))
        allowed = min(_MOST, _ROUNDING * torch.finfo(a.dtype).eps) if a.is_floating_point() else 0.0
        if not float((x - y).norm()) <= allowed * float(x.norm()):
            raise NotServed(f"with pad_to the model would compute something else: output {name!r} depends on the padding", advice="a mask among the inputs, and targets beside them that are ignored where nothing is; or pad_to=None")
