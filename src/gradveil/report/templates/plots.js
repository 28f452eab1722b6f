"use strict";
// Shared by all plots: axes, curves, marks, tooltips, and legends that hide a defence in every plot.
const CHARTS = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const hidden = new Set(), redraws = [];
  const SHAPES = [
    "M-5.5 0a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0-11 0z", "M-5-5h10v10h-10z", "M0-6.5 6 5H-6z", "M0-7 6 0 0 7-6 0z",
  ];
  const colour = (series) => `var(--s${series % 8})`;
  const shape = (series) => SHAPES[(series + Math.floor(series / 8)) % 4];

  function svg(name, attributes, ...children) {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  // Ticks of a logarithmic axis: 1, 2, 5 and their tens, thinned to at most six.
  function logTicks(low, high) {
    for (const steps of [[1, 2, 5], [1, 3], [1]]) {
      const ticks = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
        for (const step of steps) ticks.push(step * 10 ** power);
      }
      const inside = ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
      if (inside.length <= 6) return inside;
    }
    const powers = [];
    for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high); power++) powers.push(10 ** power);
    return powers.filter((_, i) => i % Math.ceil(powers.length / 6) === 0);
  }

  function linearTicks(low, high, count = 5) {
    const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= raw * 0.999);
    const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
  }

  function bytes(value) {
    const [unit, size] = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, s]) => value >= s * 0.9995) ?? ["B", 1];
    return `${Number((value / size).toPrecision(3))} ${unit}`;
  }

  const short = (value) => String(Number(value.toPrecision(3)));

  // A linear or logarithmic axis from `low` to `high`. `frame` calls it with its two ends in pixels; `gaps` keep points off them.
  function axis(low, high, { log = false, ticks = (log ? logTicks : linearTicks)(low, high), name = short, title, gaps = [0, 0] }) {
    const scale = log ? Math.log : Number, first = scale(low), span = scale(high) - first || 1;
    return (start, end) => ({
      at: (value) => start + gaps[0] + ((scale(value) - first) / span) * (end - gaps[1] - start - gaps[0]), ticks, name, title,
    });
  }

  // The vertical axis of a share of images, or of a mean SSIM.
  const shares = (measure, lowest) => axis(lowest, 1, {
    ticks: [0, 0.25, 0.5, 0.75, 1],
    name: (tick) => (measure !== "score" ? `${tick * 100}%` : String(tick)),
    title: { asr: "recovered", identifiable: "identifiable", score: "mean score" }[measure],
  });

  // The path through these points.
  const path = (points, x, y) => points.map((p, i) => `${i ? "L" : "M"}${x(p).toFixed(1)} ${y(p).toFixed(1)}`).join("");
  const curve = (series, d, kind = "curve") => svg("path", { class: kind, d, fill: "none", stroke: colour(series) });

  // The grid with its labels. An axis gets its two ends in pixels and returns {at, ticks, name(tick), title}.
  function frame(box, { label, x, y, baseline = null }) {
    const width = Math.max(box.clientWidth, 240), height = 320, [left, right, top, bottom] = [62, width - 10, 14, height - 48];
    const across = x(left, right), up = y(bottom, top), { at } = across;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });
    for (const tick of up.ticks) {
      const place = up.at(tick);
      picture.append(svg("line", { class: "grid", x1: left, x2: right, y1: place, y2: place }));
      picture.append(svg("text", { x: left - 8, y: place + 4, "text-anchor": "end" }, up.name(tick)));
    }
    let last = -Infinity;
    for (const tick of across.ticks) {
      const place = at(tick);
      if (place - last < 44 || place > right) continue;
      last = place;
      picture.append(svg("line", { class: "grid", x1: place, x2: place, y1: top, y2: bottom }));
      picture.append(svg("text", { x: place, y: bottom + 22, "text-anchor": "middle" }, across.name(tick)));
    }
    picture.append(svg("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, across.title));
    const upright = { transform: `translate(14 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" };
    picture.append(svg("text", upright, up.title));
    if (baseline !== null && baseline >= 0) {
      picture.append(svg("line", { class: "baseline", x1: left, x2: right, y1: up.at(baseline), y2: up.at(baseline) }));
      picture.append(svg("text", { x: left + 4, y: up.at(baseline) - 5 }, "baseline"));
    }
    return { picture, left, right, top, bottom, y: up.at, at };
  }

  // Coinciding points are drawn side by side, none of them beyond the axis.
  function spread(shown, x, y, left, right, near = 9, step = 10) {
    const placed = [];
    return shown.map((p) => {
      let [px, py, turn] = [x(p), y(p), 0];
      const start = px;
      const free = (cx) => cx >= left && cx <= right && placed.every(([qx, qy]) => Math.hypot(cx - qx, py - qy) > near);
      while (!free(px) && turn < 60) { turn++; px = start + (turn % 2 ? 1 : -1) * Math.ceil(turn / 2) * step; }
      if (turn === 60) px = start;
      placed.push([px, py]);
      return [p, px, py];
    });
  }

  // A point with its tooltip, drawn with these attributes.
  function mark(name, lines, series, px, py, look) {
    const symbol = svg("path", { d: shape(series), fill: colour(series), stroke: colour(series), "stroke-width": 2, ...look });
    const node = svg("g", {
      class: "point", transform: `translate(${px.toFixed(1)} ${py.toFixed(1)})`, tabindex: 0, role: "img",
      "aria-label": [name, ...lines].join(", "),
    }, symbol);
    for (const event of ["pointerenter", "focus"]) node.addEventListener(event, () => showTip(node, name, lines));
    for (const event of ["pointerleave", "blur"]) node.addEventListener(event, hideTip);
    return node;
  }

  const tip = document.getElementById("tip");
  function showTip(node, name, lines) {
    tip.replaceChildren(element("b", { textContent: name }), ...lines.flatMap((line) => [line, element("br")]));
    tip.hidden = false;
    const at = node.getBoundingClientRect(), size = tip.getBoundingClientRect();
    const x = Math.min(Math.max(8, at.left + at.width / 2 - size.width / 2), root.clientWidth - size.width - 8);
    const y = at.top - size.height - 10;
    tip.style.left = `${x}px`;
    tip.style.top = `${y < 8 ? at.bottom + 10 : y}px`;
  }
  function hideTip() { tip.hidden = true; }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
  addEventListener("scroll", hideTip, { passive: true });

  // Buttons with `data-<key>` that switch the plots of one section; one of them is pressed.
  function choice(key, choose, redraw) {
    const buttons = [...document.querySelectorAll(`[data-${key}]`)];
    buttons.forEach((button) => button.addEventListener("click", () => {
      choose(button.dataset[key]);
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      redraw();
    }));
  }

  // One button per defence; the buttons of every legend agree.
  function legend(box, entries) {
    const names = new Map(entries.map(({ series, name }) => [series, name]));
    box.append(...[...names].sort((a, b) => a[0] - b[0]).map(([series, name]) => {
      const key = svg("svg", { viewBox: "-8 -8 16 16", width: 14, height: 14, "aria-hidden": "true" },
        svg("path", { d: shape(series), fill: colour(series) }));
      const button = element("button", { type: "button" }, key, name);
      button.setAttribute("aria-pressed", "true");
      button.dataset.series = series;
      button.addEventListener("click", () => {
        if (!hidden.delete(series)) hidden.add(series);
        document.querySelectorAll(`.legend [data-series="${series}"]`)
          .forEach((other) => other.setAttribute("aria-pressed", String(!hidden.has(series))));
        redraws.forEach((redraw) => redraw());
      });
      return button;
    }));
  }

  // Draw the plots of a section now, after a choice, and for a new width only: drawing changes the height.
  // `choices` maps the key of each group of buttons to the function that gets the chosen value.
  function section(boxes, legendId, entries, draw, choices) {
    legend(document.getElementById(legendId), entries);
    const redraw = () => boxes.forEach(draw), widths = new Map();
    redraws.push(redraw);
    redraw();
    new ResizeObserver((entries) => entries.forEach(({ target, contentRect }) => {
      if (widths.get(target) !== contentRect.width) { widths.set(target, contentRect.width); redraw(); }
    })).observe(boxes[0]);
    addEventListener("resize", redraw);
    Object.entries(choices).forEach(([key, choose]) => choice(key, choose, redraw));
  }

  return { svg, colour, shape, hidden, logTicks, linearTicks, bytes, short, axis, shares, path, curve, frame, spread, mark, section };
})();
