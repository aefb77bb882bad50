"""Which errors of the gauntlet are seen in the emitted programs, before the first step and without a number compared.

The certificate is autopar's own, the witness a type checker of another project.

python -m tests.gauntlet.refused        # measures again, and writes refused.txt: a name and a judge a line
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from autopar import api
from autopar.certificate import VARIABLE
from autopar.codegen import joint
from autopar.codegen.lower import Lowered
from autopar.letters import Letter, NotCertified
from autopar.module import state
from autopar.testing import Unequal
from tests.gauntlet import suites
from tests.gauntlet.bugs import BUGS, Bug, Place
from tests.witness.adapter import Refusal, witness

FILE = Path(__file__).with_name("refused.txt")
# the others break rules, for which a proof is there, or run in processes, whose programs are not seen here
ASKED = [b for b in BUGS if b.plant is not None and b.place is not Place.RANKS and not b.suite.startswith("rule of ")]


@functools.cache
def seen() -> dict[str, frozenset[str]]:
    """By the error, the judges that refuse a program with it, as the file says."""
    lines = [line.rsplit(" ", 1) for line in FILE.read_text().splitlines()]
    return {name: frozenset(judge for other, judge in lines if other == name) for name, _ in lines}


def judges_of(bug: Bug) -> frozenset[str]:
    """Those that refuse one of the programs that its suite makes, once the error is planted."""
    programs = programs_of(bug)
    return frozenset(name for name, refuses in JUDGES.items() if any(map(refuses, programs)))


def programs_of(bug: Bug) -> list[Lowered]:
    """The programs that its suite makes with the error in them, each once."""
    programs: dict[str, Lowered] = {}

    def lower(*args, **kwargs):
        made = _lower(*args, **kwargs)
        programs.setdefault(f"{made.joint.forward}{made.joint.backward}{made.joint.settle}", made)
        return made

    joint.LOWERED.clear()
    _lower = state.lower
    with pytest.MonkeyPatch.context() as patch:
        if bug.place is Place.HERE:
            check = suites.prepared(bug.suite)
            bug.plant(patch)
        else:
            bug.plant(patch)
            check = suites.suite_of(bug.suite)()
        _lower = state.lower  # the error may be planted in it
        patch.setenv(VARIABLE, "off")  # the first refusal would end the suite
        patch.setattr(api, "lower", lower)
        patch.setattr(state, "lower", lower)
        try:
            check()
        except (Unequal, Letter):
            pass
    joint.LOWERED.clear()
    return list(programs.values())


def _is_not_certified(program: Lowered) -> bool:
    try:
        program.certified()
    except NotCertified:
        return True
    return False


def _is_not_taken(program: Lowered) -> bool:
    if dist.is_initialized():  # by a suite on one device, which has no axis
        return False
    try:
        witness(program)
    except Refusal:
        return True
    return False


JUDGES: dict[str, Callable[[Lowered], bool]] = {"certificate": _is_not_certified, "witness": _is_not_taken}


def main() -> None:
    lines = []
    for bug in ASKED:
        judges = sorted(judges_of(bug))
        lines += [f"{bug.name} {judge}\n" for judge in judges]
        print(f"{bug.name}: {', '.join(judges) or 'not seen'}", flush=True)
    FILE.write_text("".join(lines))
    print(f"{len(lines)} of {len(ASKED)} by each of {len(JUDGES)}")


if __name__ == "__main__":
    main()
