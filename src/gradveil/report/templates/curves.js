"use strict";
// Curves over the rounds of a training: one line a defence, a band over its seeds, a mark where the best round is.
(() => {
  const boxes = [...document.querySelectorAll(".plot[data-curve]")];
  if (!boxes.length) return;
  const { svg, colour, hidden, logTicks, linearTicks, bytes } = CHARTS;
  const every = REPORT.lines, most = Math.max(...every.flatMap((line) => line.points.map((p) => p.round)));
  const MARKS = 10;
  let late = false;

  const known = (line, key, across) => line.points.filter((p) => p[key] != null && (across !== "sent" || p.sent > 0) && (!late || p.round > most / 2));
  const percent = (value, step) => `${Number((100 * value).toFixed(step < 0.01 ? 1 : 0))}%`;

  function upright(key, values) {
    const low = Math.min(...values), high = Math.max(...values), margin = (high - low) * 0.06 || 0.01;
    if (key === "loss" && low > 0 && high / low > 30) {
      const [a, b] = [Math.log(low / 1.2), Math.log(high * 1.2)];
      const at = (bottom, top) => (v) => bottom - ((Math.log(v) - a) / (b - a)) * (bottom - top);
      return (bottom, top) => ({ at: at(bottom, top), ticks: logTicks(low, high), name: (t) => String(Number(t.toPrecision(3))), title: "validation loss (log scale)" });
    }
    const share = key === "accuracy";
    const from = share && !late ? 0 : Math.max(0, low - margin), to = share ? Math.min(1, high + margin) : high + margin;
    const ticks = linearTicks(from, to);
    return (bottom, top) => ({
      at: (v) => bottom - ((v - from) / (to - from || 1)) * (bottom - top), ticks,
      name: (t) => (share ? percent(t, ticks[1] - ticks[0]) : String(t)), title: share ? "accuracy" : "validation loss",
    });
  }

  function across(by, values) {
    const low = Math.min(...values), high = Math.max(...values);
    if (by === "round") {
      const ticks = linearTicks(low, high, 8).filter(Number.isInteger);
      return (left, right) => ({ at: (v) => left + 8 + ((v - low) / (high - low || 1)) * (right - left - 20), ticks, name: String, title: "round" });
    }
    const [a, b] = [Math.log(low / 1.2), Math.log(high * 1.2)];
    return (left, right) => ({
      at: (v) => left + ((Math.log(v) - a) / (b - a)) * (right - left), ticks: logTicks(low / 1.2, high * 1.2), name: bytes,
      title: "bytes sent so far (log scale)",
    });
  }

  function draw(box) {
    const key = box.dataset.curve, by = box.dataset.across, path = (points, at, y, of) => points.map((p, i) => `${i ? "L" : "M"}${at(p[by]).toFixed(1)} ${y(p[of]).toFixed(1)}`).join("");
    const shown = every.filter((line) => !hidden.has(line.series)).map((line) => [line, known(line, key, by)]).filter(([, points]) => points.length);
    if (!shown.length) { box.replaceChildren(element("p", { className: "fine", textContent: "Nothing to draw." })); return; }
    const points = shown.flatMap(([, some]) => some);
    const { picture, y, at } = CHARTS.frame({
      label: `${key} over ${by === "round" ? "rounds" : "bytes sent"}`, width: Math.max(box.clientWidth, 240),
      x: across(by, points.map((p) => p[by])), y: upright(key, points.flatMap((p) => [p[`${key}_low`], p[`${key}_high`]])),
    });
    for (const [line, some] of shown) {
      const edge = path([...some].reverse(), at, y, `${key}_low`).replace("M", "L");
      if (some.some((p) => p.seeds > 1)) picture.append(svg("path", { class: "band", d: `${path(some, at, y, `${key}_high`)}${edge}z`, fill: colour(line.series) }));
    }
    for (const [line, some] of shown) picture.append(svg("path", { class: "curve", d: path(some, at, y, key), fill: "none", stroke: colour(line.series) }));
    for (const [line, some] of shown) {
      const step = Math.ceil(some.length / MARKS);
      some.forEach((p, i) => {
        if (!p.lines || (some.length - 1 - i) % step) return;
        const node = CHARTS.mark(line.name, p.lines, line.series, at(p[by]), y(p[key]), { fill: "var(--card)" });
        node.classList.add("step");
        picture.append(node);
      });
      for (const p of line.best) {
        if (p[key] == null || (late && p.round <= most / 2)) continue;
        const node = CHARTS.mark(line.name, p.lines, line.series, at(p[by]), y(p[key]), {});
        node.classList.add("best");
        picture.append(node);
      }
    }
    box.replaceChildren(picture);
  }

  CHARTS.legend(document.getElementById("curves-legend"), every.map((line) => [line.series, line.name]));
  const redraw = CHARTS.keep(boxes, draw);
  CHARTS.choice("[data-span]", (data) => { late = data.span === "late"; }, redraw);
})();
