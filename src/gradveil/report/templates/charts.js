"use strict";
// Two scatter plots with tooltips and a legend that hides series. One point an attack run, the strongest ones at first.
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const points = REPORT.points;
  if (!document.getElementById("legend")) return;
  const names = [...new Map(points.map((p) => [p.series, p.name]))].sort((a, b) => a[0] - b[0]);
  const hidden = new Set();
  let measure = "asr", which = "best";
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

  function bytes(value) {
    const [unit, size] = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, s]) => value >= s) ?? ["B", 1];
    return `${Number((value / size).toPrecision(3))} ${unit}`;
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

  function linearTicks(high) {
    const raw = high / 5, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= raw);
    return Array.from({ length: Math.floor(high / step + 1e-9) + 1 }, (_, i) => i * step);
  }

  function scale(axis, left, right) {
    const values = points.map((p) => p[axis]).filter((v) => v !== null && v !== undefined);
    const positive = values.filter((v) => v > 0);
    const high = Math.max(...positive, 0), low = Math.min(...positive);
    const zeros = values.some((v) => v <= 0);
    // A distance may span decades (and holds zeros): those stand apart at the left of a logarithmic axis.
    if (positive.length && (axis === "bytes" || high / low > 50)) {
      const a = Math.log10(low / 1.4), b = Math.log10(high * 1.4), start = zeros ? left + 34 : left;
      const at = (v) => (v <= 0 ? left + 8 : start + ((Math.log10(v) - a) / (b - a)) * (right - start));
      return { at, ticks: [...(zeros ? [0] : []), ...logTicks(10 ** a, 10 ** b)] };
    }
    const top = high * 1.08 || 1;
    return { at: (v) => left + 8 + (Math.max(v, 0) / top) * (right - left - 8), ticks: linearTicks(top) };
  }

  // Coinciding points are drawn side by side, none of them beyond the axis.
  function spread(shown, x, y, left, right) {
    const placed = [];
    return shown.map((p) => {
      let [px, py, turn] = [x(p), y(p), 0];
      const start = px;
      const free = (cx) => cx >= left && cx <= right && placed.every(([qx, qy]) => Math.hypot(cx - qx, py - qy) > 9);
      while (!free(px) && turn < 60) { turn++; px = start + (turn % 2 ? 1 : -1) * Math.ceil(turn / 2) * 10; }
      if (turn === 60) px = start;
      placed.push([px, py]);
      return [p, px, py];
    });
  }

  function draw(box) {
    const axis = box.dataset.axis, width = Math.max(box.clientWidth, 240), height = 320;
    const [left, right, top, bottom] = [62, width - 10, 14, height - 48];
    const shown = points.filter((p) => (p.best || which === "all") && !hidden.has(p.series) && p[axis] != null && p[measure] != null);
    const lowest = measure === "asr" ? 0 : Math.min(0, ...points.map((p) => p.ssim ?? 0));
    const x = scale(axis, left, right);
    const y = (v) => bottom - ((v - lowest) / (1 - lowest)) * (bottom - top);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Attack runs against ${axis}` });
    for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
      picture.append(svg("line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) }));
      const label = measure === "asr" ? `${tick * 100}%` : String(tick);
      picture.append(svg("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, label));
    }
    let last = -Infinity;
    for (const tick of x.ticks) {
      const at = x.at(tick);
      if (at - last < 44 || at > right) continue;
      last = at;
      picture.append(svg("line", { class: "grid", x1: at, x2: at, y1: top, y2: bottom }));
      const label = axis === "bytes" ? bytes(tick) : String(Number(tick.toPrecision(3)));
      picture.append(svg("text", { x: at, y: bottom + 22, "text-anchor": "middle" }, label));
    }
    const title = axis === "bytes" ? "bytes of one update" : "relative distance of the update";
    picture.append(svg("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, title));
    const upright = { transform: `translate(14 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" };
    picture.append(svg("text", upright, measure === "asr" ? "images recovered" : "mean SSIM"));
    const floor = Math.max(...points.map((p) => p.floor ?? -1));
    if (measure === "asr" && floor >= 0) {
      picture.append(svg("line", { class: "floor", x1: left, x2: right, y1: y(floor), y2: y(floor) }));
      picture.append(svg("text", { x: left + 4, y: y(floor) - 5 }, "guessing"));
    }
    const placed = spread(shown, (p) => x.at(p[axis]), (p) => y(p[measure]), left + 7, right - 7);
    const groups = Map.groupBy ? Map.groupBy(placed, ([p]) => p.group + (which === "all" ? `|${p.seed}` : "")) : new Map();
    for (const members of groups.values()) {
      members.sort((a, b) => a[2] - b[2]);
      const path = members.map(([, px, py], i) => `${i ? "L" : "M"}${px} ${py}`).join("");
      if (members.length > 1) picture.append(svg("path", { class: "join", d: path, fill: "none", stroke: colour(members[0][0].series) }));
    }
    for (const [p, px] of placed) {
      if (measure === "asr") picture.append(svg("line", { class: "ci", x1: px, x2: px, y1: y(p.low), y2: y(p.high), stroke: colour(p.series) }));
    }
    for (const [p, px, py] of placed) picture.append(mark(p, px, py));
    box.replaceChildren(picture);
  }

  function mark(p, px, py) {
    const hollow = p.attacker === "naive";
    const path = svg("path", {
      d: shape(p.series), fill: hollow ? "var(--card)" : colour(p.series), stroke: colour(p.series), "stroke-width": 2,
      ...(p.attacker === "aware" ? { "fill-opacity": 0.45 } : {}),
      ...(p.attacker === "informed" ? { "stroke-dasharray": "2 2", "fill-opacity": 0.3 } : {}),
    });
    const node = svg("g", {
      class: "point", transform: `translate(${px.toFixed(1)} ${py.toFixed(1)})`, tabindex: 0, role: "img",
      "aria-label": [p.name, ...p.lines].join(", "),
    }, path);
    node.addEventListener("pointerenter", () => tell(node, p));
    node.addEventListener("focus", () => tell(node, p));
    for (const event of ["pointerleave", "blur"]) node.addEventListener(event, hush);
    return node;
  }

  const tip = document.getElementById("tip");
  function tell(node, p) {
    tip.replaceChildren(element("b", { textContent: p.name }), ...p.lines.flatMap((line) => [line, element("br")]));
    tip.hidden = false;
    const at = node.getBoundingClientRect(), size = tip.getBoundingClientRect();
    const x = Math.min(Math.max(8, at.left + at.width / 2 - size.width / 2), root.clientWidth - size.width - 8);
    const y = at.top - size.height - 10;
    tip.style.left = `${x}px`;
    tip.style.top = `${y < 8 ? at.bottom + 10 : y}px`;
  }
  function hush() { tip.hidden = true; }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hush(); });
  addEventListener("scroll", hush, { passive: true });

  const boxes = [...document.querySelectorAll(".plot")];
  const redraw = () => boxes.forEach(draw);
  document.getElementById("legend").append(...names.map(([series, name]) => {
    const key = svg("svg", { viewBox: "-8 -8 16 16", width: 14, height: 14, "aria-hidden": "true" },
      svg("path", { d: shape(series), fill: colour(series) }));
    const button = element("button", { type: "button" }, key, name);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      if (!hidden.delete(series)) hidden.add(series);
      button.setAttribute("aria-pressed", String(!hidden.has(series)));
      redraw();
    });
    return button;
  }));
  function choice(selector, chosen) {
    const buttons = [...document.querySelectorAll(selector)];
    buttons.forEach((button) => button.addEventListener("click", () => {
      chosen(button.dataset);
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      redraw();
    }));
  }
  choice("[data-measure]", (data) => { measure = data.measure; });
  choice("[data-which]", (data) => { which = data.which; });
  document.getElementById("which").hidden = points.every((p) => p.best);
  redraw();
  // Redraw for a new width only: drawing changes the height.
  const widths = new Map();
  new ResizeObserver((entries) => entries.forEach(({ target, contentRect }) => {
    if (widths.get(target) !== contentRect.width) { widths.set(target, contentRect.width); draw(target); }
  })).observe(boxes[0]);
  addEventListener("resize", redraw);
})();
