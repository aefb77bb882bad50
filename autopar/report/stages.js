// -- the stages: a row for each coordinate with its actions over time, and the bytes that they save for backward below
const ACTIONS = {
  F: ["forward", "--forward"], B: ["backward", "--backward"],
  I: ["backward to what came in", "--backward"], W: ["backward of parameters", "--optimizer"],
};
const drawStages = ({ axis: along, place, rows, hops, left }) => {
  document.querySelectorAll("#stages, nav a[href='#stages']").forEach((one) => { one.hidden = false; });
  document.querySelectorAll("#step, nav a[href='#step']").forEach((one) => { one.hidden = true; });
  const canvas = by("gantt"), ctx = canvas.getContext("2d"), LEFT = 64, RIGHT = 76, ROW = 52, BAR = 24;
  const each = place.length / rows.length, nth = place.map((r, s) => place.slice(0, s).filter((other) => other === r).length);
  const end = Math.max(...rows.map(({ times }) => times[times.length - 1][1]));
  const most = Math.max(1, ...rows.flatMap(({ held }) => held));
  let from = 0, to = end, width = 0, drag = null;
  const x = (t) => LEFT + (t - from) / (to - from) * (width - LEFT - RIGHT);
  const t = (px) => from + (px - LEFT) / (width - LEFT - RIGHT) * (to - from);
  const inside = (px) => Math.min(Math.max(px, LEFT), width - RIGHT);
  const arriving = rows.flatMap(({ actions, times }, r) => actions.flatMap(([kind, stage], k) => {
    const hop = kind === "W" ? null : kind === "F" ? hops[stage] : stage && hops[stage - 1];
    if (!hop) return [];
    return [[r, times[k][1], place[kind === "F" ? hop[0] : stage - 1], times[k][1] + hop[1]]];
  }));
  const paint = () => {
    const dense = devicePixelRatio || 1, height = rows.length * ROW + 34;
    width = Math.max(520, canvas.parentElement.clientWidth);
    Object.assign(canvas, { width: width * dense, height: height * dense });
    Object.assign(canvas.style, { width: width + "px", height: height + "px", display: "block" });
    ctx.setTransform(dense, 0, 0, dense, 0, 0);
    ctx.clearRect(0, 0, width, height);
    ctx.font = FONT;
    const [unit, scale] = unitOf(TIMES, end), step = roundStep((to - from) / scale, width > 900 ? 10 : 5) * scale;
    ctx.textAlign = "center";
    for (let n = Math.ceil(from / step - 1e-9); n * step <= to; n++) {
      ctx.fillStyle = css("--line");
      ctx.fillRect(x(n * step), 0, 1, rows.length * ROW);
      ctx.fillStyle = css("--quiet");
      ctx.fillText(+(n * step / scale).toPrecision(4), x(n * step), rows.length * ROW + 13);
    }
    ctx.fillText("time in the step (" + unit + ")", (LEFT + width - RIGHT) / 2, rows.length * ROW + 29);
    rows.forEach(({ actions, times, held }, r) => {
      const top = r * ROW + 3;
      ctx.textAlign = "left";
      ctx.fillStyle = css("--ink");
      ctx.fillText(along + " " + r, 0, top + 16);
      ctx.fillStyle = css("--quiet");
      ctx.fillText(size(Math.max(...held)), width - RIGHT + 8, top + BAR + 16);
      ctx.textAlign = "center";
      actions.forEach(([kind, stage, turn], k) => {
        const [a, z] = times[k].map((time) => inside(x(time)));
        if (z <= a) return;
        ctx.globalAlpha = 1 - 0.45 * nth[stage] / each;
        ctx.fillStyle = css(ACTIONS[kind][1]);
        ctx.fillRect(a, top, Math.max(0.5, z - a - (z - a > 3 ? 1 : 0)), BAR);
        ctx.globalAlpha = 1;
        ctx.fillStyle = "#fff";
        if (z - a > 16) ctx.fillText(turn, (a + z) / 2, top + 16);
        const until = k + 1 < times.length ? inside(x(times[k + 1][0])) : z, high = 18 * held[k] / most;
        ctx.fillStyle = data.line.colors["saved activations"] || css("--quiet");
        ctx.fillRect(a, top + BAR + 20 - high, until - a + 0.5, high);
      });
    });
    const shown = arriving.filter(([, a, , z]) => z > from && a < to);
    ctx.strokeStyle = css("--blocking");
    for (const [r, a, other, z] of shown.length < 1500 ? shown : []) {  // More would only be a grey area.
      if (x(a) < LEFT || x(z) > width - RIGHT) continue;
      ctx.beginPath();
      ctx.moveTo(x(a), r * ROW + 3 + (other > r ? BAR : 0));
      ctx.lineTo(x(z), other * ROW + 3 + (other > r ? 0 : BAR));
      ctx.stroke();
    }
  };
  const hint = "Point at an action for its micro-batch; drag to look closer, click twice to see all." +
    (left ? " The last " + left + " actions of a coordinate are left out here." : "");
  const tell = (event) => {
    const row = rows[Math.floor(event.offsetY / ROW)], now = t(event.offsetX);
    const k = row ? row.times.findIndex(([a, z]) => a <= now && now < z) : -1;
    if (k < 0) by("acts").textContent = hint;
    else {
      const [kind, stage, turn] = row.actions[k], [a, z] = row.times[k];
      by("acts").textContent = seconds(a) + ": " + ACTIONS[kind][0] + " of stage " + stage + ", micro-batch " + turn + ", " +
        seconds(z - a) + "; " + size(row.held[k]) + " saved for backward";
    }
  };
  canvas.addEventListener("mousemove", tell);
  canvas.addEventListener("mousedown", (event) => { drag = event.offsetX; });
  canvas.addEventListener("mouseup", (event) => {
    if (drag !== null && Math.abs(event.offsetX - drag) > 4) {
      [from, to] = [t(drag), t(event.offsetX)].sort((a, b) => a - b).map((time) => Math.min(Math.max(time, 0), end));
      paint();
    }
    drag = null;
  });
  canvas.addEventListener("dblclick", () => { [from, to] = [0, end]; paint(); });
  addEventListener("resize", paint);
  repaints.push(paint);
  const kinds = new Set(rows.flatMap(({ actions }) => actions.map(([kind]) => kind)));
  const marks = [...kinds].map((kind) => [swatch("var(" + ACTIONS[kind][1] + ")"), ACTIONS[kind][0]]);
  if (each > 1) marks.push([swatch("none"), "lighter: the later stages of a coordinate"]);
  if (arriving.length) marks.push([swatch("var(--blocking)"), "transfers" + (arriving.length < 1500 ? "" : ", in a closer look")]);
  marks.push([swatch(data.line.colors["saved activations"]), "saved for backward, with the most of a device"]);
  for (const [mark, said] of marks) {
    const one = made("span");
    one.append(mark, made("span", said));
    by("actions").append(one);
  }
  by("acts").textContent = hint;
  paint();
};
if (data.pipeline && data.pipeline.rows) drawStages(data.pipeline);
