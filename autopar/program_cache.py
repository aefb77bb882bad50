"""`Programs`: where graphs and halves of programs come from, and where they are kept for the next start.

A program is given (`program=`), or its parts are found in the folder of `cache=` or AUTOPAR_CACHE: a graph by all that
decides it, its plan by the graph (`plan_cache.py`), halves by the local program and the plan's decisions. So whatever
of a start is as it was is not made again, also in later calls of other kinds. A program that is given and does not fit
is a letter; a file of the folder that does not is left, and what it holds is made as ever.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from autopar import codec
from autopar.codegen.archive import Data
from autopar.codegen.records import Records
from autopar.graph.graph import Graph
from autopar.letters import AutoparError, BadProgram
from autopar.module import stored
from autopar.module.likeness import digest, said_of
from autopar.module.reads import Reads
from autopar.plan_cache import PlanCache
from autopar.program_file import Capture, StoredProgram, made_by, made_of, made_on
from autopar.progress import caution, tell
from autopar.request import Request
from autopar.runtime.world import plays_several_ranks, rank_here, ranks_can_talk


class KeptHalves(Mapping[str, Data]):
    """The halves that a folder has, by their keys."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.made_by = digest(sorted({**made_by(), **made_on(device)}.items()))
        self.read: dict[str, Data] = {}
        self.others: dict[str, Sequence[str]] = {}  # keys that other ranks used beside each that was read

    def path(self, key: str) -> Path:
        return self.folder / f"{key}-{self.made_by}.halves"

    def __contains__(self, key: object) -> bool:
        return self.path(str(key)).exists()

    def __getitem__(self, key: str) -> Data:
        if key not in self.read:
            path = self.path(key)
            if not path.exists():
                raise KeyError(key)
            try:
                data = stored.read(path, "halves")
                self.read[key] = data["halves"]
                self.others[key] = data["beside"]
            except (BadProgram, *codec.UNREADABLE) as e:
                caution("the kept halves %s are not taken, and are lowered anew: %s", path, str(e).split("\n")[0])
                raise KeyError(key) from e
        return self.read[key]

    def beside(self, key: str) -> Sequence[str]:
        """The keys of the halves that other ranks of a job have used beside these."""
        return self.others.get(key, ())

    def write(self, key: str, data: Data, beside: Iterable[str]) -> None:
        stored.write(self.path(key), "halves", {"halves": data, "beside": sorted(beside)})

    def __iter__(self) -> Iterator[str]:
        return (path.name.partition("-")[0] for path in self.folder.glob(f"*-{self.made_by}.halves"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(slots=True)
class Programs:
    """The file of a program that is given, or the folder in which graphs and halves are kept, or neither."""

    device: str
    given: Path | None = None
    folder: Path | None = None
    taken: StoredProgram | None = None

    @staticmethod
    def of(program: str | os.PathLike[str] | None, plans: PlanCache, device: str) -> Programs:
        """The programs of a start; ranks other than the first have none, for they are sent theirs."""
        if ranks_can_talk() and not plays_several_ranks() and rank_here():
            return Programs(device)
        if program is not None:
            return Programs(device, Path(program))
        return Programs(device, folder=plans.folder)

    def take(self, model: nn.Module, meta_inputs: Any, request: Request, inputs: str, reads: Reads) -> Graph:
        """The graph of the program that is given; a letter where it does not fit."""
        if self.given is None:
            raise BadProgram("a program is given, and this rank cannot read what rank 0 has read of it")
        try:
            found = StoredProgram.read(self.given)
            found.check(made_of(model, meta_inputs, request), made_on(self.device, inputs), model)
            graph = Graph.from_json(found.capture.graph)
            found.its_plan()
        except AutoparError as e:
            raise BadProgram(e.what, at=str(self.given), seen=e.seen, advice=e.advice) from e
        self.taken = found
        _become(reads, found.capture.reads)
        tell("took the program %s: nothing is traced, planned or lowered", self.given)
        return graph

    def graph(self, model: nn.Module, meta_inputs: Any, request: Request, reads: Reads) -> Graph:
        """The graph that is kept for a model and a call, or the one that is traced, which is kept."""
        if self.folder is None or not isinstance(model, nn.Module):  # The tracer has a letter for the latter.
            return request.trace(model, meta_inputs)
        of = {**made_of(model, meta_inputs, request), "precision=": repr(request.precision)}
        path = self.folder / f"{digest(sorted(of.items()))}.graph"
        if (kept := self._kept(path, of, model)) is not None:
            graph, read = kept
            _become(reads, read)
            return graph
        reads.clear()
        graph = request.trace(model, meta_inputs)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            Capture.of(graph, set(reads), said_of(model, set(reads)), of).write(path)
        except (AutoparError, OSError) as e:
            caution("the graph is not kept in %s: %s", self.folder, str(e).splitlines()[0])
        return graph

    def _kept(self, path: Path, of: Mapping[str, str], model: nn.Module) -> tuple[Graph, Reads] | None:
        """The graph in a file, and what its capture has read; None where there is none that fits."""
        if not path.exists():
            return None
        try:
            found = Capture.read(path)
            found.check(of, model)
            graph = Graph.from_json(found.graph)
        except AutoparError as e:
            caution("the kept graph %s is not taken, the model is traced anew: %s", path, e.what)
            return None
        tell("took the kept graph %s, without a trace", path)
        return graph, set(found.reads)

    def records(self) -> Records:
        """The halves that are known."""
        if self.taken is not None:
            halves = self.taken.halves
            return Records(halves, lambda key: halves.keys() if key in halves else ())
        if self.folder is None:
            return Records()
        kept = KeptHalves(self.folder, self.device)
        return Records(kept, kept.beside)

    def keep(self, records: Records) -> None:
        """Write the halves that were lowered, here and on other ranks."""
        if self.folder is None or not (records.lowered or records.of_others):
            return
        kept = KeptHalves(self.folder, self.device)
        try:
            for key, data in records.data().items():
                kept.write(key, data, records.of_others if key in records.used else ())
        except BadProgram as e:
            caution("the program is not kept in %s: %s", self.folder, e.what)


def _become(reads: Reads, others: Iterable[tuple[int, str, str]]) -> None:
    """Let reads be others; none of them is what the thread has read to compare the model."""
    reads.clear()
    reads.update(others)
