"""The plan of a checkpoint over all ranks, in time that grows with the number of parts.

Before anything is written torch compares the parts of a tensor with each other, to see that none overlap: with the
square of the ranks where a dim is sharded that is not the longest. Parts of a DTensor are the cells of a grid, which
can be seen without comparing them: every dim is cut into intervals that touch, and there are as many distinct parts as
the grid has cells. Parts that are no grid are compared by torch. docs/design/057-checkpoints-of-many-ranks.md has the
figures.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

from autopar.collector import without_collections
from autopar.runtime import private


class GridPlanner(dcp.DefaultSavePlanner):
    """torch's planner of checkpoints, with the same plans and metadata, for many ranks."""

    @without_collections
    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
        plans, metadata = create_default_global_save_plan(_each_part_once(all_plans))
        if self.flatten_state_dict:
            metadata = replace(metadata, planner_data=dict(ChainMap(*(plan.planner_data for plan in plans))))
        unseen = {n: held for n, held in metadata.state_dict_metadata.items() if not is_grid(held)}
        if errors := private.validate_global_plan(plans, replace(metadata, state_dict_metadata=unseen)):
            raise ValueError(f"parts of tensors do not make whole tensors: {'; '.join(errors[:3])}")
        return plans, metadata


def is_grid(held: Any) -> bool:
    """Whether parts in a checkpoint's metadata are the cells of a grid over their tensor, each there once.

    False is no error: values that are no tensors and tensors without elements have no parts.
    """
    chunks = [chunk for chunk in getattr(held, "chunks", ()) if 0 not in chunk.sizes]
    if not chunks or len({(chunk.offsets, chunk.sizes) for chunk in chunks}) != len(chunks):
        return False
    cuts = [_cuts(chunks, dim) for dim in range(len(held.size))]
    return len(chunks) == math.prod(map(len, cuts)) and all(map(_touch, cuts, held.size))


def _cuts(chunks: Sequence[Any], dim: int) -> set[tuple[int, int]]:
    """The (start, length) intervals into which chunks cut a dim."""
    return {(chunk.offsets[dim], chunk.sizes[dim]) for chunk in chunks}


def _touch(intervals: set[tuple[int, int]], length: int) -> bool:
    """Whether intervals cover a dim, each beginning where the one before it ends."""
    end = 0
    for start, size in sorted(intervals):
        if start != end:
            return False
        end += size
    return end == length


def _each_part_once(plans: Sequence[dcp.SavePlan]) -> list[dcp.SavePlan]:
    """The plans of ranks, with a part that several ranks hold in that of the rank which torch chooses."""
    distinct = {item.index for plan in plans for item in plan.items}
    if len(distinct) == sum(len(plan.items) for plan in plans):
        return list(plans)
    return private.dedup_save_plans(plans)
