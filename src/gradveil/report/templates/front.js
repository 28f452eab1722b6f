"use strict";
// Leak against a cost of choice, with the Pareto front: one chart per setting.
(() => {
  const boxes = [...document.querySelectorAll(".plot[data-front]")];
  if (!boxes.length) return;
  const { svg, colour, hidden } = CHARTS;
  const LONGEST = 26;
  let view = 0, wanted = REPORT.fronts[0].axes[0].key;

  // The axis spans the defences of all views, so that a change of view moves points up and down only.
  function across(key, title, values) {
    const low = Math.min(...values), high = Math.max(...values);
    const name = { accuracy: (tick) => `${Number((100 * tick).toFixed(1))}%`, bytes: CHARTS.bytes }[key];
    if (key !== "accuracy" && low > 0 && high / low > (key === "bytes" ? 5 : 30)) {
      return CHARTS.axis(low / 1.5, high * 1.5, { log: true, name, title: `${title} (log scale)` });
    }
    const margin = (high - low) * 0.12 || Math.abs(high) * 0.1 || 0.1;
    const from = Math.max(0, low - margin), to = key === "accuracy" ? Math.min(1.03, high + margin) : high + margin;
    return CHARTS.axis(from, to, { ticks: CHARTS.linearTicks(from, to).filter((tick) => key !== "accuracy" || tick <= 1), name, title });
  }

  // The least leak at each cost, from the cheapest member on.
  function stairs(members, at, y, key, ends) {
    const cost = key === "accuracy" ? (s) => -s.costs[key][0] : (s) => s.costs[key][0];
    const sorted = [...members].sort((a, b) => cost(a) - cost(b) || b.rate - a.rate);
    const steps = sorted.map((s, i) => `${i ? `H${at(s.costs[key][0]).toFixed(1)}` : `M${at(s.costs[key][0]).toFixed(1)} ${ends.top.toFixed(1)}`}V${y(s.rate).toFixed(1)}`);
    return steps.length ? `${steps.join("")}H${(key === "accuracy" ? ends.left : ends.right).toFixed(1)}` : "";
  }

  function draw(box) {
    const { views, axes } = REPORT.fronts[Number(box.dataset.front)], { key, title } = axes.find((axis) => axis.key === wanted) ?? axes[0];
    const every = views.flatMap(({ spots }) => spots.filter((s) => s.costs[key])), now = views[Math.min(view, views.length - 1)];
    box.nextElementSibling.textContent = now.sentences[key];
    const shown = now.spots.filter((s) => s.costs[key] && !hidden.has(s.series));
    if (!every.length) { box.replaceChildren(element("p", { className: "fine", textContent: "No cost is known." })); return; }
    const { picture, left, right, top, bottom, y, at } = CHARTS.frame(box, {
      label: `Identifiable images against ${title.toLowerCase()}`, y: CHARTS.shares("identifiable", 0),
      x: across(key, title, every.flatMap((s) => s.costs[key].slice(1))),
    });
    const undefended = now.spots.find((s) => s.undefended && s.costs[key]);
    if (undefended) picture.append(svg("line", { class: "baseline", x1: at(undefended.costs[key][0]), x2: at(undefended.costs[key][0]), y1: top, y2: bottom }));
    picture.append(svg("path", { class: "front", d: stairs(now.spots.filter((s) => s.front[key]), at, y, key, { left, right, top }), fill: "none" }));
    const placed = CHARTS.spread(shown, (s) => at(s.costs[key][0]), (s) => y(s.rate), left + 7, right - 7, 4, 5);
    const nodes = placed.map(([s, px, py]) => {
      const look = !s.compared ? { "stroke-dasharray": "2 2", "fill-opacity": 0.3 } : s.may_leak_more ? { fill: "var(--card)" } : {};
      const group = svg("g", s.front[key] ? {} : { class: "off" });
      const [, low, high] = s.costs[key];
      group.append(CHARTS.curve(s.series, `M${px} ${y(s.bounds[0])}V${y(s.bounds[1])}`, "ci"));
      if (high > low) group.append(CHARTS.curve(s.series, `M${at(low)} ${py}H${at(high)}`, "ci"));
      for (const [late, rate] of s.trail) {
        if (rate === s.rate) continue;
        const place = `translate(${px.toFixed(1)} ${y(rate).toFixed(1)}) scale(.5)`, paint = colour(s.series);
        group.append(svg("path", { d: CHARTS.shape(s.series), stroke: paint, fill: paint, "fill-opacity": late, "stroke-width": 3, transform: place }));
      }
      group.append(CHARTS.mark(s.name, s.lines, s.series, px, py, look));
      picture.append(group);
      return [s, px, py];
    });
    box.replaceChildren(picture);
    label(picture, nodes.filter(([s]) => s.front[key] || s.undefended), nodes, { left, right, top, bottom });
  }

  // Names next to their marks, where there is room; the sentence below has all of them.
  function label(picture, wanted, nodes, room) {
    const taken = nodes.map(([, px, py]) => [px - 8, py - 8, px + 8, py + 8]);
    const meets = (a) => taken.some((b) => a[0] < b[2] && a[2] > b[0] && a[1] < b[3] && a[3] > b[1]);
    for (const [s, px, py] of wanted) {
      const text = svg("text", { class: "name" }, s.name.length > LONGEST ? `${s.name.slice(0, LONGEST - 1)}…` : s.name);
      picture.append(text);
      const wide = text.getComputedTextLength();
      const places = [[12, 4], [-12 - wide, 4], [-wide / 2, -14], [-wide / 2, 22], [10, -12], [10, 20], [-10 - wide, -12], [-10 - wide, 20]];
      const spot = places.map(([dx, dy]) => [px + dx, py + dy - 12, px + dx + wide, py + dy + 3])
        .find((a) => a[0] >= room.left + 2 && a[2] <= room.right && a[1] >= room.top - 12 && a[3] <= room.bottom && !meets(a));
      if (!spot) { text.remove(); continue; }
      taken.push(spot);
      text.setAttribute("x", spot[0]);
      text.setAttribute("y", spot[1] + 12);
    }
  }

  const entries = REPORT.fronts.flatMap(({ views }) => views.flatMap(({ spots }) => spots));
  CHARTS.section(boxes, "front-legend", entries, draw, {
    cost: (value) => { wanted = value; }, view: (value) => { view = Number(value); },
  });
})();
