// What the choice costs, beside where it started and where it goes.

function exact(value, shown, name, which) {
  return node("td", { "data-name": name, "data-column": which, "data-exact": value ?? "" }, shown);
}

function bytesCell(n, name, which) {
  const short = scaled(n);
  return exact(n, node("span", {}, `${number(n)} B`, short ? node("small", {}, ` ${short}`) : null), name, which);
}

function countCell(n, name, which) {
  return exact(n, n === null ? "-" : number(n), name, which);
}

function showNumbers() {
  const all = columns();
  const line = (title, name, cell) => row(title, ...all.map(([which, place]) => cell(place, name, which)));
  const { ctx, batch, kv, w } = state;
  const at = `${tokens(ctx)} tokens${batch > 1 ? ` x ${number(batch)}` : ""}`;
  const rows = [
    line("Parameters", "total", (p, n, c) => countCell(count(p, "total"), n, c)),
    all.some(([, p]) => count(p, "active") !== null)
      ? line("Active for a token", "active", (p, n, c) => countCell(count(p, "active"), n, c)) : null,
    line("Feed-forward's share of the blocks", "ffn_share_blocks", (p, n, c) => exact(ffnShare(p),
      node("span", {}, percent(ffnShare(p)), node("small", {},
        ` ${number(count(p, "feed_forward.total"))} of ${number(count(p, "blocks_total"))}`)), n, c)),
    line(`Weights in ${w}`, "weights_bytes", (p, n, c) => bytesCell(weightBytes(p, w), n, c)),
    line("Cache, elements a token", "elements_per_token", (p, n, c) => exact(elementsPerToken(p),
      node("span", {}, number(elementsPerToken(p)), perToken(p) === null
        ? node("small", {}, " until windows are full") : null), n, c)),
    line(`Cache a token in ${kv}`, "bytes_per_token", (p, n, c) => (perToken(p) === null
      ? exact(null, node("span", {}, "-", node("small", {}, ` ${UNEVEN}`)), n, c) : bytesCell(perToken(p), n, c))),
    line(`Cache at ${at}`, "kv_cache_bytes", (p, n, c) => bytesCell(cacheBytes(p, ctx, batch, kv), n, c)),
    line("The same with all heads kept", "full_heads_bytes", (p, n, c) =>
      bytesCell(fullBytes(p, ctx, batch, kv), n, c)),
    line("All heads over kept", "full_heads_ratio", (p, n, c) => fullRatio(p, n, c)),
    all.some(([, p]) => stateBytes(p, 1) > 0n)
      ? line("State", "state_bytes", (p, n, c) => bytesCell(stateBytes(p, batch), n, c)) : null,
    line(all.some(([, p]) => stateBytes(p, 1) > 0n) ? "Weights, cache and state" : "Weights and cache", "together", (p, n, c) =>
      bytesCell(weightBytes(p, w) + cacheBytes(p, ctx, batch, kv) + stateBytes(p, batch), n, c)),
  ];
  put("numbers", table(["Quantity", ...all.map(([which]) => columnName(which))], rows.filter(Boolean)));
  put("read", ...readings().map((words) => node("li", {}, words)));
  put("warnings", ...warnings().map((words) => node("li", {}, words)));
  put("command", commands().join("\n"));
}

const UNEVEN = "not even: windows are full";

// Bytes that each token adds; null where windows are full, so that a token adds less than the ones before it.
function perToken(place) {
  const one = cacheBytes(place, 1, 1, state.kv);
  return cacheBytes(place, state.ctx, 1, state.kv) === one * BigInt(state.ctx) ? one : null;
}

function fullRatio(p, name, which) {
  const kept = cacheBytes(p, state.ctx, state.batch, state.kv);
  if (kept === 0n) return exact("", "-", name, which);
  const ratio = over(fullBytes(p, state.ctx, state.batch, state.kv), kept);
  return exact(ratio, times(ratio), name, which);
}

// What one can read off the numbers, in sentences.
function readings() {
  const p = state.place;
  const a = parts(p).attn;
  const out = [];
  const kept = elementsPerToken(p);
  const full = Number(fullBytes(p, 1, 1, "bf16")) / 2;
  const { ctx, kv } = state;
  if (kept && perToken(p) === null) {
    const fewer = over(fullBytes(p, ctx, 1, kv), cacheBytes(p, ctx, 1, kv));
    out.push(`Cache at ${tokens(ctx)} tokens: ${fewer === 1 ? "every query head keeps its own K and V"
      : `${times(fewer)} fewer bytes than if every query head kept its own K and V`}${windows(p)}.`);
  } else if (a && kept && shares(p).length) {
    const heads = shares(p)[shares(p).length - 1];
    out.push(p.share === 1
      ? `Cache: each of ${heads} query heads keeps its own K and V: ${number(kept)} elements a token.`
      : `Cache: ${heads} query heads read ${heads / p.share} KV head${heads === p.share ? "" : "s"}, so ${number(kept)} `
        + `elements a token are kept instead of ${number(full)}: ${times(full / kept)} fewer.`);
  } else if (kept && full !== kept) {
    out.push(`Cache: ${number(kept)} elements a token are kept instead of ${number(full)}: ${times(full / kept)} `
      + "fewer.");
  }
  const ff = count(p, "feed_forward.total"), at = attention(p), blocks = count(p, "blocks_total");
  const layers = form(p).layers, m = parts(p).mlp;
  if (form(p).uniform && m && m.each !== null && m.lines.length) {
    out.push(`Feed-forward: ${m.lines.join(", ")}; ${number(ff / layers)} of the ${number(blocks / layers)} parameters of a `
      + `block, beside ${number(at / layers)} of attention: ${percent(ffnShare(p))}.`);
  } else {
    const mixers = count(p, "state_space");
    const beside = [[at, "attention"], [mixers, "recurrent mixers"]].filter(([n]) => n).map(([n, w]) => `${number(n)} of ${w}`);
    out.push(`Feed-forward: ${number(ff)} of the ${number(blocks)} parameters of all blocks, beside ${beside.join(" and ")}: `
      + `${percent(ffnShare(p))}.`);
  }
  return out;
}

// Which layers keep no more than a window, where the context is longer.
function windows(place) {
  return groups(place).filter((g) => g.window !== null && g.window < state.ctx).map((g) =>
    `; ${g.layers} of ${form(place).layers} layers keep ${number(g.window)} tokens at most`).join("");
}

function attention(place) {
  return ["q", "k", "v", "o", "other"].reduce((sum, k) => sum + count(place, `attention.${k}`), 0);
}

function warnings() {
  const out = [data.start, ...(twoModels ? [data.goal] : [])].flatMap((e) => e.notes.map((words) => `${e.id}: ${words}.`));
  for (const [which, p] of columns()) {
    const usable = count(p, "usable");
    if (usable !== null && state.ctx > usable) {
      out.push(`${columnName(which)}: ${number(state.ctx)} tokens is past the ${number(usable)} positions it is made `
        + "for. The bytes are right there, its text may not be.");
    }
    if (groups(p).some((g) => g.padded.includes(state.kv))) {
      out.push(`${columnName(which)}: its rows do not fill whole blocks of ${state.kv}; they are padded here, and `
        + "llama.cpp refuses this cache type.");
    }
  }
  return out;
}

function quoted(word) {
  return /^[\w.@%+=:,/-]+$/.test(word) ? word : `'${word.replace(/'/g, "'\\''")}'`;
}

// What prints the same numbers in a terminal.
function commands() {
  const p = state.place;
  const reached = byWay && twoModels && samePlace(p, goalPlace);
  const name = quoted(reached ? data.goal.id : world(p).reference);
  const set = reached ? "" : editsOf(p).map((e) => ` --set ${quoted(e)}`).join("");
  return [`llamactl params ${name}${set} --dtype ${state.w}`,
    `llamactl kv-cache ${name}${set} --ctx ${state.ctx} --batch ${state.batch} --dtype ${state.kv}`];
}

// Where one comes by throwing the switches one after another, and what one alone taken back does to the goal.
function showSteps() {
  byId("steps-section").hidden = !twoModels;
  if (!twoModels) return;
  const order = switchRows().map(([key, title]) => [key, title]);
  const ladder = [["", data.start.id, startPlace]];
  let place = startPlace;
  const still = []; // switches that change nothing yet: other KV heads that this size's heads cannot be shared by
  for (const [key, title] of order) {
    if (isOn(place, key)) continue;
    const next = flipped(place, key);
    if (samePlace(next, place)) still.push(title);
    else ladder.push([key, `+ ${[...still.splice(0), title].join(", ")}`, next]);
    place = next;
  }
  put("ladder", stepTable("ladder", ladder));
  const taken = byWay ? order.map(([key, title]) => [key, `${data.goal.id} without: ${title}`,
    flipped(goalPlace, key)]) : [];
  byId("taken-back").hidden = taken.length === 0;
  put("without", stepTable("without", [["", data.goal.id, goalPlace], ...taken]));
}

function stepTable(name, steps) {
  const head = ["Model", "Parameters", "Feed-forward's share", `Cache a token, ${state.kv}`, `Cache at ${tokens(state.ctx)}`];
  return table(head, steps.map(([key, title, place]) => {
    const here = samePlace(place, state.place);
    const go = node("button", { type: "button", class: "link", "data-focus": `${name}/${key}`,
      "aria-pressed": here ? "true" : "false",
      onclick: () => setPlace(place) }, title);
    const made = row(go, countCell(count(place, "total"), "total", key), exact(ffnShare(place),
      percent(ffnShare(place)), "ffn_share_blocks", key),
    perToken(place) === null ? exact(null, "-", "bytes_per_token", key)
      : bytesShort(perToken(place), "bytes_per_token", key),
    bytesShort(cacheBytes(place, state.ctx, state.batch, state.kv), "kv_cache_bytes", key));
    if (here) made.className = "here";
    return made;
  }));
}

function bytesShort(n, name, which) {
  return exact(n, `${number(n)} B`, name, which);
}
