"""The layer's number in a name is read in one way, by planning, lowering and reports."""

from __future__ import annotations

import pytest

from autopar.graph.layers import around_number, block, folded, innermost_block, numbered


@pytest.mark.parametrize(
    ("path", "places", "outer", "inner"),
    [
        ("model.layers.3.mlp.up", (2,), "model.layers.3", "model.layers.3"),
        ("encoder.encoder_layer_0.fc1", (1, 2), "encoder.encoder_layer_0", "encoder.encoder_layer_0"),
        ("encoder_layer_0.experts.3.fc1", (0, 2, 3), "encoder_layer_0", "encoder_layer_0.experts.3"),
        ("wav2vec2.layers.3.fc1", (0, 2, 3), "wav2vec2", "wav2vec2.layers.3"),
        ("layer1.0.conv1", (0, 1, 2), "layer1", "layer1.0"),
        ("conv1", (0,), "conv1", "conv1"),
        ("head.up2x", (), "", ""),
        ("", (), "", ""),
    ],
)
def test_blocks_of_a_path(path, places, outer, inner):
    assert numbered(path) == places and block(path) == outer and innermost_block(path) == inner


def test_later_numbered_parts_are_inner_blocks():
    path = "layers.0.blocks.1.fc2"
    assert [block(path, depth) for depth in range(4)] == ["layers.0", "layers.0.blocks.1", path, ""]


def test_reports_fold_the_numbers_of_layers():
    assert folded("h.0.mlp/linear to h.1/add.2:shared") == "h.*.mlp/linear to h.*/add.2:shared"
    assert folded("encoder.encoder_layer_3.fc1.weight") == "encoder.encoder_layer_*.fc1.weight"
    assert (
        folded("0.weight") == "*.weight" and folded("layers.12") == "layers.*" and folded("wte.weight") == "wte.weight"
    )


def test_search_takes_the_outermost_number():
    assert around_number("model.layers.12.mlp.3/linear") == ("model.layers.", 12, ".mlp.3/linear")
    assert around_number("encoder_layer_3.fc1/conv2d") == ("encoder_layer_", 3, ".fc1/conv2d")
    assert around_number("stem/conv2d") is None and around_number("wte.weight") is None


def test_without_a_numbered_module_search_takes_the_count_of_an_op():
    assert around_number("transformer/add.2:shared") == ("transformer/add.", 2, ":shared")
    assert around_number("/view.1") == ("/view.", 1, "")
