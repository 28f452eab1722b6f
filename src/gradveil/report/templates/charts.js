"use strict";
// Two scatter plots: what was recovered against what the defence costs. One point an attack run, the strongest at first.
(() => {
  const points = REPORT.points;
  if (!document.getElementById("legend")) return;
  const { svg, colour, hidden, logTicks, linearTicks, bytes } = CHARTS;
  const names = [...new Map(points.map((p) => [p.series, p.name]))].sort((a, b) => a[0] - b[0]);
  let measure = "asr", which = "best";

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
    return { at: (v) => left + 8 + (Math.max(v, 0) / top) * (right - left - 8), ticks: linearTicks(0, top) };
  }

  function draw(box) {
    const axis = box.dataset.axis;
    const shown = points.filter((p) => (p.best || which === "all") && !hidden.has(p.series) && p[axis] != null && p[measure] != null);
    const { picture, left, right, y, at } = CHARTS.frame({
      label: `Attack runs against ${axis}`, width: Math.max(box.clientWidth, 240),
      y: CHARTS.shares(measure, measure === "asr" ? 0 : Math.min(0, ...points.map((p) => p.ssim ?? 0))),
      baseline: measure === "asr" ? Math.max(...points.map((p) => p.baseline ?? -1)) : null,
      x: (from, to) => ({
        ...scale(axis, from, to),
        name: (tick) => (axis === "bytes" ? bytes(tick) : String(Number(tick.toPrecision(3)))),
        title: axis === "bytes" ? "bytes of one update" : "relative distance of the update",
      }),
    });
    const placed = CHARTS.spread(shown, (p) => at(p[axis]), (p) => y(p[measure]), left + 7, right - 7);
    const groups = Map.groupBy ? Map.groupBy(placed, ([p]) => p.group + (which === "all" ? `|${p.seed}` : "")) : new Map();
    for (const members of groups.values()) {
      members.sort((a, b) => a[2] - b[2]);
      const path = members.map(([, px, py], i) => `${i ? "L" : "M"}${px} ${py}`).join("");
      if (members.length > 1) picture.append(svg("path", { class: "join", d: path, fill: "none", stroke: colour(members[0][0].series) }));
    }
    for (const [p, px] of placed) {
      if (measure === "asr") picture.append(svg("line", { class: "ci", x1: px, x2: px, y1: y(p.low), y2: y(p.high), stroke: colour(p.series) }));
    }
    for (const [p, px, py] of placed) picture.append(CHARTS.mark(p.name, p.lines, p.series, px, py, LOOKS[p.attacker] ?? {}));
    box.replaceChildren(picture);
  }

  const LOOKS = {
    naive: { fill: "var(--card)" }, aware: { "fill-opacity": 0.45 }, active: { "stroke-width": 4 }, informed: { "stroke-dasharray": "2 2", "fill-opacity": 0.3 },
  };
  CHARTS.legend(document.getElementById("legend"), names);
  const redraw = CHARTS.keep([...document.querySelectorAll(".plot[data-axis]")], draw);
  CHARTS.choice("[data-measure]", (data) => { measure = data.measure; }, redraw);
  CHARTS.choice("[data-which]", (data) => { which = data.which; }, redraw);
  document.getElementById("which").hidden = points.every((p) => p.best);
})();
