"""`Bug`: one published error, how it is planted, and what notices it; and the kinds of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tests.gauntlet.plants import Plant

MISSING = "missing sum"
DOUBLED = "doubled sum or wrong scale"
COUNT = "count of a mean, auxiliary loss"
ORDER = "wrong part, place or order"
STALE = "stale or differing copy"
OPTIMIZER = "optimizer"
UNEVEN = "uneven parts, padding"
RACE = "schedule, overlap"
SAVED = "checkpoint"
GROUP = "wrong group"
AGAIN = "recompute"
DTYPE = "dtype of a sum"
RANDOM = "random numbers"


class Place(enum.Enum):
    """Where an error is planted."""

    HERE = "the plan is sound, and what is made of it is broken"
    PLANNING = "rules or states are wrong, and plans come of them"
    RANKS = "in the processes of the ranks"


@dataclass(frozen=True)
class Bug:
    """One published error."""

    name: str
    sources: tuple[str, ...]  # "owner/project#number, item n", "owner/project" or "arXiv:number"
    what: str
    kind: str
    plant: Plant | None = None
    suite: str = ""  # a function of suites.py, or "rule of <op>"
    place: Place = Place.HERE
    is_nightly: bool = False
    shown_by: str = ""  # of what cannot be planted: file::test
    why: str = ""

    @property
    def links(self) -> list[tuple[str, str]]:
        """A label and an address of each source."""
        return [_link(source) for source in self.sources]


def _link(source: str) -> tuple[str, str]:
    if source.startswith("arXiv:"):
        return source.replace(":", " "), f"https://arxiv.org/abs/{source.removeprefix('arXiv:')}"
    repository, _, number = source.partition("#")
    project, address = repository.split("/")[1], f"https://github.com/{repository}"
    return (f"{project} #{number}", f"{address}/issues/{number.partition(',')[0]}") if number else (project, address)
