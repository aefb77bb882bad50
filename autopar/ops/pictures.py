"""Ops on images: pools, pixel shuffles, interpolation, sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from autopar.ops.entry import each, op
from autopar.ops.spelling import letters_of, parse, pooled, same_dims, whole_dims
from autopar.sharding.notation import Rule


def mean_of_positions(arguments: Mapping[str, Any]) -> Rule:
    """Batch and channels may be cut; a mean of positions is linear."""
    return pooled(arguments, "x")


def largest_of_positions(arguments: Mapping[str, Any]) -> Rule:
    return pooled(arguments, "")


def pixel_shuffle(arguments: Mapping[str, Any]) -> Rule:
    """Channels are major, and rows and columns come out as products with the factor inside."""
    r = arguments["upscale_factor"]
    return parse(f"... (c a:{r}! b:{r}!) h w -> ... c (h a:{r}!) (w b:{r}!)", linear="x")


def largest_and_where(arguments: Mapping[str, Any]) -> Rule:
    """Batch and channels may be cut, positions stay whole."""
    return pooled(arguments, "")


def unpooled(arguments: Mapping[str, Any]) -> Rule:
    """Batch and channels may be cut, positions stay whole: indices count in each image by itself."""
    rank = len(arguments["input"].shape)
    spatial = int(arguments["op"][-2])
    leading = [f"a{i}" for i in range(rank - spatial)]
    row = " ".join([*leading, *whole_dims("s", spatial)])
    return parse(f"{row}, {row} -> {' '.join([*leading, *whole_dims('t', spatial)])}", linear="x")


def pixel_unshuffle(arguments: Mapping[str, Any]) -> Rule:
    """Rows and columns are products with the factor inside, which become channels."""
    r = arguments["downscale_factor"]
    return parse(f"... c (h a:{r}!) (w b:{r}!) -> ... (c a:{r}! b:{r}!) h w", linear="x")


def channel_shuffle(arguments: Mapping[str, Any]) -> Rule:
    """Channels stay whole, as they are permuted; all other dims may be cut."""
    letters = letters_of(arguments["input"])
    return same_dims(letters, {1}, "x")


def grid_sample(arguments: Mapping[str, Any]) -> Rule:
    """Batch, channels and sampled places may be cut; the positions of images stay whole."""
    spatial = len(arguments["input"].shape) - 2
    maps = " ".join(whole_dims("s", spatial))
    places = " ".join(f"p{i}" for i in range(spatial))
    return parse(f"n c {maps}, n {places} xy! -> n c {places}", linear="x")


def affine_grid(arguments: Mapping[str, Any]) -> Rule | None:
    """Nothing is cut, as the size of the result is a constant of the program."""
    spatial = len(arguments["size"]) - 2
    return parse(f"n! r! c! -> n! {' '.join(whole_dims('p', spatial))} xy!", linear="x")


POOL = "input:T, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False"
MEAN = "input:T, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True"
each("avg_pool1d", MEAN, rule=mean_of_positions, keeps="input", windows=True)
each("avg_pool2d avg_pool3d", f"{MEAN}, divisor_override=None", rule=mean_of_positions, keeps="input", windows=True)
for d in (1, 2, 3):
    # the places of the largest are kept, in eight bytes each
    places_kept = dict(cuda="8*out_points", cpu="8*out_points")
    op(
        f"max_pool{d}d",
        getattr(F, f"max_pool{d}d"),
        POOL,
        rule=largest_of_positions,
        keeps="input",
        makes=places_kept,
        windows=True,
    )
    op(
        f"adaptive_avg_pool{d}d",
        getattr(F, f"adaptive_avg_pool{d}d"),
        "input:T, output_size",
        rule=mean_of_positions,
        keeps="input",
    )
    op(
        f"adaptive_max_pool{d}d",
        getattr(F, f"adaptive_max_pool{d}d"),
        "input:T, output_size, return_indices=False",
        rule=largest_and_where,
    )
    op(
        f"max_pool{d}d_with_indices",
        getattr(F, f"max_pool{d}d_with_indices"),
        POOL.replace("indices=False", "indices=True"),
        rule=largest_and_where,
    )
    op(
        f"adaptive_max_pool{d}d_with_indices",
        getattr(F, f"adaptive_max_pool{d}d_with_indices"),
        "input:T, output_size, return_indices=True",
        rule=largest_and_where,
    )
    op(
        f"max_unpool{d}d",
        getattr(F, f"max_unpool{d}d"),
        "input:T, indices:T, kernel_size, stride=None, padding=0, output_size=None",
        rule=unpooled,
    )
op(
    "interpolate",
    F.interpolate,
    "input:T, size=None, scale_factor=None, mode='nearest', align_corners=None, recompute_scale_factor=None, "
    "antialias=False",
    rule=mean_of_positions,
)
each("pixel_shuffle", "input:T, upscale_factor", rule=pixel_shuffle)
each("pixel_unshuffle", "input:T, downscale_factor", rule=pixel_unshuffle)
each("channel_shuffle", "input:T, groups", rule=channel_shuffle)
op(
    "grid_sample",
    F.grid_sample,
    "input:T, grid:T, mode='bilinear', padding_mode='zeros', align_corners=None",
    rule=grid_sample,
)
op("affine_grid", F.affine_grid, "theta:T, size, align_corners=None", rule=affine_grid)
