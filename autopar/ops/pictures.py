"""Ops on images: pools, pixel shuffles, interpolation, sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from autopar.ops.entry import each, op
from autopar.ops.rows import Row, along, parse, resized, rule_from, whole_dims
from autopar.sharding.notation import Rule


def pixel_shuffle(arguments: Mapping[str, Any]) -> Rule:
    """Channels are major, and rows and columns come out as products with the factor inside."""
    r = arguments["upscale_factor"]
    return parse(f"... (c a:{r}! b:{r}!) h w -> ... c (h a:{r}!) (w b:{r}!)", linear="x")


def interpolate(arguments: Mapping[str, Any]) -> Rule:
    """Batch and channels may be cut; positions stay whole."""
    return resized(range(2, len(arguments["input"].shape)), linear="x")(arguments)


def unpooled(arguments: Mapping[str, Any]) -> Rule:
    """Batch and channels may be cut, positions stay whole: indices count in each image by itself."""
    row = Row.of(arguments["input"])
    positions = range(-int(arguments["op"][-2]), 0)
    given = row.resized(positions, "in")
    return rule_from([given, given], [row.resized(positions, "out")], linear="x")


def pixel_unshuffle(arguments: Mapping[str, Any]) -> Rule:
    """Rows and columns are products with the factor inside, which become channels."""
    r = arguments["downscale_factor"]
    return parse(f"... c (h a:{r}!) (w b:{r}!) -> ... (c a:{r}! b:{r}!) h w", linear="x")


def grid_sample(arguments: Mapping[str, Any]) -> Rule:
    """Batch, channels and sampled places may be cut; the positions of images stay whole."""
    spatial = len(arguments["input"].shape) - 2
    places = [f"p{i}" for i in range(spatial)]
    maps = ["n", "c", *whole_dims("s", spatial)]
    return rule_from([maps, ["n", *places, "xy!"]], [["n", "c", *places]], linear="x")


def affine_grid(arguments: Mapping[str, Any]) -> Rule | None:
    """Nothing is cut, as the size of the result is a constant of the program."""
    spatial = len(arguments["size"]) - 2
    return parse(f"n! r! c! -> n! {' '.join(whole_dims('p', spatial))} xy!", linear="x")


POOL = "input:T, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False"
MEAN = "input:T, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True"
for d in (1, 2, 3):
    # batch and channels may be cut, positions stay whole; a mean of positions is linear
    mean: dict[str, Any] = dict(rule=resized(range(-d, 0), linear="x"), keeps="input")
    largest: dict[str, Any] = dict(rule=resized(range(-d, 0)), homes=[F])
    # the places of the largest are kept, in eight bytes each
    kept: dict[str, Any] = dict(keeps="input", makes=dict(cuda="8*out_points", cpu="8*out_points"), windows=True)
    each(f"avg_pool{d}d", MEAN + ("" if d == 1 else ", divisor_override=None"), windows=True, **mean)
    each(f"adaptive_avg_pool{d}d", "input:T, output_size", homes=[F], **mean)
    each(f"max_pool{d}d", f"{POOL}, return_indices=False", **largest, **kept)
    each(f"max_pool{d}d_with_indices", f"{POOL}, return_indices=True", **largest)
    each(f"adaptive_max_pool{d}d", "input:T, output_size, return_indices=False", **largest)
    each(f"adaptive_max_pool{d}d_with_indices", "input:T, output_size, return_indices=True", **largest)
    each(
        f"max_unpool{d}d",
        "input:T, indices:T, kernel_size, stride=None, padding=0, output_size=None",
        rule=unpooled,
    )
op(
    "interpolate",
    F.interpolate,
    "input:T, size=None, scale_factor=None, mode='nearest', align_corners=None, recompute_scale_factor=None, "
    "antialias=False",
    rule=interpolate,
)
each("pixel_shuffle", "input:T, upscale_factor", rule=pixel_shuffle)
each("pixel_unshuffle", "input:T, downscale_factor", rule=pixel_unshuffle)
each("channel_shuffle", "input:T, groups", rule=along(1, linear="x"))  # channels are permuted
each("grid_sample", "input:T, grid:T, mode='bilinear', padding_mode='zeros', align_corners=None", rule=grid_sample)
each("affine_grid", "theta:T, size, align_corners=None", rule=affine_grid)
