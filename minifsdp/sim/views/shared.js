// What scripts of pages have in common: words, colours, sizes and tables.
const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// What runs in each lane. They have the names of the engine's streams, as on all pictures.
const LANES = {
  host: "the host launches work, frees memory and waits", upload: "shards, from the host to the GPU",
  unshard: "all-gathers of parameters", compute: "the layers", reduce: "reduce-scatters of gradients",
  replicate: "all-reduces of gradients", download: "gradients, from the GPU to the host",
};
const WAITS = { limiter: ["#bc4c00", "host waits for the limiter"], "host waits": ["#d4a72c", "host waits for the GPU"] };
const UNITS = ["#1f6feb", "#bf3989", "#0a7f8f", "#8250df", "#7a6a10"];  // those of svg.py
const ROOT = "#57606a", NOBODY = "#6e7781", OPTIMIZER = "#424a53";
// Of memory, by kind: what stays between steps is blue, whole units are violet, what a batch needs is green.
const KIND_COLOURS = {
  parameters: "#0a3069", gradients: "#218bff", optimizer: "#80ccff", "gathered parameters": "#6639ba",
  "unsharded gradients": "#c297ff", "kept from earlier steps": "#6e7781", activations: "#2da44e", temporary: "#7ee2a8",
};
const BEYOND = "#8c959f66";  // reserved, and not allocated

function colourOf(unit, units) {  // units: all of the step's
  if (unit === "<root>") return ROOT;
  if (unit === "optimizer") return OPTIMIZER;
  const at = units.filter((it) => !["", "<root>", "loss", "optimizer"].includes(it)).indexOf(unit);
  return at < 0 ? NOBODY : UNITS[at % UNITS.length];
}

// Bytes in words, all of a page in one unit: that of the largest.
const GiB = 2 ** 30, MiB = 2 ** 20;
function sizesUpTo(most) {
  const [unit, name] = most >= GiB ? [GiB, "GiB"] : [MiB, "MiB"];
  return (bytes) => (bytes && Math.abs(bytes) < unit / 200 ? `< 0.01 ${name}` : `${(bytes / unit).toFixed(2)} ${name}`);
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
      if (colour) td.append(sign(colour));
      td.append(text); row.append(td);
    }
    return row;
  }));
}

function sign(colour) {
  const it = document.createElement("i");
  it.style.background = colour;
  return it;
}

function legend(where, lines) {  // a colour, "" for none, and what it means
  where.replaceChildren(...lines.map(([colour, text]) => {
    const it = document.createElement("span");
    if (colour) it.append(sign(colour));
    it.append(text);
    return it;
  }));
}
