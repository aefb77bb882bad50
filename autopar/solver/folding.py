"""A plan's file, in which layers that are alike are written once.

    {"name": "h.0.up/linear", "op": "linear", ...}      at place 7
    {"name": "h.1.up/linear", "op": "linear", ...}      at place 19
    {"name": "h.2.up/linear", "op": "linear", ...}      at place 31

is written as one record, whose names have `{}` for the layer and `{+1}` for the one after it:

    {"names": ["h.{}.up/linear"], "layer": 0, "count": 3, "at": 7, "every": 12, "op": "linear", ...}

Behind the name of a decision stand those of the places that it reads: `["h.{}.up/linear", "h.{-1}.down/linear"]`.
`fold` and `unfold` are inverse to each other; choices stand in a table of their own.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autopar import codec
from autopar.graph.layers import around_number

VERSION = 6
READ = (5, VERSION)  # a decision of version 5 has no outputs, and reads nothing
# Fields that are lists of names.
_LISTS = ("regathered", "scattered", "recomputed", "without_rule", "hosted", "wholly_hosted")
# Fields that are objects by name, with a figure or several for each.
_COLUMNS = {"parameter_bytes": ("bytes",), "needed": ("bytes", "seconds"), "fused": ("family",)}
_NAMED = frozenset({"passing", "offloaded"})  # Fields that are lists of a value's name and those of ops.
_HOLE = re.compile(r"\{([+-]\d+)?\}")
_Record = tuple[tuple[str, ...], Mapping[str, Any]]  # names, and what is said of them
_place = functools.partial(codec.whole, most=10_000_000)  # a place of a file


def fold(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a plan in the form of its file."""
    table = list(dict.fromkeys(tuple(d["choice"]) for d in data["decisions"].values()))
    places = {choice: i for i, choice in enumerate(table)}
    records: dict[str, list[_Record]] = {
        "decisions": [
            ((name, *d["reads"]), {**_without(d, "reads"), "choice": places[tuple(d["choice"])]})
            for name, d in data["decisions"].items()
        ],
        "conversions": [((c["source"], c["target"]), _without(c, "source", "target")) for c in data["conversions"]],
    }
    records |= {key: _records_of(data[key]) for key in _LISTS if key in data}
    records |= {key: _rows(data[key], columns) for key, columns in _COLUMNS.items() if key in data}
    records |= {key: _named_only(data[key]) for key in sorted(_NAMED & data.keys())}
    folded = {key: _folded(listed) for key, listed in records.items()}
    return {**data, "version": VERSION, "choices": [list(choice) for choice in table], **folded}


def unfold(data: Mapping[str, Any], version: int) -> dict[str, Any]:
    """The data of a plan from that of its file; KeyError, TypeError or ValueError where it cannot be read."""
    choices = data["choices"]
    found = {
        **_without(data, "choices"),
        "version": version,
        "decisions": codec.once(
            (name, {**said, "choice": choices[_place(said["choice"])], "reads": reads})
            for (name, *reads), said in _unfolded(data["decisions"])
        ),
        "conversions": [
            {"source": source, "target": target, **said} for (source, target), said in _unfolded(data["conversions"])
        ],
    }
    found |= {key: _names_of(_unfolded(data[key])) for key in _LISTS if key in data}
    found |= {key: _entries(_unfolded(data[key]), columns) for key, columns in _COLUMNS.items() if key in data}
    for key in _NAMED & data.keys():
        found[key] = [names for names, _ in _unfolded(data[key])]
    return found


def written(data: Mapping[str, Any]) -> str:
    """The text of a file, with a line for each record."""
    lines = []
    for key, value in data.items():
        if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
            rows = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in value)
            lines.append(f" {json.dumps(key)}: [\n  {rows}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


# -- records


def _records_of(names: Iterable[str]) -> list[_Record]:
    """Records with one name each, of which nothing is said."""
    return [((name,), {}) for name in names]


def _named_only(rows: Iterable[Sequence[str]]) -> list[_Record]:
    """Records with several names each, of which nothing is said."""
    return [(tuple(names), {}) for names in rows]


def _names_of(records: Iterable[tuple[list[str], Any]]) -> list[str]:
    """The names of records with one name each; ValueError where one has more or none."""
    return [name for (name,), _ in records]


def _rows(entries: Mapping[str, Any], columns: Sequence[str]) -> list[_Record]:
    """Records with one name each, and its figures by columns."""
    if len(columns) == 1:
        return [((name,), {columns[0]: figure}) for name, figure in entries.items()]
    return [((name,), dict(zip(columns, figures, strict=True))) for name, figures in entries.items()]


def _entries(records: Iterable[tuple[list[str], dict[str, Any]]], columns: Sequence[str]) -> dict[str, Any]:
    """The figures of records by name, from which `_rows` makes them."""
    if len(columns) == 1:
        return codec.once((name, said[columns[0]]) for (name,), said in records)
    figures = operator.itemgetter(*columns)
    return codec.once((name, list(figures(said))) for (name,), said in records)


def _folded(records: Sequence[_Record]) -> list[dict[str, Any]]:
    """Records with those of layers that are alike merged into one, in the order of their first places."""
    alike: dict[Any, list[tuple[int, int]]] = {}  # (pattern, content) -> layers and places
    for place, (names, said) in enumerate(records):
        layer, patterns = _pattern(names)
        key = (patterns, layer is None, json.dumps(said, sort_keys=True))
        alike.setdefault(key, []).append((0 if layer is None else layer, place))
    found = []
    for (patterns, is_plain, _), members in alike.items():
        said = records[members[0][1]][1]
        runs = [[one] for one in members] if is_plain else _runs(members)
        for run in runs:
            (layer, place), *_ = run
            listed = list(records[place][0] if len(run) == 1 else patterns)
            every = run[1][1] - place if len(run) > 1 else 0
            head: dict[str, Any] = {"names": listed, "at": place}
            if len(run) > 1:
                head |= {"layer": layer, "count": len(run), "every": every}
            found.append({**head, **said})
    return sorted(found, key=lambda record: record["at"])


def _runs(members: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Runs of consecutive layers whose places are evenly spaced."""
    run: list[tuple[int, int]] = []
    for layer, place in sorted(members):
        is_next = bool(run) and layer == run[-1][0] + 1 and place > run[-1][1]
        is_even = len(run) < 2 or place - run[-1][1] == run[1][1] - run[0][1]
        if run and not (is_next and is_even):
            yield run
            run = []
        run.append((layer, place))
    if run:
        yield run


def _pattern(names: Sequence[str]) -> tuple[int | None, tuple[str, ...]]:
    """The layer of the first name that has one, and all names with `{}` holes for layers relative to it."""
    parts = [around_number(name) for name in names]
    first = next((part[1] for part in parts if part is not None), None)
    if first is None or any("{" in name or "}" in name for name in names):
        return None, tuple(names)
    patterns = []
    for name, part in zip(names, parts, strict=True):
        if part is None:
            patterns.append(name)
            continue
        before, layer, behind = part
        by = "" if layer == first else f"{layer - first:+d}"
        is_plain = f"{before}{layer}{behind}" == name  # no leading zeros
        patterns.append(f"{before}{{{by}}}{behind}" if is_plain else name)
    return first, tuple(patterns)


def _unfolded(records: Any) -> list[tuple[list[str], dict[str, Any]]]:
    """The records of all layers, in the order of their places."""
    found: dict[int, tuple[list[str], dict[str, Any]]] = {}
    for record in records:
        said = _without(record, "names", "at", "layer", "count", "every")
        count, at, every = (_place(record.get(k, d)) for k, d in (("count", 1), ("at", 0), ("every", 0)))
        for i in range(count):
            names: list[str] = record["names"]
            if "layer" in record:
                names = [_HOLE.sub(_layer(codec.whole(record["layer"]) + i), name) for name in names]
            place = at + i * every
            if place in found:
                raise ValueError(f"two records stand at place {place}")
            found[place] = (list(names), said)
    if len(found) and max(found) != len(found) - 1:
        raise ValueError(f"{len(found)} records do not fill the places up to {max(found)}")
    return [found[place] for place in range(len(found))]


def _without(data: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in data.items() if k not in keys}


def _layer(number: int) -> Callable[[re.Match[str]], str]:
    return lambda hole: str(number + int(hole[1] or 0))
