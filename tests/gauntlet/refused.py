"""Which errors of the gauntlet a certificate refuses, before the first step and without a number being compared.

python -m tests.gauntlet.refused        # measures again, and writes refused.txt: a name a line
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar import api
from autopar.certificate import VARIABLE
from autopar.codegen import joint
from autopar.letters import Letter, NotCertified
from autopar.module import state
from autopar.testing import Unequal
from tests.gauntlet import suites
from tests.gauntlet.bugs import BUGS, Bug, Place

FILE = Path(__file__).with_name("refused.txt")
# the others break rules, for which a proof is there, or run in processes, where nobody asks for a certificate
ASKED = [b for b in BUGS if b.plant is not None and b.place is not Place.RANKS and not b.suite.startswith("rule of ")]


def names() -> list[str]:
    """Those of the file."""
    return FILE.read_text().splitlines()


def is_refused(bug: Bug) -> bool:
    """Is one of the programs that its suite makes refused by its certificate, once the error is planted?"""
    refusals: list[NotCertified] = []

    def lower(*args, **kwargs):
        made = _lower(*args, **kwargs)
        try:
            made.certified()
        except NotCertified as e:
            refusals.append(e)
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
    return bool(refusals)


def main() -> None:
    found = []
    for bug in ASKED:
        if is_refused(bug):
            found.append(bug.name)
        print(f"{bug.name}: {'refused' if bug.name in found else 'not seen'}", flush=True)
    FILE.write_text("".join(f"{name}\n" for name in found))
    print(f"{len(found)} of {len(ASKED)}")


if __name__ == "__main__":
    main()
