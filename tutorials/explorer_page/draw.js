// ------------------------------------------------------------------ drawing a step
function element(name, attributes = {}, ...inside) {
  const svg = ["svg", "g", "rect", "path", "text"].includes(name);
  const it = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) it.setAttribute(key, value);
  it.append(...inside);
  return it;
}

const narrow = () => innerWidth < 1000;
// Heights of rows and plots: two steps have to be seen at once, on a phone above what changes them.
const measures = () => (narrow() ? { left: 62, strip: 15, row: 20, axis: 17, plot: 44 } : { left: 82, strip: 18, row: 28, axis: 22, plot: 84 });
const RIGHT = 12;

function draw(which, width, seconds, most) {
  const its = shown[which], run = runOf(its), { pieces, figures } = run, m = measures();
  const there = data.lanes_in_order.filter((l) => l === "host" || pieces.some((p) => p.lane === l));
  const axis = m.strip + there.length * m.row, floor = axis + m.axis + m.plot;
  const x = (at) => m.left + (at / seconds) * (width - m.left - RIGHT), y = (value) => floor - (value / most) * m.plot;
  const top = (lane) => m.strip + there.indexOf(lane) * m.row;
  const svg = element("svg", { viewBox: `0 0 ${width} ${floor + 6}`, height: floor + 6, role: "group", "aria-label": `Timeline: ${titleOf(which)}` });
  const put = (name, attributes, ...inside) => svg.appendChild(element(name, attributes, ...inside));

  const step = roundStep(seconds / Math.max((width - m.left) / 100, 2));
  for (let at = 0; at <= figures.step * 1.0001; at += step) {
    put("path", { class: "rule", d: `M${x(at)} ${m.strip}V${floor}` });
    if (x(at) < width - 30) put("text", { class: "middle", x: x(at), y: axis + 13 }, `${+(at * 1e3).toPrecision(6)} ms`);
  }
  for (const lane of there) {
    put("text", { class: "right", x: m.left - 6, y: top(lane) + m.row / 2 + 4 }, lane);
    put("path", { class: "rule", d: `M${m.left} ${top(lane) + m.row}H${x(figures.step)}` });
  }
  const begins = Object.entries(run.phases).map(([name, at]) => [name, x(at)]);
  begins.forEach(([name, from], i) => {
    put("path", { class: "phase", d: `M${from} 2V${axis}` });
    const room = (begins[i + 1]?.[1] ?? width) - from, before = i > 0 && begins[i - 1][1] < from - 150;
    if (room > 8 * name.length) put("text", { x: from + 4, y: 12 }, name);
    else if (before) put("text", { class: "right", x: from - 4, y: 12 }, name);
  });
  drawMemory(run, its, put, x, y, most, m);
  for (const piece of pieces) if (["all-gather", "all-reduce", "copy"].includes(piece.kind)) {
    const colour = colourOf(piece.unit, run.units), from = top("host") + m.row - 2;
    put("path", { stroke: colour, "stroke-width": 1, fill: "none", opacity: 0.7, d: `M${x(piece.launched)} ${from}L${x(piece.start)} ${top(piece.lane) + 3}` });
    put("path", { stroke: colour, "stroke-width": 2, d: `M${x(piece.launched)} ${from - m.row / 2 + 3}V${from}` });
  }
  for (const piece of [...pieces].sort((a, b) => (a.kind === "free") - (b.kind === "free"))) svg.append(drawPiece(piece, which, run, x, top(piece.lane), m));
  svg.querySelector("g[tabindex]")?.setAttribute("tabindex", 0);
  return svg;
}

function drawPiece(piece, which, run, x, top, m) {
  const from = x(piece.start), wide = Math.max(x(piece.end) - from, 1), host = piece.lane === "host";
  const group = element("g", { tabindex: -1, role: "button", "data-number": piece.number,
    "aria-label": `${words(piece)}, ${ms(piece.start)} to ${ms(piece.end)}` });
  const fill = WAITS[piece.kind]?.[0] ?? colourOf(piece.unit, run.units);
  if (piece.kind === "free") {
    group.append(element("path", { class: "shape", d: `M${from - 4} ${top + 1}h8l-4 6z`, fill }));
  } else {
    const [y, height] = host ? [top + m.row / 2 - 4, 8] : [top + 3, m.row - 6];
    group.append(element("rect", { class: "shape", x: from, y, width: wide, height, fill, rx: Math.min(2, wide / 2) }));
    const short = piece.unit === "<root>" ? "root" : piece.unit.replace(/^blocks\./, "");
    if (!host && short && wide > 6.5 * short.length + 4) {
      group.append(element("text", { class: "in", x: from + wide / 2, y: top + m.row / 2 + 4 }, short));
    }
  }
  group.addEventListener("pointerenter", (event) => tip(words(piece), piece, event));
  group.addEventListener("pointerleave", () => tip());
  group.addEventListener("focus", () => tip(words(piece), piece, group.getBoundingClientRect()));
  group.addEventListener("blur", () => tip());
  group.addEventListener("click", () => select(which, piece.number));
  group.addEventListener("keydown", (event) => walk(event, which, piece, group));
  return group;
}

function drawMemory(run, its, put, x, y, most, m) {
  const { figures } = run, unit = 2 ** Math.ceil(Math.log2(most / (narrow() ? 2 : 3))), end = figures.step;
  for (const [level, curve] of Object.entries(run.curves)) {
    let d = `M${x(0)} ${y(0)}`;
    curve.forEach((value, i) => {
      const height = y((value / 255) * figures["peak reserved"]).toFixed(1);
      d += `V${height}H${x((end * (i + 1)) / curve.length).toFixed(1)}`;
    });
    put("path", { class: level, d: `${d}V${y(0)}Z` });
  }
  for (let at = 0; at <= most; at += unit) {
    put("text", { class: "right", x: m.left - 6, y: y(at) + 4 }, at ? size(at, its).replace(/\.0+ /, " ") : "0");
    put("path", { class: "rule", d: `M${m.left - 4} ${y(at)}H${x(end)}` });
  }
  const has = data.machine.capacity;
  if (most > has) {
    put("path", { class: "capacity", d: `M${m.left} ${y(has)}H${x(end)}` });
    put("text", { class: "right alarm", x: x(end), y: y(has) - 3 }, "all that the GPU has");
  }
  put("text", { x: m.left + 6, y: y(figures["peak reserved"]) - 3, style: "fill: var(--ink)" }, `${size(figures["peak reserved"], its)} reserved`);
}

function tip(text, piece, at) {
  const box = byId("tip");
  box.style.display = text ? "block" : "none";
  if (!text) return;
  const lasts = piece.end > piece.start ? `: ${ms(piece.end - piece.start)}` : "";
  box.textContent = `${capital(text)}${lasts}`;
  const [left, top] = [at.clientX ?? at.x, at.clientY ?? at.y + at.height];
  box.style.left = `${clamp(left + 12, 0, innerWidth - box.offsetWidth - 4)}px`;
  box.style.top = `${Math.min(top + 14, innerHeight - box.offsetHeight - 4)}px`;
}
