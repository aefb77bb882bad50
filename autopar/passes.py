"""Run the passes of a stage in order; verify the graph after each, and print it around the pass that is asked for.

    AUTOPAR_PRINT=drop_round_trips python train.py          # that graph before and after that pass, on stderr

A stage is a tuple `PASSES` of functions that rewrite one value in place. All stages are listed in STAGES.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from autopar.letters import NotServed

G = TypeVar("G")

VARIABLE = "AUTOPAR_PRINT"
STAGES = {  # stage -> the module that holds its PASSES, in the order in which they run
    "graph": "autopar.tracer.passes",
    "local graph": "autopar.codegen.local_passes",
    "joint graph": "autopar.codegen.joint_passes",
    "half": "autopar.codegen.schedule",
}


def run_passes(
    stage: str,
    passes: Sequence[Callable[[G], None]],
    graph: G,
    verify: Callable[[G, str], None],
    text: Callable[[G], str] = str,
) -> None:
    """Run the passes of a stage on its graph; `verify(graph, name)` raises where a pass has broken it."""
    printed = _printed_pass()
    for one in passes:
        name = one.__name__
        if name == printed:
            _show("before", stage, name, text(graph))
        one(graph)
        if name == printed:
            _show("after", stage, name, text(graph))
        verify(graph, name)


def pass_names() -> dict[str, list[str]]:
    """The names of all passes, by stage."""
    stages = {stage: importlib.import_module(home).PASSES for stage, home in STAGES.items()}
    return {stage: _names_once(passes) for stage, passes in stages.items()}


def _names_once(passes: Iterable[Callable[..., Any]]) -> list[str]:
    return list(dict.fromkeys(one.__name__ for one in passes))


def _printed_pass() -> str:
    """The pass that the environment asks to print, "" for none; a letter where no pass has that name."""
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return ""
    known = pass_names()
    if not any(wanted in names for names in known.values()):
        lists = (f"{stage}: {', '.join(names)}" for stage, names in known.items())
        raise NotServed(f"{VARIABLE}={wanted} names no pass", advice="\n".join(lists))
    return wanted


def _show(when: str, stage: str, name: str, text: str) -> None:
    print(f"-- {when} {name} ({stage})\n{text.rstrip()}", file=sys.stderr)
