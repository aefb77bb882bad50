"""A lowered program in a file: its graph, its plan and its halves, as data, with all that decides them.

A file is taken where everything that it was made of is here as it was: releases, the model, its inputs and sources,
the device, settings of torch, users' rules. What was edited has another digest, and is refused before it is read; what
does not fit is refused by a letter that says what has changed. A certificate is made of what was read.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar import __version__, codec, kernels
from autopar.codec import Codec
from autopar.codegen.archive import Data
from autopar.codegen.records import Records
from autopar.graph.graph import Graph
from autopar.kernels import backend
from autopar.letters import AutoparError, BadProgram
from autopar.module import stored
from autopar.module.likeness import digest, likeness_of, said_of, text_of
from autopar.module.reads import Reads
from autopar.module.sources import files_of, sources_of
from autopar.ops.declare import rules_of_users
from autopar.request import Request
from autopar.solver.plan import Plan


@dataclass(frozen=True, slots=True)
class Capture:
    """A graph as text, with all that decides it."""

    made_of: Mapping[str, str]  # All that was known before the model was traced, by name.
    reads: tuple[tuple[int, str, str], ...]  # the attributes of modules that were read meanwhile
    said: str  # a digest of what these attributes said
    graph: str

    @staticmethod
    def of(graph: Graph, reads: Reads, said: str, made_of: Mapping[str, str]) -> Capture:
        """The capture of a graph; a letter where it cannot be written."""
        if graph.idle:
            where = graph.idle[0].path or "the model"
            raise BadProgram(f"a hook of {where} runs beside the program, and a file does not hold it")
        return Capture(made_of, tuple(sorted(reads)), said, graph.to_json())

    def check(self, made_of: Mapping[str, str], model: nn.Module) -> None:
        """Raise a letter unless it was made of what is here, and the model says what it said then."""
        for name in {**self.made_of, **made_of}:
            was = self.made_of.get(name, "none")
            now = made_of.get(name, "none")
            if was != now:
                seen = f"made of {was:.60}, here is {now:.60}"
                raise BadProgram(
                    f"the program was made of something else: {name} differs", seen=seen, advice=stored.AGAIN
                )
        if said_of(model, set(self.reads)) != self.said:
            raise BadProgram(
                "the program was made of a model whose attributes or settings say something else", advice=stored.AGAIN
            )

    def write(self, path: Path) -> None:
        stored.write(path, "graph", Codec({}, {}).plain(self))

    @staticmethod
    def read(path: Path) -> Capture:
        return _read_as(Capture, stored.read(path, "graph"))


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """A lowered program as data: rank 0 sends it, and every rank lowers its own by it."""

    capture: Capture
    made_on: Mapping[str, str]  # all of a machine that decides the program, and how ranks pass inputs, by name
    plan: Data
    halves: Mapping[str, Data]

    def write(self, path: Path) -> None:
        stored.write(path, "program", Codec({}, {dict: lambda data: data}).plain(self))

    @staticmethod
    def read(path: Path) -> StoredProgram:
        return _read_as(StoredProgram, stored.read(path, "program"))

    def check(self, made_of: Mapping[str, str], made_on: Mapping[str, str], model: nn.Module) -> None:
        """Raise a letter unless the program was made of what is here, on such a machine."""
        whole = Capture({**self.capture.made_of, **self.made_on}, self.capture.reads, self.capture.said, "")
        whole.check({**made_of, **made_on}, model)

    def its_plan(self) -> Plan:
        """The plan of the program."""
        try:
            return Plan.from_dict(self.plan)
        except AutoparError as e:
            raise BadProgram(f"the plan of a program does not read: {e.what}", seen=e.seen) from e


def _read_as(kind: Any, data: Any) -> Any:
    reads = {Data: codec.entries, "halves": codec.by_name(codec.entries), "plan": codec.entries}
    try:
        return Codec(reads, {}).reader(kind)(data)
    except codec.UNREADABLE as e:
        raise BadProgram("this does not read as a program", seen=codec.seen(e)) from e


@dataclass(frozen=True, slots=True)
class Origin:
    """What a plan was made of, so that its program can be lowered."""

    request: Request
    graph: Graph  # The graph as traced, before micro-batches.
    reads: Reads
    said: str
    made_of: Mapping[str, str]

    def program(self, plan: Plan, records: Records, made_on: Mapping[str, str]) -> StoredProgram:
        """The program of the plan, as it is stored; a letter where it cannot be."""
        capture = Capture.of(self.graph, self.reads, self.said, self.made_of)
        return StoredProgram(capture, made_on, plan.to_dict(), records.data())


def made_of(model: nn.Module, meta_inputs: Any, request: Request) -> dict[str, str]:
    """All that decides a graph, as text by name."""
    return {
        "model or meta_inputs": likeness_of(model, meta_inputs),
        **{f"source {name}": text for name, text in sources_of(model, request.loss).items()},
        "loss=": text_of(request.loss),
        "assume=": repr(request.assume),
        "outputs=": repr(request.outputs),
        **made_by(),
    }


def made_by() -> dict[str, str]:
    """The releases and settings that decide graphs and programs, as text by name."""
    return {
        "autopar": f"{__version__} {_own_files()}",
        "torch": torch.__version__,
        "settings of torch": _settings(),
        "rules of users": digest(rules_of_users()),
    }


def made_on(device: str, inputs: str = "") -> dict[str, str]:
    """All of a machine that decides a program, and how ranks pass inputs, as text by name."""
    has_kernels = f"Triton {kernels.can_run()}, as ops of their own {backend.is_traced(device)}"
    is_here = device != "cpu" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if is_here else torch.backends.cpu.get_cpu_capability()
    return {"device": f"{device} {capability}", "kernels": has_kernels, "inputs=": inputs}


@functools.cache
def _own_files() -> str:
    return files_of("autopar")


def _settings() -> str:
    """Settings of torch by which it chooses kernels while a program is traced."""
    cuda = torch.backends.cuda
    flags = (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )
    return ", ".join(map(str, flags))
