// ------------------------------------------------------------------ figures, each with its formula and the run's values in it
const T = (flops) => `${(flops / 1e12).toPrecision(3)} Tflop`, G = (n) => `${(n / 1e9).toPrecision(3)} billion`;
const bytesOf = (its) => (its.precision === "fp32" ? 4 : 2);
const peakOf = (its) => data.machine[its.precision];
function rootOf(its) {  // one unit for all is a root without blocks
  const { params, root } = models[its.model].sizes;
  return its.unit === "model" ? params : root;
}

// Bytes of a step by formulas.py: gathers and a reduction, where the root is gathered once. In words, too.
function sentBy(its) {
  const { params } = models[its.model].sizes, b = bytesOf(its), ranks = ranksOf(its), node = models[its.model].gpus;
  const once = (n, sharers) => sheet.sent(n, sharers, 0, b);
  const gathers = { full_shard: 2, hybrid_shard: 2 }[its.strategy] ?? 1;
  if (its.strategy === "hybrid_shard" && ranks > node) {
    return [sheet.sent_by_hybrid(params, node, Number(its.nodes), b) - once(rootOf(its), node),
      `${b} bytes × (3 × ${G(params)} − ${G(rootOf(its))} of the root) × ${node - 1}/${node} in a node, 2 × ${b} bytes × ${G(params / node)} × ${its.nodes - 1}/${its.nodes} between nodes`];
  }
  const less = gathers === 2 ? rootOf(its) : 0;
  return [sheet.sent(params, ranks, gathers, b) - once(less, ranks),
    `${b} bytes × (${gathers + 1} × ${G(params)}${less ? ` − ${G(less)} of the root` : ""}) × ${ranks - 1}/${ranks}`];
}

function sendingTakes(its, f) {  // bytes over bandwidth, without latency and other traffic; and in words
  const { links, reached } = data.machine, node = models[its.model].gpus, network = (Number(its.network) * 1e9 / 8) * reached;
  const slowest = its.nodes === "1" ? links : Math.min(links, network), gb = (rate) => `${(rate / 1e9).toPrecision(3)} GB/s`;
  const across = f["bytes sent by all-reduces"];
  if (its.strategy === "hybrid_shard" && its.nodes !== "1") {
    const inside = f["bytes sent"] - across, rate = network / node;
    return [inside / links + across / rate, `${gigabytes(inside)} / ${gb(links)} in a node + ${gigabytes(across)} / ${gb(rate)} between nodes`];
  }
  return [f["bytes sent"] / slowest, `${gigabytes(f["bytes sent"])} / ${gb(slowest)}`];
}

const tokensOf = (its) => Number(its.batch) * Number(its.seq);
// name: words; its value in words; its formula, "" for none
const FIGURES = {
  step: ["Step", ms, (f) => `${ms(f.compute)} computed + ${ms(f["exposed communication"])} not hidden + ${ms(f.idle)} nothing to do`],
  compute: ["Computation", ms, (f, its) => `${T(f.flops)} / ${T(peakOf(its))}/s = ${ms(f.flops / peakOf(its))} at the data sheet's pace: ${percent(f.flops / peakOf(its) / f.compute)} of it`],
  communication: ["Communication", ms, (f, its) => {
    const [seconds, how] = sendingTakes(its, f);
    const overlaps = its.strategy === "hybrid_shard" && its.nodes !== "1";
    const more = Number(its.nodes) > data.machine.quiet ? "latency and other traffic" : "latency";
    return `${how} = ${ms(seconds)}, and ${more}${overlaps ? "; both in part at the same time" : ""}`;
  }],
  "exposed communication": ["… not hidden", ms, (f) => `${ms(f.communication)} − ${ms(f.communication - f["exposed communication"])} beside computation`],
  idle: ["GPU has nothing to do", ms, () => ""],
  "host stalls in the limiter": ["Host waits: limiter", ms, () => ""], "other host stalls": ["Host waits: other", ms, () => ""],
  "peak reserved": ["Reserved at most", size, () => ""], "peak active": ["Active at most", size, () => ""],
  "peak allocated": ["Allocated at most", size, (f, its) => `in: ${runOf(its).peak}`], "peak unsharded units": ["Units gathered at once", String, () => ""],
  cudaMallocs: ["cudaMalloc calls so far", String, () => ""], retries: ["Allocator retries so far", String, () => ""],
  "bytes sent": ["Sent by this GPU", gigabytes, (f, its) => `${sentBy(its)[1]} = ${gigabytes(sentBy(its)[0])}`],
  "tokens/s per GPU": ["Tokens a second", (v) => v.toFixed(0), (f, its) => `${its.batch} × ${its.seq} / ${ms(f.step)}`],
  MFU: ["MFU", (v) => percent(v), (f, its) => `6 × ${G(models[its.model].sizes.params)} × ${f["tokens/s per GPU"].toFixed(0)}/s / ${T(peakOf(its))}/s = ${percent(sheet.mfu(models[its.model].sizes.params, f["tokens/s per GPU"], peakOf(its)))}, and attention's products`],
};

function kindsOf(its) {  // memory at the peak of what is reserved, by kind: bytes, and a formula
  const { figures: f } = runOf(its), { params, unit } = models[its.model].sizes, b = bytesOf(its), sharers = sharersOf(its);
  const state = (each) => (its.offload === "yes" ? "on the host" : `${each} bytes × ${G(params)} / ${sharers} = ${size(sheet.state(params, sharers, each), its)}`);
  const token = (bytes) => `${(bytes / tokensOf(its) / 1024).toFixed(0)} KiB for each of ${tokensOf(its).toLocaleString("en")} tokens`;
  const block = its.unit === "model" ? 0 : unit, whole = sheet.gathered(its.strategy, params, rootOf(its), block, b);
  const gathers = its.strategy === "no_shard" ? "a copy in 16 bits" : its.strategy === "shard_grad_op" ? "all units" : block ? "the root and one block" : "the one unit";
  const formulas = {
    parameters: state(4), gradients: state(4), optimizer: state(8), activations: token(f.activations), temporary: token(f.temporary),
    "gathered parameters": whole ? `${gathers}: ${b} bytes × ${G(whole / b)} = ${size(whole, its)}` : "",
  };
  const lines = data.memory.map((kind) => [kind, f[kind], formulas[kind] ?? ""]);
  return [...lines, ["reserved beyond that", f["peak reserved"] - f["peak allocated"], "freed early and still in use by the GPU, cached for later, or between blocks"]]
    .filter(([, bytes, formula]) => bytes || formula === "on the host");
}

function change(before, after) {
  if (before === after) return "=";
  if (!before || !after) return "";
  const ratio = after / before;
  if (Math.abs(ratio - 1) < 5e-4) return "≈";
  return ratio < 0.1 || ratio >= 10 ? `× ${ratio.toPrecision(2)}` : `${ratio > 1 ? "+" : "−"}${Math.abs(100 * (ratio - 1)).toFixed(1)} %`;
}
