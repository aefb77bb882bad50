"""The files of device classes: figures of their data sheets in the right units, seconds of a hand, and plans."""

import json
from importlib import resources

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, DeviceMesh
from autopar.letters import BadCluster
from autopar.sharding.certainty import PEAK, REACHED, source_of_links
from autopar.sharding.cost_model import CostModel
from autopar.sharding.costs import collective_seconds
from tests.sharding.world import product

FILES = sorted(
    f.name[:-5] for f in resources.files("autopar.sharding").joinpath("clusters").iterdir() if f.name.endswith(".json")
)

# By data sheets: half-precision TFLOP/s with sparsity, GB of memory (10^9), TB/s of it, GB/s of a device's links in a
# node, both directions together, Gbit/s of its adapter, devices a node.
SHEETS = {
    "b200": (4500, 192, 8.0, 1800, 400, 8),
    "b300": (4500, 288, 8.0, 1800, 800, 8),
    "gb200": (5000, 186, 8.0, 1800, 400, 72),
    "gb300": (5000, 278, 8.0, 1800, 800, 72),
    "mi300x": (2614.9, 206, 5.3, 896, 400, 8),
    "mi325x": (2614.9, 275, 6.0, 896, 400, 8),
    "mi355x": (5000, 309, 8.0, 1075, 400, 8),
    "l40s": (724, 48, 0.864, 64, 100, 4),
    "h100pcie": (1513, 86, 2.0, 128, 200, 4),
    "h100nvl": (1671, 94, 3.9, 600, 400, 2),
    "a100g40": (624, 43, 1.555, 600, 200, 8),
    "h100": (1979, 86, 3.35, 900, 400, 8),
    "h200": (1979, 149, 4.8, 900, 400, 8),
    "a100": (624, 86, 2.039, 600, 200, 8),
}


@pytest.mark.parametrize("name", SHEETS)
def test_figures_are_those_of_data_sheets_in_the_units_of_the_file(name):
    cluster = Cluster.of(name)
    device, (inner, outer) = cluster.device, cluster.links
    sparse, memory, bandwidth, links, adapter, a_node = SHEETS[name]
    assert device.rate("bfloat16") == device.rate("float16") == pytest.approx(sparse / 2 * 1e12, rel=2e-3)
    assert device.memory_bytes == pytest.approx(memory * 1e9, rel=0.01)
    assert device.memory_bytes_per_s == pytest.approx(bandwidth * 1e12, rel=1e-3)
    one_way = links / 2 * 1e9
    reachable = 25 / 32 if "PCIe" in inner.name else 1  # What is taken as reachable of a slot.
    assert inner.bytes_per_s == pytest.approx(reachable * one_way, rel=2e-3)
    assert outer.bytes_per_s == pytest.approx(adapter / 8 * 1e9) and cluster.devices_per_node == a_node


@pytest.mark.parametrize("name", FILES)
def test_what_is_reached_is_below_the_peak(name):
    device = Cluster.of(name).device
    fast = [rate for dtype, rate in device.flops_per_s if dtype.startswith("float8")]
    assert not fast or fast[0] == pytest.approx(2 * device.rate("bfloat16"), rel=0.02)
    assert device.rate("float64") <= device.rate("float32") < device.rate("bfloat16")
    assert device.reached_bytes_per_s < device.memory_bytes_per_s
    for dtype, rate in device.products.reached if device.products else ():
        assert 0.4 < rate / dict(device.flops_per_s)[dtype] < 1 or name == "rtx4090"  # which has a higher clock


@pytest.mark.parametrize(
    "name, seconds, gathered",
    [
        # 2 x 8192^3 FLOPs at 2.25e15; 7/8 of 2^30 bytes at 9e11, and a start of 14 us with 7 hops of 1.9 us.
        ("b300", 488.7e-6, 1043.9e-6 + 27.3e-6),
        # Of 1,024 tiles of 256 x 256 four waves on 304 units, at 668.4e12, and what four waves write, 192 tiles of it
        # for nothing: 2 x 256 x 256 bytes a tile at 4.11e12; 7/8 of 2^30 bytes at 4.48e11, and a start of 15 us.
        ("mi300x", 1953e-6 + 39e-6 + 5e-6, 2097.2e-6 + 15e-6),
    ],
)
def test_a_product_and_a_gather_take_what_a_hand_computes(name, seconds, gathered):
    cluster = Cluster.of(name)
    assert CostModel(cluster).forward(product(8192, 8192, 8192))[0] == pytest.approx(seconds, rel=0.02)
    levels = cluster.levels(DeviceMesh(8), 0, "all_gather")
    assert collective_seconds("all_gather", levels, 2.0**30) == pytest.approx(gathered, rel=0.01)


# GB/s a direction by data sheets: lanes of 16 and 32 GT/s with 128 of 130 bits, and half of the 900 of NVLink-C2C.
SLOTS = {"PCIe 4.0 x16": 31.5, "PCIe 5.0 x16": 63.0, "NVLink-C2C to Grace": 450.0}


@pytest.mark.parametrize("name", FILES)
def test_a_host_reaches_most_of_its_slot_and_says_where_its_figures_are_from(name):
    cluster = Cluster.of(name)
    host, said = cluster.host, dict(cluster.sources)["host"]
    slot, _, shared = host.name.partition(" for ")
    assert name == "generic" or slot in SLOTS
    most = SLOTS.get(slot, 31.5) * 1e9 / (2 if shared else 1)
    least = 0.35 if slot.startswith("NVLink") else 0.7
    assert all(least * most < rate < most for rate in (host.down_bytes_per_s, host.up_bytes_per_s))
    assert host.both_bytes_per_s == 0.0 and host.latency_s == 1e-5 and ("assumption" in said or name == "generic")
    assert (host.adamw_params_per_s > 0) == ("adamw_params_per_s:" in said)
    assert host.bytes / cluster.devices_per_node > 0.8 * cluster.device.memory_bytes


def test_a_part_of_a_node_has_a_part_of_its_host():
    whole, part, more = (Cluster.of(name).host for name in ("h100", "h100-2x3", "h100@100G-8x4"))
    assert whole.bytes == 32 * 64 * 2**30 == more.bytes == 4 * part.bytes
    assert part.down_bytes_per_s == whole.down_bytes_per_s
    assert part.down_s(52e9) == pytest.approx(1.0, rel=1e-4) and part.up_s(0) == 1e-5
    assert str(part) == "PCIe 5.0 x16: 52 GB/s down, 51 up a device, 512 GiB a node"


@pytest.mark.parametrize("key", ["down_bytes_per_s", "up_bytes_per_s", "bytes", "latency_s", "adamw_params_per_s"])
def test_a_host_that_cannot_be_is_a_letter_with_its_place(key, tmp_path):
    data = json.loads(resources.files("autopar.sharding").joinpath("clusters", "h100.json").read_text())
    data["host"][key] = -1
    (tmp_path / "wrong.json").write_text(json.dumps(data))
    with pytest.raises(BadCluster, match=f"host.*{key}|{key}.*host"):
        Cluster.of(tmp_path / "wrong.json")


def test_a_rack_of_72_is_one_node():
    """A gather over 72 devices of one rack does not touch the adapters, and one over two racks does."""
    seconds = [
        collective_seconds("all_gather", Cluster.of(f"gb200-72x{racks}").levels(DeviceMesh(72 * racks), 0), 72e9)
        for racks in (1, 2)
    ]
    assert seconds[0] == pytest.approx(71e9 / 900e9, rel=0.01) and seconds[1] > seconds[0]


def test_collectives_are_measured_where_all_kinds_of_a_step_are():
    sources = {name: source_of_links(Cluster.of(name)) for name in FILES}
    assert sources["h100"] == sources["a100"] == sources["a100g40"] == REACHED
    assert sources["b200"] == sources["mi300x"] == sources["mi355x"] == sources["l4"] == PEAK


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x).square().mean()


@pytest.mark.parametrize("name", FILES)
def test_a_small_model_is_planned(name):
    plan = autopar.plan(Net(), torch.zeros(32, 64), mesh=(2,), cluster=name)
    assert 0 < plan.step_time_s < 1e-2
