// ------------------------------------------------------------------ controls
let shown = [complete({})], previous = null, selected = null;
const rank = (value) => ({ none: Infinity, true: 2.5 })[value] ?? Number(value);  // true: a limit of 2, and one being freed
const ordered = (values) => [...values].sort((a, b) => rank(a) - rank(b));
const valuesOf = (model) => ({ model: Object.keys(models), ...models[model].settings });

function makeControls() {  // anew for each model, which has its own values
  const model = shown[0].model, all = valuesOf(model);
  byId("controls").replaceChildren(...Object.keys(CONTROLS).map((name) => {
    const { legend: title, type, meaning, page } = CONTROLS[name], values = all[name];
    const note = element("small", { id: `note-${name}` }), box = element("fieldset", { id: `set-${name}` }, element("legend", {}, title));
    const given = { name, "aria-describedby": note.id };
    if (type === "range") {
      const input = element("input", { ...given, type, min: 0, max: values.length - 1, step: 1, "aria-label": title });
      input.addEventListener("input", () => set(name, ordered(values)[input.value]));
      box.append(input, element("output", { id: `out-${name}` }));
    } else {
      for (const value of values) {
        const input = element("input", { ...given, type, value });
        input.addEventListener("input", () => set(name, value));
        box.append(element("label", {}, input, ` ${CONTROLS[name].say(value, model)}`));
      }
    }
    const link = element("a", { href: `${page}.md` }, `page ${page.slice(0, 2)}`);
    box.append(note, element("details", { class: "what" }, element("summary", { "aria-label": `What is ${title}?` }, "?"), element("p", {}, `${meaning} More on `, link, ".")));
    return box;
  }));
}

function showControls() {
  for (const [name, values] of Object.entries(valuesOf(shown[0].model))) {
    const { type } = CONTROLS[name], value = shown[0][name], can = name === "model" || varied(name, shown[0]);
    for (const input of document.getElementsByName(name)) {
      input.disabled = values.length === 1 || !can;
      if (type === "range") {
        input.value = ordered(values).indexOf(value);
        input.setAttribute("aria-valuetext", say(name, shown[0]));
        byId(`out-${name}`).textContent = say(name, shown[0]);
      } else input.checked = input.value === value;
    }
    byId(`note-${name}`).textContent = name === "model" ? `${models[value].about}.` : noteOf(name, values, can);
  }
}

function noteOf(name, values, can) {
  if (values.length === 1) return "not varied for this model";
  if (!can) return "varied only with 1,024 tokens, no recomputation and no offload";
  return new Set(values.map((other) => runOf(complete({ ...shown[0], [name]: other })))).size === 1 ? "makes no difference here" : "";
}

function set(name, value) {
  previous = shown[0];
  // Another model has other networks and batches; what both have stays.
  shown[0] = complete({ ...shown[0], [name]: value });
  if (name === "model") {
    makeControls();
    document.querySelector(`input[name=model][value=${value}]`).focus();
  }
  show();
}

// ------------------------------------------------------------------ the address
const hash = () => `#${shown.map((its) => new URLSearchParams(its)).join("/")}`;

function fromAddress() {
  const parts = location.hash.slice(1).split("/").slice(0, 2);
  shown = parts.map((part) => complete(Object.fromEntries(new URLSearchParams(part))));
  previous = null;
  makeControls();
  show();
}

// ------------------------------------------------------------------ one operation, and what it waits for
function walk(event, which, piece, group) {
  const all = runOf(shown[which]).pieces, order = data.lanes_in_order.filter((l) => all.some((p) => p.lane === l));
  const lane = all.filter((p) => p.lane === piece.lane).sort((a, b) => a.start - b.start), at = lane.indexOf(piece);
  const nearest = (name) => all.filter((p) => p.lane === name).reduce((best, p) =>
    (!best || Math.abs(p.start - piece.start) < Math.abs(best.start - piece.start) ? p : best), null);
  const row = order.indexOf(piece.lane);
  const next = { ArrowRight: lane[at + 1], ArrowLeft: lane[at - 1], Home: lane[0], End: lane[lane.length - 1],
    ArrowDown: nearest(order[row + 1]), ArrowUp: nearest(order[row - 1]) };
  if (event.key === "Enter" || event.key === " ") select(which, piece.number);
  else if (!(event.key in next)) return;
  else if (next[event.key]) {
    const other = group.ownerSVGElement.querySelector(`[data-number="${next[event.key].number}"]`);
    group.setAttribute("tabindex", -1);
    other.setAttribute("tabindex", 0);
    other.focus();
  }
  event.preventDefault();
}

function reasons(piece, pieces) {  // why it did not start before: words, when, and a piece if it is one; the last of these came true last
  const row = pieces.filter((p) => p.lane === piece.lane && p.number < piece.number && p.kind !== "free");
  const before = row[row.length - 1], found = [], host = piece.lane === "host";
  if (!host) found.push(["launched by the host", piece.launched, hostBefore(piece, pieces)]);
  if (before && !host) found.push([`before it on its stream: ${words(before)}`, before.end, before]);
  for (const { on, until } of piece.waits) if (pieces[on] !== before || host) found.push([`${host ? "" : "told to wait for: "}${words(pieces[on])}`, until, pieces[on]]);
  return found.sort((a, b) => a[1] - b[1]);
}

function hostBefore(piece, pieces) {  // the host's wait that ended shortly before it launched this
  const near = pieces.filter((p) => p.lane === "host" && p.end > p.start && p.end <= piece.launched + 1e-9).pop();
  return near && piece.launched - near.end < 1e-3 ? near : null;
}

function guide(which) {  // what one should click first: a piece of computation that a gather keeps waiting for long
  const { pieces } = runOf(shown[which]);
  const waits = (p) => {
    const [last] = reasons(p, pieces).slice(-1), before = pieces.filter((q) => q.lane === p.lane && q.number < p.number).pop();
    return last?.[2] && last[2].lane !== p.lane ? p.start - (before?.end ?? 0) : 0;
  };
  const computing = pieces.filter((p) => ["forward", "backward"].includes(p.kind) && p.end - p.start > 0.01 * runOf(shown[which]).figures.step);
  return computing.reduce((best, p) => (!best || waits(p) > waits(best) ? p : best), null);
}

function select(which, number) {
  selected = { which, number };
  showSelected();
}

const pieceIn = (which, number) => document.querySelectorAll("#shown svg")[which].querySelector(`[data-number="${number}"]`);

function showSelected() {
  document.querySelectorAll(".selected, .awaited, .first").forEach((it) => it.classList.remove("selected", "awaited", "first"));
  document.querySelectorAll(".await").forEach((it) => it.remove());
  const button = byId("follow");
  if (!selected) {
    const first = guide(0);
    byId("which").textContent = "Click on an operation";
    fill(byId("operation"), [["In the picture, with a click, or with Tab, the arrow keys and Enter: then you see here what it waited for, and there a line to it."]]);
    button.hidden = !first;
    if (!first) return;
    pieceIn(0, first.number).classList.add("first");
    button.textContent = `Begin with this one: why does the ${words(first)} start only after ${ms(first.start)}?`;
    button.onclick = () => select(0, first.number);
    return;
  }
  const { which, number } = selected, { pieces, figures } = runOf(shown[which]), piece = pieces[number];
  pieceIn(which, number).classList.add("selected");
  for (const { on } of piece.waits) connect(which, pieces[on], piece);
  byId("which").textContent = capital(words(piece));
  const why = reasons(piece, pieces), last = why[why.length - 1], host = piece.lane === "host";
  const late = last && !host ? piece.start - last[1] : 0;
  const lines = why.map(([what, when], i) => [`${i === why.length - 1 && why.length > 1 ? "last, " : ""}${what}`, ms(when)]);
  if (late > 5e-5 * figures.step) lines.push(["the kernels before it lost time beside a collective", ms(late)]);
  fill(byId("operation"), piece.kind === "free"
    ? [["at", ms(piece.start)], ["the GPU may still use the parameters: the memory stays active until it is done", ""]]
    : [["from", ms(piece.start)], ["until", `${ms(piece.end)}, so it takes ${ms(piece.end - piece.start)}`],
      ...(lines.length ? [[host ? "the host waits until the GPU is done with" : "it had to wait until", ""]] : []), ...lines]);
  button.hidden = !last?.[2];
  if (last?.[2]) {
    button.textContent = `And what did that wait for? (${words(last[2])})`;
    button.onclick = () => select(which, last[2].number);
  }
}

function connect(which, from, to) {
  const box = (piece) => pieceIn(which, piece.number).querySelector(".shape").getBBox(), [a, b] = [box(from), box(to)];
  pieceIn(which, from.number).classList.add("awaited");
  const end = to.lane === "host" ? b.x + b.width : b.x, down = b.y > a.y;
  const line = element("path", { class: "await", d: `M${a.x + a.width} ${down ? a.y + a.height : a.y}L${end} ${down ? b.y : b.y + b.height}` });
  document.querySelectorAll("#shown svg")[which].append(line);
}

// ------------------------------------------------------------------ all of it
function titleOf(which) {
  if (shown.length === 1) return models[shown[0].model].title;
  const other = shown[1 - which], its = shown[which];
  const apart = Object.keys(CONTROLS).filter((name) => its[name] !== other[name]);
  const says = apart.map((name) => (name === "model" ? say(name, its) : `${small(CONTROLS[name].legend)} ${say(name, its)}`));
  return `${which ? "kept: " : "this one: "}${says.join(", ") || "the same settings"}`;
}

function showSteps() {
  const found = shown.map(runOf), width = Math.max(byId("shown").clientWidth, 280);
  const alike = shown.every((its) => its.model === shown[0].model);
  const largest = (name, run) => Math.max(...(alike ? found : [run]).map((r) => r.figures[name]));
  byId("shown").replaceChildren(...found.map((run, which) => element("section", {},
    element("h2", {}, capital(titleOf(which))),
    draw(which, width, largest("step", run), largest("peak reserved", run) * 1.16))));
  showSelected();
}

function showFigures() {
  const [its, kept] = shown, figures = runOf(its).figures, old = kept && runOf(kept).figures;
  const heads = ["", "this one", ...(kept ? ["kept", "change"] : [])];
  const head = element("thead", {}, element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text))));
  const row = (key, label, cells, formula) => element("tr", { "data-figure": key },
    element("th", { scope: "row" }, label, element("small", {}, formula)), ...cells.map((text) => element("td", {}, text)));
  byId("figures").replaceChildren(head, element("tbody", {}, ...Object.entries(FIGURES).map(([name, [label, words_, formula]]) =>
    row(name, label, [words_(figures[name], its), ...(old ? [words_(old[name], kept), change(old[name], figures[name])] : [])], formula(figures, its)))));
  const before = kept ? new Map(kindsOf(kept)) : null, kinds = kindsOf(its);
  const colour = (kind) => KIND_COLOURS[kind] ?? BEYOND;
  byId("kinds").replaceChildren(head.cloneNode(true), element("tbody", {}, ...kinds.map(([kind, bytes, formula]) => {
    const it = row(kind, kind, [size(bytes, its), ...(before ? [size(before.get(kind) ?? 0, kept), change(before.get(kind) ?? 0, bytes)] : [])], formula);
    it.firstChild.prepend(sign(colour(kind)));
    return it;
  })));
  const has = data.machine.capacity, most = Math.max(has, figures["peak reserved"]), part = (bytes) => `${(100 * bytes) / most}%`;
  byId("bar").replaceChildren(...kinds.map(([kind, bytes]) => element("span", { style: `width: ${part(bytes)}; background: ${colour(kind)}`, title: kind })));
  const over = figures["peak reserved"] - has;
  byId("room").textContent = over > 0 ? `${size(over, its)} more than the ${size(has, its)} that a ${data.machine.name} has for PyTorch.`
    : `The bar is all that a ${data.machine.name} has for PyTorch, ${size(has, its)}; ${percent(-over / has)} of it is free.`;
}

function show() {
  selected = null;
  history.replaceState(null, "", hash());
  showControls();
  const its = shown[0], against = shown[1] ?? previous, found = against ? difference(its, against) : [];
  const look = LOOKS.find(([, address]) => sameLook(address));
  byId("summary").textContent = `${capital(summary(its))}.`;
  byId("summary").classList.toggle("alarm", !runOf(its).figures.fits);
  byId("difference").textContent = found[0] ?? "Change a setting, and read here what it does and why.";
  byId("more").replaceChildren(...[look?.[2], ...found.slice(1), binds(its)].filter(Boolean).map((text) => element("p", {}, text)));
  byId("advice").textContent = adviceWords(its);
  const help = advised(its);
  byId("follow-advice").hidden = !help;
  byId("follow-advice").onclick = () => set(...help);
  byId("swap").hidden = byId("drop").hidden = shown.length < 2;
  const { model, ...rest } = its, options = Object.entries(rest).map(([name, value]) => `--${name} ${value}`);
  byId("command").textContent = `minifsdp sim ${models[model].options} ${options.join(" ")}`;
  showFigures();
  if (byId("rows").open) showRows();
  for (const link of document.querySelectorAll("#looks a")) link.toggleAttribute("aria-current", link.textContent === look?.[0]);
  showSteps();
}

function sameLook(address) {
  const parts = address.split("/").map((part) => complete(Object.fromEntries(new URLSearchParams(part))));
  return parts.length === shown.length && parts.every((part, i) => JSON.stringify(part) === JSON.stringify(shown[i]));
}

function showRows() {
  const { pieces } = runOf(shown[0]), head = ["operation", "row", "launched", "starts", "ends", "last waited for"];
  const rows = pieces.map((piece) => [words(piece), piece.lane, ms(piece.launched), ms(piece.start), ms(piece.end), reasons(piece, pieces).pop()?.[0] ?? ""]);
  fill(document.querySelector("#rows table"), rows);
  document.querySelector("#rows table").prepend(element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text))));
}

byId("looks").append(...LOOKS.map(([title, address, says]) => element("li", {}, element("a", { href: `#${address}`, title: says }, title))));
legend(byId("legend"), [
  ...Object.values(WAITS), ["", "▾ parameters freed by the host"], ["", "│ on the host: launch of an all-gather"],
  ["var(--reserved)", "reserved"], ["var(--active)", "active: freed, maybe still in use"], ["var(--allocated)", "allocated"],
  [ROOT, "the root"], [OPTIMIZER, "optimizer"], ["", "Other colours are units, numbers are blocks."],
]);
fill(byId("lanes"), data.lanes_in_order.map((lane) => [lane, LANES[lane]]));
const how = data.predicted, [within, compared] = how["within 15 %"].split(" of ");
byId("predicted").textContent = `How near it is to real GPUs: of ${compared} published runs that no constant was chosen by, ${within} were within 15 % of the prediction, ` +
  `3 of 4 within ${how["3 of 4 within"]}; the median error was ${how["median error"]}, and the worst ${how.worst}.`;
byId("keep").addEventListener("click", () => { shown = [shown[0], { ...shown[0] }]; show(); });
byId("swap").addEventListener("click", () => { shown.reverse(); makeControls(); show(); });
byId("drop").addEventListener("click", () => { shown.length = 1; previous = null; show(); byId("keep").focus(); });
byId("rows").addEventListener("toggle", () => { if (byId("rows").open) showRows(); });
addEventListener("hashchange", fromAddress);
addEventListener("resize", showSteps);
fromAddress();
