// ------------------------------------------------------------------ settings, and the run they give
const data = JSON.parse(byId("data").textContent), { models, names } = data;
const unpack = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const steps = new DataView(unpack(data.steps).buffer), parsed = [];
for (const model of Object.values(models)) {
  model.index = new Uint16Array(unpack(model.index).buffer);
  model.advice = unpack(model.advice);
}
const defaults = (model) => Object.fromEntries(Object.entries(models[model].settings).map(([n, v]) => [n, v[0]]));

// Whether a setting has other values than its default beside these.
const varied = (name, its) => Object.entries(data.only_with[name] ?? {}).every(([other, values]) => values.includes(its[other]));

function complete(given) {  // all settings, with defaults for what is missing or is not there
  const model = given.model in models ? given.model : Object.keys(models)[0], its = defaults(model);
  for (const [name, values] of Object.entries(models[model].settings)) {
    if (values.includes(given[name])) its[name] = given[name];
  }
  for (const name of Object.keys(data.only_with)) if (!varied(name, its)) its[name] = defaults(model)[name];
  return { model, ...its };
}

function placeOf(settings) {
  return Object.entries(models[settings.model].settings)
    .reduce((at, [name, all]) => at * all.length + all.indexOf(settings[name]), 0);
}

function runOf(settings) {  // unpacked when it is first looked at
  const number = models[settings.model].index[placeOf(settings)];
  return (parsed[number] ??= parse(data.runs[number]));
}

function advised(settings) {  // a setting and its value; null if none helps
  const number = models[settings.model].advice[placeOf(settings)] - 1, name = data.advised[number >> 2];
  return number < 0 ? null : [name, models[settings.model].settings[name][number & 3]];
}

function parse([at, binds, peak, units, phases, count]) {
  const word = () => (at += 2, steps.getUint16(at - 2, true)), byte = () => steps.getUint8(at++);
  const figures = {};
  for (const name of names) { figures[name] = steps.getFloat32(at, true); at += 4; }
  figures.binds = data.binds[binds];
  const time = () => (word() / data.full) * figures.step;
  const pieces = Array.from({ length: count }, word).map((token, number) => {
    const [head, ...waits] = data.tokens[token];
    return { number, lane: data.lanes[head & 7], kind: data.kinds[(head >> 3) & 31], unit: data.units[units][head >> 8], waits };
  });
  for (const piece of pieces) {
    const host = piece.lane === "host", launched = host ? 0 : time();
    piece.start = time();
    piece.launched = host ? piece.start : launched;
    piece.end = piece.kind === "free" ? piece.start : time();
    piece.waits = piece.waits.map((it) => [piece.number - (it >> 1), it & 1 ? time() : null]);
  }
  for (const piece of pieces) piece.waits = piece.waits.map(([on, until]) => ({ on, until: until ?? pieces[on].end }));
  // What NO_SHARD does in the place of a gather is to copy its parameters to the dtype of computation.
  if (!figures["peak unsharded units"]) for (const piece of pieces) if (piece.kind === "all-gather") piece.kind = "copy";
  const curves = {};
  for (const level of data.levels) {
    const curve = (curves[level] = []);
    while (curve.length < data.columns) curve.push(...Array(byte() + 1).fill(byte()));
  }
  const begins = Object.fromEntries(Object.entries(phases).map(([name, part]) => [name, (part / data.full) * figures.step]));
  return { figures, peak: data.peaks[peak], units: data.units[units], phases: begins, pieces, curves };
}
