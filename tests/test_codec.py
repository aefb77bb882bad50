"""Values come back from JSON as they were, or an error says which part does not read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from autopar import Cluster, codec
from autopar.codec import Codec, Misread
from autopar.letters import BadCluster


@dataclass(frozen=True)
class Wheel:
    spokes: int
    name: str = ""


@dataclass(frozen=True)
class Cart:
    wheels: tuple[Wheel, ...]
    size: tuple[float, bool]
    load: Mapping[str, int] | None
    marks: frozenset[str]
    owners: tuple[tuple[str, str], ...] = ()
    colour: str = "red"
    by_name: dict[str, Wheel] = field(default_factory=dict)

    @property
    def heavy(self) -> frozenset[str]:
        return frozenset(name for name, weight in (self.load or {}).items() if weight > 9)


KEYS = ("wheels", "size", "load", "marks", "owners", "by_name")
CODEC = Codec({"owners": codec.pairs_by_name(codec.text)}, {"owners": dict})
CART = Cart(
    (Wheel(3), Wheel(4, "rear")),
    (1.5, True),
    {"hay": 2, "iron": 10},
    frozenset("ba"),
    (("a", "x"), ("b", "y")),
    by_name={"spare": Wheel(5)},
)
DATA = {
    "wheels": [{"spokes": 3, "name": ""}, {"spokes": 4, "name": "rear"}],
    "size": [1.5, True],
    "load": {"hay": 2, "iron": 10},
    "marks": ["a", "b"],
    "owners": {"a": "x", "b": "y"},
    "by_name": {"spare": {"spokes": 5, "name": ""}},
}


def test_values_come_back_as_they_were():
    data = json.loads(json.dumps(CODEC.write(CART, KEYS)))
    assert data == DATA and list(data) == list(KEYS)
    assert Cart(**CODEC.read(Cart, data, {}, KEYS)) == CART
    assert CODEC.read(Cart, {"load": None}, {"size": (0.0, False)}, ("load", "size")) == {
        "load": None,
        "size": (0.0, False),
    }
    assert CODEC.write(CART, ("heavy",)) == {"heavy": ["iron"]}
    assert CODEC.read(Cart, {"heavy": ["iron"]}, {}, ("heavy",)) == {"heavy": frozenset(["iron"])}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"wheels": [{"spokes": 3}, {"spokes": "4"}]}, "'4' is not a whole number from 0 .*, at wheels.1.spokes$"),
        ({"wheels": [{"name": "rear"}]}, "KeyError: 'spokes', at wheels.0$"),
        ({"wheels": {"spokes": 3}}, "is not a list, at wheels$"),
        ({"size": [1.5]}, "does not have 2 entries, at size$"),
        ({"size": [float("inf"), True]}, "inf is not a finite number, at size.0$"),
        ({"size": [1.5, 1]}, "1 is not true or false, at size.1$"),
        ({"load": {"hay": -1}}, "-1 is not a whole number .*, at load.hay$"),
        ({"load": {"hay": 2**400}}, "a whole number of 401 bits is not .*, at load.hay$"),
        ({"marks": [1]}, "1 is not a string, at marks.0$"),
        ({"owners": []}, r"\[\] is not an object, at owners$"),
        ({"by_name": {"spare": 5}}, "5 is not an object, at by_name.spare$"),
    ],
)
def test_an_error_says_where_it_is(change, words):
    with pytest.raises(Misread, match=words):
        CODEC.read(Cart, {**DATA, **change}, {}, KEYS)


def test_a_missing_attribute_is_an_error():
    with pytest.raises(KeyError, match="load"):
        CODEC.read(Cart, {key: DATA[key] for key in KEYS if key != "load"}, {}, KEYS)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: d.update(hidden=1.5), "1.5 is not a number from 0 to 1, at hidden"),
        (lambda d: d.update(links=[]), "links: none"),
        (lambda d: d.pop("nodes"), "'nodes'"),
        (lambda d: d["device"].update(lanch_s=1.0), "lanch_s is not one of name, flops_per_s, .*, at device"),
        (
            lambda d: d["device"].update(memory_bytes="80 GB"),
            "'80 GB' is not a whole number .*, at device.memory_bytes",
        ),
        (lambda d: d["device"]["flops_per_s"].update(float32=None), "None is not a .*, at device.flops_per_s.float32"),
        (lambda d: d["device"]["products"].update(tile=[1]), r"2 entries, at device.products.tile"),
        (lambda d: d["device"]["products"].update(unaligned=2.0), "unaligned: 2.0, .*, at device.products"),
        (lambda d: d["links"][1].update(reached=3), "3 is not an object, at links.1.reached"),
    ],
)
def test_a_cluster_file_that_was_edited_wrongly_says_where(change, words, tmp_path):
    path = tmp_path / "machine.json"
    Cluster.of("h100").save(path)
    assert Cluster.of(path) == replace(Cluster.of("h100"), name="machine")
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(BadCluster, match=words):
        Cluster.of(path)
