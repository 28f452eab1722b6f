// Filters and sorts the table of the papers' cells; without it, the table is whole.
"use strict";
const table = document.getElementById("paper-cells");
const rows = [...table.tBodies[0].rows];
const controls = document.createElement("p");
const field = document.createElement("input");
field.type = "search";
field.placeholder = "Filter: DP+CVB, ResNet-18, ...";
field.setAttribute("aria-label", "Filter the table");
const count = document.createElement("output");

function select(column, label) {
  const list = document.createElement("select");
  list.setAttribute("aria-label", label);
  const values = [...new Set(rows.map((row) => row.cells[column].dataset.key || row.cells[column].textContent))];
  for (const value of ["", ...values]) list.add(new Option(value || label, value));
  list.oninput = filter;
  return { column, list };
}

const lists = [select(0, "every paper"), select(7, "every status")];

function filter() {
  const words = field.value.toLowerCase().split(/\s+/);
  let shown = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    const key = (column) => row.cells[column].dataset.key || row.cells[column].textContent;
    row.hidden = !(words.every((word) => text.includes(word)) && lists.every((each) => !each.list.value || key(each.column) === each.list.value));
    shown += !row.hidden;
  }
  count.textContent = ` ${shown} of ${rows.length} numbers`;
}

[...table.tHead.rows[0].cells].forEach((head, column) => {
  const button = document.createElement("button");
  button.textContent = head.textContent;
  let up = 1;
  button.onclick = () => {
    const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
    rows.sort((a, b) => up * key(a).localeCompare(key(b), "en", { numeric: true }));
    up = -up;
    table.tBodies[0].append(...rows);
  };
  head.replaceChildren(button);
});
field.oninput = filter;
controls.append(field, ...lists.map((each) => each.list), count);
table.before(controls);
filter();
