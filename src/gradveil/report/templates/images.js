"use strict";
// Ground truth next to reconstruction, cut from the contact sheets onto small canvases.
(() => {
  const gallery = document.getElementById("gallery");
  if (!gallery) return;
  const STEP = 24;
  const { pairs, rows, sheets } = REPORT;
  const attackName = (row) => (row.attacker ? `${row.attack} (${row.attacker})` : row.attack);
  const number = (value, digits) => (value === null ? "–" : value.toFixed(digits));

  async function paint(canvas, sheet, tile) {
    const image = document.getElementById(`sheet-${sheet.number}`);
    await image.decode();
    const x = (tile % sheet.columns) * sheet.width, y = Math.floor(tile / sheet.columns) * sheet.height;
    canvas.getContext("2d").drawImage(image, x, y, sheet.width, sheet.height, 0, 0, sheet.width, sheet.height);
    canvas.dataset.painted = "yes";
  }

  // Only pictures that come near the window are painted.
  const near = new IntersectionObserver((entries) => entries.forEach(({ isIntersecting, target }) => {
    if (!isIntersecting) return;
    near.unobserve(target);
    paint(target, sheets[target.dataset.sheet], Number(target.dataset.tile));
  }), { rootMargin: "400px" });

  function picture(number, tile, label) {
    const sheet = sheets[number];
    const canvas = element("canvas", { width: sheet.width, height: sheet.height });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", label);
    canvas.title = label;
    canvas.dataset.sheet = number;
    canvas.dataset.tile = tile;
    canvas.style.setProperty("--ratio", sheet.width / sheet.height);
    if (Math.max(sheet.width, sheet.height) > 128) canvas.style.imageRendering = "auto";
    near.observe(canvas);
    return canvas;
  }

  function figure(pair) {
    const row = rows[pair.row];
    const tiles = element("div", { className: "tiles" }, picture(pair.truth, pair.tile, `ground truth, target client ${pair.target_client}`));
    if (pair.trained !== null) tiles.append(picture(pair.trained, pair.tile, `what the client trained on, target client ${pair.target_client}`));
    tiles.append(picture(pair.reconstruction, pair.tile, `reconstruction, target client ${pair.target_client}`));
    const verdict = element("span", { className: pair.recovered ? "yes" : "no", textContent: pair.recovered ? "✕ recovered" : "✓ not recovered" });
    const top = element("div", { className: "top" }, element("b", { textContent: `SSIM ${number(pair.ssim, 2)}` }), verdict);
    const rest = `${number(pair.psnr, 1)} dB · target client ${pair.target_client} · ${pair.status}`;
    const where = `${row.defence} · ${attackName(row)}`;
    return element("figure", { className: "pair" }, tiles, element("figcaption", {}, top, rest, element("br"), where));
  }

  const filters = {
    defence: document.getElementById("by-defence"), attack: document.getElementById("by-attack"),
    seed: document.getElementById("by-seed"), result: document.getElementById("by-result"),
  };
  const fill = (select, values) => {
    const unique = [...new Set(values)];
    select.append(...unique.map((value) => element("option", { value, textContent: value })));
    if (select === filters.seed) select.parentElement.hidden = unique.length < 2;
  };
  const used = rows.filter((row) => pairs.some((pair) => pair.row === row.number));
  fill(filters.defence, used.map((row) => row.defence));
  fill(filters.attack, used.map(attackName));
  fill(filters.seed, used.map((row) => String(row.seed)));
  document.querySelector(".filters").hidden = false;

  const more = document.getElementById("more"), shown = document.getElementById("shown");
  let limit = STEP;
  function show() {
    const wanted = pairs.filter((pair) => {
      const row = rows[pair.row];
      return (!filters.defence.value || row.defence === filters.defence.value)
        && (!filters.attack.value || attackName(row) === filters.attack.value)
        && (!filters.seed.value || String(row.seed) === filters.seed.value)
        && (!filters.result.value || pair.recovered === (filters.result.value === "yes"));
    });
    gallery.replaceChildren(...wanted.slice(0, limit).map(figure));
    more.hidden = wanted.length <= limit;
    shown.textContent = `${Math.min(limit, wanted.length)} of ${wanted.length} pairs`;
  }
  Object.values(filters).forEach((select) => select.addEventListener("change", () => { limit = STEP; show(); }));
  more.addEventListener("click", () => { limit += 4 * STEP; show(); });
  show();

  // The worst leaks of a verdict, truths above reconstructions.
  document.querySelectorAll(".strip").forEach((strip) => {
    const worst = pairs.filter((pair) => pair.row === Number(strip.dataset.row)).slice(0, 5);
    strip.append(element("div", {}, ...worst.flatMap((pair) => [
      picture(pair.truth, pair.tile, `ground truth, target client ${pair.target_client}`),
      picture(pair.reconstruction, pair.tile, `reconstruction, target client ${pair.target_client}, SSIM ${number(pair.ssim, 2)}`),
    ])));
    if (worst.length) strip.append(element("p", { textContent: "ground truth above, reconstruction below" }));
  });

  // The first target clients of the run, the same ones under every defence.
  document.getElementById("side-by-side").append(...REPORT.side_by_side.flatMap(({ title, rows: chosen }) => {
    const of = (row) => pairs.filter((pair) => pair.row === row).sort((a, b) => a.tile - b.tile).slice(0, 8);
    const line = (name, note, trials) => element("tr", {}, element("th", { scope: "row" }, name, element("small", { textContent: note })),
      ...trials.map((trial) => element("td", {}, trial)));
    const truths = of(chosen[0]).map((pair) => picture(pair.truth, pair.tile, `ground truth, target client ${pair.target_client}`));
    const reconstruction = (row, pair) => {
      const result = pair.recovered ? ", recovered" : "";
      const canvas = picture(pair.reconstruction, pair.tile, `${rows[row].defence}, target client ${pair.target_client}, SSIM ${number(pair.ssim, 2)}${result}`);
      canvas.classList.toggle("won", pair.recovered);
      return canvas;
    };
    const lines = chosen.map((row) => line(rows[row].defence, attackName(rows[row]), of(row).map((pair) => reconstruction(row, pair))));
    const where = REPORT.side_by_side.length > 1 ? `: ${title}` : "";
    const caption = `The first target clients of the run under every defence, each at its strongest attack${where}. A frame marks what counts as recovered.`;
    const table = element("table", { className: "matrix" }, element("tbody", {}, line("Ground truth", "private images", truths), ...lines));
    const scroll = element("div", { className: "scroll", tabIndex: 0 }, table);
    scroll.setAttribute("role", "group");
    scroll.setAttribute("aria-label", caption);
    return [element("p", { className: "lead", textContent: caption }), scroll];
  }));

  // Print the canvases far from the window too.
  addEventListener("beforeprint", () => document.querySelectorAll("canvas:not([data-painted])").forEach((canvas) => {
    near.unobserve(canvas);
    paint(canvas, sheets[canvas.dataset.sheet], Number(canvas.dataset.tile));
  }));
})();
