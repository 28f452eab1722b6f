"use strict";
// What a defence leaks against what it costs, one chart a price, with the front that nobody beats.
(() => {
  const boxes = [...document.querySelectorAll(".plot[data-front]")];
  if (!boxes.length) return;
  const { svg, colour, hidden, logTicks, linearTicks, bytes } = CHARTS;
  const TITLES = { accuracy: "accuracy at the end", bytes: "bytes sent a round", seconds: "seconds of a client's update" };
  const LONGEST = 26;
  let view = 0;

  // The axis spans the defences of all views, so that changing the view moves points up and down alone.
  function across(key, values) {
    const low = Math.min(...values), high = Math.max(...values);
    if (key !== "accuracy" && low > 0 && high / low > (key === "bytes" ? 5 : 30)) {
      const [a, b] = [Math.log(low / 1.5), Math.log(high * 1.5)];
      return (left, right) => ({
        at: (v) => left + ((Math.log(v) - a) / (b - a)) * (right - left), ticks: logTicks(low / 1.5, high * 1.5),
        name: key === "bytes" ? bytes : (t) => String(Number(t.toPrecision(3))), title: `${TITLES[key]} (log scale)`,
      });
    }
    const margin = (high - low) * 0.12 || Math.abs(high) * 0.1 || 0.1;
    const from = Math.max(0, low - margin), to = key === "accuracy" ? Math.min(1.03, high + margin) : high + margin;
    const ticks = linearTicks(from, to);
    const share = (t) => `${Number((100 * t).toFixed(1))}%`;
    return (left, right) => ({
      at: (v) => left + ((v - from) / (to - from)) * (right - left), ticks: key === "accuracy" ? ticks.filter((t) => t <= 1) : ticks,
      name: key === "accuracy" ? share : key === "bytes" ? bytes : (t) => String(Number(t.toPrecision(3))), title: TITLES[key],
    });
  }

  // From the cheapest member on, the least leak that its money buys.
  function stairs(members, at, y, key, ends) {
    const dear = key === "accuracy" ? (s) => -s.prices[key][0] : (s) => s.prices[key][0];
    const sorted = [...members].sort((a, b) => dear(a) - dear(b) || b.rate - a.rate);
    const steps = sorted.map((s, i) => `${i ? `H${at(s.prices[key][0]).toFixed(1)}` : `M${at(s.prices[key][0]).toFixed(1)} ${ends.top.toFixed(1)}`}V${y(s.rate).toFixed(1)}`);
    return steps.length ? `${steps.join("")}H${(key === "accuracy" ? ends.left : ends.right).toFixed(1)}` : "";
  }

  function draw(box) {
    const { views } = REPORT.fronts[Number(box.dataset.front)], key = box.dataset.price;
    const every = views.flatMap(({ spots }) => spots.filter((s) => s.prices[key])), now = views[Math.min(view, views.length - 1)];
    box.nextElementSibling.textContent = now.said[key];
    const shown = now.spots.filter((s) => s.prices[key] && !hidden.has(s.series));
    if (!every.length) { box.replaceChildren(element("p", { className: "fine", textContent: "No price is known." })); return; }
    const { picture, left, right, top, bottom, y, at } = CHARTS.frame({
      label: `Identifiable images against ${TITLES[key]}`, width: Math.max(box.clientWidth, 240), y: CHARTS.shares("identifiable", 0),
      x: across(key, every.flatMap((s) => s.prices[key].slice(1))),
    });
    const bare = now.spots.find((s) => s.bare && s.prices[key]);
    if (bare) picture.append(svg("line", { class: "baseline", x1: at(bare.prices[key][0]), x2: at(bare.prices[key][0]), y1: top, y2: bottom }));
    picture.append(svg("path", { class: "front", d: stairs(now.spots.filter((s) => s.front[key]), at, y, key, { left, right, top }), fill: "none" }));
    const placed = CHARTS.spread(shown, (s) => at(s.prices[key][0]), (s) => y(s.rate), left + 7, right - 7, 4, 5);
    const nodes = placed.map(([s, px, py]) => {
      const look = s.bound ? { "stroke-dasharray": "2 2", "fill-opacity": 0.3 } : s.vague ? { fill: "var(--card)" } : {};
      const group = svg("g", s.front[key] ? {} : { class: "off" });
      const [, low, high] = s.prices[key];
      group.append(svg("line", { class: "ci", x1: px, x2: px, y1: y(s.bounds[0]), y2: y(s.bounds[1]), stroke: colour(s.series) }));
      if (high > low) group.append(svg("line", { class: "ci", x1: at(low), x2: at(high), y1: py, y2: py, stroke: colour(s.series) }));
      for (const [late, rate] of s.trail) {
        if (rate === s.rate) continue;
        const small = svg("path", { d: CHARTS.shape(s.series), stroke: colour(s.series), fill: colour(s.series), "fill-opacity": late, "stroke-width": 3, transform: `translate(${px.toFixed(1)} ${y(rate).toFixed(1)}) scale(.5)` });
        group.append(small);
      }
      group.append(CHARTS.mark(s.name, s.lines, s.series, px, py, look));
      picture.append(group);
      return [s, px, py];
    });
    box.replaceChildren(picture);
    label(picture, nodes.filter(([s]) => s.front[key] || s.bare), nodes, { left, right, top, bottom });
  }

  // Names beside their marks, where there is room; the sentence below has all of them.
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

  const names = new Map(REPORT.fronts.flatMap(({ views }) => views.flatMap(({ spots }) => spots.map((s) => [s.series, s.name]))));
  CHARTS.legend(document.getElementById("front-legend"), [...names].sort((a, b) => a[0] - b[0]));
  const redraw = CHARTS.keep(boxes, draw);
  CHARTS.choice("[data-view]", (data) => { view = Number(data.view); }, redraw);
})();
