// Nodes that are changed in place, so that the focus, a selection and a screen reader stay where they
// are. Names of tables, models and peers are other people's: they become text, never markup.

export function made(name, attributes = {}, children = []) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== "") node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Set the text of a node if it differs.
export function texts(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Give `box` one child for each of the distinct keys, in their order: make(key) a new one, and
// update(child, key) each.
export function show(box, keys, make, update) {
  const wanted = new Set(keys);
  // First, so that no child that stays must move: a node that moves loses the focus.
  for (const child of [...box.children]) if (!wanted.has(child.dataset.key)) child.remove();
  const old = new Map([...box.children].map((child) => [child.dataset.key, child]));
  let at = box.firstElementChild;
  for (const key of keys) {
    let child = old.get(key);
    if (!child) {
      child = make(key);
      child.dataset.key = key;
    }
    if (child === at) at = at.nextElementSibling;
    else box.insertBefore(child, at);
    update(child, key);
  }
}

// Show rows in a table. columns: [title, class] of each; the first cell of a row is its heading.
// rows: a map from a key to the cells: a text, [text, class], or a node that is reused by its key.
export function showTable(table, columns, rows) {
  const head = table.tHead ?? table.createTHead();
  const body = table.tBodies[0] ?? table.createTBody();
  const titles = columns.map(([title]) => title);
  if (head.textContent !== titles.join("")) {
    const row = made("tr", {}, columns.map(([title, kind]) => made("th", { scope: "col", class: kind ?? "" }, [title])));
    head.replaceChildren(row);
  }
  const cells = (key) =>
    made("tr", {}, columns.map(([, kind], index) =>
      index ? made("td", { class: kind ?? "" }) : made("th", { scope: "row", class: kind ?? "" })));
  show(body, [...rows.keys()], cells, (row, key) => {
    rows.get(key).forEach((value, index) => {
      const cell = row.children[index];
      const [content, kind] = Array.isArray(value) ? value : [value, ""];
      cell.className = [columns[index][1], kind].filter(Boolean).join(" ");
      if (!(content instanceof Node)) texts(cell, content);
      else if (cell.firstChild !== content) cell.replaceChildren(content);
    });
  });
}
