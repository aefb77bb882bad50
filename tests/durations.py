"""Seconds of the tests by area, from a report of pytest.

make test PYTEST="--junitxml report.xml"
python -m tests.durations report.xml > tests/durations.md
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict

DEAREST = 12  # tests that are listed by themselves

HEAD = """# Seconds of the tests

`make test`, two workers on two cores without a GPU: seconds of each test by the clock. `python -m tests.durations`
writes this page and says how.
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(path: str, note: str = "") -> None:
    areas, single = defaultdict(list), []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        folder, file = case.attrib["classname"].split(".")[1:3] if case.attrib["classname"].count(".") > 1 else ("", "")
        taken = float(case.attrib["time"])
        areas[folder or "the rest"].append((file, taken))
        single.append((taken, f"{case.attrib['classname'].removeprefix('tests.')}: {case.attrib['name']}"))
    total = sum(taken for taken, _ in single)
    rows = []
    for folder, cases in sorted(areas.items(), key=lambda item: -sum(taken for _, taken in item[1])):
        files = defaultdict(float)
        for file, taken in cases:
            files[file] += taken
        dearest = ", ".join(f"{file} {files[file]:.0f}" for file in sorted(files, key=files.get)[:-4:-1] if file)
        seconds = sum(taken for _, taken in cases)
        rows.append([folder, str(len(cases)), f"{seconds:.0f}", f"{seconds / total:.0%}", dearest])
    print(HEAD)
    if note:
        print(note + "\n")
    print(f"{len(single)} tests, {total:.0f} seconds, {total / 120:.0f} minutes on two workers.\n")
    print(table(["area", "tests", "seconds", "share", "dearest files"], rows))
    print()
    print(
        table(
            ["dearest tests", "seconds"],
            [[name, f"{taken:.0f}"] for taken, name in sorted(single)[: -DEAREST - 1 : -1]],
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
