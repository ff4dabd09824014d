// Switches, sliders and fields. Each changes `state` and has everything drawn anew.

function setPlace(place) {
  state.place = place;
  draw();
}

function isMost(place) {
  const options = shares(place);
  return options.length > 1 && place.share === options[options.length - 1];
}

// Throw or take back one switch; KV heads keep their proportion at the other size.
function flipped(place, key) {
  const atGoal = place.world === goalWorld && !byWay;
  if (key === "goal") return atGoal ? placed(0, keys, "goal") : goalPlace;
  if (key === "kv") return placed(place.world, place.on, isOn(place, "kv") ? "start" : "goal");
  const on = new Set(atGoal ? keys : place.on);
  if (on.has(key)) on.delete(key);
  else on.add(key);
  return placed(0, on, place.wish, place.share, isMost(place));
}

const kvSwitch = twoModels && data.start.share !== null && data.goal.share !== null
  && Object.values(data.worlds[0].aims.values).some(([a, b]) => a !== b);

// Every switch in the order it is told: [key, title, what it changes].
function switchRows() {
  const rows = data.switches.map((s) => [s.key, s.title, told(s.changes)]);
  if (kvSwitch) {
    const at = rows.findIndex(([key]) => key === "ffn" || key === "biases" || key === "head");
    rows.splice(at < 0 ? rows.length : at, 0,
      ["kv", "KV heads", told([["attention", shareWords(startPlace), shareWords(goalPlace)]])]);
  }
  if (twoModels && !byWay) rows.push(["goal", "the rest", `only with every edit: ${told(data.rest)}`]);
  return rows;
}

function told(changes) {
  return changes.map(([feature, before, after]) => `${feature}: ${before} → ${after}`).join("; ");
}

function shareWords(place) {
  if (place.share === 1) return "every query head has its own KV head";
  return `${isMost(place) ? "all " : ""}${place.share} query heads share a KV head`;
}

// Where a size's heads cannot be shared as the goal's are: what the switch puts in there.
function kvNote(place) {
  const there = placed(place.world, place.on, "goal");
  const same = there.share === goalPlace.share || (isMost(there) && isMost(goalPlace));
  return same ? "" : `; at this size, of ${Math.max(...shares(place))} heads, ${shareWords(there)}`;
}

function isOn(place, key) {
  if (key === "kv") return place.wish === "goal";
  return place.world === goalWorld && !byWay ? true : place.on.has(key);
}

function makeControls() {
  const rows = switchRows().map(([key, title, words]) => {
    const box = node("input", { type: "checkbox", role: "switch", id: `switch-${key}`,
      "aria-describedby": `switch-${key}-words` });
    box.addEventListener("change", () => setPlace(flipped(state.place, key)));
    return node("li", {}, node("label", { for: `switch-${key}` }, box, node("span", {}, title)),
      node("p", { class: "soft", id: `switch-${key}-words` }, words));
  });
  put("switches", ...rows);
  byId("edits").hidden = rows.length === 0; // without a second model there is nothing to switch to
  byId("play").className = rows.length ? "play" : "";
  options("kv-dtype", data.cache_dtypes, (v) => { state.kv = v; });
  options("weights-dtype", data.weight_dtypes, (v) => { state.w = v; });
  typed("ctx", MOST_CTX, (n) => { state.ctx = n; });
  typed("batch", MOST_BATCH, (n) => { state.batch = n; });
  slid("ctx-slider", () => { state.ctx = 2 ** Number(byId("ctx-slider").value); });
  slid("batch-slider", () => { state.batch = 2 ** Number(byId("batch-slider").value); });
  slid("kv-heads", () => {
    const options_ = [...shares(state.place)].reverse();
    state.place = sharing(state.place, options_[Number(byId("kv-heads").value)]);
  });
  byId("loaded").addEventListener("change", () => { state.loaded = byId("loaded").checked; draw(); });
  byId("all-off").addEventListener("click", () => setPlace(startPlace));
  byId("all-on").addEventListener("click", () => setPlace(goalPlace));
  byId("all-off").textContent = `As ${data.start.id}`;
  byId("all-on").textContent = twoModels ? `As ${data.goal.id}` : "";
  byId("all-on").hidden = !twoModels;
}

function options(id, names, set) {
  put(id, ...names.map((n) => node("option", { value: n }, n)));
  byId(id).addEventListener("change", () => { set(byId(id).value); draw(); });
}

function typed(id, most, set, least = 1) {
  byId(id).setAttribute("max", most);
  byId(id).addEventListener("change", () => {
    const n = whole(byId(id).value, least, most, null);
    if (n !== null) set(n);
    draw();
  });
}

function slid(id, set) {
  byId(id).addEventListener("input", () => { set(); draw(); });
}

function showControls() {
  for (const [key, , words] of switchRows()) {
    byId(`switch-${key}`).checked = isOn(state.place, key);
    put(`switch-${key}-words`, words, key === "kv" ? kvNote(state.place) : "");
  }
  byId("kv-dtype").value = state.kv;
  byId("weights-dtype").value = state.w;
  byId("ctx").value = state.ctx;
  byId("batch").value = state.batch;
  byId("ctx-slider").value = Math.round(Math.log2(state.ctx));
  byId("ctx-slider").setAttribute("aria-valuetext", `${number(state.ctx)} tokens`);
  byId("batch-slider").value = Math.round(Math.log2(state.batch));
  byId("batch-slider").setAttribute("aria-valuetext", `${number(state.batch)} sequences`);
  byId("loaded").checked = state.loaded;
  const all = [...shares(state.place)].reverse();
  const slider = byId("kv-heads");
  slider.disabled = all.length < 2;
  slider.max = Math.max(0, all.length - 1);
  slider.value = all.indexOf(state.place.share);
  const said = all.length ? kvWords(state.place) : "no heads of keys and values that could be set alike in all layers";
  slider.setAttribute("aria-valuetext", said);
  put("kv-heads-said", said);
}

function kvWords(place) {
  const heads = shares(place)[shares(place).length - 1];
  const kept = heads / place.share;
  if (place.share === 1) return `${kept} KV heads, one for each query head (MHA)`;
  return `${kept} KV head${kept === 1 ? "" : "s"}, ${place.share} of ${heads} query heads share one (${
    kept === 1 ? "MQA" : "GQA"})`;
}
