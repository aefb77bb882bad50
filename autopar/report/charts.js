// -- charts
const FONT = "12px system-ui, sans-serif";
// Round steps: 1, 2 or 5 times a power of ten, in a unit that divides the values.
const roundStep = (span, most) => {
  const raw = span / most, ten = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((n) => n * ten).find((step) => step >= raw * (1 - 1e-9));
};
const axis = (more) => ({
  stroke: () => css("--quiet"), font: FONT, labelFont: FONT, labelSize: 24,
  grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, ...more,
});
const roundAxis = (units, most, label, count, more) => {
  const [unit, scale] = unitOf(units, most);
  const splits = (u, k, low, high) => {
    const step = roundStep((high - low) / scale, count), found = [];
    for (let n = Math.ceil(low / scale / step - 1e-9); n * step * scale <= high * (1 + 1e-9); n++) found.push(n * step * scale);
    return found;
  };
  const values = (u, at) => {
    const step = at.length > 1 ? (at[1] - at[0]) / scale : 1, digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return at.map((n) => (n / scale).toFixed(digits));
  };
  return axis({ label: label + " (" + unit + ")", splits, values, ...more });
};
const chartIn = (place, height, options, columns) => {
  const sized = () => ({ width: place.clientWidth, height });
  const chart = new uPlot({ ...sized(), legend: { show: false }, ...options }, columns, place);
  addEventListener("resize", () => chart.setSize(sized()));
  repaints.push(() => chart.redraw(false, true));
  return chart;
};
const written = (u, text, x, y, align, color) => {
  u.ctx.save();
  u.ctx.font = 12 * devicePixelRatio + "px system-ui, sans-serif";
  Object.assign(u.ctx, { fillStyle: color, textAlign: align, textBaseline: "alphabetic" });
  u.ctx.fillText(text, x, y);
  u.ctx.restore();
};
const upright = (u, index, color, dash) => {
  const x = Math.round(u.valToPos(index, "x", true));
  u.ctx.save();
  Object.assign(u.ctx, { strokeStyle: color, lineWidth: devicePixelRatio });
  u.ctx.setLineDash(dash.map((n) => n * devicePixelRatio));
  u.ctx.beginPath();
  u.ctx.moveTo(x, u.bbox.top);
  u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
  u.ctx.stroke();
  u.ctx.restore();
};

// -- memory
const held = Object.entries(data.line.held);
const drawMemory = () => {
  const times = data.line.times.map((_, i) => i);
  const whole = times.map((i) => held.reduce((sum, [, bytes]) => sum + bytes[i], 0));
  const peak = whole.indexOf(Math.max(...whole));
  const isNear = data.budget !== null && data.budget < 3 * data.peak.bytes;  // One far above would press the rest flat.
  let below = times.map(() => 0);
  const stacks = held.map(([, bytes]) => (below = below.map((n, i) => n + bytes[i])));
  const series = [{}], columns = [times];
  for (let k = held.length - 1; k >= 0; k--) {  // The whole is first, so that what lies below is drawn over it.
    const color = data.line.colors[held[k][0]];
    series.push({ stroke: color, fill: color, width: 0, points: { show: false } });
    columns.push(stacks[k]);
  }
  if (isNear) {
    series.push({ stroke: () => css("--limit"), width: 1.5, dash: [6, 4], points: { show: false } });
    columns.push(times.map(() => data.budget));
  }

  const head = made("p", undefined, "quiet");
  by("kinds").append(head);
  const cells = [...held].reverse().filter(([, bytes]) => bytes.some(Boolean))
    .map(([kind, bytes]) => [entry(by("kinds"), swatch(data.line.colors[kind]), kind), bytes]);
  const total = entry(by("kinds"), swatch("none"), "in all", undefined, "total");
  if (data.budget !== null) entry(by("kinds"), swatch("", "dashed"), "budget", size(data.budget));
  const tell = (i) => {
    const at = i ?? peak;
    head.textContent = (at === peak ? "At the peak, the " : "At the ") + data.line.times[at];
    for (const [cell, bytes] of cells) cell.textContent = size(bytes[at]);
    total.textContent = size(whole[at]);
  };

  const phase = (i) => data.pipeline ? "" : (data.line.times[i] || "").split(" ")[0];
  const turns = times.filter((i) => i === 0 || phase(i) !== phase(i - 1));  // where forward, backward and the step begin
  const phases = (u) => {
    const y = u.bbox.top + u.bbox.height + 18 * devicePixelRatio, end = u.bbox.left + u.bbox.width;
    turns.forEach((from, k) => {
      const first = u.valToPos(from, "x", true), last = k + 1 < turns.length ? u.valToPos(turns[k + 1], "x", true) : end;
      if (from > 0) upright(u, from, css("--quiet"), [2, 3]);
      const isThin = last - first < 80 * devicePixelRatio;
      written(u, phase(from), isThin ? end : (first + last) / 2, y, isThin ? "right" : "center", css("--ink"));
    });
    upright(u, peak, css("--ink"), [3, 3]);
    if (isNear) {
      const above = u.valToPos(data.budget, "y", true) - 6 * devicePixelRatio;
      written(u, "budget " + size(data.budget), u.bbox.left + 6 * devicePixelRatio, above, "left", css("--limit"));
    }
  };
  const top = Math.max(data.peak.bytes, isNear ? data.budget : 0) * 1.1;
  chartIn(by("held"), 330, {
    series, padding: [8, 12, 0, 0],
    axes: [
      axis({ splits: () => turns, values: () => [], grid: { show: false }, size: 30, label: data.pipeline ? "actions of the " + data.peak.at + ", in their order" : "ops in the order in which they run" }),
      roundAxis(UNITS, top, "memory of a device", 6, { size: 46 }),
    ],
    scales: { x: { time: false }, y: { range: () => [0, top] } },
    cursor: { points: { show: false }, y: false },
    hooks: { draw: [phases], setCursor: [(u) => tell(u.cursor.idx)] },
  }, columns);
  tell(null);
};
if (data.line.times.length) drawMemory();
else {
  by("held").append(made("p", "The file of this plan does not have memory over the step: it is of an older release.", "quiet"));
  by("kinds").append(made("p", "At the peak, the " + data.peak.at, "quiet"));
  for (const [kind, n] of Object.entries(data.peak.kinds).sort((a, b) => b[1] - a[1]))
    if (n) entry(by("kinds"), swatch(data.line.colors[kind]), kind, size(n));
}

// -- the step: above what computes, below what communicates, and at the bottom what travels to the host
const LANES = ["cpus", "host", "communication", "compute"].filter((lane) => !["cpus", "host"].includes(lane) || data.step.events.some((event) => event[1] === lane));
const KINDS = {  // of events, by lane
  compute: { forward: "forward", backward: "backward", recompute: "recompute", optimizer: "optimizer" },
  communication: { overlapped: "overlapped by compute", blocking: "blocking, between ops", exposed: "exposed, not hidden" },
  host: { down: "copies to the host", up: "copies back" },
  cpus: { optimizer: "steps of the host" },
};
const drawStep = () => {
  const events = data.step.events;
  const at = [...new Set(events.flatMap(([, , , begins, lasts]) => [begins, begins + lasts]))].sort((a, b) => a - b);
  const indices = new Map(at.map((t, i) => [t, i]));
  const tracks = [], lanes = new Map();
  const standing = new Map(LANES.map((lane) => [lane, at.map(() => null)]));  // the event of a lane at each time
  for (const lane of LANES.slice().reverse()) {
    const head = made("h3"), base = LANES.indexOf(lane) + 0.12;
    by("spent").append(head);
    let spent = 0;
    for (const [kind, said] of Object.entries(KINDS[lane])) {
      const found = events.filter((event) => event[1] === lane && event[2] === kind);
      const lasting = found.reduce((sum, event) => sum + event[4], 0);
      if (!found.length) continue;
      spent += lasting;
      lanes.set(kind, lasting);
      const heights = at.map(() => base);
      for (const event of found)
        for (let i = indices.get(event[3]); i < indices.get(event[3] + event[4]); i++) {
          heights[i] = base + 0.76;
          standing.get(lane)[i] = event;
        }
      tracks.push({ kind, base, heights });
      entry(by("spent"), swatch("var(--" + kind + ")"), said, seconds(lasting));
    }
    head.append(made("span", lane), made("span", seconds(spent)));
  }
  const waits = (lanes.get("blocking") || 0) + (lanes.get("exposed") || 0);
  if (waits) entry(by("spent"), swatch("", "gap"), "gaps: compute waits", seconds(waits), "total");

  const hint = "Point at an event for its place; drag to look closer, click twice to see all.";
  const tell = (i) => {
    const here = i === null || i === undefined ? [] : LANES.slice().reverse().map((lane) => standing.get(lane)[i]).filter(Boolean);
    const named = (event) => data.step.places[event[0]] + ", " + event[2] + " " + seconds(event[4]);
    by("busy").textContent = here.length ? seconds(at[i]) + ": " + here.map(named).join("; ") : hint;
  };
  const series = tracks.map(({ kind, base }) => ({
    fill: () => css("--" + kind), width: 0, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }), fillTo: base,
  }));
  chartIn(by("lanes"), 40 + 75 * LANES.length, {
    series: [{}, ...series], padding: [8, 12, 0, 0],
    axes: [
      roundAxis(TIMES, at[at.length - 1], "time in the step", 10, { size: 30 }),
      axis({ values: () => LANES, splits: () => LANES.map((_, i) => i + 0.5), size: 108, grid: { show: false }, stroke: () => css("--ink") }),
    ],
    scales: { x: { time: false }, y: { range: [0, LANES.length] } },
    cursor: { points: { show: false }, y: false },
    hooks: { setCursor: [(u) => tell(u.cursor.idx)] },
  }, [at, ...tracks.map((track) => track.heights)]);
  tell(null);
};
if (data.step.events.length) drawStep();
else by("busy").textContent = "The file of this plan does not have the step event by event: it is of an older release.";

// -- the curve of budgets
const drawCurve = () => {
  by("budgets").hidden = false;
  const points = [...data.curve].sort((a, b) => a[0] - b[0]);
  const columns = [0, 1, 2].map((k) => points.map((p) => p[k]));
  const head = made("p", undefined, "quiet");
  by("points").append(head);
  const cells = [["var(--backward)", "step by formulas"], ["var(--exposed)", "no plan takes less"]]
    .map(([color, name]) => entry(by("points"), swatch(color), name));
  const tell = (i) => {
    const point = points[i ?? points.length - 1];
    head.textContent = "At a budget of " + size(point[0]);
    cells.forEach((cell, k) => { cell.textContent = seconds(point[k + 1]); });
  };
  const steps = columns[1].concat(columns[2]), [low, high] = [Math.min(...steps), Math.max(...steps)];
  const room = 0.1 * (high - low) || 0.1 * high;
  chartIn(by("curve"), 260, {
    series: [
      {}, { stroke: () => css("--backward"), width: 2, points: { show: true, size: 6, fill: () => css("--paper") } },
      { stroke: () => css("--exposed"), width: 1.5, dash: [6, 4], points: { show: false } },
    ],
    padding: [8, 16, 0, 0],
    axes: [
      roundAxis(UNITS, columns[0][points.length - 1], "memory budget of a device", 8, { size: 30 }),
      roundAxis(TIMES, high, "step by formulas", 5, { size: 56 }),
    ],
    scales: { x: { time: false }, y: { range: () => [low - room, high + room] } },
    cursor: { y: false },
    hooks: { setCursor: [(u) => tell(u.cursor.idx)] },
  }, columns);
  tell(null);
};
if (data.curve.length > 1) drawCurve();
