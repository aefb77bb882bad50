"use strict";
// -- what all parts use
const data = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const TIMES = [["s", 1], ["ms", 1e-3], ["us", 1e-6]];
const unitOf = (units, n) => units.find(([, scale]) => n >= scale) || units[units.length - 1];
const seconds = (s) => {
  const [unit, scale] = unitOf(TIMES, s);
  return (s / scale).toFixed(unit === "us" ? 1 : 2) + " " + unit;
};
const size = (n) => {
  const [unit, scale] = unitOf(UNITS, n);
  return (n / scale).toFixed(unit === "B" ? 0 : 2) + " " + unit;
};
const percent = (share) => (100 * share).toFixed(1) + "%";
// The seconds that the ops of a step are shares of: with stages, those of all coordinates.
const whole = data.step_s * ((data.pipeline && data.pipeline.rows) || [1]).length;
const made = (tag, text, kind) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
};
const swatch = (color, kind) => {
  const element = made("span", undefined, "swatch" + (kind ? " " + kind : ""));
  if (color) element.style.background = color;
  return element;
};
// A row of a chart's key: its colour, its name and its value, which is returned.
const entry = (place, mark, name, value, kind) => {
  const row = made("div", undefined, kind), cell = made("span", value);
  row.append(mark, made("span", name), cell);
  place.append(row);
  return cell;
};
// What draws on a canvas does it again where the colours of the page change: in the dark, and on paper.
const repaints = [];
for (const query of ["(prefers-color-scheme: dark)", "print"])
  matchMedia(query).addEventListener("change", () => repaints.forEach((repaint) => repaint()));

// -- what it is
by("title").textContent = data.title;
by("subtitle").textContent = data.subtitle;
by("verdict").textContent = data.verdict;
for (const { name, value, note, share } of data.tiles) {
  const tile = made("div", undefined, "tile");
  tile.append(made("span", name), made("b", value), made("span", note));
  if (share !== null) {
    const meter = made("div", undefined, "meter"), part = made("i");
    part.style.width = percent(Math.min(1, share));
    meter.append(part);
    tile.append(meter);
  }
  by("tiles").append(tile);
}
