// ------------------------------------------------------------------ what can be set, in words
const count = (n, one, many = `${one}s`) => `${Number(n).toLocaleString("en")} ${n === "1" || n === 1 ? one : many}`;
const upper = (v) => v.toUpperCase();
const PREFETCH = { pre: "PRE", post: "POST", none: "none" };
// meaning: for those who see the word for the first time; page: of the tutorial.
const CONTROLS = {
  model: { legend: "Model", type: "radio", say: (v) => models[v].title, page: "00_ddp",
    meaning: "What is trained. Both are GPTs: an embedding, blocks that are all alike, and a head." },
  strategy: { legend: "Strategy", type: "radio", say: upper, page: "16_groups",
    meaning: "What the GPUs share out among them. FULL_SHARD: all cut parameters, gradients and Adam's state into shards, and a unit is gathered for its forward and again for its backward. SHARD_GRAD_OP: gathered once. HYBRID_SHARD: cut within a node, copied between nodes. NO_SHARD: each GPU has all, as with DDP." },
  unit: { legend: "Unit", type: "radio", say: (v) => (v === "block" ? "each block" : "the whole model"), page: "07_unit",
    meaning: "A unit is a part of the model whose parameters are gathered and freed together. What is in no block (embeddings, head) is the root, a unit of its own." },
  limit: { legend: "Limit", type: "range", say: (v) => ({ none: "none", true: "2 units, and 1 being freed" })[v] || `${count(v, "unit")} at once`, page: "11_limiter",
    meaning: "How many units may be gathered at once. The limiter makes the host wait before it launches one more gather. The default, `limit_all_gathers=True`, allows two, and a third that the host has freed and the GPU still uses. The root is not counted." },
  backward: { legend: "Backward prefetch", type: "radio", say: (v) => PREFETCH[v], page: "12_prefetch",
    meaning: "When the backward launches the gather of the next unit: PRE before it computes this unit's gradients, POST after that, none only when the next unit is needed." },
  forward: { legend: "Forward prefetch", type: "radio", say: (v) => PREFETCH[v], page: "12_prefetch",
    meaning: "The same in the forward. PRE launches the gather of the next unit before this one is computed with." },
  nodes: { legend: "Number of GPUs", type: "range", say: (v, model) => `${Number(v) * models[model].gpus} in ${count(v, "node")}`, page: "22_hybrid",
    meaning: "More GPUs share one copy of the state, so that each keeps less of it; and each has texts of its own." },
  network: { legend: "Network of a node", type: "range", say: (v) => `${v} Gbit/s`, page: "22_hybrid",
    meaning: "What all GPUs of a node together can send to other nodes. Within a node they have faster links." },
  batch: { legend: "Batch of a GPU", type: "range", say: (v) => count(v, "text"), page: "23_settings",
    meaning: "How many texts a GPU computes with in a step. More of them take longer, and hide more communication." },
  seq: { legend: "Sequence length", type: "range", say: (v) => count(v, "token"), page: "23_settings",
    meaning: "Tokens of a text. Activations grow with it, and attention with its square." },
  precision: { legend: "Precision", type: "radio", say: (v) => v, page: "14_precision",
    meaning: "What layers compute and communicate with. Parameters and Adam's state are kept in fp32 either way." },
  recompute: { legend: "Recomputation", type: "radio", say: (v) => (v === "none" ? "none" : "of all blocks"), page: "15_recompute",
    meaning: "Activations of a block are not kept for the backward, but computed again there." },
  offload: { legend: "Offload", type: "radio", say: (v) => (v === "no" ? "no" : "to the host"), page: "17_offload",
    meaning: "Shards of parameters, gradients and Adam's state are in the host's memory, where the CPU steps the optimizer. They are copied to the GPU before a gather." },
};
// A title, the two settings, and what to look at.
const LOOKS = [
  ["What the limiter is for", "limit=none/limit=true", "Without a limit the host launches all gathers of the forward in the first milliseconds, and takes memory for each of them. With a limit it waits (orange) until a unit has been freed."],
  ["No prefetch in the backward, and PRE", "backward=none/backward=pre", "Follow one unit in the backward. Without a prefetch its gather is launched when the unit before it is done, behind that unit's reduction; with PRE it is on its way before."],
  ["Room for one unit: PRE and POST", "limit=1/limit=1&backward=post", "Where only one unit may be gathered, PRE comes too early: the limiter declines its prefetch. POST comes when the place has become free."],
  ["A slow network", "batch=1&network=100/batch=1", "The same bytes through a quarter of the bandwidth, and little to compute: the row of computation is mostly empty, and no schedule can fill it."],
  ["Parameters kept for the backward", "strategy=shard_grad_op/strategy=full_shard", "No gathers in the backward, for the parameters stay after the forward. Look at what is gathered then, and at the bytes sent."],
  ["Sharded within a node", "strategy=hybrid_shard&network=100/network=100", "Gathers do not leave the node, where links are fast. Instead there are all-reduces between nodes, of a shard only, and each GPU keeps more of the state."],
  ["Nothing sharded", "strategy=no_shard/strategy=full_shard", "Nothing is gathered, and each GPU has all of the state. Look at the memory by kind."],
  ["All in one unit", "unit=model/unit=block", "One gather, and nothing to compute with until it is done. At the end of the backward it is the same with the reduction."],
  ["More GPUs", "nodes=8/nodes=1", "Each GPU keeps less of the state, and its gathers have to leave the node."],
  ["A model that does not fit", "seq=4096&strategy=no_shard/seq=4096", "The state of a GPU that shards nothing, and the activations of long texts, are more than it has. The step is drawn as on a GPU with enough memory."],
  ["Activations computed twice", "recompute=full/recompute=none", "Each block's backward begins with its forward once more. Look at what activations there are at the peak."],
  ["State on the host", "offload=yes/offload=no", "The optimizer's step is the host's now, and shards are copied before each gather. The GPU waits for both, and has the state's memory for other things."],
  ["A model that is too small", "model=demo&network=100&precision=bf16", "The host needs longer to launch the kernels than the GPU to do them. What is faster on the GPU does not help."],
];
const SENTENCES = {
  upload: "upload of", "all-gather": "all-gather of", copy: "copy to 16 bits of", forward: "forward of", backward: "backward of",
  reduce: "reduction of", "all-reduce": "all-reduce of", download: "download of", cast: "reduced gradient, cast, of",
  free: "host frees", limiter: WAITS.limiter[1], "host waits": WAITS["host waits"][1],
  loss: "loss", optimizer: "optimizer", other: "small kernels of no unit",
};
const ms = (seconds) => `${(seconds * 1e3).toFixed(2)} ms`;
const percent = (share) => `${(100 * share).toFixed(Math.abs(share) < 0.0995 ? 1 : 0)} %`;
const unitWords = (unit) => (unit === "<root>" ? "the root (embeddings, head)" : unit.replace(/^blocks\./, "block "));
const small = (text) => text[0].toLowerCase() + text.slice(1);
const capital = (text) => text[0].toUpperCase() + text.slice(1);
function words(piece) {
  const alone = ["loss", "optimizer", "other", "limiter", "host waits"].includes(piece.kind);
  return alone ? SENTENCES[piece.kind] : `${SENTENCES[piece.kind]} ${unitWords(piece.unit)}`;
}
const gigabytes = (bytes) => (bytes >= 1e9 ? `${(bytes / 1e9).toFixed(2)} GB` : `${(bytes / 1e6).toFixed(2)} MB`);
const ranksOf = (its) => Number(its.nodes) * models[its.model].gpus;
const sharersOf = (its) => sheet.sharers(its.strategy, ranksOf(its), models[its.model].gpus);
const size = (bytes, its) => sizesUpTo(runOf(its).figures["peak reserved"])(bytes);
const say = (name, its) => CONTROLS[name].say(its[name], its.model);

// ------------------------------------------------------------------ what one run is
function summary(its) {
  const { figures: f } = runOf(its), whole = data.machine.capacity, over = f["peak reserved"] - whole;
  const state = f.fits ? `${size(f["peak reserved"], its)} of ${size(whole, its)} are reserved`
    : `does not fit: it would reserve ${size(f["peak reserved"], its)}, ${size(over, its)} more than the GPU has for PyTorch`;
  return `${ms(f.step)} a step, ${Math.round(f["tokens/s per GPU"]).toLocaleString("en")} tokens/s; ${state}`;
}

function binds(its) {
  const { figures: f } = runOf(its), share = (seconds) => percent(seconds / f.step);
  const where = {
    network: `The network binds: for ${share(f["exposed communication"])} of the step the GPU waits for communication that no computation hides.`,
    host: `The host binds: for ${share(f.idle)} of the step the GPU has nothing to do, because the host has not launched it yet.`,
    compute: `Computation binds: the GPU computes for ${share(f.compute)} of the step. It waits for communication for ${share(f["exposed communication"])}, and for ${share(f.idle)} it has nothing to do.`,
  }[f.binds];
  const units = f["peak unsharded units"];
  return `${where} ${units ? `At most ${count(units, "unit")}${units > 1 ? " (with the root)" : ""} gathered at once.` : "Nothing is gathered."}`;
}

function adviceWords(its) {
  const found = advised(its);
  if (!found) {
    return runOf(its).figures.fits ? `No other value of one setting makes it more than ${percent(data.worth)} faster.`
      : "No other value of one setting makes it fit: change two, or take more GPUs.";
  }
  const [name, value] = found, there = { ...its, [name]: value }, [f, g] = [its, there].map((s) => runOf(s).figures);
  const what = `${CONTROLS[name].legend} ${say(name, there)}`;
  if (!f.fits) return `${what} makes it fit, with ${size(g["peak reserved"], its)} reserved.`;
  const more = g["peak reserved"] - f["peak reserved"];
  const memory = Math.abs(more) < 2 * MiB ? "as much memory" : `${size(Math.abs(more), its)} ${more > 0 ? "more" : "less"} memory`;
  return `${what}: ${percent(g["tokens/s per GPU"] / f["tokens/s per GPU"] - 1)} more tokens a second, and ${memory}.`;
}
