"""Loops over the places of a mask (`chosen.py`), as over the experts that were hit: all of them run.

    hit = (mask.sum((1, 2)) > 0).nonzero()                  as the model says it: experts that some token has chosen
    for e in hit:
        top, token = torch.where(mask[e[0]])

    for e in [0, 1, 2, ...]: ...                            as it is captured: one without rows adds nothing

What is chosen inside is chosen by a mask of what was hit too, where it is not the mask of which `hit` is the count. A
value that is made inside may be used outside only where rows were added to it, or written into it.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph.graph import info, op_name, type_of
from autopar.letters import NotCaptured
from autopar.tracer.chosen import Mask, Rows, as_chosen

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder

_COUNTS = ("sum", "any", "amax", "count_nonzero")
_SAME_TRUTH = ("clone", "detach", "contiguous", "to", "view", "permute", "transpose")


class Hits:
    """The places of a mask of one dim, for a loop over them: one round for each, whatever it is."""

    LONGEST = 1024  # A loop over more places, each of which is written out, is refused.

    def __init__(self, recorder: Recorder, rows: Rows, shape: tuple[int, ...] | None) -> None:
        self.recorder = recorder
        self.rows = rows
        self.shape = shape  # The shape of the tensor that a round is given; None: it is given a number.

    def __iter__(self) -> Iterator[Any]:
        mask = self.rows.mask
        count = min(mask.shape[0], _bound(mask.node))
        if count > self.LONGEST:
            raise self.recorder.values.chosen.letter(
                mask, f"a loop over the places of a mask would run {count:,} times"
            )
        self.recorder.assumptions.add(f"a loop over places of a mask runs for all {count} of them")
        for number in range(int(count)):
            with self.recorder.values.chosen.rounds.round(mask, number, self.shape is None):
                yield number if self.shape is None else torch.full(self.shape, number)

    def __getattr__(self, name: str) -> Any:
        raise self._letter()

    def __len__(self) -> int:
        raise self._letter()

    def __getitem__(self, index: Any) -> Any:
        raise self._letter()

    def _letter(self) -> NotCaptured:
        return self.recorder.values.chosen.letter(
            self.rows.mask, "the places of a mask are used as a list", "a loop over them"
        )


class Rounds:
    """The rounds of loops over the places of a mask, and the nodes that are made in each."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.open: list[Round] = []
        self.count = 0
        self.made: dict[fx.Node, int] = {}
        self.safe: set[fx.Node] = set()  # Values to which nothing has been added where a place is not there.
        self.is_read = False  # whether the model has the number of a round

    def numbers(self, rows: Rows) -> Hits:
        """The places of a mask as Python numbers, for a loop over them."""
        return Hits(self.recorder, rows, None)

    def round(self, mask: Mask, number: int, is_a_number: bool) -> Round:
        """The block of one round."""
        return Round(self, mask, number, is_a_number)

    def since(self, last: fx.Node | None) -> list[fx.Node]:
        """The nodes that were recorded after this one."""
        found = []
        for node in reversed(self.recorder.program.graph.nodes):
            if node is last:
                break
            found.append(node)
        return found

    def last(self) -> fx.Node | None:
        """The last node."""
        return next(iter(reversed(self.recorder.program.graph.nodes)), None)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """A block that adds chosen rows to a tensor, which is what it was where nothing is chosen."""
        before = self.last() if self.open else None
        yield
        if self.open:
            self.safe.update(self.since(before))

    def only_hit(self, tensor: Tensor) -> Tensor:
        """A mask that is made in a round, false where the round's place is not there; called while recording."""
        for each in self.open:
            if not _is_counted(self.recorder.node(tensor), each.mask.node, each.number):
                tensor = tensor & each.mask.tensor[each.number]
        return tensor

    def number_of(self, tensor: Any) -> int | None:
        """The number of a round that a tensor holds; None for other values."""
        if not self.open or not isinstance(tensor, Tensor) or id(tensor) not in self.recorder.values.nodes:
            return None
        node = self.recorder.node(tensor)
        while op_name(node) in ("index", "select", "view", "to", "clone"):
            node = node.kwargs["input"]
        number = node.kwargs.get("fill_value") if op_name(node) == "full" else None
        return number if type(number) is int else None

    def check(self) -> None:
        """Raise for a value of a round that is used outside: it would be another one without the round."""
        for node in self.recorder.program.graph.nodes:
            for operand in node.all_input_nodes:
                is_of_another = operand in self.made and self.made[operand] != self.made.get(node)
                if is_of_another and operand not in self.safe and not _is_of_the_model(operand):
                    raise NotCaptured(
                        "a value that is made in a loop over places of a mask is used outside of it: whether the "
                        "round takes place depends on values, which a graph cannot hold",
                        at=info(operand).source,
                        seen=str(type_of(operand)),
                        advice="out.index_add_(0, places, y) in the loop, which adds nothing without places",
                    )


class Round:
    """One round of a loop: notes the nodes that are made inside."""

    def __init__(self, rounds: Rounds, mask: Mask, number: int, is_a_number: bool) -> None:
        self.rounds = rounds
        self.mask = mask
        self.number = number
        self.is_a_number = is_a_number  # whether the model is given a number, and not a tensor
        self.before: fx.Node | None = None

    def __enter__(self) -> None:
        self.before = self.rounds.last()
        self.rounds.open.append(self)
        self.rounds.is_read = self.is_a_number

    def __exit__(self, *raised: object) -> None:
        self.rounds.open.remove(self)
        self.rounds.count += 1
        made = self.rounds.since(self.before)
        for node in made:
            self.rounds.made.setdefault(node, self.rounds.count)
        if raised[0] is None and self.rounds.is_read and self.rounds.safe.isdisjoint(made):
            raise self.rounds.recorder.values.chosen.letter(
                self.mask,
                "the places of a mask are taken as numbers, and no rows are chosen by them",
                "a loop over them",
            )


def _is_of_the_model(node: fx.Node) -> bool:
    """Whether a value is a cast of a parameter or buffer, which is kept for later uses."""
    return op_name(node) == "to" and all(operand.op == "get_attr" for operand in node.all_input_nodes)


def _is_counted(mask: fx.Node, hit: fx.Node, number: int) -> bool:
    """Whether `hit` counts the true elements of a tensor, of which `mask` is the part at this place."""
    counted = _behind_truth(hit)
    if op_name(counted) not in _COUNTS:
        return False
    whole = as_chosen(counted.kwargs["input"])
    part = _behind_truth(mask)
    while op_name(part) in _SAME_TRUTH and part is not whole:
        part = as_chosen(_behind_truth(part.kwargs["input"]))
    if _kept_dim(counted) != 0 or op_name(part) != "index" or as_chosen(part.kwargs["input"]) is not whole:
        return False
    return _is_never_negative(whole) and part.kwargs["index"] in (
        number,
        (number,),
        slice(number, number + 1),
        (slice(number, number + 1),),
    )


def _bound(hit: fx.Node) -> float:
    """The places from here on are never there: classes that no number of one of the largest elements is."""
    counted = _behind_truth(hit)
    if op_name(counted) not in _COUNTS:
        return math.inf
    classes = as_chosen(counted.kwargs["input"])
    kept = _kept_dim(counted)
    if op_name(classes) == "permute" and kept is not None:
        kept = classes.kwargs["dims"][kept] % len(type_of(classes).shape)
        classes = as_chosen(classes.kwargs["input"])
    if op_name(classes) != "one_hot" or kept != len(type_of(classes).shape) - 1:
        return math.inf
    ids = as_chosen(classes.kwargs["input"])
    while op_name(ids) in ("to", "view"):
        ids = as_chosen(ids.kwargs["input"])
    largest = ids.args[0] if ids.target is operator.getitem and ids.args[1] == 1 else ids
    if op_name(largest) not in ("topk", "sort", "argmax"):
        return math.inf
    dim = largest.kwargs.get("dim", -1)
    return type_of(largest.kwargs["input"]).shape[dim]


def _kept_dim(counted: fx.Node) -> int | None:
    """The one dim that a count keeps."""
    rank = len(type_of(counted.kwargs["input"]).shape)
    dims = counted.kwargs.get("dim", ())
    kept = set(range(rank)) - {d % rank for d in (dims if isinstance(dims, (tuple, list)) else [dims])}
    return kept.pop() if len(kept) == 1 and not counted.kwargs.get("keepdim") else None


def _behind_truth(node: fx.Node) -> fx.Node:
    """The node whose elements that are not zero are the true ones of another, in the same places."""
    while True:
        node = as_chosen(node)
        is_positive = op_name(node) in ("ne", "gt") and node.kwargs["other"] in (0, False)
        if not is_positive and op_name(node) != "to":
            return node
        node = node.kwargs["input"]


def _is_never_negative(node: fx.Node) -> bool:
    while op_name(node) in _SAME_TRUTH:
        node = node.kwargs["input"]
    return op_name(node) == "one_hot" or type_of(node).dtype == "bool"
