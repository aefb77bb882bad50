// -- places: those that take little of the step are behind one row
const LITTLE = 0.01;
const total = whole || 1;
const rowOf = (place, order) => {
  const row = made("tr", undefined, "place"), cost = place.seconds + place.moved;
  const name = made("td", place.name, "name");
  if (place.count > 1) name.append(made("span", " x " + place.count, "tag"));
  if (place.recomputed) name.append(made("span", " recomputed", "tag"));
  if (place.offloaded) name.append(made("span", " on the host", "tag"));
  const result = made("td");
  for (const cut of place.cut) {
    const badge = made("span", cut, "cut");
    badge.style.background = "var(--cut-" + cut + ", var(--cut-R))";
    result.append(badge);
  }
  const share = made("td", undefined, "number"), bar = made("span", undefined, "bar");
  bar.style.width = Math.round((160 * cost) / total) + "px";
  share.append(bar, percent(cost / total));
  row.append(name, made("td", place.op), result, share);
  for (const s of [place.seconds, place.moved]) row.append(made("td", s ? seconds(s) : "", "number"));
  const more = made("tr"), cell = made("td");
  cell.colSpan = 6;
  cell.append(made("pre", (place.source ? place.source + "\n" : "") + (place.told || place.choice)));
  more.append(cell);
  more.hidden = true;
  row.addEventListener("click", () => { more.hidden = !more.hidden; });
  return { row, more, order, cost, text: [place.name, place.op, place.choice].join(" ").toLowerCase() };
};
const placeRows = data.places.map(rowOf);
let isFolded = true;
const foldRow = (small) => {
  const row = made("tr", undefined, "fold"), cell = made("td"), button = made("button");
  const sum = small.reduce((all, r) => all + r.cost, 0) / total;
  button.textContent = (isFolded ? "▸ " : "▾ ") + small.length + " places below " + 100 * LITTLE + "% each, " + percent(sum) + " in all";
  button.setAttribute("aria-expanded", String(!isFolded));
  cell.colSpan = 6;
  cell.append(button);
  row.append(cell);
  row.addEventListener("click", () => { isFolded = !isFolded; show(); });
  return row;
};
const show = () => {
  const wanted = by("search").value.toLowerCase(), isByCost = by("dear").checked;
  const found = placeRows.filter((r) => r.text.includes(wanted));
  found.sort((a, b) => (isByCost ? b.cost - a.cost : 0) || a.order - b.order);
  // What was searched for is shown whatever it takes, and so is the order of the step, which has no gaps.
  const small = wanted || !isByCost ? [] : found.filter((r) => r.cost < LITTLE * total);
  const large = found.filter((r) => !small.includes(r)), open = isFolded ? [] : small;
  const both = (r) => [r.row, r.more];
  by("rows").replaceChildren(...large.flatMap(both), ...(small.length ? [foldRow(small)] : []), ...open.flatMap(both));
  by("shown").textContent = found.length + " of " + placeRows.length;
};
by("search").addEventListener("input", show);
by("dear").addEventListener("change", show);
show();

// -- parameters
for (const [name, count, stored, bytes] of data.parameters) {
  const row = made("tr"), cell = made("td", name, "name");
  if (count > 1) cell.append(made("span", " x " + count, "tag"));
  row.append(cell, made("td", stored), made("td", size(bytes), "number"));
  by("stored").append(row);
}

// -- other plans
const tableOf = (heading, rows) => {
  if (!rows.length) return;
  const table = made("table"), head = made("tr");
  ["plan", "step by formulas", "memory at the peak", ""].forEach((name, k) => head.append(made("th", name, k === 1 || k === 2 ? "number" : "")));
  const first = made("thead"), body = made("tbody");
  first.append(head);
  table.append(first, body);
  for (const [name, step, peak, why] of rows) {
    const row = made("tr");
    row.append(made("td", name), made("td", step ? seconds(step) : "", "number"), made("td", peak ? size(peak) : "", "number"), made("td", why));
    body.append(row);
  }
  by("rivals").append(made("h3", heading), table);
};
const beside = data.beside.map(([name, step, peak, fits, why]) => {
  const ratio = step && data.step_s ? (step / data.step_s).toFixed(2) + " x as long" : "";
  return [name, step, peak, why || (fits ? ratio : "does not fit where nothing is recomputed")];
});
tableOf(data.pipeline ? "The same model on these devices without stages" : "The same model on the same mesh", beside.length ? [["this plan", data.step_s, data.peak.bytes, ""], ...beside] : []);
tableOf("Other meshes", data.meshes.map(([mesh, step, , peak, why]) => [mesh, step, peak, why]));
if (!beside.length && !data.meshes.length && data.curve.length < 2)
  by("rivals").append(made("p", "None were asked for: plan.beside(), and plan.report(path, budgets=12).", "quiet"));

// -- in words
by("summary").textContent = data.summary;
for (const [heading, lines] of [["Warnings", data.said.warnings], ["Assumed", data.said.assumed]]) {
  if (!lines.length) continue;
  const list = made("ul");
  list.append(...lines.map((line) => made("li", line)));
  by("said").append(made("h3", heading), list);
}
if (data.said.defaults.length) {
  const list = made("dl");
  for (const [name, meaning] of data.said.defaults) list.append(made("dt", name), made("dd", meaning));
  by("said").append(made("h3", "Arguments left at their defaults"), list);
}
