"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const by = (id) => document.getElementById(id);
  const COLORS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d", "#bab0ac"];
  const CUTS = { R: "#d0d5dd", P: "#f4a7a0", S0: "#9ecbff", S1: "#a6e3b4", S2: "#ffd591", S3: "#d9b8ff" };
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink");
  const line = getComputedStyle(document.documentElement).getPropertyValue("--line");

  const seconds = (s) => (s >= 1 ? s.toFixed(2) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(2) + " ms" : (s * 1e6).toFixed(1) + " us");
  const size = (n) => {
    for (const [unit, scale] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) if (n >= scale) return (n / scale).toFixed(2) + " " + unit;
    return n + " B";
  };
  const made = (tag, text, kind) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };

  // -- what it is
  by("title").textContent = data.title;
  by("verdict").textContent = data.verdict;
  const gap = data.step_s ? (data.step_s - data.bound_s) / data.step_s : 0;
  for (const [said, value] of [
    ["a step", seconds(data.step_s)],
    ["no plan takes less than", seconds(data.bound_s) + " (gap " + (100 * gap).toFixed(2) + "%)"],
    ["a device holds at most", size(data.peak.bytes)],
    ["of a budget of", data.budget === null ? "none was asked for" : size(data.budget)],
  ]) {
    const box = made("div", undefined, "figure");
    box.append(made("b", value), made("span", said));
    by("figures").append(box);
  }

  // -- memory
  const axis = (values) => ({ stroke: ink, grid: { stroke: line }, ticks: { stroke: line }, values });
  const wide = () => Math.min(1072, document.body.clientWidth - 48);
  const kinds = Object.entries(data.line.held);
  if (kinds.length) {
    const times = data.line.times.map((_, i) => i);
    let below = times.map(() => 0);
    const stacks = kinds.map(([, held]) => (below = below.map((n, i) => n + held[i])));
    const series = [{ label: "time", value: (u, i) => (i === null ? "--" : data.line.times[i]) }];
    const drawn = [times];
    for (let k = kinds.length - 1; k >= 0; k--) {  // the whole first, so that what lies below is drawn over it
      const color = COLORS[k % COLORS.length];
      series.push({ label: kinds[k][0], stroke: color, fill: color, width: 0, points: { show: false }, value: (u, v, s, i) => (i === null ? "--" : size(kinds[k][1][i])) });
      drawn.push(stacks[k]);
    }
    if (data.budget !== null && data.budget < 3 * data.peak.bytes) {  // one far above would press the rest flat
      series.push({ label: "budget", stroke: "#d92d20", width: 2, dash: [6, 4], points: { show: false }, value: () => size(data.budget) });
      drawn.push(times.map(() => data.budget));
    }
    const phase = (i) => (data.line.times[i] || "").split(" ")[0];
    const turns = times.filter((i) => i === 0 || phase(i) !== phase(i - 1));  // where forward, backward and the step begin
    const axes = [{ ...axis((u, at) => at.map(phase)), splits: () => turns }, { ...axis((u, at) => at.map(size)), size: 84 }];
    const chart = new uPlot({ width: wide(), height: 300, series, axes, scales: { x: { time: false } }, cursor: { points: { show: false } } }, drawn, by("held"));
    addEventListener("resize", () => chart.setSize({ width: wide(), height: 300 }));
    by("at").textContent = "fullest at the " + data.peak.at;
  } else {
    by("at").textContent = "fullest at the " + data.peak.at + "; memory over the step is known where a plan is made";
  }
  for (const [kind, n] of Object.entries(data.peak.kinds).sort((a, b) => b[1] - a[1])) {
    if (!n) continue;
    const place = kinds.findIndex(([name]) => name === kind);
    const swatch = made("span", undefined, "swatch");
    swatch.style.background = place < 0 ? "var(--mark)" : COLORS[place % COLORS.length];
    by("kinds").append(swatch, made("span", kind + " " + size(n)));
  }

  // -- the step: above what computes, below what communicates
  const lanes = ["communication", "compute"];
  if (data.step.events.length) {
    const at = [...new Set(data.step.events.flatMap(([, , , begins, lasts]) => [begins, begins + lasts]))].sort((a, b) => a - b);
    const place = new Map(at.map((t, i) => [t, i]));
    const tracks = new Map();  // of a lane and a part: its heights, and which event stands at each time
    for (const event of data.step.events) {
      const [, lane, part, begins, lasts] = event, key = lane + ", " + part, base = lanes.indexOf(lane);
      if (!tracks.has(key)) tracks.set(key, { base, heights: at.map(() => base), events: at.map(() => null) });
      const track = tracks.get(key);
      for (let i = place.get(begins); i < place.get(begins + lasts); i++) {
        track.heights[i] = base + 0.8;
        track.events[i] = event;
      }
    }
    const named = (event) => data.step.places[event[0]] + " " + seconds(event[4]);
    const series = [{ label: "at", value: (u, t) => (t === null ? "--" : seconds(t)) }];
    for (const [label, track] of tracks) {
      const color = COLORS[["forward", "backward", "recompute", "optimizer"].indexOf(label.split(", ")[1])];
      series.push({ label, fill: color, width: 0, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }), fillTo: track.base, value: (u, v, s, i) => (i === null || !track.events[i] ? "--" : named(track.events[i])) });
    }
    const axes = [axis((u, ticks) => ticks.map(seconds)), { ...axis(() => lanes), splits: () => [0.4, 1.4], size: 110, grid: { show: false } }];
    const chart = new uPlot({ width: wide(), height: 200, series, axes, scales: { x: { time: false }, y: { range: [0, 2] } }, cursor: { points: { show: false } } }, [at, ...[...tracks.values()].map((track) => track.heights)], by("lanes"));
    addEventListener("resize", () => chart.setSize({ width: wide(), height: 200 }));
    const spent = (lane) => data.step.events.reduce((sum, event) => sum + (event[1] === lane ? event[4] : 0), 0);
    by("busy").textContent = seconds(spent("compute")) + " of compute and " + seconds(spent("communication")) + " of communication in a step of " + seconds(data.step_s) + "; drag to look closer, click twice to see all";
  } else {
    by("busy").textContent = "the step, event by event, is known where a plan is made";
  }

  // -- the graph: modules that are closed stand for what is in them
  const prefixes = (name) => {
    const path = (name.includes("/") ? name.slice(0, name.lastIndexOf("/")) : name.split(".").slice(0, -1).join(".")).split(".");
    return path[0] ? path.map((_, i) => path.slice(0, i + 1).join(".")) : [];
  };
  const inside = new Map();  // of a module: its nodes
  data.graph.nodes.forEach(([name, place], k) => {
    if (place >= 0) for (const prefix of prefixes(name)) inside.set(prefix, [...(inside.get(prefix) || []), k]);
  });
  const modules = [...inside].filter(([name, members]) => members.length > 1 && ![...inside].some(([other, theirs]) => other.startsWith(name + ".") && theirs.length === members.length)).map(([name]) => name);
  const around = data.graph.nodes.map(([name, place]) => (place >= 0 ? prefixes(name).filter((prefix) => modules.includes(prefix)) : []));
  const opened = new Set();
  const seen = (k) => around[k].find((module) => !opened.has(module));  // the closed module that hides a node
  const count = () => new Set(data.graph.nodes.map((_, k) => seen(k) || k)).size;
  const spent = (members) => members.map((k) => data.places[data.graph.nodes[k][1]]).reduce((sum, place) => sum + (place ? place.seconds + place.moved : 0), 0);
  // the dearest are open first, and what is around them before
  for (const module of [...modules].sort((a, b) => spent(inside.get(b)) - spent(inside.get(a)) || a.length - b.length)) {
    opened.add(module);
    if (count() > 40) opened.delete(module);
  }
  const strongest = (cut) => CUTS[cut.find((c) => c !== "R") || "R"] || "#cfd8e3";
  const label = (name, cost) => name + (cost >= 0.0005 * data.step_s && cost ? "  " + ((100 * cost) / data.step_s).toFixed(1) + "%" : "");
  const elements = () => {
    const found = [], taken = new Set();
    for (const module of opened) {
      const parent = around[inside.get(module)[0]].filter((other) => opened.has(other) && module.startsWith(other + ".")).pop();
      if (around[inside.get(module)[0]].every((other) => opened.has(other) || other.length >= module.length)) found.push({ data: { id: module, parent, label: parent ? module.slice(parent.length + 1) : module, module }, classes: "open" });
    }
    data.graph.nodes.forEach(([name, place], k) => {
      const closed = seen(k), id = closed || "n" + k;
      if (taken.has(id)) return;
      taken.add(id);
      const parent = around[k].filter((module) => opened.has(module) && module !== closed && (!closed || closed.startsWith(module + "."))).pop();
      const cost = spent(closed ? inside.get(closed) : [k]);
      const here = closed || name, within = parent && here.startsWith(parent) ? here.slice(parent.length + 1) : here.replace(/^\//, "");
      const cut = closed || place < 0 ? ["R"] : data.places[place].cut;
      found.push({ data: { id, parent, label: label(within, cost), module: closed, place, colors: cut.flatMap((c) => [CUTS[c] || "#cfd8e3", CUTS[c] || "#cfd8e3"]).join(" "), stops: cut.flatMap((_, i) => [(100 * i) / cut.length + "%", (100 * (i + 1)) / cut.length + "%"]).join(" ") }, classes: closed ? "closed" : place < 0 ? "end" : data.places[place].recomputed ? "op recomputed" : "op" });
    });
    const lines = new Map();
    for (const [from, to, cut, outputs, steps, lasts, back] of data.graph.lines) {
      const source = seen(from) || "n" + from, target = seen(to) || "n" + to;
      if (source === target) continue;
      const key = [source, target, back].join("|"), line = lines.get(key) || { source, target, back, color: strongest(cut), steps: new Set(), shape: outputs.join(" "), seconds: 0 };
      if (steps) line.steps.add(steps);
      line.seconds += lasts;
      lines.set(key, line);
    }
    for (const line of lines.values()) {
      const said = [...line.steps].join("; ");
      found.push({ data: { source: line.source, target: line.target, color: line.color, shape: line.shape, label: said && label(said, line.seconds) }, classes: line.back ? "back" : "" });
    }
    return found;
  };
  if (data.graph.lines.length) {
    const faint = getComputedStyle(document.documentElement).getPropertyValue("--quiet");
    const style = [
      { selector: "node", style: { label: "data(label)", shape: "round-rectangle", width: (n) => 16 + 6.4 * n.data("label").length, height: 24, "font-size": 11, "font-family": "ui-monospace, monospace", "text-valign": "center", color: "#10151d", "background-color": "#d0d5dd" } },
      { selector: ".op", style: { "background-fill": "linear-gradient", "background-gradient-direction": "to-right", "background-gradient-stop-colors": "data(colors)", "background-gradient-stop-positions": "data(stops)" } },
      { selector: ".closed", style: { "border-width": 2, "border-style": "double", "border-color": faint, height: 30 } },
      { selector: ".recomputed", style: { "border-width": 2, "border-style": "dashed", "border-color": "#e45756" } },
      { selector: ".open", style: { "text-valign": "top", color: ink, "background-opacity": 0.06, "border-width": 1, "border-color": line, padding: 14 } },
      { selector: "edge", style: { width: 3, "line-color": "data(color)", "target-arrow-color": "data(color)", "target-arrow-shape": "triangle", "curve-style": "bezier", label: "data(label)", "font-size": 10, color: "#d92d20", "text-background-color": "#fff", "text-background-opacity": 0.85 } },
      { selector: ".back", style: { "line-style": "dashed", "curve-style": "unbundled-bezier", "control-point-distances": 160, "control-point-weights": 0.5 } },
    ];
    const cy = cytoscape({ container: by("picture"), style, userZoomingEnabled: false, minZoom: 0.1, maxZoom: 3 });
    const draw = () => {
      cy.elements().remove();
      cy.add(elements());
      cy.elements().not(".back").layout({ name: "dagre", rankDir: "TB", nodeSep: 14, rankSep: 26, edgeSep: 8 }).run();
      cy.fit(undefined, 16);
      if (cy.zoom() < 0.55) {  // a tall graph is read from its beginning
        cy.zoom(0.8);
        const box = cy.elements().boundingBox();
        cy.pan({ x: cy.width() / 2 - 0.4 * (box.x1 + box.x2), y: 16 - 0.8 * box.y1 });
      }
    };
    cy.on("tap", "node", ({ target }) => {
      const { module, place } = target.data();
      if (module) {
        if (!opened.delete(module)) opened.add(module);
        draw();
      } else if (place >= 0) {
        const one = data.places[place];
        by("told").textContent = [one.name, one.outputs.join(", "), one.source, one.told || one.choice].filter(Boolean).join("\n");
      }
    });
    cy.on("tap", "edge", ({ target }) => { by("told").textContent = [target.data("shape"), target.data("label")].filter(Boolean).join("\n"); });
    const zoom = (by) => cy.zoom({ level: cy.zoom() * by, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } });
    by("closer").addEventListener("click", () => zoom(1.4));
    by("farther").addEventListener("click", () => zoom(1 / 1.4));
    by("fit").addEventListener("click", () => cy.fit(undefined, 16));
    by("picture").cy = cy;
    draw();
    for (const [cut, said] of [["R", "whole"], ["P", "part of a sum"], ["S0", "cut along dim 0"], ["S1", "dim 1"], ["S2", "dim 2"], ["S3", "dim 3"]]) {
      const swatch = made("span", undefined, "swatch");
      swatch.style.background = CUTS[cut];
      by("key").append(swatch, made("span", said));
    }
    by("key").append(made("span", "; colours from left to right: the axes of the mesh; dashed arrow: to the next layer; in red: conversions"));
  } else {
    by("picture").hidden = true;
    by("told").textContent = "the plan's file is of a release that did not write who reads whom";
  }

  // -- places
  const total = data.step_s || 1;
  const rows = data.places.map((place, order) => {
    const row = made("tr", undefined, "place");
    const name = made("td", place.name + (place.count > 1 ? " (x" + place.count + ")" : "") + (place.recomputed ? " recomputed" : ""), "name");
    const result = made("td");
    for (const cut of place.cut) {
      const badge = made("span", cut, "cut");
      badge.style.background = CUTS[cut] || "#cfd8e3";
      result.append(badge);
    }
    const share = made("td", undefined, "number");
    const bar = made("span", undefined, "bar");
    bar.style.width = Math.round((160 * (place.seconds + place.moved)) / total) + "px";
    share.append(bar, (100 * (place.seconds + place.moved) / total).toFixed(1) + "%");
    row.append(name, made("td", place.op), result, share, made("td", seconds(place.seconds), "number"), made("td", place.moved ? seconds(place.moved) : "", "number"));
    const more = made("tr"), cell = made("td");
    cell.colSpan = 6;
    cell.append(made("pre", (place.source ? place.source + "\n" : "") + (place.told || place.choice)));
    more.append(cell);
    more.hidden = true;
    row.addEventListener("click", () => { more.hidden = !more.hidden; });
    return { row, more, order, cost: place.seconds + place.moved, text: [place.name, place.op, place.choice].join(" ").toLowerCase() };
  });
  const show = () => {
    const wanted = by("search").value.toLowerCase();
    const found = rows.filter((r) => r.text.includes(wanted));
    found.sort((a, b) => (by("dear").checked ? b.cost - a.cost : 0) || a.order - b.order);
    by("rows").replaceChildren(...found.flatMap((r) => [r.row, r.more]));
    by("shown").textContent = found.length + " of " + rows.length;
  };
  by("search").addEventListener("input", show);
  by("dear").addEventListener("change", show);
  show();

  // -- parameters
  for (const [name, count, stored, bytes] of data.parameters) {
    const row = made("tr");
    row.append(made("td", name + (count > 1 ? " (x" + count + ")" : ""), "name"), made("td", stored), made("td", size(bytes), "number"));
    by("stored").append(row);
  }

  // -- other plans
  if (data.curve.length > 1) {
    const points = [...data.curve].sort((a, b) => a[0] - b[0]);
    const columns = [0, 1, 2].map((k) => points.map((p) => p[k]));
    const axes = [axis((u, at) => at.map(size)), { ...axis((u, at) => at.map(seconds)), size: 84 }];
    const series = [{ label: "budget", value: (u, v) => (v === null ? "--" : size(v)) }, { label: "step", stroke: COLORS[0], width: 2, value: (u, v) => (v === null ? "--" : seconds(v)) }, { label: "bound", stroke: COLORS[3], dash: [6, 4], value: (u, v) => (v === null ? "--" : seconds(v)) }];
    new uPlot({ width: wide(), height: 260, series, axes, scales: { x: { time: false } } }, columns, by("curve"));
  }
  const others = [...data.beside.map(([name, step, peak, fits]) => [name, step, peak, fits ? "" : "over the budget before recompute"]), ...data.meshes.map(([mesh, step, , peak, why]) => ["mesh " + mesh, step, peak, why])];
  if (others.length) {
    const table = made("table");
    for (const [name, step, peak, why] of others) {
      const row = made("tr");
      row.append(made("td", name), made("td", step ? seconds(step) : "-", "number"), made("td", peak ? size(peak) : "-", "number"), made("td", why));
      table.append(row);
    }
    by("rivals").append(table);
  } else if (data.curve.length < 2) {
    by("rivals").append(made("p", "none were asked for: plan.beside(), and plan.report(path, budgets=12)", "quiet"));
  }

  // -- in words
  by("summary").textContent = data.summary;
  for (const [name, meaning] of data.said) by("said").append(made("dt", name), made("dd", meaning));
  document.body.dataset.drawn = "yes";
})();
