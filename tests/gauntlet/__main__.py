"""python -m tests.gauntlet: write docs/gauntlet.md, the errors of the gauntlet and what notices each."""

from __future__ import annotations

from collections import Counter

from tests.docs.blocks import HERE
from tests.gauntlet import suites
from tests.gauntlet.bugs import BUGS, Bug
from tests.gauntlet.refused import ASKED, JUDGES, seen

PAGE = "docs/gauntlet.md"

TEXT = """# The gauntlet: published silent errors

An error of parallel training rarely stops a run. A sum over ranks that is missing, or taken twice, gives a loss that
falls, and a model that is not the one you wrote. The gauntlet is a list of such errors, as users and maintainers of
other projects have reported or mended them. Each is planted in this compiler, one at a time, and the tests have to
notice it: in the form that it can take here, so that a hook that was lost elsewhere is a sum that is left out. An error
that could not be planted, because there is nothing here that could break that way, names a test that shows why.

What notices them is what this project promises: losses, gradients, parameters and buffers are those of one device.
A suite plans a small model, pins the plan to the one in which the error can happen, trains it on threads or processes
in float64, and compares. The few suites that compare something else say so: sums in float32, steps by themselves, and
rules, of which every strategy is run on shards.

Before them stands the [certificate](design/047-a-certificate.md), which types every emitted program without running it
and without a plan, and refuses it by a letter while it is lowered. And a [witness](design/049-an-outside-witness.md), a
type checker of another project under which tests run emitted programs. The table says where each of them refuses the
program with the error in it, before any number is compared: they see sums that are missing, doubled, of other ranks or
in a narrower dtype. They do not see factors, what is drawn, what lies between two steps, or what is wrong with the
graph that they are given. What tests notice was measured with certificates switched off.

The sources are links. The sentences are about what those reports say, in short; nobody re-tested them here, and none
is an error of autopar. A fix may have come long ago.

## In numbers

{numbers}

## What is not here

These kinds of error were published too, and nothing here can have them yet:

- pipelines: micro-batches that stages scale, stages that share a weight, names of layers that stages number;
- experts whose buffers are on the ranks that have them, such as a count of rows that each rank keeps for itself;
- eight-bit floats: scales that ranks do not share, weights that were quantised a step ago;
- what is the user's loop: schedules that read each rank's clock, a loop that never clips;
- several streams of a GPU: collectives that are under way are tested on gloo processes.

Two more wait for a case of their own: buffers outside a checkpoint whose values are lost on meta, and one weight whose
readers have cut it in different ways.

## Every error

{table}

## The suites

What each trains, and how many of the errors it notices.

{suites}

`python -m tests.gauntlet` writes this page from `tests/gauntlet/bugs.py`; the plants are in `tests/gauntlet/plants.py`.
"""


def caught(bug: Bug) -> str:
    """What notices an error, for the table."""
    if bug.plant is None:
        return f"cannot happen: {bug.why} (`{bug.shown_by.split('::')[1]}`)"
    if bug.suite.startswith("rule of "):
        return f"the proof of the {bug.suite.replace('rule of ', 'rule of `')}`"
    return f"`{bug.suite}`" + (", nightly" if bug.is_nightly else "")


def about(suite: str) -> str:
    """What a suite does, in its own words."""
    return (suites.suite_of(suite).__doc__ or "").strip()


def _said(is_refused: bool, is_asked: bool) -> str:
    return "refused" if is_refused else "no" if is_asked else "not asked"


def page() -> str:
    """The page as text."""
    kinds = Counter(bug.kind for bug in BUGS)
    rules = sum(bug.suite.startswith("rule of ") for bug in BUGS)
    ranks = sum(bug.suite in suites.IN_RANKS for bug in BUGS)
    shown = sum(bug.plant is None for bug in BUGS)
    nightly = sum(bug.is_nightly for bug in BUGS)
    numbers = [
        "| errors | |",
        "| --- | --- |",
        f"| planted, and noticed because results differ from those of one device | {len(BUGS) - rules - shown} |",
        f"| of those, on gloo processes | {ranks} |",
        f"| of those, refused by the certificate before the first step, of {len(ASKED)} that it was asked about "
        f"| {sum('certificate' in judges for judges in seen().values())} |",
        f"| of those, refused by the witness | {sum('witness' in judges for judges in seen().values())} |",
        f"| planted in a rule, and noticed by its proof | {rules} |",
        f"| not to be planted, with a test that shows it | {shown} |",
        f"| all | {len(BUGS)} |",
        f"| of those, noticed by `make nightly` alone | {nightly} |",
        "",
        "| kind | errors |",
        "| --- | --- |",
        *(f"| {kind} | {count} |" for kind, count in kinds.most_common()),
    ]
    table = [
        "| error | where it happened | what went wrong | noticed here by | the certificate | the witness | kind |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    asked = {bug.name for bug in ASKED}
    for bug in BUGS:
        judges = seen().get(bug.name, ())
        sees = " | ".join(_said(judge in judges, bug.name in asked) for judge in JUDGES)
        links = ", ".join(f"[{label}]({address})" for label, address in bug.links)
        table.append(f"| {bug.name} | {links} | {bug.what} | {caught(bug)} | {sees} | {bug.kind} |")
    counts = Counter(bug.suite for bug in BUGS if bug.suite and not bug.suite.startswith("rule of "))
    rows = ["| suite | what it trains | errors |", "| --- | --- | --- |"]
    rows += [f"| `{name}` | {about(name)} | {count} |" for name, count in sorted(counts.items())]
    return TEXT.format(numbers="\n".join(numbers), table="\n".join(table), suites="\n".join(rows))


if __name__ == "__main__":
    (HERE / PAGE).write_text(page())
    print(f"{PAGE}: {len(BUGS)} errors")
