"use strict";
// Curves over the rounds of a training: one line per defence, a band over its seeds, a mark at the best round.
(() => {
  const boxes = [...document.querySelectorAll(".plot[data-curve]")];
  if (!boxes.length) return;
  const every = REPORT.lines, most = Math.max(...every.flatMap((line) => line.points.map((p) => p.round)));
  const MARKS = 10;
  let late = false;

  const known = (line, key, by) => line.points.filter((p) => p[key] != null && (by !== "sent" || p.sent > 0) && (!late || p.round > most / 2));
  const percent = (value, step) => `${Number((100 * value).toFixed(step < 0.01 ? 1 : 0))}%`;

  function upright(key, values) {
    const low = Math.min(...values), high = Math.max(...values), margin = (high - low) * 0.06 || 0.01;
    if (key === "accuracy") {
      const from = late ? Math.max(0, low - margin) : 0, to = Math.min(1, high + margin), ticks = CHARTS.linearTicks(from, to);
      return CHARTS.axis(from, to, { ticks, name: (tick) => percent(tick, ticks[1] - ticks[0]), title: "accuracy" });
    }
    if (low > 0 && high / low > 30) return CHARTS.axis(low / 1.2, high * 1.2, { log: true, title: "validation loss (log scale)" });
    return CHARTS.axis(Math.max(0, low - margin), high + margin, { title: "validation loss" });
  }

  function across(by, values) {
    const low = Math.min(...values), high = Math.max(...values);
    if (by === "sent") return CHARTS.axis(low / 1.2, high * 1.2, { log: true, name: CHARTS.bytes, title: "bytes sent so far (log scale)" });
    return CHARTS.axis(low, high, { ticks: CHARTS.linearTicks(low, high, 8).filter(Number.isInteger), title: "round", gaps: [8, 12] });
  }

  function draw(box) {
    const { curve: key, across: by } = box.dataset;
    const shown = every.filter((line) => !CHARTS.hidden.has(line.series)).map((line) => [line, known(line, key, by)]).filter(([, points]) => points.length);
    if (!shown.length) { box.replaceChildren(element("p", { className: "fine", textContent: "Nothing to draw." })); return; }
    const all = shown.flatMap(([, points]) => points);
    const { picture, y, at } = CHARTS.frame(box, {
      label: `${key} over ${by === "round" ? "rounds" : "bytes sent"}`,
      x: across(by, all.map((p) => p[by])), y: upright(key, all.flatMap((p) => [p[`${key}_low`], p[`${key}_high`]])),
    });
    const through = (points, value) => CHARTS.path(points, (p) => at(p[by]), (p) => y(p[value]));
    for (const [line, points] of shown) {
      if (!points.some((p) => p.seeds > 1)) continue;
      const edge = through([...points].reverse(), `${key}_low`).replace("M", "L");
      picture.append(CHARTS.svg("path", { class: "band", d: `${through(points, `${key}_high`)}${edge}z`, fill: CHARTS.colour(line.series) }));
    }
    for (const [line, points] of shown) picture.append(CHARTS.curve(line.series, through(points, key)));
    const mark = (line, p, kind, look) => {
      const node = CHARTS.mark(line.name, p.lines, line.series, at(p[by]), y(p[key]), look);
      node.classList.add(kind);
      picture.append(node);
    };
    for (const [line, points] of shown) {
      const step = Math.ceil(points.length / MARKS);
      points.filter((p, i) => p.lines && (points.length - 1 - i) % step === 0).forEach((p) => mark(line, p, "step", { fill: "var(--card)" }));
      line.best.filter((p) => p[key] != null && !(late && p.round <= most / 2)).forEach((p) => mark(line, p, "best", {}));
    }
    box.replaceChildren(picture);
  }

  CHARTS.section(boxes, "curves-legend", every, draw, { span: (value) => { late = value === "late"; } });
})();
