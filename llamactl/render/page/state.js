// What is being looked at, kept in the address so that a view can be shared.

const MOST_CTX = 2 ** 30;
const MOST_BATCH = 65536;
const first = data.goal ?? data.start;

function fresh() {
  return {
    place: goalPlace,
    ctx: first.usable ?? 8192,
    batch: 1,
    kv: data.cache_dtypes.includes(first.dtype) ? first.dtype : "bf16",
    w: data.weight_dtypes.includes(first.dtype) ? first.dtype : "bf16",
    part: "attn",
    loaded: true,
    turn: 0,
    way: 0,
    pair: 0,
    q: 10,
    k: 3,
    shift: 0,
  };
}

const state = fresh();

// A number as it was typed, at the nearest place in range; what is no number leaves things as they were.
function whole(text, low, high, fallback) {
  const words = String(text ?? "").trim();
  if (!/^[+-]?[\d.]+(e\+?\d+)?$/i.test(words) || Number.isNaN(Number(words))) return fallback;
  return Math.min(high, Math.max(low, Math.round(Number(words))));
}

function oneOf(text, known, fallback) {
  return known.includes(text) ? text : fallback;
}

function toAddress(s) {
  const on = s.place.world === goalWorld && !byWay ? "goal" : [...keys.filter((k) => s.place.on.has(k))].join(".");
  const share = kvSwitch && s.place.wish !== "own" ? s.place.wish : s.place.share ?? "";
  const fields = { on, share, ctx: s.ctx, batch: s.batch, kv: s.kv, w: s.w, part: s.part,
    loaded: s.loaded ? 1 : 0, turn: s.turn, way: s.way, pair: s.pair, q: s.q, k: s.k, shift: s.shift };
  return "#" + Object.entries(fields).map(([k, v]) => `${k}=${encodeURIComponent(v)}`).join("&");
}

// Anyone can write an address: what it does not know, or out of range, stays as it was.
function fromAddress(hash) {
  const s = fresh();
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const words = (given.get("on") ?? "?").split(".").filter(Boolean);
  const goal = twoModels && !byWay && words[0] === "goal";
  if (twoModels && (goal || words.every((k) => keys.includes(k)))) {
    s.place = placed(goal ? goalWorld : 0, goal ? [] : words, goal ? "goal" : "start");
  }
  const share = given.get("share");
  if (twoModels && (share === "start" || share === "goal")) s.place = placed(s.place.world, s.place.on, share);
  else if (shares(s.place).includes(Number(share))) s.place = sharing(s.place, Number(share));
  s.ctx = whole(given.get("ctx"), 1, MOST_CTX, s.ctx);
  s.batch = whole(given.get("batch"), 1, MOST_BATCH, s.batch);
  s.kv = oneOf(given.get("kv"), data.cache_dtypes, s.kv);
  s.w = oneOf(given.get("w"), data.weight_dtypes, s.w);
  s.part = oneOf(given.get("part"), PART_ORDER, s.part);
  s.loaded = given.get("loaded") !== "0";
  s.turn = whole(given.get("turn"), 0, Math.max(0, turnings.length - 1), s.turn);
  if (turnings.length) {
    const t = turnings[s.turn].turning;
    s.way = whole(given.get("way"), 0, t.ways.length - 1, s.way);
    s.pair = whole(given.get("pair"), 0, t.plain.length - 1, s.pair);
  }
  s.q = whole(given.get("q"), 0, MOST_CTX, s.q);
  s.k = whole(given.get("k"), 0, MOST_CTX, s.k);
  s.shift = whole(given.get("shift"), 0, MOST_CTX, s.shift);
  return s;
}

const PART_ORDER = ["embed", "pos_embed", "embed_norm", "attn_norm", "state", "attn", "rotation", "attn_post_norm", "mlp_norm",
  "mlp", "mlp_post_norm", "norm", "head", "other"];
const turnings = [data.start, ...(twoModels ? [data.goal] : [])].flatMap((end) =>
  end.rotations.map((turning, n) => ({ turning, n, of: end.rotations.length, id: end.id })));
