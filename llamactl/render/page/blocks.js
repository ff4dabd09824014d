// The two blocks, part by part in the order a token meets them.

function kinds(key, part, both = false) {
  const [title, form_, words] = data.texts[part.kind];
  const formula = form_.replace("{}", part.fill);
  const place = { attn_norm: both ? "before both" : "before attention", attn_post_norm: "after attention",
    mlp_norm: "before feed-forward", mlp_post_norm: "after feed-forward", norm: "at the end",
    embed_norm: "on the embedding" }[key];
  return { title: place ? `${title} ${place}` : title, name: title, formula, words };
}

// "" for a part that both have alike, "size" where only its numbers differ, "kind" where it is another thing.
function changed(key, mine, other) {
  const a = mine[key], b = other[key];
  if (!a || !b || a.kind !== b.kind || worded(a) !== worded(b)) return "kind";
  return a.words !== b.words || a.params !== b.params ? "size" : "";
}

function worded(part) {
  return part.words.replace(/\d[\d,.]*/g, "#");
}

// How many blocks have a part, where that is not said already.
function where(part, layers) {
  const some = part.blocks && part.blocks < layers && !part.words.includes(` of ${layers} layers`);
  return some ? `; in ${part.blocks} of ${layers} blocks` : "";
}

function partButton(key, mine, other, column, layers) {
  const part = mine[key];
  const { name } = kinds(key, part);
  const mark = other ? changed(key, mine, other) : "";
  const said = { kind: "another kind", size: "another size", "": "" }[mark];
  return node("button", { type: "button", class: `part ${mark}`, "data-part": key, "data-column": column,
    "data-focus": `${column}/${key}`, "aria-pressed": state.part === key ? "true" : "false",
    onclick: () => choose(key, column) },
  node("strong", {}, name), said ? node("em", {}, said) : null, node("span", {}, part.words, where(part, layers)));
}

function choose(key, column) {
  state.part = key;
  draw();
  const panel = byId("part-section");
  panel.className = "held";
  const own = panel.querySelector(`.explained[data-column="${column}"]`), first = panel.querySelector(".explained");
  panel.scrollTop = own.offsetTop - first.offsetTop; // where they stand below each other, the one that was chosen
}

function sum(words, stream = true) {
  return node("div", { class: stream ? "sum stream" : "sum", role: "img", "aria-label": words }, node("span", {}, "+"));
}

function branch(keysOf, mine, button, afterSum) {
  const inside = keysOf.filter((k) => mine[k] && !(afterSum && k.endsWith("post_norm")));
  const after = keysOf.filter((k) => mine[k] && afterSum && k.endsWith("post_norm"));
  if (inside.length === 0) return [];
  return [node("div", { class: "branch" }, ...inside.map(button)), sum("added to the stream"), ...after.map(button)];
}

function sharedNorm(mine, f) {
  return Boolean(f.parallel && mine.attn_norm && !mine.mlp_norm);
}

function column(which, place, otherPlace) {
  const mine = parts(place), other = otherPlace ? parts(otherPlace) : null, f = form(place);
  const button = (k) => partButton(k, mine, other, which, f.layers);
  const has = (list) => list.filter((k) => mine[k]);
  const shared = sharedNorm(mine, f) ? ["attn_norm"] : []; // one norm, whose output both branches read
  const first = ["attn_norm", "state", "rotation", "attn", "attn_post_norm"];
  const second = ["mlp_norm", "mlp", "mlp_post_norm"];
  const block = f.parallel
    ? [node("div", { class: "branch" }, ...shared.map(button),
      node("div", { class: "two" }, node("div", {}, ...has(first).filter((k) => !shared.includes(k)).map(button)),
        node("div", {}, node("p", { class: "at-once" }, "beside it, on the same input"), ...has(second).map(button)))),
    sum("both added to the stream")]
    : [...branch(first, mine, button, f.after_sum), ...branch(second, mine, button, f.after_sum)];
  return node("div", { class: "column", "data-column": which, role: "group",
    "aria-label": `The block of ${columnName(which)}` },
  node("h3", {}, columnName(which)),
  node("div", { class: "flow" },
    ...has(["embed"]).map(button), ...(mine.pos_embed ? [sum("positions are added", false), button("pos_embed")] : []),
    ...has(["embed_norm"]).map(button),
    node("div", { class: "block" }, node("p", { class: "times" }, `${f.layers} x`,
      f.uniform ? "" : " (blocks differ; each part as most that have it)"), ...block),
    ...has(["norm", "head", "other"]).map(button)));
}

function showBlocks() {
  const made = twoModels
    ? [column("start", startPlace, state.place), column("now", state.place, startPlace)]
    : [column("now", state.place, null)];
  byId("reader").className = twoModels ? "reader" : "reader single";
  put("blocks", ...made);
  const all = columns();
  put("features", table(["Feature", ...all.map(([which]) => columnName(which))], Object.keys(data.worlds[0].words)
    .map((name) => row(name, ...all.map(([which, p]) => exact("", look(world(p).words[name], p), name, which))))));
  showPart();
}

// The explanation of the part that was chosen, beside the same place in the other block.
function showPart() {
  const sides = twoModels ? [["start", startPlace], ["now", state.place]] : [["now", state.place]];
  const found = sides.map(([which, place]) => [which, place, parts(place)[state.part]]);
  put("part", ...found.map(([which, place, part]) => {
    const heading = node("h3", {}, columnName(which), ": ",
      part ? kinds(state.part, part, sharedNorm(parts(place), form(place))).title : "nothing stands here");
    if (!part) return node("div", { class: "explained", "data-column": which }, heading);
    const { formula, words } = kinds(state.part, part);
    return node("div", { class: "explained", "data-column": which }, heading,
      formula ? node("p", {}, node("code", {}, formula)) : null,
      node("p", {}, words), node("p", {}, part.words, where(part, form(place).layers)),
      node("ul", {}, ...costs(part, place).map((l) => node("li", {}, l))));
  }));
}

function costs(part, place) {
  const total = count(place, "total");
  const out = [...part.lines];
  if (part.each !== null && part.params) {
    out.push(`parameters: ${number(part.each)} a block, ${number(part.params)} in all ${form(place).layers}`);
  } else {
    out.push(`parameters: ${number(part.params)}`);
  }
  out.push(`${percent(part.params / total)} of the whole model`);
  if (state.part === "state") out.push(`state: ${number(stateBytes(place, state.batch))} B, at any context`);
  if (state.part === "attn") {
    const bytes = cacheBytes(place, state.ctx, state.batch, state.kv);
    out.push(`cache at ${tokens(state.ctx)} tokens: ${number(bytes)} B, ${scaled(bytes)}`);
  }
  return out;
}
