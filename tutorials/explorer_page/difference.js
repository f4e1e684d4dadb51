// ------------------------------------------------------------------ what differs between two runs, and why
const SUBJECT = {
  model: (its) => capital(say("model", its)),
  strategy: (its) => say("strategy", its),
  unit: (its) => (its.unit === "block" ? "A unit for each block" : "One unit for the whole model"),
  limit: (its) => ({ none: "No limit", true: "The limiter" })[its.limit] || `The limit of ${count(its.limit, "unit")}`,
  backward: (its) => (its.backward === "none" ? "No prefetch in the backward" : `${PREFETCH[its.backward]} in the backward`),
  forward: (its) => (its.forward === "none" ? "No prefetch in the forward" : `${PREFETCH[its.forward]} in the forward`),
  nodes: (its) => `Training on ${Number(its.nodes) * models[its.model].gpus} GPUs`,
  network: (its) => `A network of ${say("network", its)}`,
  batch: (its) => `A batch of ${say("batch", its)}`,
  seq: (its) => `Length ${say("seq", its)}`,
  precision: (its) => `Precision ${its.precision}`,
  recompute: (its) => (its.recompute === "none" ? "Keeping activations" : "Computing activations again"),
  offload: (its) => (its.offload === "no" ? "State on the GPU" : "State on the host"),
};
// The mechanism, for a run with figures f and settings a, against one with g and b.
const WHY = {
  strategy: (f, g, a, b) => `a GPU keeps ${partOf(a)} of the state instead of ${partOf(b)}, and sends ${gigabytes(f["bytes sent"])} a step instead of ${gigabytes(g["bytes sent"])}`,
  unit: (f, g, a) => (a.unit === "model" ? "all parameters are gathered at once, before anything can be computed, and all gradients are reduced after the backward"
    : "while one block is computed with, the next is gathered, and only a few are there at once"),
  limit: (f, g) => {
    const [fewer, more] = [f["peak unsharded units"], g["peak unsharded units"]], waits = "host stalls in the limiter";
    const before = f[waits] > g[waits];
    if (fewer === more) return before ? `the host waits ${ms(f[waits])} in the limiter` : "the host waits less in the limiter";
    return before ? `the host waits (${ms(f[waits])} in the limiter) instead of taking memory early, and ${fewer} units are gathered at once instead of ${more}`
      : `the host waits ${f[waits] ? "less in" : "never in"} the limiter and takes memory early, and ${fewer} units are gathered at once instead of ${more}`;
  },
  backward: (f, g, a) => ({ pre: "the next unit's gather is launched before this unit's gradients are computed",
    post: "the next unit's gather is launched after this unit's gradients are computed",
    none: "a unit's gather is launched only when its backward begins" })[a.backward],
  forward: (f, g, a) => (a.forward === "pre" ? "the host launches the next unit's gather before this unit's forward" : "a unit's gather is launched when its forward begins"),
  nodes: (f, g, a, b) => `a GPU keeps ${partOf(a)} of the state instead of ${partOf(b)}, and its collectives take ${ms(f.communication)} instead of ${ms(g.communication)}`,
  network: (f, g) => `the same bytes take ${ms(f.communication)} instead of ${ms(g.communication)}`,
  batch: (f, g, a, b) => tokensWhy(f, g, a, b),
  seq: (f, g, a, b) => tokensWhy(f, g, a, b),
  precision: (f, g, a) => (a.precision === "bf16" ? "products in 16 bits are faster, and half of the bytes are sent" : "products in 32 bits are slower, and twice the bytes are sent"),
  recompute: (f, g, a) => (a.recompute === "full" ? `a block's activations are freed after its forward and computed again for its backward, ${percent(f.flops / g.flops - 1)} more flops` : "activations stay from the forward to the backward, and nothing is computed twice"),
  offload: (f, g, a) => (a.offload === "yes" ? "shards are in the host's memory, come over PCIe for each gather, and the CPU steps the optimizer" : "shards are where they are needed, and the GPU steps the optimizer"),
  model: () => "it is another model",
};
const SAME = {
  limit: "the host is never so far ahead that it would matter", backward: "the gathers come early enough either way",
  forward: "the host is ahead of the GPU, so gathers come early enough either way",
  strategy: "one unit for the whole model stays gathered until the backward anyway", network: "nothing leaves the node",
};

const partOf = (its) => (sharersOf(its) === 1 ? "all" : `1/${sharersOf(its)}`);

function tokensWhy(f, g, a, b) {
  const share = (its) => percent(its["exposed communication"] / its.step);
  return `activations grow with the ${count(Number(a.batch) * Number(a.seq), "token")} of a step (instead of ${count(Number(b.batch) * Number(b.seq), "token")}), the bytes sent do not, and the GPU waits for communication ${share(f)} of the time instead of ${share(g)}`;
}

function difference(a, b) {  // sentences: run a, seen from b
  const apart = Object.keys(CONTROLS).filter((name) => name in a && a[name] !== b[name]);
  if (!apart.length) return ["Both have the same settings."];
  const [x, y] = [runOf(a), runOf(b)], [f, g] = [x.figures, y.figures], one = apart.length === 1 && apart[0];
  const subject = apart.map((name) => SUBJECT[name](a)).map((text, i) => (i && !/^[A-Z]{2}/.test(text) ? small(text) : text)).join(", ");
  if (x === y) return [`${subject}: no difference here${one in SAME ? `, because ${SAME[one]}` : ""}.`];
  const said = [`${subject} ${effects(f, g, a, b)}${one ? `: ${WHY[one](f, g, a, b)}` : ""}.`];
  if (!f.fits || !g.fits) said.push(fits(f, g, a));
  const most = measured(f, g, a);
  if (most) said.push(most);
  const equal = allocatedEqual(x, y, a);
  if (equal) said.push(equal);
  return said;
}

function effects(f, g, a, b) {
  const bytes = f["peak reserved"] - g["peak reserved"], same = Number(a.batch) * Number(a.seq) === Number(b.batch) * Number(b.seq) && a.model === b.model;
  const memory = Math.abs(bytes) < 2 * MiB ? "takes as much memory" : `${bytes < 0 ? "saves" : "takes"} ${size(Math.abs(bytes), bytes < 0 ? b : a)}${bytes < 0 ? "" : " more"}`;
  const share = same ? f.step / g.step - 1 : f["tokens/s per GPU"] / g["tokens/s per GPU"] - 1, by = percent(Math.abs(share));
  if (Math.abs(share) < 5e-4) return `${memory} and takes the same time`;
  if (same) return `${memory} and ${share > 0 ? "costs" : "saves"} ${by} of the time`;
  return `${memory} and makes ${by} ${share > 0 ? "more" : "fewer"} tokens a second`;
}

function fits(f, g, a) {
  if (!f.fits && !g.fits) return "Neither fits in the GPU's memory.";
  return f.fits ? "It fits, and the other one does not." : `It does not fit: ${size(f["peak reserved"] - data.machine.capacity, a)} are missing.`;
}

function measured(f, g, a) {  // the largest part of what changed, of time and of memory
  const times = { compute: "computation", "exposed communication": "communication that nothing hides", idle: "time without work for the GPU" };
  const largest = (names) => names.map((name) => [name, f[name] - g[name]]).sort((p, q) => Math.abs(q[1]) - Math.abs(p[1]))[0];
  const [time, seconds] = largest(Object.keys(times)), parts = [];
  if (Math.abs(seconds) > 0.005 * g.step) parts.push(`in time it is ${times[time]} (${signed(ms(Math.abs(seconds)), seconds)})`);
  const beyond = (it) => it["peak reserved"] - it["peak allocated"];
  const [kind, bytes] = [...data.memory.map((name) => [name, f[name] - g[name]]), ["memory reserved beyond what is allocated", beyond(f) - beyond(g)]]
    .sort((p, q) => Math.abs(q[1]) - Math.abs(p[1]))[0];
  if (Math.abs(f["peak reserved"] - g["peak reserved"]) >= 2 * MiB) parts.push(`in memory ${kind} (${signed(size(Math.abs(bytes), a), bytes)})`);
  return parts.length ? `What makes most of the difference: ${parts.join(", and ")}.` : "";
}
const signed = (text, value) => `${value < 0 ? "−" : "+"}${text}`;

function allocatedEqual(x, y, a) {  // though more units are gathered: why
  const [f, g] = [x.figures, y.figures], [few, many] = [f, g].map((it) => it["peak unsharded units"]).sort((p, q) => p - q);
  if (few === many || !few || Math.abs(f["peak allocated"] / g["peak allocated"] - 1) > 0.005) return "";
  const there = f["gathered parameters"];
  const when = x.peak === y.peak && there === g["gathered parameters"]
    ? `Both reach it at the same place (${x.peak}), with ${size(there, a)} of gathered parameters in it: all other units have been freed by then. ` : "";
  return `“Allocated” is at most ${size(f["peak allocated"], a)} in both, though ${few} units are gathered in one and ${many} in the other. ${when}` +
    "Allocated counts by the host's time. A unit that the host has freed, but the GPU has not used yet, is active and no longer allocated: compare those.";
}
