"""Helpers for rules that depend on a call: letters of a tensor's dims, and the dims that an argument names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autopar.sharding.notation import NAMES, Rule, parse

__all__ = ["NAMES", "dims_of", "letters_of", "parse", "pooled", "reduced", "same_dims", "whole_dims"]


def letters_of(tensor: Any) -> list[str]:
    """A letter for each dim of a tensor: a0, a1, ..."""
    return [f"a{i}" for i in range(len(tensor.shape))]


def whole_dims(prefix: str, count: int) -> list[str]:
    """Letters of `count` dims that stay whole."""
    return [f"{prefix}{i}!" for i in range(count)]


def dims_of(arguments: Mapping[str, Any], default: int | None = None) -> set[int]:
    """The dims that a call names; all where it names none."""
    rank = len(arguments["input"].shape)
    named = arguments.get("dim", arguments.get("dims", default))
    if named is None:
        return set(range(rank))
    return {d % rank for d in ((named,) if isinstance(named, int) else named)} if rank else set()


def same_dims(letters: list[str], whole: set[int], linear: str = "") -> Rule:
    """The rule of an op with one operand that keeps its dims, of which `whole` stay whole."""
    text = " ".join(f"{a}!" if i in whole else a for i, a in enumerate(letters))
    return parse(f"{text} -> {text}", linear=linear)


def reduced(arguments: Mapping[str, Any], mark: str, default: int | None = None) -> Rule:
    """The rule of a reduction, with a mark on reduced dims.

    All dims are reduced where the call names none and `default` is None.
    """
    letters = letters_of(arguments["input"])
    gone = dims_of(arguments, default)
    left = " ".join(f"{a}{mark}" if i in gone else a for i, a in enumerate(letters))
    kept = [i for i in range(len(letters)) if i not in gone or arguments.get("keepdim")]
    row = " ".join("1" if i in gone else letters[i] for i in kept)
    return parse(f"{left} -> {', '.join([row] * len(arguments['outputs']))}")


def pooled(arguments: Mapping[str, Any], linear: str) -> Rule:
    """The rule of an op on images: batch and channels may be cut, positions stay whole.

    The op's name says how many positions there are, the rank whether there is a batch.
    """
    rank = len(arguments["input"].shape)
    spatial = int(re.findall(r"(\d)d", arguments["op"])[0]) if arguments["op"] != "interpolate" else rank - 2
    leading = " ".join(f"a{i}" for i in range(rank - spatial))
    before, after = (" ".join(whole_dims(letter, spatial)) for letter in "st")
    rows = ", ".join([f"{leading} {after}"] * len(arguments["outputs"]))
    return parse(f"{leading} {before} -> {rows}", linear=linear)
