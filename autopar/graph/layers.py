"""The layer's number in a name: `3` in `model.layers.3.mlp.up/linear` and in `encoder.encoder_layer_3`.

A part of a module path is numbered if it ends in a digit. A part that is a number alone, as in a ModuleList, numbers a
layer for sure; of other parts only the outermost is taken for one, for `fc1` and `fc2` inside it are no layers. Names
are only where to look: whoever needs layers that are alike compares them.

Names of nodes are a path and an op, `h.0.mlp/linear`. Nothing here imports torch.
"""

from __future__ import annotations

import re

DIGITS = "0123456789"
_COUNTED = re.compile(r"([^.:]+\.[0-9]+).*")  # `add.2`, `add.2:shared`: an op that its module runs several times


def numbered(path: str) -> tuple[int, ...]:
    """Indices of the parts of a module path that end in a digit, outermost first."""
    return tuple(i for i, part in enumerate(path.split(".")) if part[-1:] in DIGITS and part)


def block(path: str, depth: int = 0) -> str:
    """The path up to its numbered part `depth`, such as `layers.0.blocks.1` at 1; "" where it has none."""
    places = numbered(path)
    return _up_to(path, places[depth]) if depth < len(places) else ""


def innermost_block(path: str) -> str:
    """The path up to its last layer: `h.3` of `h.3.mlp.up`, `layer_0` of `layer_0.fc1`; or ""."""
    places = _layers(path)
    return _up_to(path, places[-1]) if places else ""


def folded(text: str) -> str:
    """A text of names with `*` for the numbers of their layers: `h.*.mlp/linear to h.*/add`."""
    return " ".join(map(_folded, text.split(" ")))


def around_number(name: str) -> tuple[str, int, str] | None:
    """The text before the outermost layer's number, the number, and the text behind it; None without one.

    Where no module is numbered, the number is that of the op among those of its module: 2 in `transformer/add.2`.
    """
    path, slash, op = name.partition("/")
    counted = _COUNTED.fullmatch(op)
    outer = block(path) or (f"{path}{slash}{counted[1]}" if counted else "")
    before = outer.rstrip(DIGITS)
    return (before, int(outer[len(before) :]), name[len(outer) :]) if outer else None


def _folded(name: str) -> str:
    path, slash, op = name.partition("/")
    parts = path.split(".")
    for place in _layers(path):
        parts[place] = parts[place].rstrip(DIGITS) + "*"
    return ".".join(parts) + slash + op


def _layers(path: str) -> list[int]:
    """Indices of the outermost numbered part of a path, and of its parts that are numbers alone."""
    parts = path.split(".")
    return [place for at, place in enumerate(numbered(path)) if at == 0 or not parts[place].strip(DIGITS)]


def _up_to(path: str, place: int) -> str:
    return ".".join(path.split(".")[: place + 1])
