"""What a plan costs and holds, added up again from its JSON and the tables of its space.

Imports nothing of the solver: no search, no elimination, none of its sums.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autopar.sharding.placement import Sharding
from autopar.space.lookup import Taken
from autopar.space.space import Space


def validate(data: dict[str, Any], space: Space) -> None:
    """Raises AssertionError unless every choice is of the space, every conversion is there, and seconds and peak are
    what they come to.
    """
    axes = space.setting.mesh.axes
    cast = {
        e.target: e.source for e in space.edges if space.sites[e.target].regathered or space.sites[e.target].scattered
    }
    picked = []
    for k, site in enumerate(space.sites):
        texts, owner = data["decisions"][site.name]["choice"], space.sites[cast.get(k, k)].name
        fits = [
            i
            for i, c in enumerate(site.choices)
            if [repr(s) for s in c.strategies] == texts
            and (not site.regathered or site.regathered[i] == (owner in data["regathered"]))
            and (not site.scattered or site.scattered[i] == (owner in data["scattered"]))
        ]
        assert len(fits) == 1, (site.name, texts, fits)
        picked.append(fits[0])
    seconds = math.fsum(site.seconds[i] for site, i in zip(space.sites, picked))
    written = {(c["source"], c["target"], c["operand"]): c for c in data["conversions"]}
    for e in space.edges:
        choices = space.sites[e.source].choices[picked[e.source]], space.sites[e.target].choices[picked[e.target]]
        given, taken = e.given[e.given_by[picked[e.source]]], e.taken[e.taken_by[picked[e.target]]]
        assert taken == choices[1].operand(e.operand)
        cost = float(e.seconds[e.given_by[picked[e.source]], e.taken_by[picked[e.target]]])
        assert math.isfinite(cost), (space.sites[e.source].name, space.sites[e.target].name)
        seconds += cost
        conversion = written.get((space.sites[e.source].name, space.sites[e.target].name, e.operand))
        if conversion is None:  # nothing moves: the values are the same, or differ in words alone
            assert (
                space.conversions.path(
                    e.type.shape,
                    e.type.itemsize,
                    Sharding(tuple(f.value for f in given)),
                    Sharding(tuple(f.value for f in taken)),
                ).steps
                == ()
            )
        else:
            assert conversion["value"] == [
                Sharding(tuple(f.value for f in flows)).text(axes) for flows in (given, taken)
            ]
    hidden = 0.0
    for w in space.windows:
        moved = math.fsum(
            float(
                t[
                    space.edges[k].given_by[picked[space.edges[k].source]],
                    space.edges[k].taken_by[picked[space.edges[k].target]],
                ]
            )
            for k, t in w.communication
        )
        hidden += w.times * min(moved, math.fsum(float(c[picked[i]]) for i, c in w.compute))
    assert math.isclose(data["step_time_s"], seconds - hidden, rel_tol=1e-9, abs_tol=1e-12) and math.isclose(
        data["hidden_s"], hidden, rel_tol=1e-9, abs_tol=1e-12
    )
    assert data["lower_bound_s"] <= data["step_time_s"] * (1 + 1e-12)
    assert space.memory is not None
    peak = 0.0
    events: dict[int, float] = {}
    for p in space.memory.pieces:
        e = space.edges[p.place] if p.is_edge else None
        amount = float(
            p.bytes[e.given_by[picked[e.source]], e.taken_by[picked[e.target]]]
            if e is not None
            else p.bytes[picked[p.place]]
        )
        events[p.first] = events.get(p.first, 0.0) + amount
        events[p.last + 1] = events.get(p.last + 1, 0.0) - amount
    flows = [(int(e.given_by[picked[e.source]]), int(e.taken_by[picked[e.target]])) for e in space.edges]
    for amount, first, last in space.memory.missing(flows.__getitem__):
        events[first] = events.get(first, 0.0) + amount
        events[last + 1] = events.get(last + 1, 0.0) - amount
    beside = space.memory.beside(Taken(np.array(picked), *np.array(flows).T))  # counted by tests/space/test_memory.py
    held = 0.0
    for time in range(space.memory.times):
        held += events.get(time, 0.0)
        peak = max(peak, held + beside[time])
    assert abs(sum(data["memory"].values()) - peak) <= len(data["memory"]) + 1e-9 * peak, (data["memory"], peak)
    assert data["budget"] is None or peak <= data["budget"] + len(data["memory"])
