"""How errors of pipelines are planted: in what stages send, add up and share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.module import stage_runner, turn_runner
from autopar.module.stage_runner import InStages
from autopar.runtime.transfers import Line, Way
from tests.gauntlet.plants import Patch


def tied_left_out(patch: Patch) -> None:
    """The gradient of a parameter that two stages read is not added up over them."""
    patch.setattr(stage_runner, "added_up", lambda value, group, what: value)


def tied_twice(patch: Patch) -> None:
    """It is added up twice."""
    once = stage_runner.added_up
    patch.setattr(stage_runner, "added_up", lambda value, group, what: once(once(value, group, what), group, what))


def norm_of_one_stage(patch: Patch) -> None:
    """Gradients are clipped by the norm of those that lie here."""
    clip = torch.nn.utils.clip_grad_norm_

    def broken(parameters: Any, most: float) -> Tensor:
        return clip([p for p in parameters if p.device_mesh.get_coordinate() is not None], most)

    patch.setattr(torch.nn.utils, "clip_grad_norm_", broken)


def mean_of_means(patch: Patch) -> None:
    """Every micro-batch weighs the same, however many targets count in it."""
    patch.setattr(turn_runner, "_added_up", lambda values: len(values) * values[0])


def weights_twice(patch: Patch) -> None:
    """The gradients of parameters are added once more."""
    run = InStages._weights

    def broken(self: InStages, step: Any, stage: Any, turn: int, arrivals: Any) -> None:
        again = list(step.context[stage.number, turn])
        run(self, step, stage, turn, arrivals)
        step.context[stage.number, turn] = again
        run(self, step, stage, turn, arrivals)

    patch.setattr(InStages, "_weights", broken)


def another_turns_context(patch: Patch) -> None:
    """The second part of a backward takes what another micro-batch has left."""
    run = InStages._weights

    def broken(self: InStages, step: Any, stage: Any, turn: int, arrivals: Any) -> None:
        kept = self.__dict__.setdefault("_kept", {})
        mine = step.context[stage.number, turn]
        step.context[stage.number, turn] = [x.clone() for x in kept.setdefault(stage.number, mine)]
        run(self, step, stage, turn, arrivals)

    patch.setattr(InStages, "_weights", broken)


def freed_under_a_send(patch: Patch) -> None:
    """Memory is written to before what it holds was sent."""
    send = Line.send

    def broken(self: Line, value: Tensor, way: Way) -> None:
        send(self, value.clone().narrow(0, 0, 1).expand_as(value), way)

    patch.setattr(Line, "send", broken)


def nothing_but_on_the_last(patch: Patch) -> None:
    """The loss is zero on the ranks of other stages."""
    of_all = Line.of_all

    def broken(self: Line, value: Tensor, source: int) -> Tensor:
        found = of_all(self, value, source)
        return found if self.index == source else torch.zeros_like(found)

    patch.setattr(Line, "of_all", broken)


def last_micro_batch_alone(patch: Patch) -> None:
    """Gradients of the last micro-batch take the place of the sums."""
    run = InStages._backward

    def broken(self: InStages, step: Any, stage: Any, turn: int, arrivals: Any) -> None:
        step.totals[stage.number] = [None] * len(step.totals[stage.number])
        run(self, step, stage, turn, arrivals)

    patch.setattr(InStages, "_backward", broken)
