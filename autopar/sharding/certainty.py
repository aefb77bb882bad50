"""How accurate predicted seconds are, by their source.

    measured   curves that `autopar calibrate` measured on the machine itself
    reached    what kernels and collectives of the device class were measured to reach
    peak       the rates of a data sheet

The spread of a source is an interval of ratios of measured to predicted step time, in which nine of ten steps were
(`benchmarks/published.md` and `benchmarks/times.md`). A step whose seconds have several sources has the mean of their
spreads, weighted by seconds: the errors of one step are taken to have the same sign.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.sharding.cluster import Cluster

MEASURED, REACHED, PEAK = "measured", "reached", "peak"
FROM = {
    MEASURED: "measured on the machine",
    REACHED: "from what its class was measured to reach",
    PEAK: "from data sheets",
}
# Median ratios of measured to predicted step time: `benchmarks/times.md`, and `benchmarks/published.md` as run (steps
# took 1 / .966 of what was predicted, nine of ten .95 to 1.26) and at peaks alone (an error of 30.9 %).
MIDDLES = {MEASURED: 1.01, REACHED: 1.035, PEAK: 1.45}
SPREADS = {MEASURED: (0.85, 1.25), REACHED: (0.95, 1.26), PEAK: (1.32, 1.82)}
ALIKE = {MEASURED: 0.05, REACHED: 0.045, PEAK: 0.31}  # median relative error: closer steps may rank either way

# Where one of these kinds of collective was not measured, seconds of collectives count as those of a data sheet.
_KINDS = {"all_gather", "reduce_scatter", "all_reduce"}


def spread(seconds: Mapping[str, float]) -> tuple[float, float]:
    """The (least, most) ratio of a step's measured to predicted time, from predicted seconds by source."""
    total = sum(seconds.values())
    if not total:
        return 1.0, 1.0
    low = sum(SPREADS[source][0] * s for source, s in seconds.items()) / total
    high = sum(SPREADS[source][1] * s for source, s in seconds.items()) / total
    return low, high


def middle(seconds: Mapping[str, float]) -> float:
    """The median ratio of a step's measured to predicted time, from predicted seconds by source."""
    total = sum(seconds.values())
    return sum(MIDDLES[source] * s for source, s in seconds.items()) / total if total else 1.0


def resolution(seconds: Mapping[str, float]) -> float:
    """The relative difference from which on two predicted steps can be told apart; `seconds` by source."""
    total = sum(seconds.values())
    return sum(ALIKE[source] * s for source, s in seconds.items()) / total if total else 0.0


def source_of_links(cluster: Cluster) -> str:
    """The source of the seconds of collectives on a cluster: MEASURED, REACHED or PEAK."""
    if cluster.measured:
        return MEASURED
    return REACHED if any(dict(link.reached).keys() >= _KINDS for link in cluster.links) else PEAK
