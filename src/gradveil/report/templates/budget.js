"use strict";
// Quality against budget: one curve per defence, of what its strongest attack reconstructs after fewer iterations.
(() => {
  const boxes = [...document.querySelectorAll(".plot[data-chart]")];
  if (!boxes.length) return;
  let measure = "score";

  function draw(box) {
    const { lines, baseline } = REPORT.curves[Number(box.dataset.chart)];
    const points = lines.flatMap((line) => line.points), counts = points.map((p) => p.iterations);
    const low = Math.min(...counts), high = Math.max(...counts);
    const { picture, y, at } = CHARTS.frame(box, {
      label: "Quality against iterations", baseline: baseline[measure],
      y: CHARTS.shares(measure, measure === "asr" ? 0 : Math.min(0, ...points.map((p) => p.score ?? 0))),
      x: CHARTS.axis(low, high, {
        log: true, gaps: [10, 10], ticks: [...new Set([...CHARTS.logTicks(low, high), high])],
        name: (tick) => tick.toLocaleString("en"), title: "iterations",
      }),
    });
    const shown = lines.filter((line) => !CHARTS.hidden.has(line.series));
    const known = (line) => line.points.filter((p) => p[measure] != null);
    for (const line of shown) picture.append(CHARTS.curve(line.series, CHARTS.path(known(line), (p) => at(p.iterations), (p) => y(p[measure]))));
    for (const line of shown) {
      for (const p of known(line)) {
        const final = p === line.points.at(-1);
        const node = CHARTS.mark(line.name, [line.attack, ...p.lines], line.series, at(p.iterations), y(p[measure]), final ? {} : { fill: "var(--card)" });
        node.classList.toggle("passing", !final);
        picture.append(node);
      }
    }
    box.replaceChildren(picture);
  }

  CHARTS.section(boxes, "budget-legend", REPORT.curves.flatMap((chart) => chart.lines), draw, { quality: (value) => { measure = value; } });
})();
