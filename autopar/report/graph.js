// -- the graph: modules that are closed stand for what is in them
const CUTS = ["R", "P", "S0", "S1", "S2", "S3"];
const cutColor = (cut, what = "cut") => css("--" + what + "-" + (CUTS.includes(cut) ? cut : "R"));
const prefixes = (name) => {
  const outer = name.includes("/") ? name.slice(0, name.lastIndexOf("/")) : name.split(".").slice(0, -1).join(".");
  const path = outer.split(".");
  return path[0] ? path.map((_, i) => path.slice(0, i + 1).join(".")) : [];
};
const inside = new Map();  // of a module: its nodes
data.graph.nodes.forEach(([name, place], k) => {
  if (place >= 0) for (const prefix of prefixes(name)) inside.set(prefix, [...(inside.get(prefix) || []), k]);
});
// A module around nothing but another is drawn as one with it.
const isAlone = (name, members) =>
  ![...inside].some(([other, theirs]) => other.startsWith(name + ".") && theirs.length === members.length);
const modules = [...inside].filter(([name, members]) => members.length > 1 && isAlone(name, members)).map(([name]) => name);
const around = data.graph.nodes.map(([name, place]) =>
  place >= 0 ? prefixes(name).filter((prefix) => modules.includes(prefix)) : []);
const opened = new Set();
const closedAround = (k) => around[k].find((module) => !opened.has(module));  // the closed module that hides a node
const shownNodes = () => new Set(data.graph.nodes.map((_, k) => closedAround(k) || k)).size;
const costOf = (members) => members.map((k) => data.places[data.graph.nodes[k][1]])
  .reduce((sum, place) => sum + (place ? place.seconds + place.moved : 0), 0);
// The slowest are open first, and what is around them before.
const bySpent = [...modules].sort((a, b) => costOf(inside.get(b)) - costOf(inside.get(a)) || a.length - b.length);
for (const module of bySpent) {
  opened.add(module);
  if (shownNodes() > 40) opened.delete(module);
}
const strongest = (cut) => cut.find((c) => c !== "R") || "R";
const label = (name, cost) => name + (cost >= 0.0005 * whole && cost ? "  " + percent(cost / whole) : "");
const openAround = (k) => around[k].filter((module) => opened.has(module) && !around[k].slice(0, around[k].indexOf(module))
  .some((outer) => !opened.has(outer)));

const openModules = () => {
  const found = [];
  for (const module of opened) {
    const path = around[inside.get(module)[0]];
    if (!path.every((other) => opened.has(other) || other.length >= module.length)) continue;
    const parent = path.filter((other) => opened.has(other) && module.startsWith(other + ".")).pop();
    found.push({ data: { id: module, parent, label: parent ? module.slice(parent.length + 1) : module, module }, classes: "open" });
  }
  return found;
};
const boxes = () => {
  const found = [], taken = new Set();
  data.graph.nodes.forEach(([name, place], k) => {
    const closed = closedAround(k), id = closed || "n" + k;
    if (taken.has(id)) return;
    taken.add(id);
    const isAround = (module) => module !== closed && (!closed || closed.startsWith(module + "."));
    const parent = around[k].filter((module) => opened.has(module) && isAround(module)).pop();
    const here = closed || name;
    const within = parent && here.startsWith(parent) ? here.slice(parent.length + 1) : here.replace(/^\//, "");
    const cut = closed || place < 0 ? ["R"] : data.places[place].cut;
    const kind = closed ? "closed" : place < 0 ? "end" : data.places[place].recomputed ? "op recomputed" : "op";
    found.push({
      data: {
        id, parent, place, module: closed, label: label(within, costOf(closed ? inside.get(closed) : [k])),
        colors: cut.flatMap((c) => [cutColor(c), cutColor(c)]).join(" "),
        stops: cut.flatMap((_, i) => [(100 * i) / cut.length + "%", (100 * (i + 1)) / cut.length + "%"]).join(" "),
      },
      classes: kind,
    });
  });
  return found;
};
const lines = () => {
  const merged = new Map();
  for (const [from, to, cut, outputs, steps, lasts, back] of data.graph.lines) {
    const source = closedAround(from) || "n" + from, target = closedAround(to) || "n" + to;
    if (source === target) continue;
    const key = [source, target, back].join("|");
    const fresh = { source, target, back, from, to, cut: strongest(cut), steps: new Set(), shape: outputs.join(" "), seconds: 0 };
    const one = merged.get(key) || fresh;
    if (steps) steps.split(", ").forEach((step) => one.steps.add(step));
    one.seconds += lasts;
    merged.set(key, one);
  }
  return [...merged.values()];
};
// A conversion is a box of its own between two ops, so that the layout keeps room for its text. What goes to the next
// layer leaves through a box at the end of the layer and comes in through one at its beginning.
const elements = () => {
  const found = [...openModules(), ...boxes()], doors = new Set();
  lines().forEach(({ source, target, back, from, to, cut, steps, shape, seconds: lasts }, k) => {
    const said = [...steps].join("\n"), told = [shape, said && label([...steps].join(", "), lasts)].filter(Boolean).join("\n");
    const edge = { color: cutColor(cut, "edge"), told };
    const theirs = openAround(to), parent = openAround(from).filter((module) => theirs.includes(module)).pop(), id = "c" + k;
    if (back) {
      for (const [end, text, ends] of [["first", "from the layer before", { target }], ["last", "to the next layer", { source }]]) {
        const door = end + " of " + parent;
        if (!doors.has(door)) found.push({ data: { id: door, parent, label: text }, classes: "door" });
        doors.add(door);
        found.push({ data: { ...edge, source: door, target: door, ...ends }, classes: "back" });
      }
      return;
    }
    if (!said) {
      found.push({ data: { ...edge, source, target } });
      return;
    }
    found.push({ data: { id, parent, told, label: label(said, lasts) }, classes: "moved" });
    found.push({ data: { ...edge, source, target: id }, classes: "into" }, { data: { ...edge, source: id, target } });
  });
  return found;
};
const measure = made("canvas").getContext("2d");
const MONO = "ui-monospace, SFMono-Regular, Menlo, DejaVu Sans Mono, monospace";
measure.font = "12px " + MONO;
const textWidth = (text) => Math.max(...text.split("\n").map((row) => measure.measureText(row).width));
const graphStyle = () => {
  const quiet = css("--quiet"), limit = css("--limit");
  const text = { "font-size": 12, "font-family": MONO, "min-zoomed-font-size": 6 };
  return [
    { selector: "node", style: {
      ...text, label: "data(label)", shape: "round-rectangle", width: (n) => 20 + textWidth(n.data("label")), height: 26,
      "text-valign": "center", "text-wrap": "wrap", color: css("--cut-ink"), "background-color": css("--cut-R") } },
    { selector: ".op", style: {
      "background-fill": "linear-gradient", "background-gradient-direction": "to-right",
      "background-gradient-stop-colors": "data(colors)", "background-gradient-stop-positions": "data(stops)" } },
    { selector: ".closed", style: { "border-width": 3, "border-style": "double", "border-color": quiet, height: 32 } },
    { selector: ".recomputed", style: { "border-width": 1.5, "border-style": "dashed", "border-color": limit } },
    { selector: ".moved", style: {
      color: limit, "background-color": css("--paper"), "border-width": 1.2, "border-color": limit, "line-height": 1.3,
      height: (n) => 12 + 16 * n.data("label").split("\n").length } },
    { selector: ".open", style: {
      "text-valign": "top", "text-margin-y": -3, "text-margin-x": (n) => (textWidth(n.data("label")) - n.outerWidth()) / 2 + 4,
      color: quiet, "background-color": css("--quiet"), "background-opacity": 0.05,
      "border-width": 1, "border-color": css("--line"), padding: 16 } },
    { selector: "edge", style: {
      width: 2.5, "line-color": "data(color)", "target-arrow-color": "data(color)", "target-arrow-shape": "triangle",
      "arrow-scale": 0.9, "curve-style": "bezier" } },
    { selector: ".into", style: { "target-arrow-shape": "none" } },
    { selector: ".back", style: { "line-style": "dashed" } },
    { selector: ".door", style: { color: quiet, "background-opacity": 0, "font-family": "system-ui, sans-serif", height: 18 } },
  ];
};
const drawGraph = () => {
  const cy = cytoscape({ container: by("picture"), style: graphStyle(), userZoomingEnabled: false, minZoom: 0.1, maxZoom: 3 });
  const draw = () => {
    cy.elements().remove();
    cy.add(elements());
    cy.elements().layout({ name: "dagre", rankDir: "TB", nodeSep: 18, rankSep: 30, edgeSep: 10 }).run();
    cy.style().update();  // Names of modules stand at their left, which is known now.
    cy.fit(undefined, 20);
    if (cy.zoom() > 1.2) cy.zoom(1.2), cy.center();
    if (cy.zoom() < 0.92) {  // A large graph is read from its beginning, with text that can be read.
      const scale = 0.95, box = cy.elements().boundingBox(), half = (cy.width() / 2 - 20) / scale;
      const above = cy.nodes(".op, .closed, .end").filter((n) => n.position("y") < box.y1 + cy.height() / scale);
      const middle = above.map((n) => n.position("x")).reduce((sum, x) => sum + x, 0) / above.length;
      const isNarrow = box.w < 2 * half;
      const x = isNarrow ? (box.x1 + box.x2) / 2 : Math.min(box.x2 - half, Math.max(box.x1 + half, middle));
      cy.zoom(scale);
      cy.pan({ x: cy.width() / 2 - scale * x, y: 20 - scale * box.y1 });
    }
  };
  cy.on("tap", "node", ({ target }) => {
    const { module, place, told } = target.data();
    if (module) {
      if (!opened.delete(module)) opened.add(module);
      draw();
    } else if (place >= 0) {
      const one = data.places[place];
      by("told").textContent = [one.name, one.outputs.join(", "), one.source, one.told || one.choice].filter(Boolean).join("\n");
    } else if (told) by("told").textContent = told;
  });
  cy.on("tap", "edge", ({ target }) => { by("told").textContent = target.data("told"); });
  const zoom = (factor) => cy.zoom({ level: cy.zoom() * factor, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } });
  by("closer").addEventListener("click", () => zoom(1.4));
  by("farther").addEventListener("click", () => zoom(1 / 1.4));
  by("fit").addEventListener("click", () => cy.fit(undefined, 20));
  by("picture").cy = cy;
  draw();
  repaints.push(() => { cy.style(graphStyle()); draw(); });

  const meaning = (mark, text) => {
    const one = made("span");
    one.append(mark, made("span", text));
    by("key").append(one);
  };
  const used = new Set(data.places.flatMap((place) => place.cut));
  for (const [cut, said] of [["R", "R: whole"], ["P", "P: part of a sum"], ...[0, 1, 2, 3].map((d) => ["S" + d, "S(" + d + "): cut along dim " + d])])
    if (used.has(cut)) meaning(swatch("var(--cut-" + cut + ")"), said);
  if (data.axes.length > 1) {
    const shares = data.axes.map((_, k) => 100 * k / data.axes.length), shades = ["--cut-S0", "--cut-S1", "--cut-S2", "--cut-S3"];
    const stops = shares.map((from, k) => "var(" + shades[k % 4] + ") " + from + "% " + (from + 100 / data.axes.length) + "%");
    meaning(swatch("linear-gradient(to right, " + stops.join(", ") + ")", "pair"), "from left to right: along " + data.axes.join(", "));
  }
  meaning(swatch("", "box moved"), "conversion");
  meaning(swatch("", "box double"), "module that is closed");
  if (data.places.some((place) => place.recomputed)) meaning(swatch("", "box recomputed"), "recomputed");
  if (data.graph.lines.some((one) => one[6])) meaning(swatch("", "dashes"), "from layer to layer");
};
if (data.graph.lines.length) drawGraph();
else {
  by("picture").hidden = true;
  by("told").textContent = "The file of this plan does not say who reads whom: it is of an older release.";
}
