// What scripts of pages have in common.
const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
function size(bytes) {
  for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (bytes >= unit) return `${(bytes / unit).toFixed(2)} ${name}`;
  }
  return `${bytes} B`;
}

function roundStep(about) {
  const decade = 10 ** Math.floor(Math.log10(about));
  return decade * [1, 2, 5, 10].find((times) => decade * times >= about);
}

function fill(table, lines) {  // of cells: text, or a colour and text
  table.replaceChildren(...lines.map((cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) {
      const [colour, text] = Array.isArray(cell) ? cell : [null, cell], td = document.createElement("td");
      if (colour) {
        td.append(document.createElement("i"));
        td.firstChild.style.background = colour;
      }
      td.append(text); row.append(td);
    }
    return row;
  }));
}
