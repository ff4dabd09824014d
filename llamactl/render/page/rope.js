// Rotary positions: one pair seen turning, and the wavelengths of all of them.

function wayName(way) {
  const own = turning().scheme;
  const scheme = way.method || (own === "default" ? "as configured" : `as configured (${own})`);
  return way.target === null ? scheme : `${scheme}, at ${tokens(way.target)} tokens`;
}

// What becomes of a pair: only some schemes blend two frequencies, the others slow each pair by another factor.
function kindWord(letter) {
  const t = turning(), scheme = t.ways[state.way].method || t.scheme;
  return { u: "untouched", b: ["yarn", "llama3"].includes(scheme) ? "blended" : "slowed less", s: "slowed" }[letter];
}

// The training whose angles are meant: a stretched model may have been trained on more, with the stretched ones.
function training() {
  return turning().scheme === "default" ? "training" : "unstretched training";
}

function turning() {
  return turnings[state.turn].turning;
}

function makeRope() {
  byId("rope-body").hidden = turnings.length === 0;
  put("rope-none", ...silentEnds());
  if (!turnings.length) return;
  put("turn", ...turnings.map((t, i) => node("option", { value: i }, `${t.id}${t.of > 1
    ? `, ${t.turning.layers} layers` : ""}: base ${number(t.turning.theta)}`)));
  byId("turn").addEventListener("change", () => {
    state.turn = Number(byId("turn").value);
    state.way = 0;
    state.pair = Math.min(state.pair, turning().plain.length - 1);
    draw();
  });
  byId("way").addEventListener("change", () => { state.way = Number(byId("way").value); draw(); });
  for (const id of ["pair", "q", "k", "shift"]) {
    slid(id, () => { state[id] = Number(byId(id).value); });
  }
  typed("pair-exact", MOST_CTX, (n) => { state.pair = Math.min(n, turning().plain.length - 1); }, 0);
  // What was typed may be far nearer to 0: the picture is drawn for it anew.
  typed("q-exact", MOST_CTX, (n) => { state.q = n; width.of = ""; }, 0);
  typed("k-exact", MOST_CTX, (n) => { state.k = n; width.of = ""; }, 0);
  typed("shift-exact", MOST_CTX, (n) => { state.shift = n; }, 0);
  dragged(byId("score"));
  picked(byId("waves"));
}

function silentEnds() {
  const ends = [data.start, ...(twoModels ? [data.goal] : [])];
  const silent = ends.filter((e) => e.silent !== null).map((e) => `${e.id}: ${e.silent}. `);
  const shown = twoModels && turnings.length ? ["The rotations here are those of the models as published, whatever the "
    + "switches are."] : [];
  return [...new Set(silent), ...shown];
}

// The angle of a position for the pair in view, in radians.
function angle(position) {
  return position * frequency();
}

function frequency() {
  return turning().ways[state.way].frequencies[state.pair];
}

// q and k of this pair, both (1, 0) before they are turned: their product is the pair's share of the score.
function share(q, k) {
  const m = angle(q), n = angle(k);
  return Math.cos(m) * Math.cos(n) + Math.sin(m) * Math.sin(n);
}

function showRope() {
  if (!turnings.length) return;
  const t = turning(), way = t.ways[state.way];
  byId("turn").value = state.turn;
  if (byId("way").dataset.turn !== String(state.turn)) {
    put("way", ...t.ways.map((w, i) => node("option", { value: i }, wayName(w))));
    byId("way").dataset.turn = state.turn;
  }
  byId("way").value = state.way;
  byId("pair").max = t.plain.length - 1;
  byId("pair").value = state.pair;
  byId("pair-exact").value = state.pair;
  const most = span();
  for (const id of ["q", "k", "shift"]) {
    byId(id).max = id === "shift" ? Math.max(t.trained ?? 8192, state.shift) : most;
    byId(id).value = state[id];
    byId(`${id}-exact`).value = state[id];
  }
  const q = state.q + state.shift, k = state.k + state.shift;
  const f = frequency(), s = share(q, k);
  put("rope-numbers", table(["Quantity", `pair ${state.pair}`], [
    row("Share of the score", exact(s, s.toFixed(6), "share", "rope")),
    row("Query, key", exact("", `${number(q)}, ${number(k)}`, "positions", "rope")),
    row("Distance", exact(q - k, number(q - k), "distance", "rope")),
    row("Angle between them", exact(angle(q) - angle(k), `${(angle(q) - angle(k)).toFixed(4)} rad`, "angle", "rope")),
    row("Positions a turn", exact((2 * Math.PI) / f, ((2 * Math.PI) / f).toFixed(4), "wavelength", "rope")),
    row("Frequency", exact(f, `${f.toExponential(6)} rad`, "frequency", "rope")),
    row("Under this scheme", exact(way.kinds[state.pair], kindWord(way.kinds[state.pair])
      + (way.unseen[state.pair] === "1" ? `, goes further than it did in ${training()}` : ""), "kind", "rope")),
    row(`Pairs that go further than in ${training()}`, exact([...way.unseen].filter((u) => u === "1").length,
      `${[...way.unseen].filter((u) => u === "1").length} of ${way.unseen.length}`, "unseen", "rope")),
  ]));
  showDial(q, k);
  showScore();
  showWaves();
}

// The picture's width in positions: both are in it, and eight turns of the pair as far as texts go. It grows at need,
// and stays while a thumb or the key is moved, for a scale that changed under the pointer would not follow it.
let width = { of: "", most: 0 };

function span() {
  const t = turning(), of = `${state.turn} ${state.way} ${state.pair}`;
  const far = Math.max(4096, t.usable ?? t.trained ?? 0, t.ways[state.way].target ?? 0);
  const most = Math.max(32, state.q, state.k, Math.min(far, Math.ceil((8 * 2 * Math.PI) / frequency())));
  if (width.of !== of || most > width.most) width = { of, most };
  return width.most;
}

function showDial(q, k) {
  const c = 110, r = 88;
  const arrow = (a, kind, name) => {
    const x = c + r * Math.cos(a), y = c - r * Math.sin(a);
    return [line(c, c, x, y, kind), drawn("circle", { cx: x, cy: y, r: 5, class: kind }),
      label(c + (r + 12) * Math.cos(a), c - (r + 12) * Math.sin(a) + 4, name, { "text-anchor": "middle" })];
  };
  const said = `q at position ${number(q)} and k at position ${number(k)}, turned as pair ${state.pair} turns them; the `
    + `cosine of the angle between them is ${share(q, k).toFixed(6)}.`;
  put("dial", drawn("svg", { viewBox: "0 0 220 220", role: "img", "aria-label": said },
    drawn("circle", { cx: c, cy: c, r, class: "ring" }), ...arrow(angle(q), "query", "q"), ...arrow(angle(k), "key", "k")));
}

function showScore() {
  fit("score");
  const most = span(), mid = (TOP + H - BOTTOM) / 2, high = (H - TOP - BOTTOM) / 2 - 8;
  const x = (p) => LEFT + (W - LEFT - RIGHT) * (p / most);
  const y = (v) => mid - high * v;
  const steps = 480, step = most / steps, at = (i) => share(state.q, i * step);
  const dense = step * frequency() > Math.PI / 4; // too many turns for single waves: what is drawn is how far they reach
  const points = [], under = [];
  for (let i = 0; i <= steps; i += 1) {
    const [low, high_] = dense ? reached(i * step, step) : [at(i), at(i)];
    points.push(`${x(i * step).toFixed(2)},${y(high_).toFixed(2)}`);
    under.unshift(`${x(i * step).toFixed(2)},${y(low).toFixed(2)}`);
  }
  const q = state.q, k = state.k;
  const parts_ = [-1, 0, 1].flatMap((v) => [line(LEFT, y(v), W - RIGHT, y(v), "axis"),
    label(LEFT - 6, y(v) + 4, String(v), { "text-anchor": "end" })]);
  for (const part of ticks()) {
    const p = Math.round(most * part);
    parts_.push(label(x(p), H - BOTTOM + 16, number(p + state.shift), { "text-anchor": part === 1 ? "end" : "middle" }));
  }
  parts_.push(dense ? drawn("polygon", { points: [...points, ...under].join(" "), class: "held" })
    : drawn("polyline", { points: points.join(" "), class: "line" }),
  line(x(q), TOP, x(q), H - BOTTOM, "query"), label(x(q) + 5, H - BOTTOM - 6, "q"),
    line(x(k), TOP, x(k), H - BOTTOM, "key"),
    drawn("circle", { cx: x(k), cy: y(share(q, k)), r: 8, class: "key handle" }),
    label(x(k) + 10, Math.max(y(share(q, k)) - 8, TOP + 12), "k"),
    label((LEFT + W) / 2, H - 6, "position of the key", { "text-anchor": "middle" }));
  put("score-said", dense ? `Each of ${number(most)} positions has its own height; the pair turns too often here for them `
    + "to be drawn one by one, so the grey is how far they reach. A slower pair, or positions nearer to 0, shows them." : "");
  put("score", svg("score", "One pair's share of the score against the key's position",
    `The query stands at ${number(q + state.shift)}; the key at ${number(k + state.shift)} gives ${share(q, k).toFixed(6)}.`,
    parts_));
}

// The least and the largest share of keys in this stretch: of a whole turn -1 and 1, else of its ends and its tops.
function reached(from, step) {
  const f = frequency(), a = (from - state.q) * f, b = (from + step - state.q) * f;
  const has = (angle_) => Math.ceil((a - angle_) / (2 * Math.PI)) * 2 * Math.PI + angle_ <= b;
  const ends = [Math.cos(a), Math.cos(b)];
  return [has(Math.PI) ? -1 : Math.min(...ends), has(0) ? 1 : Math.max(...ends)];
}

// Where a pointer is in a picture, as a fraction of the plotted width.
function across(event, figure) {
  const picture = figure.querySelector("svg"), box = picture.getBoundingClientRect(), wide = picture.viewBox.baseVal.width;
  const x = ((event.clientX - box.left) / box.width) * wide;
  return Math.min(1, Math.max(0, (x - LEFT) / (wide - LEFT - RIGHT)));
}

function dragged(figure) {
  let held = false;
  const put_ = (e) => {
    state.k = Math.round(across(e, figure) * span());
    draw();
  };
  figure.addEventListener("pointerdown", (e) => {
    if (e.button !== 0) return;
    held = true;
    figure.setPointerCapture(e.pointerId);
    put_(e);
  });
  figure.addEventListener("pointermove", (e) => { if (held) put_(e); });
  for (const end of ["pointerup", "pointercancel"]) figure.addEventListener(end, () => { held = false; });
}

function picked(figure) {
  figure.addEventListener("click", (e) => {
    state.pair = Math.round(across(e, figure) * (turning().plain.length - 1));
    draw();
  });
}

function showWaves() {
  fit("waves");
  const t = turning(), way = t.ways[state.way];
  const before = t.plain.map((f) => (2 * Math.PI) / f), after = way.frequencies.map((f) => (2 * Math.PI) / f);
  const marks = [[t.trained, "trained"], [way.target ?? t.usable, way.target ? "target" : "usable"]].filter(([c]) => c)
    .filter(([c], i, all) => i === 0 || c !== all[0][0]);
  const finite = [...before, ...after].filter(Number.isFinite);
  const most = Math.log10(Math.max(...finite, ...marks.map(([c]) => c))) + 0.2;
  const x = (j) => LEFT + (W - LEFT - RIGHT) * (j / Math.max(1, before.length - 1));
  const y = (v) => H - BOTTOM - (H - TOP - BOTTOM) * (Math.log10(Math.max(1, v)) / most);
  const out = [];
  for (let p = 0; p <= most; p += 1) {
    out.push(line(LEFT, y(10 ** p), W - RIGHT, y(10 ** p), "axis"),
      label(LEFT - 6, y(10 ** p) + 4, `1e${p}`, { "text-anchor": "end" }));
  }
  for (const [c, word] of marks) {
    const said = word === "trained" && training() !== "training" ? "unstretched" : word;
    out.push(line(LEFT, y(c), W - RIGHT, y(c), "limit"),
      label(word === "trained" ? W - RIGHT : LEFT + 6, y(c) + (word === "trained" ? 12 : -4), `${said} ${number(c)}`,
        { class: "limit-text", "text-anchor": word === "trained" ? "end" : "start" }));
  }
  const path = (values) => values.map((v, j) => (Number.isFinite(v) ? `${x(j).toFixed(2)},${y(v).toFixed(2)}` : null))
    .filter(Boolean).join(" ");
  out.push(drawn("polyline", { points: path(before), class: "dashed" }),
    drawn("polyline", { points: path(after), class: "line" }));
  after.forEach((v, j) => {
    if (way.unseen[j] === "1") out.push(drawn("path", { d: `M${x(j) - 4},${y(v) - 4}l8,8m0,-8l-8,8`, class: "unseen" }));
  });
  out.push(drawn("circle", { cx: x(state.pair), cy: y(after[state.pair]), r: 6, class: "key handle" }));
  for (const part of ticks()) {
    const j = Math.round((before.length - 1) * part);
    out.push(label(x(j), H - BOTTOM + 16, String(j), { "text-anchor": "middle" }));
  }
  out.push(label((LEFT + W) / 2, H - 6, "pair", { "text-anchor": "middle" }), label(4, 11, "positions a turn"));
  const kinds_ = (letter) => [...way.kinds].filter((c) => c === letter).length;
  const own = byId("turn").selectedOptions[0].textContent;
  const said = `${own}. Positions a turn of ${before.length} pairs, dashed as in ${training()}, solid ${wayName(way)}: `
    + `${["u", "b", "s"].map((k) => `${kinds_(k)} ${kindWord(k)}`).join(", ")}. `
    + `Crosses: pairs that go further than they did in ${training()}.`;
  put("waves", svg("waves", "Wavelengths of all pairs", said, out));
  put("waves-said", said);
  put("waves-table", table(["pair", "unstretched", "stretched", "kind"], before.map((v, j) => row(String(j),
    exact(v, v.toFixed(4), "before", j), exact(after[j], after[j].toFixed(4), "after", j),
    exact(way.kinds[j], kindWord(way.kinds[j]) + (way.unseen[j] === "1" ? ", unseen" : ""), "kind", j)))));
}
