"use strict";
// One line a defence: what its strongest attacker would have answered after fewer iterations.
(() => {
  const boxes = [...document.querySelectorAll(".plot[data-chart]")];
  if (!boxes.length) return;
  const { svg, colour, hidden, logTicks } = CHARTS;
  const every = REPORT.curves.flatMap((chart) => chart.lines);
  let measure = "ssim";

  function draw(box) {
    const { lines, baseline } = REPORT.curves[Number(box.dataset.chart)];
    const counts = lines.flatMap((line) => line.points.map((p) => p.iterations));
    const low = Math.min(...counts), high = Math.max(...counts);
    const { picture, y, at } = CHARTS.frame({
      label: "Quality against iterations", width: Math.max(box.clientWidth, 240), baseline: baseline[measure],
      y: CHARTS.shares(measure, measure === "asr" ? 0 : Math.min(0, ...lines.flatMap((line) => line.points.map((p) => p.ssim ?? 0)))),
      x: (left, right) => ({
        at: (v) => left + 10 + (Math.log(v / low) / (Math.log(high / low) || 1)) * (right - left - 20),
        ticks: [...new Set([...logTicks(low, high), high])], name: (tick) => tick.toLocaleString("en"), title: "iterations",
      }),
    });
    const shown = lines.filter((line) => !hidden.has(line.series));
    const known = (line) => line.points.filter((p) => p[measure] != null);
    for (const line of shown) {
      const path = known(line).map((p, i) => `${i ? "L" : "M"}${at(p.iterations).toFixed(1)} ${y(p[measure]).toFixed(1)}`).join("");
      picture.append(svg("path", { class: "curve", d: path, fill: "none", stroke: colour(line.series) }));
    }
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

  const names = [...new Map(every.map((line) => [line.series, line.name]))].sort((a, b) => a[0] - b[0]);
  CHARTS.legend(document.getElementById("budget-legend"), names);
  const redraw = CHARTS.keep(boxes, draw);
  CHARTS.choice("[data-quality]", (data) => { measure = data.quality; }, redraw);
})();
