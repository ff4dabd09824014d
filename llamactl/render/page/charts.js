// Where the parameters live, and the cache against the context.

const COMPONENTS = [
  ["token embedding", ["token_embedding"]], ["positions", ["position_embedding"]],
  ["attention", ["attention.q", "attention.k", "attention.v", "attention.o", "attention.other"]],
  ["feed-forward", ["feed_forward.gate", "feed_forward.up", "feed_forward.down"]],
  ["experts", ["feed_forward.router", "feed_forward.routed_experts", "feed_forward.shared_experts"]],
  ["norms", ["norms"]], ["state space", ["state_space"]], ["output head", ["lm_head"]],
  ["vision", ["vision", "projector"]], ["other", ["other"]],
];

function component(place, names) {
  return names.reduce((sum, n) => sum + (count(place, n) ?? 0), 0);
}

function showBars() {
  const all = columns();
  const there = COMPONENTS.map(([name, names], n) => [name, names, n])
    .filter(([, names]) => all.some(([, p]) => component(p, names)));
  const wide = byId("bars").clientWidth;
  put("bars", ...all.map(([which, place]) => {
    const total = count(place, "total");
    const bar = node("div", { class: "bar-row", role: "img", "aria-label": `${columnName(which)}: ${there.map(([n, names]) =>
      `${n} ${percent(component(place, names) / total)}`).join(", ")}` });
    for (const [name, names, n] of there) {
      const part = component(place, names) / total;
      if (!part) continue;
      const words = `${name} ${percent(part)}`;
      const piece = node("span", { class: `piece c${n}`, title: `${name}: ${number(component(place, names))}` },
        part * wide > 7 * words.length + 8 ? node("span", {}, words) : "");
      piece.style.width = `${100 * part}%`;
      bar.append(piece);
    }
    return node("div", {}, node("p", { class: "bar-name" }, columnName(which), ` ${number(total)}`), bar);
  }));
  put("bars-table", table(["Part", ...all.map(([which]) => columnName(which))], there.map(([name, names, n]) =>
    row(node("span", {}, node("i", { class: `key c${n}` }), ` ${name}`), ...all.map(([which, p]) =>
      exact(component(p, names), node("span", {}, number(component(p, names)),
        node("small", {}, ` ${percent(component(p, names) / count(p, "total"))}`)), name, which))))));
}

// W follows the screen, so that a letter in a picture is as large as one beside it.
let W = 640;
const H = 320, LEFT = 64, RIGHT = 16, TOP = 32, BOTTOM = 40;

function fit(figure) {
  W = Math.round(Math.min(760, Math.max(280, byId(figure).clientWidth || 640)));
}

// Fractions of an axis that are labelled.
function ticks() {
  return W < 480 ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
}

function svg(id, title, said, children) {
  return drawn("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-labelledby": `${id}-name ${id}-text` },
    drawn("title", { id: `${id}-name` }, title), drawn("desc", { id: `${id}-text` }, said), ...children);
}

function label(x, y, words, attributes = {}) {
  return drawn("text", { x, y, ...attributes }, words);
}

function line(x1, y1, x2, y2, kind) {
  return drawn("line", { x1, y1, x2, y2, class: kind });
}

function niceStep(most) {
  const power = 10 ** Math.floor(Math.log10(most / 5 || 1));
  return [1, 2, 5, 10].map((m) => m * power).find((s) => most / s <= 6) ?? 10 * power;
}

function groupName(g) {
  return `${g.kind}${g.window === null ? "" : ` ${number(g.window)}`}, ${g.layers} layer${g.layers === 1 ? "" : "s"}`;
}

// Bytes of what a device would hold at a context: what does not grow with it first, then each group of layers.
function layersAt(place, ctx) {
  const base = (state.loaded ? weightBytes(place, state.w) : 0n) + stateBytes(place, state.batch);
  return [base, ...groups(place).map((g) => groupBytes(g, ctx, state.batch, state.kv))];
}

function together(place, ctx) {
  return layersAt(place, ctx).reduce((a, b) => a + b, 0n);
}

function showCache() {
  fit("cache");
  const place = state.place, list = groups(place);
  const usable = count(place, "usable");
  const far = Math.max(state.ctx, usable ?? 0, 131072);
  const bends = list.map((g) => g.window).filter((w) => w !== null && w < far);
  const stops = [...new Set([0, ...bends, state.ctx, far])].sort((a, b) => a - b);
  const full = (ctx) => fullBytes(place, ctx, state.batch, state.kv)
    + layersAt(place, 0)[0];
  const high = Number(full(far)) || 1;
  const next = data.devices.map((d) => d.memory_bytes).filter((m) => m >= high).sort((a, b) => a - b)[0];
  const most = 1.08 * (next !== undefined && next < 2 * high ? next : high);
  const x = (ctx) => LEFT + (W - LEFT - RIGHT) * (ctx / far);
  const y = (bytes) => H - BOTTOM - (H - TOP - BOTTOM) * (Number(bytes) / most);
  const out = [];
  const unit = ["EiB", "PiB", "TiB", "GiB", "MiB"].map((name, i) => [1024 ** (6 - i), name]).find(([size]) => most >= size)
    ?? [1024, "KiB"];
  const step = niceStep(most / unit[0]);
  for (let v = 0; v * unit[0] <= most; v += step) {
    out.push(line(LEFT, y(v * unit[0]), W - RIGHT, y(v * unit[0]), "axis"),
      label(LEFT - 6, y(v * unit[0]) + 4, `${Number(v.toPrecision(6))} ${unit[1]}`, { "text-anchor": "end" }));
  }
  const sums = stops.map((ctx) => {
    let at = 0n;
    return layersAt(place, ctx).map((b) => { at += b; return at; });
  });
  sums[0].forEach((_, n) => {
    const top = stops.map((ctx, i) => `${x(ctx)},${y(sums[i][n])}`);
    const under = stops.map((ctx, i) => `${x(ctx)},${y(n ? sums[i][n - 1] : 0n)}`).reverse();
    out.push(drawn("polygon", { points: [...top, ...under].join(" "), class: n ? `area g${(n - 1) % 4}` : "area held" }));
  });
  out.push(drawn("polyline", { points: stops.map((c) => `${x(c)},${y(full(c))}`).join(" "), class: "dashed" }));
  const beside = (ctx, down, words) => label(x(ctx) + (ctx > 0.7 * far ? -4 : 4), down, words,
    { "text-anchor": ctx > 0.7 * far ? "end" : "start", class: "limit-text" });
  const fits = devices(most);
  for (const [name, memory] of fits) {
    out.push(line(LEFT, y(memory), W - RIGHT, y(memory), "limit"),
      label(W - RIGHT, y(memory) - 4, name, { "text-anchor": "end", class: "limit-text" }));
  }
  if (usable !== null && usable < far) {
    out.push(line(x(usable), TOP, x(usable), H - BOTTOM, "dashed"),
      beside(usable, 12, `made for ${tokens(usable)}`));
  }
  out.push(line(x(state.ctx), TOP, x(state.ctx), H - BOTTOM, "here"),
    state.ctx === usable && usable < far ? "" : beside(state.ctx, 26, `${tokens(state.ctx)} tokens`));
  for (const part of ticks()) {
    const ctx = Math.round(far * part);
    out.push(label(x(ctx), H - BOTTOM + 16, tokens(ctx), { "text-anchor": part === 1 ? "end" : "middle" }));
  }
  out.push(label((LEFT + W) / 2, H - 6, "context, tokens", { "text-anchor": "middle" }));
  const said = `${columnName("now")}, from 0 to ${number(far)} tokens. At ${number(state.ctx)} tokens: `
    + `${number(together(place, state.ctx))} `
    + `bytes${state.loaded ? " with the weights" : ""}, ${number(full(state.ctx))} if all heads were kept.`;
  put("cache", svg("cache", "Memory against context", said, out));
  put("cache-said", said);
  showGroups(list);
  showDevices(place);
}

// Devices whose memory the picture reaches, far enough apart for their names to be read.
function devices(most) {
  const shown = [];
  for (const d of [...data.devices].sort((a, b) => a.memory_bytes - b.memory_bytes)) {
    const last = shown.length ? shown[shown.length - 1][1] : 0;
    if (d.memory_bytes <= most && d.memory_bytes - last > most / 18) shown.push([d.title, d.memory_bytes]);
  }
  return shown;
}

function showGroups(list) {
  const { ctx, batch, kv } = state;
  put("groups", table(["Layers", "KV heads x (K + V)", `Bytes a token, ${kv}`, `At ${tokens(ctx)} tokens`],
    list.map((g, n) => row(node("span", {}, node("i", { class: `key g${n % 4}` }), ` ${groupName(g)}`),
      exact("", `${g.heads} x (${g.k_dim} + ${g.v_dim})`, "shape", n), countCell(g.bytes[kv], "group_per_token", n),
      bytesCell(groupBytes(g, ctx, batch, kv), "group_bytes", n)))));
}

// The longest context at which weights and cache alone still lie in so much memory; null if none does.
function reach(place, memory) {
  const held = (ctx) => together(place, ctx) <= BigInt(memory);
  if (!held(1)) return null;
  let low = 1, high = MOST_CTX;
  if (held(high)) return high;
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (held(middle)) low = middle;
    else high = middle;
  }
  return low;
}

function showDevices(place) {
  const full = `Full at, tokens, ${state.loaded ? "with" : "without"} the weights`;
  put("devices", table(["Device", "Memory", full], data.devices.map((d) => {
    const most = reach(place, d.memory_bytes);
    const said = most === null ? "too small" : most === MOST_CTX ? `past ${number(MOST_CTX)}` : number(most);
    return row(d.title, bytesShort(BigInt(d.memory_bytes), "memory", d.name), exact(most ?? "", said, "reach", d.name));
  })));
}
