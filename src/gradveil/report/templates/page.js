"use strict";
// The script of every page: light and dark, and the sortable table.
const root = document.documentElement;
root.classList.add("js");
const REPORT = JSON.parse(document.getElementById("data").textContent);

function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  // Browsers refuse storage to some pages opened from disk: the choice then lasts as long as the page.
  const remember = (value) => { try { localStorage.setItem("gradveil-theme", value); } catch { return; } };
  const recall = () => { try { return localStorage.getItem("gradveil-theme"); } catch { return null; } };
  const saved = recall();
  if (saved === "dark" || saved === "light") root.dataset.theme = saved;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
    root.dataset.theme = dark ? "light" : "dark";
    remember(root.dataset.theme);
  });
})();

// Links into a closed entry open it, and paper shows everything but what is for the screen only.
(() => {
  const reveal = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  reveal();
  const closed = () => [...document.querySelectorAll("details:not([open], .screen)")];
  let opened = [];
  addEventListener("beforeprint", () => { opened = closed(); opened.forEach((node) => { node.open = true; }); });
  addEventListener("afterprint", () => { opened.forEach((node) => { node.open = false; }); opened = []; });
})();

(() => {
  const table = document.getElementById("trials");
  if (!table) return;
  const heads = [...table.tHead.rows[0].cells];
  const collator = new Intl.Collator(undefined, { numeric: true });
  heads.forEach((head, index) => head.querySelector("button").addEventListener("click", () => {
    const numeric = head.classList.contains("num");
    const now = head.getAttribute("aria-sort");
    // First click: largest number, or A.
    const down = now ? now === "ascending" : numeric;
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows].map((row) => [row.cells[index].dataset.sort, row]);
    rows.sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === ""); // missing values stay last
      const order = numeric ? Number(a) - Number(b) : collator.compare(a, b);
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }));
})();
