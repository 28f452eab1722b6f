"use strict";
// Two scatter plots: images recovered against the cost of the update. One point per attack run, the strongest at first.
(() => {
  const boxes = [...document.querySelectorAll(".plot[data-axis]")];
  if (!boxes.length) return;
  const points = REPORT.points;
  const LOOKS = {
    naive: { fill: "var(--card)" }, aware: { "fill-opacity": 0.45 }, active: { "stroke-width": 4 }, informed: { "stroke-dasharray": "2 2", "fill-opacity": 0.3 },
  };
  let measure = "asr", which = "best";

  function across(key) {
    const values = points.map((p) => p[key]).filter((v) => v !== null && v !== undefined), positive = values.filter((v) => v > 0);
    const high = Math.max(...positive, 0), low = Math.min(...positive), zeros = values.some((v) => v <= 0);
    const words = key === "bytes" ? { name: CHARTS.bytes, title: "bytes of one update" } : { title: "relative distance of the update" };
    // Distances may span decades and hold zeros, which stand apart at the left of a logarithmic axis.
    if (!positive.length || (key !== "bytes" && high / low <= 50)) return CHARTS.axis(0, high * 1.08 || 1, { ...words, gaps: [8, 0] });
    const ticks = [...(zeros ? [0] : []), ...CHARTS.logTicks(low / 1.4, high * 1.4)];
    const scale = CHARTS.axis(low / 1.4, high * 1.4, { ...words, log: true, ticks, gaps: [zeros ? 34 : 0, 0] });
    return (left, right) => {
      const whole = scale(left, right);
      return { ...whole, at: (v) => (v <= 0 ? left + 8 : whole.at(v)) };
    };
  }

  function draw(box) {
    const key = box.dataset.axis;
    const shown = points.filter((p) => (p.best || which === "all") && !CHARTS.hidden.has(p.series) && p[key] != null && p[measure] != null);
    const { picture, left, right, y, at } = CHARTS.frame(box, {
      label: `Attack runs against ${key}`, x: across(key),
      y: CHARTS.shares(measure, measure === "asr" ? 0 : Math.min(0, ...points.map((p) => p.ssim ?? 0))),
      baseline: measure === "asr" ? Math.max(...points.map((p) => p.baseline ?? -1)) : null,
    });
    const placed = CHARTS.spread(shown, (p) => at(p[key]), (p) => y(p[measure]), left + 7, right - 7);
    const groups = Map.groupBy ? Map.groupBy(placed, ([p]) => p.group + (which === "all" ? `|${p.seed}` : "")) : new Map();
    for (const members of groups.values()) {
      members.sort((a, b) => a[2] - b[2]);
      if (members.length > 1) picture.append(CHARTS.curve(members[0][0].series, CHARTS.path(members, ([, px]) => px, ([, , py]) => py), "join"));
    }
    for (const [p, px] of placed) {
      if (measure === "asr") picture.append(CHARTS.curve(p.series, `M${px} ${y(p.low)}V${y(p.high)}`, "ci"));
    }
    for (const [p, px, py] of placed) picture.append(CHARTS.mark(p.name, p.lines, p.series, px, py, LOOKS[p.attacker] ?? {}));
    box.replaceChildren(picture);
  }

  CHARTS.section(boxes, "legend", points, draw, { measure: (value) => { measure = value; }, which: (value) => { which = value; } });
  document.querySelector("[data-which]").parentElement.hidden = points.every((p) => p.best);
})();
