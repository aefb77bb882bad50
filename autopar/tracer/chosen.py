"""Rows that a mask chooses, though nobody knows how many: they stay where they are.

    top, token = torch.where(mask)                         as the model says it: as many places as are true
    out.index_add_(0, token, expert(x[token]) * w[token, top, None])

    seen = where(any(mask, 0), view(x, [1, T, h]), 0)      as it is captured, with shapes that stay
    y = expert(seen) * where(mask, view(permute(w), [K, T, 1]), 0)
    out' = add(out, sum(where(view(mask, [K, T, 1]), y, 0), 0))

The model is shown fakes whose first dim has a size that is data (`Count`); each stands for a `whole`, which has the
dims of the mask in its stead, of size one where all of them see the same. What treats each row by itself runs on the
whole (`chosen_calls.py`), and writes and sums at the places take what the mask chooses (`chosen_ends.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph.graph import info, op_name
from autopar.letters import NotCaptured
from autopar.tracer.call import tensors_in
from autopar.tracer.place import source

if TYPE_CHECKING:
    from autopar.tracer.hits import Rounds
    from autopar.tracer.recorder import Recorder


OF_CHOSEN_ROWS = "rows that a mask chooses"  # how assumptions about them begin


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A mask whose true elements choose, with the function and the line that asked for them."""

    tensor: Tensor
    node: fx.Node
    by: str
    line: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What a fake stands for: `whole` has the dims of the mask in the place of the fake's dim `dim`."""

    whole: Tensor
    mask: Mask
    dim: int
    places: tuple[int, ...] = ()  # dims of the mask along which these rows are the places, one in each column

    @property
    def rank(self) -> int:
        """Number of dims of the mask."""
        return len(self.mask.shape)

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the whole in the mask's dims: one where all places along it share a row."""
        return tuple(self.whole.shape[self.dim : self.dim + self.rank])

    @property
    def is_list(self) -> bool:
        """Whether these are the places of a mask of one dim."""
        return self.places == (0,) and self.rank == 1

    def of_size(self, shape: tuple[int, ...], dim: int, lead: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole for a fake of this shape, whose rows are at `dim`."""
        return (*shape[:dim], *lead, *shape[dim + 1 :])


class ChosenRows:
    """The fakes of one capture that stand for chosen rows."""

    SIZE = 1_000_003  # The size of a dim of rows on fakes: a prime that no model has, so that no view mixes it up.

    def __init__(self, recorder: Recorder, rounds: Rounds) -> None:
        self.recorder = recorder
        self.rounds = rounds
        self.rows: dict[int, Rows] = {}
        self.alive: list[Tensor] = []  # ids stay unique while their tensors live
        self.counts = 0  # numbers of rows that the model has been shown
        self.recording: Callable[[], AbstractContextManager[Any]] | None = None  # records what the block computes

    def show(self, fake: Tensor, rows: Rows) -> Tensor:
        """Let a fake stand for these rows from here on."""
        self.rows[id(fake)] = rows
        self.alive.append(fake)
        if rows.is_list and fake.dim() == 1:  # torch's own tolist of a fake is a loop that no mode sees
            vars(fake)["tolist"] = functools.partial(self.rounds.numbers, rows)
        return fake

    def of(self, value: Any) -> Rows | None:
        """The rows that a value stands for, or None."""
        return self.rows.get(id(value)) if isinstance(value, Tensor) else None

    def meets(self, *values: Any) -> bool:
        """Whether chosen rows, or their number, are among these values."""
        if not self.rows:
            return False
        return any(id(t) in self.rows for t in tensors_in(values, {})) or (self.counts > 0 and _has_count(values))

    def recorded(self) -> AbstractContextManager[Any]:
        """A block whose torch functions are recorded as the model's are."""
        assert self.recording is not None
        return self.recording()

    def count(self, rows: Rows) -> Count:
        """The number of chosen rows, as the model sees it."""
        self.counts += 1
        return Count(self, rows.mask)

    def letter(self, mask: Mask, why: str, advice: str = "") -> NotCaptured:
        """A letter about rows that this mask chooses."""
        what = f"the shape of {mask.by}'s result depends on the values of a tensor, which a graph cannot hold"
        chosen = f" (chosen at {mask.line})" if mask.line != source() else ""
        return self.recorder.letter(
            f"{what}: {why}{chosen}", (mask.tensor,), advice or "torch.where, or a mask of fixed shape"
        )

    def mask_of(self, given: Tensor, by: str) -> Mask:
        """The mask of what is true in a tensor now; called while recording."""
        tensor = given.clone() if given.dtype == torch.bool else given != 0
        tensor = self.rounds.only_hit(tensor)
        said = f"{OF_CHOSEN_ROWS} stay where they are: what is done with them is done with every row"
        self.recorder.assumptions.add(said)
        return Mask(tensor, self.recorder.node(tensor), by, source())

    def close(self) -> None:
        """Release all tensors."""
        for fake in self.alive:
            vars(fake).pop("tolist", None)
        self.rows.clear()
        self.alive.clear()
        self.recording = None

    def refuse(self, tensors: Sequence[Tensor], why: str, at_their_line: bool = False) -> None:
        """Raise where chosen rows are among these tensors."""
        for rows in filter(None, map(self.of, tensors)):
            letter = self.letter(rows.mask, why)
            raise letter.but(at=rows.mask.line) if at_their_line else letter


class Count(torch.SymInt):
    """A number of chosen rows: a size that views may take, and that nothing may be computed from.

    Whether it is zero is answered by no: what is done with no rows adds nothing.
    """

    def __init__(self, chosen: ChosenRows, mask: Mask) -> None:
        self.chosen = chosen
        self.mask = mask

    def _is_none(self, other: Any, least: int) -> bool:
        """No, for the question whether there are fewer rows than `least`; others raise."""
        if type(other) is not int or other != least:
            raise self.letter()
        self.chosen.recorder.assumptions.add(f"{OF_CHOSEN_ROWS} are computed, also where there are none")
        return False

    def letter(self, *_: Any) -> NotCaptured:
        return self.chosen.letter(
            self.mask,
            "the model computes with the number of rows",
            "mask.sum(), a tensor; a question whether there are none: places.numel() == 0",
        )

    def __eq__(self, other: object) -> bool:
        return other is self or self._is_none(other, 0)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return self._is_none(other, 1)

    def __le__(self, other: Any) -> bool:
        return self._is_none(other, 0)

    def __gt__(self, other: Any) -> bool:
        return not self._is_none(other, 0)

    def __ge__(self, other: Any) -> bool:
        return not self._is_none(other, 1)

    def __bool__(self) -> bool:
        return not self._is_none(0, 0)

    def __hash__(self) -> int:
        return id(self)

    def _refuse(self, *_: Any) -> Any:
        raise self.letter()


for _name in (
    "int float index str repr format neg abs add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod "
    "pow rpow round floor ceil trunc divmod rdivmod"
).split():
    setattr(Count, f"__{_name}__", Count._refuse)


def _has_count(values: Any) -> bool:
    for value in values:
        if isinstance(value, Count):
            return True
        if isinstance(value, slice) and _has_count((value.start, value.stop, value.step)):
            return True
        if isinstance(value, (list, tuple)) and _has_count(value):
            return True
        if isinstance(value, dict) and _has_count(value.values()):
            return True
    return False


def are_alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes are the same value, computed twice or not."""
    one = as_chosen(one)
    other = as_chosen(other)
    if one is other:
        return True
    if one.target != other.target or one.op != other.op or one.op != "call_function" or info(one).random >= 0:
        return False
    return _same((one.args, one.kwargs), (other.args, other.kwargs))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        return are_alike(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    return type(one) is type(other) and bool(one == other)


def as_chosen(node: fx.Node) -> fx.Node:
    """The node behind copies of it."""
    while op_name(node) in ("clone", "detach", "contiguous"):
        node = node.kwargs["input"]
    return node
