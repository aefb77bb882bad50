"""`LIMITS`: the tuned numbers of the page and of what a notebook shows, each with its unit. All were chosen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """Sizes of pictures, and what is too small to be seen in them."""

    times: int = 1200  # times of a step in the page's chart of memory: about its pixels across
    few_times: int = 120  # the same in a notebook, whose files grow with each plan that is shown
    width: int = 720  # pixels of a notebook's chart
    height: int = 150
    top: int = 14  # pixels above the chart, for the text of the budget
    least: float = 0.01  # share of the peak; kinds with less are not named in a notebook
    far: float = 3.0  # times the peak; a budget above that is not drawn, as it would press the rest flat
    same: float = 1e-9  # share of a step; times that differ by less are one time


LIMITS = PictureLimits()
