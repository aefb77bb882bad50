"""The page about a plan: its data are the plan's, it needs no network, and a browser draws it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import autopar
from autopar import Assume, Plan
from autopar.cli import main
from autopar.graph.layers import folded
from autopar.report import data_of
from autopar.solver.figures import size, time
from autopar.solver.record import Record
from autopar.solver.summary import parts_of_step
from tests.kernels.sites import SITES
from tests.language import drawn

MOST = 2 * 2**20
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--enable-logging=stderr",
    "--dump-dom",
    "--virtual-time-budget=5000",
)
# what a person does: searches, opens the first place, lists places in their order
ACTS = """<script>
const search = document.getElementById("search");
search.value = "c_fc/linear";
search.dispatchEvent(new Event("input"));
const found = document.querySelectorAll("#rows tr.place").length;
document.querySelector("#rows tr.place").click();
const opened = [...document.querySelectorAll("#rows tr:not(.place)")].filter((row) => !row.hidden);
search.value = "";
search.dispatchEvent(new Event("input"));
const shown = () => document.querySelectorAll("#rows tr.place").length;
const folded = shown();
document.querySelector("#rows tr.fold").click();
const unfolded = shown();
document.querySelector("#rows tr.fold").click();
document.body.dataset.fold = JSON.stringify([folded, unfolded, shown()]);
document.getElementById("dear").click();
search.dispatchEvent(new Event("input"));
document.body.dataset.acted = JSON.stringify([found, opened.length, opened[0].textContent.includes("rival"),
  document.querySelectorAll("#rows tr.place").length, document.querySelector("#rows td.name").textContent,
  document.querySelectorAll(".uplot canvas").length]);
const cy = document.getElementById("picture").cy, ops = () => cy.nodes(".op").length;
const before = ops(), closed = cy.nodes(".closed")[0].id();
cy.getElementById(closed).emit("tap");
const after = ops(), open = cy.getElementById(closed).isParent();
cy.getElementById(closed).emit("tap");
cy.nodes(".op").filter((n) => n.data("label").includes("layer_norm"))[0].emit("tap");
document.body.dataset.graph = JSON.stringify([after - before, open, ops() - before,
  document.getElementById("told").textContent.includes("rival"), cy.edges(".back").length,
  cy.nodes().every((n) => Number.isFinite(n.position("x"))), cy.nodes(".moved").every((n) => n.degree() === 2),
  Math.min(...cy.nodes().map((n) => parseFloat(n.style("font-size")) * cy.zoom()))]);
</script></body>"""


@pytest.fixture(scope="module")
def plan():
    build, config = SITES["gpt2"]
    asked = {"mesh": (2, 2), "recompute": "full", "memory_budget": "64GiB", "assume": Assume(no_padding=True)}
    found = autopar.plan(build(config).train(), drawn(16, 16, 128), **asked)
    found.beside()
    return found


class Page(HTMLParser):
    """The elements by their ids, and the text of the data."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.text, self._in = [], [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self._in = named.get("id", "")
        self.ids.append(self._in)
        self.links += [named[key] for key in ("src", "href") if key in named]

    def handle_data(self, data):
        if self._in == "data":
            self.text, self._in = data, ""


@pytest.fixture(scope="module")
def text(plan, tmp_path_factory):
    """The page of the plan, with step times over two budgets."""
    return plan.report(tmp_path_factory.mktemp("page") / "plan.html", budgets=2).read_text()


def test_a_page_holds_what_the_plan_says(plan, text):
    page = Page(text)
    data = json.loads(page.text)
    assert {"held", "lanes", "picture", "rows", "stored", "curve", "search", "summary"} <= set(page.ids)
    assert len(text) < MOST and all(link.startswith("#") for link in page.links)
    assert not re.findall(r"(?:src|href|url|import|fetch)\s*[=(]\s*[\"']?(?:https?:)?//", text)
    assert re.search("<title>GPT2LMHeadModel, .* parameters, on 4 x .*: .* a step</title>", text)
    assert "screen and (prefers-color-scheme: dark)" in text and "@media print" in text
    assert data["step_s"] == plan.step_time_s and data["summary"] == str(plan) and data["budget"] == plan.budget
    places = {p["name"]: p for p in data["places"]}
    seconds = sum(d.seconds for d in plan.decisions.values() if d.kind == "op")
    assert sum(p["seconds"] for p in data["places"]) == pytest.approx(seconds)
    moved = sum(c.seconds for c in plan.conversions if plan.decisions[c.target].kind == "op")
    assert sum(p["moved"] for p in data["places"]) == pytest.approx(moved)
    assert places["lm_head/linear"]["told"] == plan.explain("lm_head/linear")
    assert sum(size for *_, size in data["parameters"]) == sum(plan.parameter_bytes.values())
    whole = [sum(kinds) for kinds in zip(*data["line"]["held"].values(), strict=True)]
    assert max(whole) == pytest.approx(plan.peak_bytes, abs=len(data["line"]["held"]))
    assert data["line"]["times"][whole.index(max(whole))] == plan.peak_at
    events = data["step"]["events"]
    assert max(begins + lasts for *_, begins, lasts in events) == pytest.approx(plan.step_time_s, rel=1e-5)
    assert {data["step"]["places"][e[0]] for e in events} == {e.place for e in plan.timeline().events}
    assert [row[0] for row in data["beside"]] == ["ddp", "fsdp", "megatron"] and len(data["curve"]) > 1


def in_units(text):
    """The first figure of a text, in seconds, bytes or as it stands."""
    scales = {"s": 1, "ms": 1e-3, "us": 1e-6, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "%": 0.01}
    figure, unit = re.search(r"([\d.,]+) ?(%|\w*)", text).groups()
    return float(figure.replace(",", "")) * scales.get(unit, 1)


def test_tiles_are_the_figures_of_the_plan(plan):
    tiles = {tile["name"]: tile for tile in data_of(plan)["tiles"]}
    value = {name: in_units(tile["value"]) for name, tile in tiles.items()}
    fsdp = next(rival for rival in plan.known_beside if rival.name == "fsdp")
    rows, length, devices = 16, 16, 4
    assert value == {
        "expected step": pytest.approx(plan.expected_s, rel=1e-2),
        "tokens/s a device": pytest.approx(rows * length / devices / plan.expected_s, rel=1e-2),
        "MFU": pytest.approx(plan.rates.mfu, abs=1e-3),
        "memory at the peak": pytest.approx(plan.peak_bytes, rel=1e-2),
        "gap to the best": pytest.approx(plan.gap, abs=1e-4),
        "FSDP on this mesh": pytest.approx(fsdp.step_time_s / plan.step_time_s, abs=1e-2),
    }
    assert time(plan.step_interval_s[1]) in tiles["expected step"]["note"]
    assert "64.00 GiB" in tiles["memory at the peak"]["note"]
    assert tiles["memory at the peak"]["share"] == pytest.approx(plan.peak_bytes / (64 * 2**30))


def test_a_notebook_shows_the_tiles_and_memory_without_scripts(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    for one in (plan, Plan.load(tmp_path / "plan.json")):
        shown = one._repr_html_()
        assert not re.search("<script|<style|<pre|class=|http", shown) and len(shown) < 20_000
        told = re.sub("<[^>]*>", "\n", shown).splitlines()
        assert {text for tile in data_of(plan)["tiles"] for text in (tile["name"], tile["value"])} <= set(told)
        assert shown.count("<path") > 4 and f"saved activations {size(plan.memory['saved activations'])}" in shown
    old = replace(Plan.load(tmp_path / "plan.json"), record=Record())  # a file of an older release
    assert "<svg" not in old._repr_html_() and "expected step" in old._repr_html_()


@pytest.mark.parametrize("cluster", ["generic", "a100-8x1"])  # links of the second hinder compute
def test_communication_is_overlapped_blocking_or_exposed(cluster, tmp_path):
    plan = autopar.plan(*split_gpt2(), mesh=(8,), cluster=cluster, parallel="fsdp", memory_budget="inf")
    plan.save(tmp_path / "plan.json")
    parts = parts_of_step(plan)
    for one, tolerance in ((plan, 1e-5), (Plan.load(tmp_path / "plan.json"), 0.02)):
        spent = Counter()
        for _, _, kind, _, lasts in data_of(one)["step"]["events"]:
            spent[kind] += lasts
        near = {"abs": tolerance * plan.step_time_s}
        assert spent["overlapped"] == pytest.approx(plan.hidden_s, **near) and spent["overlapped"]
        assert spent["exposed"] == pytest.approx(parts["exposed communication"], **near) and spent["exposed"]
        assert spent["blocking"] == pytest.approx(parts["blocking communication"], **near)
        assert spent["optimizer"] == pytest.approx(parts["optimizer"], **near)


def test_the_graph_of_a_page_has_every_value_and_its_conversions(plan, tmp_path):
    split = autopar.plan(*split_gpt2(), mesh=(2, 2), parallel="megatron", memory_budget="inf")
    for one in (plan, split):
        graph = data_of(one)["graph"]
        places = [name for name, _ in graph["nodes"]]
        steps = {(places[line[0]], places[line[1]], line[4]) for line in graph["lines"]}
        moved = {
            (folded(c.source), folded(c.target), ", ".join(s.text(one.mesh.axes) for s in c.forward))
            for c in one.conversions
            if {one.decisions[c.source].kind, one.decisions[c.target].kind} == {"op"} and c.forward
        }
        assert moved <= steps and (one is plan or moved)
        read = {name for d in one.decisions.values() for name in d.reads if one.decisions[name].kind == "op"}
        assert {folded(name) for name in read} <= {places[line[0]] for line in graph["lines"]}
        back = {(places[line[0]], places[line[1]]) for line in graph["lines"] if line[6]}
        assert back and all("h.*" in source and "h.*" in target for source, target in back)  # to the next layer


def split_gpt2():
    build, config = SITES["gpt2"]
    return build(config).train(), drawn(16, 16, 128)


def test_a_plan_that_was_read_has_a_page_too(plan, tmp_path, capsys):
    plan.save(tmp_path / "plan.json")
    assert main(["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "plan.html")]) == 0
    data = json.loads(Page((tmp_path / "plan.html").read_text()).text)
    whole = [sum(kinds) for kinds in zip(*data["line"]["held"].values(), strict=True)]
    assert len(whole) <= 150 and data["line"]["times"][whole.index(max(whole))] == plan.peak_at
    assert max(whole) == pytest.approx(plan.peak_bytes, abs=len(data["line"]["held"]))
    events = data["step"]["events"]
    assert max(begins + lasts for *_, begins, lasts in events) == pytest.approx(plan.step_time_s, rel=1e-4)
    busy = sum(lasts for _, lane, *_, lasts in events if lane == "compute")
    assert busy == pytest.approx(sum(e.seconds for e in plan.timeline().events if e.lane == "compute"), rel=0.01)
    assert [row[0] for row in data["beside"]] == ["ddp", "fsdp", "megatron"]
    slowest = max((p for p in data["places"] if p["op"] != "output"), key=lambda p: p["seconds"])
    assert "rival" in slowest["told"] and "rival" in Plan.load(tmp_path / "plan.json").explain(slowest["name"])
    assert data["parameters"] and data["places"] and "parameters" in data["peak"]["kinds"]
    alone = [sys.executable, "-m", "autopar", "report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "alone.html")]
    assert subprocess.run(alone, timeout=60, capture_output=True).returncode == 0 and (tmp_path / "alone.html").exists()
    with pytest.raises(autopar.letters.BadPlan, match="is gone"):
        Plan.load(tmp_path / "plan.json").timeline()  # a file has the events of blocks only
    again = Plan.load(tmp_path / "plan.json")
    again.save(tmp_path / "again.json")
    assert Plan.load(tmp_path / "again.json").record == again.record and "against   ddp" in str(again)
    assert main(["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "no" / "plan.html")]) == 1


def test_text_of_a_model_ends_no_script(plan, tmp_path):
    odd = replace(plan, assumptions=("of </script><b>",))
    text = odd.report(tmp_path / "odd.html").read_text()
    assert text.count("</script>") == 5 and json.loads(Page(text).text)["said"]["assumed"] == ["of </script><b>"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium: apt-get install chromium")
def test_a_browser_draws_it(plan, text, tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(text.replace("</body>", ACTS))
    made = subprocess.run(
        ["chromium", *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"file://{path}"],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert 'data-drawn="yes"' in made.stdout, made.stderr[-2000:]
    errors = [line for line in made.stderr.splitlines() if "CONSOLE" in line and ("Error" in line or "error" in line)]
    assert not errors
    acted = re.search(r'data-acted="([^"]*)"', made.stdout)[1].replace("&quot;", '"')
    found, opened, has_rivals, count, first, canvases = json.loads(acted)
    assert 1 <= found < count and opened == 1 and has_rivals and canvases == 3
    assert first.startswith(plan_first(plan))
    graph = re.search(r'data-graph="([^"]*)"', made.stdout)[1].replace("&quot;", '"')
    more, is_open, less, has_rivals, to_the_next, is_laid_out, is_between, font = json.loads(graph)
    assert more > 0 and is_open and less == 0 and has_rivals and to_the_next and is_laid_out
    assert is_between and font >= 11  # pixels
    folded_rows, unfolded, again = json.loads(re.search(r'data-fold="([^"]*)"', made.stdout)[1])
    little = sum(p["seconds"] + p["moved"] < 0.01 * plan.step_time_s for p in data_of(plan)["places"])
    assert folded_rows == again == count - little < unfolded == count


def plan_first(plan):
    """The first op of the plan, layers as one."""
    return folded(next(name for name, d in plan.decisions.items() if d.kind == "op"))
