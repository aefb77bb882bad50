"""Passes keep where gradients flow: random graphs before and after each pass, against eager."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import autopar
from autopar.graph.graph import Graph, info, type_of
from autopar.graph.verify import verify
from autopar.letters import NotCaptured, NotServed
from autopar.testing import Equality, Unequal
from autopar.tracer import ColoTracer, capture, composites, indexing, losses, passes, values
from autopar.turns.chunked import in_chunks
from autopar.turns.micro_batches import in_micro_batches
from autopar.turns.writer import Writer
from tests.shares import one_in
from tests.tracer.random_graphs import Drawn, InTurns, gradients

HERE = Path(autopar.__file__).parent
AT_A_TIME = 20


def test_passes_change_readers_by_one_primitive():
    """`forward_past` refuses where shape, dtype or gradient would change, and no other pass asks for less."""
    files = [file for folder in ("graph", "tracer", "turns") for file in (HERE / folder).glob("*.py")]
    raw = {file.name for file in files for word in ("replace_all_uses", "replace_input") if word in file.read_text()}
    asking = {file.name for file in files if "hand_readers" in file.read_text()}
    assert raw == {"walks.py"} and asking == {"walks.py", "rewriting.py"}


def check(seed: int) -> set[str]:
    """Hold a random model's graph against eager, before and after each pass; returns the passes that changed it."""
    model, eager = Drawn(seed), Drawn(seed)
    expected = gradients(eager(**eager.batch), eager)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "canonicalise", lambda graph: graph)
        try:
            graph = ColoTracer().trace(model, model.batch)
        except NotCaptured as letter:  # a buffer that carries a gradient is written under no_grad
            assert "to a value that carries a gradient" in letter.what
            return set()
    changed, before = set(), ""

    def hold(graph: Graph, after: str) -> None:
        nonlocal before
        verify(graph, after)
        if str(graph) == before:
            return
        before = str(graph)
        changed.add(after)
        found = gradients(InTurns(graph, model, model.batch).loss(), model)
        Equality.in_float64(f"seed {seed}, after {after}", found, expected, 1e-4).check()
        assert Graph.from_json(graph.to_json()) == graph

    hold(graph, "capture")
    for one in passes.PASSES:
        one(graph)
        hold(graph, one.__name__)
    graph.fx.__dict__.pop("_autopar_keys", None)
    hold(in_chunks(graph, 2, keeps_outputs=False), "in_chunks")
    for turns in (2, 4):
        try:
            hold(in_micro_batches(graph, turns, keeps_outputs=False), "in_micro_batches")
        except NotServed:
            continue
    return changed


def check_all(seeds) -> None:
    changed = set().union(*map(check, seeds))
    assert {"no_ops_leave", "indexing_is_spelled_out", "one_name_per_fan_out", "in_micro_batches"} <= changed


@pytest.mark.parametrize("first", one_in(5, range(0, 200, AT_A_TIME)))
def test_every_pass_keeps_the_gradients_of_eager(first):
    check_all(range(first, first + AT_A_TIME))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(200, 1200, 100))
def test_every_pass_keeps_the_gradients_of_more_graphs(first):
    check_all(range(first, first + 100))


def _forwards_all_of_a_shape(patch):
    def forward(node, by, except_for=()):
        one, other = type_of(node), type_of(by)
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        node.replace_all_uses_with(by, delete_user_cb=lambda user: user not in except_for)
        return True

    for module in (passes, indexing, losses, composites):
        patch.setattr(module, "forward_past", forward)


def _in_turns_with_gradients(patch):
    """What a turn makes under no_grad has a gradient."""
    emit = Writer.emit

    def emitted(self, node, operands, strategy):
        made = emit(self, node, operands, strategy)
        flows = any(type_of(n).requires_grad for n in made.all_input_nodes)
        types = tuple(replace(t, requires_grad=flows and t.may_have_gradient) for t in info(made).outputs)
        made.meta["info"] = replace(info(made), outputs=types)
        return made

    patch.setattr(Writer, "emit", emitted)


MUTANTS = {
    "a value is forwarded past no_grad": (_forwards_all_of_a_shape, 154),
    "a whole slice stops nothing": (
        lambda patch: (
            patch.setattr(indexing, "stopped_like", lambda node, value: value) or _forwards_all_of_a_shape(patch)
        ),
        21,
    ),
    "a copy stops nothing": (
        lambda patch: patch.setattr(
            values.Values, "has_gradient", lambda self, t: type_of(self.nodes[id(t)]).requires_grad
        ),
        47,
    ),
    "a linear reaches past a blind view": (
        lambda patch: patch.setattr(passes, "_stops_a_gradient", lambda node: False),
        46,
    ),
    "a turn knows no no_grad": (_in_turns_with_gradients, 32),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_pass_is_noticed(name, monkeypatch):
    mutant, seed = MUTANTS[name]
    check(seed)
    mutant(monkeypatch)
    with pytest.raises(Unequal):
        check(seed)
