"""Assumptions of one capture: those that the caller declares, and those that the graph records."""

from __future__ import annotations

from autopar.graph.graph import Assume
from autopar.letters import NotCaptured
from autopar.tracer.place import source


class Assumptions:
    """The lines of `graph.assumptions`, and the declared branches that the model has reached."""

    def __init__(self, declared: Assume) -> None:
        self.declared = declared
        self.lines: list[str] = []
        self.asked: set[str] = set()

    def add(self, what: str) -> None:
        """Record an assumption, with the user's line of source."""
        self.lines.append(f"{what}, at {source()}")

    def branch(self, line: str) -> bool | None:
        """The declared answer to a condition at this line of source; None where there is none."""
        for where, answer in self.declared.branches:
            if line.startswith(where + ","):
                self.asked.add(where)
                return answer
        return None

    def refuse_unasked(self) -> None:
        """Raise a letter where a declared branch was never reached."""
        for where, _ in self.declared.branches:
            if where not in self.asked:
                raise NotCaptured(
                    f"the declared branch {where} was never asked for",
                    advice="the file and line of graph.assumptions or of a letter",
                )
