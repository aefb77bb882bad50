"""Assumptions of one capture: those that the caller declared, and those that the graph repeats."""

from __future__ import annotations

from autopar.graph.graph import Assume
from autopar.letters import NotCaptured
from autopar.tracer.place import source


class Assumptions:
    """Lines of `graph.assumptions`, and the declared branches that were asked for."""

    def __init__(self, declared: Assume) -> None:
        self.declared = declared
        self.lines: list[str] = []
        self.asked: set[str] = set()

    def add(self, what: str) -> None:
        """A line, with the user's line of source."""
        self.lines.append(f"{what}, at {source()}")

    def branch(self, line: str) -> bool | None:
        """The declared answer to a question at this line of source; None: there is none."""
        for where, answer in self.declared.branches:
            if line.startswith(where + ","):
                self.asked.add(where)
                return answer
        return None

    def refuse_unasked(self) -> None:
        """A letter where a declared branch was never asked for."""
        for where, _ in self.declared.branches:
            if where not in self.asked:
                raise NotCaptured(
                    f"the declared branch {where} was never asked for",
                    advice="the file and line of graph.assumptions or of a letter",
                )
