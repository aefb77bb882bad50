"""Seconds of single kernels and collectives beside microbenchmarks that others published.

No figure here is one from which a cluster file was made, but for the products of cuBLAS by size, which two figures of
the file (a rate and a start) must meet at five sizes.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from autopar import Cluster, DeviceMesh
from autopar.sharding.cluster import Timed
from autopar.sharding.cost_model import CostModel, Heads, Kernel
from autopar.sharding.costs import collective_seconds
from tests.sharding.world import product


@pytest.mark.parametrize("n, published", [(512, 103), (1024, 243), (2048, 515), (4096, 614), (8192, 722)])
def test_products_take_as_long_as_cublas_by_size(n, published):
    """2048 x N x N on an H100, in TFLOP/s: triton-lang/triton#2339."""
    (seconds,) = CostModel(Cluster.of("h100")).forward(product(2048, n, n))
    assert 2 * 2048 * n * n / seconds / 1e12 == pytest.approx(published, rel=0.12)


@pytest.mark.parametrize(
    "name, best", [("a100", 271.2), ("h100", 794.5), ("h200", 794.5), ("l4", 91.4), ("rtx4090", 178.8)]
)
def test_no_product_is_faster_than_the_best_that_a_search_over_shapes_found(name, best):
    model = CostModel(Cluster.of(name))
    for m, n, k in ((8192, 8192, 8192), (1024, 10240, 5120), (2048, 2048, 13312), (16384, 16384, 1024)):
        assert 2 * m * n * k / model.forward(product(m, n, k))[0] / 1e12 <= best * 1.001


def test_norms_take_as_long_as_their_passes_were_measured_to_take_by_columns_and_channels():
    """Seconds of torch's kernels on an H200 (benchmarks/gpu_measured.profile.json) at sizes between those of the file.

    Its bandwidth bounds them, and what a chain of torch.compile's or an unknown op reads has the bandwidth alone.
    """
    model, one = CostModel(Cluster.of("h200")), np.ones(1)
    norm = Kernel(("layer_norm",), "bfloat16", one, 4e8 * one, 6e8 * one, size=768 * one)
    assert model.forward(norm)[0] == pytest.approx(268e-6, rel=0.02)
    assert model.backward(norm)[0] == pytest.approx(768e-6, rel=0.02)
    slow = replace(norm, size=300 * one)
    assert model.forward(norm)[0] < model.forward(slow)[0] < 0.51e-3
    assert model.is_known(norm) and not model.is_measured(norm)
    for free in (replace(norm, names=()), replace(norm, size=None), replace(norm, dtype="float64")):
        assert model.forward(free)[0] == pytest.approx(4e8 / model.cluster.device.bandwidth, rel=0.05)
        assert not model.is_known(free)
    quick = replace(norm, dtype="float32", size=2048 * one)
    slower = replace(model.cluster, device=replace(model.cluster.device, reached_bytes_per_s=1e12))
    assert CostModel(slower).forward(quick)[0] == pytest.approx(4e-4, rel=0.02)


def test_rows_that_are_not_aligned_are_slower_in_halves_alone():
    model = CostModel(Cluster.of("h200"))
    for dtype, slower in (("bfloat16", 4.0), ("float32", 1.0)):
        odd = replace(product(8192, 50257, 1024, dtype), as_cut=("mm unaligned", np.array([True])))
        ratio = model.forward(odd)[0] / model.forward(replace(odd, as_cut=None))[0]
        assert slower <= ratio < 1.6 * slower


def test_a_product_of_one_tile_more_than_there_are_units_takes_two_waves():
    model = CostModel(Cluster.of("h100"))
    full, more = (model.forward(product(128 * tiles, 256, 8192))[0] for tiles in (132, 133))
    assert 1.9 < more / full < 2.0


def test_a_product_whose_rows_are_no_whole_number_of_16_bytes_is_slower_where_that_was_measured():
    """On its curve on a measured machine; by a file that says how much; and in single precision by four numbers."""
    sizes = product(8192, 50257, 1024).matrices
    assert sizes.unaligned(2).all() and not product(8192, 50260, 1024).matrices.unaligned(4).any()
    odd, even = (
        replace(product(8192, n, 1024), as_cut=("mm unaligned", np.array([n % 8 > 0]))) for n in (50257, 50264)
    )
    for name, slower in (("h200", 4.0), ("h100", 1.0)):
        model = CostModel(Cluster.of(name))
        assert slower <= model.forward(odd)[0] / model.forward(even)[0] < 1.6 * slower
    curves = tuple(
        Timed(name, "bfloat16", ((1.0, s), (1e15, s)), ()) for name, s in (("mm", 1.0), ("mm unaligned", 7.0))
    )
    model = CostModel(replace(Cluster.of("h100"), timed=curves))
    assert model.forward(odd)[0] == pytest.approx(7.0) and model.forward(even)[0] == pytest.approx(1.0)


def test_compiled_code_pads_such_rows_where_that_is_faster():
    """Seconds by hand: copies of the matrices that have them, at a nanosecond a number, and a product that has not."""
    mask, far = np.array([True]), 1e15
    slow = Timed("mm unaligned", "bfloat16", ((1.0, 7.0), (far, 7.0)), ((1.0, 9.0), (far, 9.0)))
    fast = Timed("mm", "bfloat16", ((1.0, 1.0), (far, 1.0)), ((1.0, 2.0), (far, 2.0)))
    copies = Timed("clone", "float32", ((1e3, 1e-6), (1e12, 1e3)), ())
    model = CostModel(replace(Cluster.of("h100"), timed=(slow, fast, copies)))
    kernel = replace(product(8192, 50257, 1024), as_cut=("mm unaligned", mask), pads=2)
    weight, logits = 50257 * 1024 / 2 * 1e-9, 8192 * 50257 / 2 * 1e-9  # as numbers of four bytes
    assert model.forward(kernel)[0] == pytest.approx(1.0 + weight)
    (left, right) = (replace(kernel, matrices=sizes) for sizes in kernel.matrices.gradients)
    assert model.backward(left)[0] == pytest.approx(2.0 + logits + weight)
    assert model.backward(right)[0] == pytest.approx(2.0 + logits)
    assert model.told(kernel, "forward").endswith("copies that pad its rows to whole 16 bytes")
    dear = CostModel(
        replace(Cluster.of("h100"), timed=(slow, fast, replace(copies, forward=((1e3, 8.0), (1e12, 1e6)))))
    )
    assert dear.forward(kernel)[0] == pytest.approx(7.0) and "pad" not in dear.told(kernel, "forward")
    assert model.forward(replace(kernel, pads=0))[0] == pytest.approx(7.0)


@pytest.mark.parametrize("m, n, k", [(768, 768, 50432), (64, 147, 3211264), (64, 64, 802816), (2048, 2048, 256)])
def test_a_small_result_of_long_sums_is_computed_in_parts(m, n, k):
    """As the gradient of a weight is: no unit is without work. It takes at most twice what its FLOPs or bytes take."""
    device = Cluster.of("h200").device
    least = max(2.0 * m * n * k / dict(device.products.reached)["bfloat16"], 2 * k * (m + n) / device.bandwidth)
    seconds = CostModel(Cluster.of("h200")).forward(product(m, n, k))[0]
    assert least <= seconds <= 2 * least + 2 * device.products.start_s


def test_a_narrow_product_is_not_computed_as_if_it_were_wide():
    """Each 64 columns of work need as many bytes as it takes longer to move."""
    cluster = Cluster.of("h100")
    for m, n in ((33792, 64), (64, 33792)):
        kernel = product(m, n, 512)
        moving = kernel.bytes[0] / cluster.device.bandwidth + cluster.device.products.start_s
        assert CostModel(cluster).forward(kernel)[0] == pytest.approx(moving)


def test_seconds_between_the_curves_of_a_second_size_are_by_powers():
    curves = [Timed("mm", "bfloat16", ((1.0, s), (1e18, s)), ((1.0, 3 * s), (1e18, 3 * s)), at) for s, at in SECOND]
    model = CostModel(replace(Cluster.of("h100"), timed=tuple(curves)))
    sizes = np.array([16.0, 64.0, 128.0, 256.0, 1024.0, 4096.0])
    one = product(8, 8, 8)
    kernel = replace(one, amount=np.full(6, 1e3), bytes=np.ones(6), back=np.ones(6), matrices=None, size=sizes)
    assert model.forward(kernel) == pytest.approx([1.0, 1.0, 2.0, 4.0, 0.5, 0.5])
    assert model.backward(kernel) == pytest.approx([3.0, 3.0, 6.0, 12.0, 1.5, 1.5])
    assert model.forward(replace(kernel, size=None)) == pytest.approx(np.ones(6))  # those of the least


SECOND = [(4.0, 256.0), (0.5, 1024.0), (1.0, 64.0)]  # seconds, at a size


def test_what_was_not_measured_takes_as_long_as_a_sum_of_as_many_bytes_in_its_dtype():
    """And what runs in the kernel of another op pays no start."""
    curve = ((100.0, 1e-6), (1e6, 1e-4), (1e9, 1e-1))
    timed = tuple(Timed("add", dtype, curve, ()) for dtype in ("float32", "bfloat16"))
    model, one = CostModel(replace(Cluster.of("h100"), timed=timed)), np.ones(1)
    for dtype, moved in (("float32", 12e6), ("bfloat16", 6e6)):
        kernel = Kernel((), dtype, one, moved * one, moved * one)
        assert model.forward(kernel)[0] == pytest.approx(1e-4)
        inside = replace(kernel, starts=(False, False))
        assert model.forward(inside)[0] == pytest.approx(1e-4 - 1e-6)
        assert model.forward(replace(inside, bytes=0 * one))[0] < 1e-15


def attention(length, width, is_causal):
    rows, heads = 16384, 2048 // width
    pairs = np.array([4.0 * rows * length * heads * width])
    moved = np.array([4.0 * 2 * rows * 2048])
    share = np.full(1, 0.5 if is_causal else 1.0)
    about = Heads(width, np.full(1, float(length)), share, is_causal)
    return Kernel(("attention",), "bfloat16", pairs, moved, 2 * moved, is_product=True, heads=about)


@pytest.mark.parametrize(
    "length, published", [(512, 215), (1024, 254), (2048, 274), (4096, 288), (8192, 294), (16384, 295)]
)
def test_attention_takes_as_long_as_in_the_paper_of_its_kernel(length, published):
    """Forward and backward, width 64, no mask, H100: arXiv 2307.08691, figure 7; the file has another source."""
    model, kernel = CostModel(Cluster.of("h100")), attention(length, 64, False)
    seconds = model.forward(kernel)[0] + model.backward(kernel)[0]
    assert 3.5 * kernel.amount[0] / seconds / 1e12 == pytest.approx(published, rel=0.15)


def test_a_causal_mask_halves_the_work_but_not_the_time_of_short_sequences():
    model = CostModel(Cluster.of("a100"))
    ratio = [
        model.forward(attention(n, 128, True))[0] / model.forward(attention(n, 128, False))[0] for n in (512, 16384)
    ]
    assert ratio[0] > 0.7 > 0.56 > ratio[1] > 0.5


@pytest.mark.parametrize(
    "name, mesh, kind, nbytes, published",
    [
        ("h100-8x1", 8, "all_gather", 16e9, 360),  # NVIDIA/nccl-tests#326
        ("h100-8x1", 8, "all_reduce", 8e9, 476),  # NVIDIA/nccl-tests#290
        ("b200-8x4", 32, "all_reduce", 2**30, 366),  # stas00/ml-engineering, network/benchmarks
    ],
)
def test_collectives_reach_the_bus_bandwidth_that_nccl_tests_print(name, mesh, kind, nbytes, published):
    cluster = Cluster.of(name)
    seconds = collective_seconds(kind, cluster.levels(DeviceMesh(mesh), 0, kind), nbytes)
    factor = (2 if kind == "all_reduce" else 1) * (mesh - 1) / mesh
    assert factor * nbytes / seconds / 1e9 == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize("nodes, published", [(4, 360), (8, 345), (16, 320), (32, 300), (64, 280), (128, 260)])
def test_the_more_nodes_take_part_in_a_ring_the_less_it_reaches(nodes, published):
    """NVIDIA/nccl#1229, from which the file's shares are: a large reduce-scatter on H100, start and hops included.

    Beyond the last point it falls as before, and a fabric that is put in place of another falls as that.
    """
    for cluster, rate in ((Cluster.of(f"h100-8x{nodes}"), 1.0), (Cluster.of(f"h100@200G-8x{nodes}"), 0.5)):
        devices = 8 * nodes
        levels = cluster.levels(DeviceMesh(devices), 0, "reduce_scatter")
        seconds = collective_seconds("reduce_scatter", levels, 64 * 2**30)
        reached = (devices - 1) / devices * 64 * 2**30 / seconds / 1e9
        assert reached == pytest.approx(rate * published, rel=0.03)
    outer, tree = cluster.links[-1], cluster.links[-1].wire("all_reduce", nodes)
    assert outer.wire("reduce_scatter", 2 * nodes) < outer.wire("reduce_scatter", nodes) <= tree
    assert outer.wire("reduce_scatter", 2**20) > 0 and outer.wire("all_to_all", nodes) == outer.wire("all_to_all", 2)


@pytest.mark.parametrize(
    "name, mib, published",
    [
        *(("h200-8x1", *found) for found in ((1, 74.6), (4, 145), (16, 256), (64, 369), (256, 442), (16384, 482))),
        *(("b200-8x4", *found) for found in ((1, 12.5), (4, 31.6), (16, 71.8), (64, 198), (256, 283), (16384, 377))),
    ],
)
def test_a_sum_reaches_what_one_of_its_bytes_was_measured_to(name, mib, published):
    """stas00/ml-engineering, network/benchmarks, GB/s of bus bandwidth, from which the file's doublings are."""
    cluster = Cluster.of(name)
    devices = 8 * cluster.nodes
    seconds = collective_seconds("all_reduce", cluster.levels(DeviceMesh(devices), 0), mib * 2**20)
    assert 2 * (devices - 1) / devices * mib * 2**20 / seconds / 1e9 == pytest.approx(published, rel=0.2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "op, read, given",
    [
        ("mul broadcast", 1, 1),
        ("div broadcast", 1, 1),
        ("where", 2, 2),
        ("masked_fill", 1, 1),
        ("softmax", 1, 2),
        ("copy turned", 1, 1),
    ],
)
def test_eager_passes_of_a_class_take_as_long_as_they_were_measured_to(op, read, given, dtype):
    """The file of an H200 beside seconds of an H200: bytes of the tensors, and one for each number of a mask."""
    file = CostModel(replace(Cluster.of("h200"), variation=0.0))
    timed = CostModel(Cluster.of("benchmarks/gpu_measured.profile.json")).cluster.times_of(op, dtype)
    (amount, forward), (_, backward) = timed.forward[-1], timed.backward[-1]
    itemsize, masked = {"bfloat16": 2, "float32": 4}[dtype], op in ("where", "masked_fill")
    moved, back = (amount * ((n + 1) * itemsize + masked) * np.ones(1) for n in (read, given))
    kernel = Kernel((op,), dtype, amount * np.ones(1), moved, back)
    assert file.forward(kernel)[0] == pytest.approx(forward, rel=0.06)
    assert file.backward(kernel)[0] == pytest.approx(backward, rel=0.06)


@pytest.mark.parametrize("name", ["a100", "h100", "h200"])
def test_a_cast_to_single_precision_moves_half_the_bytes_of_one_from_it(name):
    """As measured on an H200: 2.1 TB/s up, 4.2 down; what a chain reads has the bandwidth alone."""
    model, one = CostModel(Cluster.of(name)), np.ones(1)
    up, down = (Kernel(("to",), dtype, one, 6e9 * one, 6e9 * one) for dtype in ("float32", "bfloat16"))
    assert model.forward(up)[0] > 1.3 * model.forward(down)[0]
    assert model.forward(up)[0] == pytest.approx(model.backward(down)[0])
    assert model.forward(replace(up, names=()))[0] == pytest.approx(model.forward(down)[0])


def test_a_file_names_a_source_for_each_kind_of_figure_and_what_it_writes_is_what_it_reads(tmp_path):
    files = resources.files("autopar.sharding").joinpath("clusters").iterdir()
    for name in (file.name.removesuffix(".json") for file in files if file.name.endswith(".json")):
        cluster = Cluster.of(name)
        figures = {"products": cluster.device.products, "attention": cluster.device.attention}
        figures |= {"memory": cluster.device.reached_bytes_per_s, "hidden": cluster.hidden < 1}
        figures |= {"variation": cluster.variation, "passes": cluster.device.passes}
        assert dict(cluster.sources).keys() >= {"device", "links", *(n for n, figure in figures.items() if figure)}
        cluster.save(tmp_path / f"{name}.json")
        assert Cluster.of(tmp_path / f"{name}.json") == cluster


def test_an_h200_has_the_memory_that_devices_report():
    assert Cluster.of("h200").device.memory_bytes / 2**30 == pytest.approx(139, abs=1)


def test_devices_wait_for_the_slowest_of_them():
    """By as much as the largest of so many normal draws is over their mean; bytes on links take what they take."""
    cluster, drawn = replace(Cluster.of("h100"), variation=0.02), np.random.default_rng(0)
    one, kernel = CostModel(cluster), product(4096, 4096, 4096)
    for devices in (1, 2, 8, 64, 512):
        model = CostModel(cluster, devices)
        slowest = 1 + 0.02 * drawn.standard_normal((20_000, devices)).max(1).mean()
        asked = (
            lambda costs: costs.forward(kernel)[0],
            lambda costs: costs.copy(1e9),
            lambda costs: costs.optimizer("adamw", "float32", 4, np.array([1e9]))[0],
        )
        for seconds in asked:
            assert seconds(model) / seconds(one) == pytest.approx(slowest, abs=0.001)
        levels = cluster.levels(DeviceMesh(2), 0, "all_gather")
        assert model.step("all_gather", 0, levels, 1e9) == one.step("all_gather", 0, levels, 1e9)
        assert ("of the slowest of" in model.told(kernel, "forward")) == (devices > 1)


def test_what_was_measured_on_the_machine_itself_holds_the_slowest_already():
    timed = (Timed("mm", "bfloat16", ((1.0, 1.0), (1e15, 1.0)), ()),)
    model = CostModel(replace(Cluster.of("h100"), timed=timed), 64)
    assert model.forward(product(512, 512, 512))[0] == pytest.approx(1.0)


@pytest.mark.parametrize("name, nodes", [("h100", 512), ("h100@3200G", 2), ("b300", 64), ("generic", 9)])
def test_a_collective_of_more_bytes_takes_no_less(name, nodes):
    """Doublings of 8 MiB were measured to be cheaper than those of 2 MiB: a sum waits for as long as a smaller one."""
    levels = Cluster.of(f"{name}-8x{nodes}").levels(DeviceMesh((nodes, 8)), 0)
    sizes = np.geomspace(2**16, 2**28, 80)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
        assert (np.diff([collective_seconds(kind, levels, size) for size in sizes]) >= 0).all(), kind


def test_shares_that_rise_are_not_continued():
    """A link that was measured better over four nodes than over two does not exceed what it reached."""
    link = replace(Cluster.of("generic").links[1], falls=(("all_gather", ((2, 0.8), (4, 1.0))),))
    assert link.wire("all_gather", 1024) == link.bytes_per_s
