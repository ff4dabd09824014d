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
  const most = isMost(place);
  if (key === "goal") {
    return place.world === goalWorld && !byWay ? placed(0, keys, data.goal.share) : goalPlace;
  }
  if (key === "kv") {
    const wished = place.share === aim(place) ? data.start.share : data.goal.share;
    return placed(place.world, place.on, wished);
  }
  const on = new Set(place.world === 0 ? place.on : keys);
  if (on.has(key)) on.delete(key);
  else on.add(key);
  return placed(0, on, place.share, most);
}

// The sharing that the switch for KV heads puts in at this place.
function aim(place) {
  return nearestShare(place, data.goal.share);
}

const kvSwitch = twoModels && data.start.share !== null && data.goal.share !== null
  && data.start.share !== data.goal.share;

// Every switch in the order it is told: [key, title, what it changes].
function switchRows() {
  const rows = data.switches.map((s) => [s.key, s.title, s.changes]);
  if (kvSwitch) {
    const words = (n) => (n === 1 ? "every query head has its own KV head" : `${n} query heads share a KV head`);
    const at = rows.findIndex(([key]) => key === "ffn" || key === "biases" || key === "head");
    rows.splice(at < 0 ? rows.length : at, 0,
      ["kv", "KV heads", [["attention", words(data.start.share), words(data.goal.share)]]]);
  }
  if (twoModels && !byWay) rows.push(["goal", "the rest", data.rest]);
  return rows;
}

function isOn(place, key) {
  if (place.world === goalWorld && !byWay) return key === "kv" ? place.share === data.goal.share : true;
  return key === "kv" ? place.share === aim(place) : place.on.has(key);
}

function makeControls() {
  const rows = switchRows().map(([key, title, changes]) => {
    const box = node("input", { type: "checkbox", role: "switch", id: `switch-${key}`,
      "aria-describedby": `switch-${key}-words` });
    box.addEventListener("change", () => setPlace(flipped(state.place, key)));
    const words = changes.map(([feature, before, after]) => `${feature}: ${before} → ${after}`).join("; ");
    return node("li", {}, node("label", { for: `switch-${key}` }, box, node("span", {}, title)),
      node("p", { class: "soft", id: `switch-${key}-words` }, words));
  });
  put("switches", ...rows);
  byId("edits").hidden = !twoModels; // without a second model there is nothing to switch to
  byId("play").className = twoModels ? "play" : "";
  byId("switches").hidden = rows.length === 0;
  options("kv-dtype", data.cache_dtypes, (v) => { state.kv = v; });
  options("weights-dtype", data.weight_dtypes, (v) => { state.w = v; });
  typed("ctx", MOST_CTX, (n) => { state.ctx = n; });
  typed("batch", MOST_BATCH, (n) => { state.batch = n; });
  slid("ctx-slider", () => { state.ctx = 2 ** Number(byId("ctx-slider").value); });
  slid("batch-slider", () => { state.batch = 2 ** Number(byId("batch-slider").value); });
  slid("kv-heads", () => {
    const options_ = [...shares(state.place)].reverse();
    state.place = { ...state.place, share: options_[Number(byId("kv-heads").value)] };
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
  for (const [key] of switchRows()) byId(`switch-${key}`).checked = isOn(state.place, key);
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
