"""What autopar says when it cannot go on: short letters to the user.

    NoRule: autopar has no sharding rule for cumsum
        at      h = torch.cumsum(scores, dim=-1)          model.py:84, in Attention.forward
        with    scores: f32[8, 512]
        try     rule("cumsum", "b s! -> b s!")            docs/rules.md

What happened, where in the user's own source, what was seen, what to do. `raise` speaks to users, `assert` to
ourselves.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any, TypeVar

_Kind = TypeVar("_Kind", bound="AutoparError")


def among(names: Iterable[str], given: Any) -> str:
    """The known names, and the one that may have been meant, as text for the line `with` of a letter."""
    known = list(names)
    folded = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given.lower(), list(folded), n=1) if isinstance(given, str) else []
    meant = f"; did you mean {folded[near[0]]!r}?" if near else ""
    return f"known: {', '.join(known)}{meant}"


class AutoparError(Exception):
    """Base of the errors that autopar raises: a sentence, then the lines `at`, `with` and `try` that apply."""

    def __init__(self, what: str, *, at: str = "", seen: str = "", advice: str = "") -> None:
        self.what, self.at, self.seen, self.advice = map(_printable, (what, at, seen, advice))
        lines = [self.what]
        for label, text in (("at", self.at), ("with", self.seen), ("try", self.advice)):
            if text:
                lines.append(f"    {label:<8}" + text.replace("\n", "\n" + " " * 12))
        super().__init__("\n".join(lines))

    @property
    def parts(self) -> dict[str, Any]:
        """The parts of the letter, by the names of its arguments."""
        return {"what": self.what, "at": self.at, "seen": self.seen, "advice": self.advice}

    def but(self: _Kind, **changes: Any) -> _Kind:
        """The same letter with some parts changed."""
        return type(self)(**{**self.parts, **changes})

    def __reduce__(self) -> tuple[Any, ...]:  # letters cross process boundaries whole
        return _rebuild, (type(self), self.parts)


Letter = AutoparError  # The name that the class had first, kept for code that catches it.


def _printable(text: str) -> str:
    """The text with lone surrogates as escapes: users and files may have them, and no stream takes them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _rebuild(cls: type[AutoparError], parts: dict[str, Any]) -> AutoparError:
    return cls(**parts)


class NotServed(AutoparError):
    """An argument or a situation that no stage of this version handles."""


class NotCaptured(AutoparError):
    """The tracer met something that a graph cannot hold."""


class NoRule(AutoparError):
    """An op has no sharding rule, and the caller asked for strictness."""


class BadRule(AutoparError):
    """A sharding rule that cannot be read, or does not fit its operands."""


class BadSharding(AutoparError):
    """A sharding, placement or mesh that cannot be read or cannot exist."""


class BadConstraint(AutoparError):
    """A constraint that matches nothing, or that no strategy can satisfy."""


class BadBudget(AutoparError):
    """A memory budget that cannot be read."""


class BadPreset(AutoparError):
    """A preset that is not known, or that the mesh or the model cannot carry."""


class BadCluster(AutoparError):
    """A cluster description that cannot be found or read."""


class BadGraph(AutoparError):
    """A graph that cannot be written, or a text that does not read as one."""


class BadPlan(AutoparError):
    """A plan that cannot be read, or belongs to another model."""


class BadOrder(BadPlan):
    """An order of a pipeline that loses an action, waits for ever, or holds more than was planned."""


class BadProgram(AutoparError):
    """A file of a program that cannot be written or read, was edited, or was made of something else."""


class Infeasible(AutoparError):
    """No plan satisfies what was asked.

    Where a budget is in the way, `needs` are the bytes that any plan needs, and `smallest` those of the smallest plan
    that was found, of which `fullest` tells: infinite where parameters, gradients and optimizer states alone need more
    than the budget. `stands` are those that are held all the time, however small a micro-batch is.
    """

    def __init__(
        self,
        what: str,
        *,
        at: str = "",
        seen: str = "",
        advice: str = "",
        needs: float = 0.0,
        smallest: float = 0.0,
        fullest: str = "",
        stands: float = 0.0,
    ) -> None:
        super().__init__(what, at=at, seen=seen, advice=advice)
        self.needs = needs
        self.smallest = smallest
        self.fullest = fullest
        self.stands = stands

    @property
    def parts(self) -> dict[str, Any]:
        numbers = {"needs": self.needs, "smallest": self.smallest, "stands": self.stands}
        return {**super().parts, **numbers, "fullest": self.fullest}

    @property
    def is_of_states(self) -> bool:
        """Whether parameters, gradients and optimizer states alone exceed the budget, whatever a plan does."""
        return self.needs > 0 and math.isinf(self.smallest)


class Lost(AutoparError):
    """Another rank hangs, has ended, or has raised."""


class Anomaly(AutoparError):
    """A gradient is not a number, and torch.autograd.detect_anomaly asks to be told."""


class BadWeights(AutoparError):
    """A file of weights or a checkpoint that cannot be read or written, or is of another model."""


class BadInput(AutoparError):
    """Inputs of the parallel model that differ from what it was lowered for."""


class Disagreement(AutoparError):
    """Ranks hold different plans, programs or worlds."""


class NotCertified(AutoparError):
    """An emitted program whose values do not lie as its ops need them: an error of autopar, caught before it runs."""


class Diverged(AutoparError):
    """`autopar.watch` has found copies that differ between ranks, or a gradient that is not that of a single device."""


class Consumed(AutoparError):
    """The single-device model was used after it became the parallel one."""
