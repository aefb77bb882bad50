"""Clusters as a command line names them, and what a reader has to know of one."""

from __future__ import annotations

import re

from autopar.letters import BadCluster
from autopar.sharding.cluster import Cluster


def cluster_of(name: str | None, fabric: str | None = None) -> Cluster:
    """The cluster of a name or path, with another link between its nodes where one is named."""
    cluster = Cluster.of(name)
    if fabric is None:
        return cluster
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*G(?:b|bps|bit|b/s|bit/s)?", fabric)
    if match is None or not float(match[1]):
        raise BadCluster(f"--fabric {fabric!r} is not a rate of a link", advice="--fabric 400G, in Gbit/s a device")
    return cluster.with_fabric(float(match[1]))


def notes_of(cluster: Cluster) -> list[str]:
    """Lines about a cluster: which of several parts it is, the fabric that was named, and its host."""
    said = [("part", cluster.part), ("fabric", cluster.fabric), ("host", str(cluster.host or ""))]
    return [f"{what:<9} {cluster.name}: {text}" for what, text in said if text]
