// Looking up: every value comes from a table that llamactl filled by costing the model itself.

const data = JSON.parse(document.getElementById("data").textContent);
const keys = data.switches.map((s) => s.key);
const twoModels = data.goal !== null;
const byWay = data.worlds.length === 1; // the switches lead all the way to the goal
const goalWorld = data.worlds.length - 1;

// A place is {world, on: Set of switches, share: query heads to a KV head or null, wish: whose sharing that follows}.
function look(table, place) {
  const key = table.by.map((c) => (c === "share" ? String(place.share ?? "") : place.on.has(c) ? "1" : "0"));
  return table.values[key.join(",")];
}

function world(place) {
  return data.worlds[place.world];
}

function count(place, name) {
  const table = world(place).counts[name];
  return table ? look(table, place) : null;
}

function shares(place) {
  return look(world(place).shares, place);
}

// The sharing of the "start" or the "goal" at this place, as llamactl found it nearest; of what was set by hand ("own")
// the same one, MQA for MQA, else the next smaller one.
function nearestShare(place, wish, own, most) {
  const options = shares(place);
  if (!options.length) return null;
  if (wish !== "own") return aim(place, wish);
  if (most) return options[options.length - 1];
  return options.filter((s) => s <= own).pop() ?? options[0];
}

function aim(place, wish) {
  return look(world(place).aims, place)[wish === "start" ? 0 : 1];
}

function placed(worldIndex, on, wish, own = null, most = false) {
  const place = { world: worldIndex, on: new Set(on), share: null, wish };
  place.share = nearestShare(place, wish, own, most);
  return place;
}

// The same place with this sharing, which follows an end's where it is that end's.
function sharing(place, share) {
  const wish = ["goal", "start"].find((w) => aim(place, w) === share) ?? "own";
  return { ...place, share, wish };
}

const startPlace = placed(0, [], "start");
const goalPlace = twoModels ? placed(goalWorld, byWay ? keys : [], "goal") : startPlace;

function samePlace(a, b) {
  return a.world === b.world && a.share === b.share && a.on.size === b.on.size && [...a.on].every((k) => b.on.has(k));
}

function editsOf(place) {
  return world(place).edits.flatMap((table) => look(table, place));
}

function parts(place) {
  const found = {};
  for (const [key, table] of Object.entries(world(place).parts)) {
    const part = look(table, place);
    if (part) found[key] = part;
  }
  return found;
}

function form(place) {
  return look(world(place).form, place);
}

function groups(place) {
  return look(world(place).cache, place);
}

// Multiplying: coefficients times batch times the tokens a layer still sees. BigInt, so that no digit is lost.
function cells(group, ctx) {
  return group.window === null ? ctx : Math.min(ctx, group.window);
}

function groupBytes(group, ctx, batch, dtype) {
  return BigInt(group.bytes[dtype]) * BigInt(cells(group, ctx)) * BigInt(batch);
}

function cacheBytes(place, ctx, batch, dtype) {
  return groups(place).reduce((sum, g) => sum + groupBytes(g, ctx, batch, dtype), 0n);
}

function fullBytes(place, ctx, batch, dtype) {
  return groups(place).reduce((sum, g) => sum + BigInt(g.full_bytes[dtype]) * BigInt(cells(g, ctx)) * BigInt(batch),
    0n);
}

function elementsPerToken(place) {
  return groups(place).reduce((sum, g) => sum + g.elements, 0);
}

function stateBytes(place, batch) {
  return BigInt(look(world(place).state_bytes, place)) * BigInt(batch);
}

function weightBytes(place, dtype) {
  const [block, bytes] = data.dtypes[dtype].map(BigInt);
  return ((BigInt(count(place, "total")) + block - 1n) / block) * bytes;
}

// a / b to the nearest double, as Python divides whole numbers: 64 bits of it, and whether anything was left.
function over(a, b) {
  const bits = (a << 64n) / b;
  return Number(bits | ((a << 64n) % b ? 1n : 0n)) / 2 ** 64;
}

function ffnShare(place) {
  return count(place, "feed_forward.total") / count(place, "blocks_total");
}

// The page finds the numbers again that llamactl gave it finished. Returns [equal, all].
function proven() {
  let equal = 0;
  for (const p of data.proofs) {
    const place = { world: p.world, on: new Set(p.on), share: p.share };
    const same = count(place, "total") === p.total && ffnShare(place) === p.ffn_share_blocks
      && weightBytes(place, p.weights_dtype) === BigInt(p.weights_bytes)
      && cacheBytes(place, p.ctx, p.batch, p.dtype) === BigInt(p.kv_cache_bytes)
      && fullBytes(place, p.ctx, p.batch, p.dtype) === BigInt(p.full_heads_bytes);
    equal += same ? 1 : 0;
  }
  return [equal, data.proofs.length];
}
