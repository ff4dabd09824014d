// Elements and words. Text only ever goes in as text: names come from files that nobody has checked.

const SVG = "http://www.w3.org/2000/svg";

function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  return filled(made, attributes, children);
}

function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
}

function byId(id) {
  return document.getElementById(id);
}

function put(id, ...children) {
  byId(id).replaceChildren(...children);
}

function number(n) {
  const [whole_, rest] = String(n).split(".");
  return whole_.replace(/\B(?=(\d{3})+(?!\d))/g, ",") + (rest === undefined ? "" : `.${rest}`);
}

// As Python rounds: the nearest, and of two that are as near the even one. Only eighths (of 2 digits) lie between two.
function fixed(x, digits) {
  const near = Math.floor(x * 10 ** digits);
  const between = (x * 2 ** (digits + 1)) % 2 === 1;
  return between ? ((near + (near % 2)) / 10 ** digits).toFixed(digits) : x.toFixed(digits);
}

// 17179869184n -> "17.18 GB, 16.00 GiB": both, named rightly.
function scaled(n) {
  const of = (units, base) => {
    for (let i = units.length; i > 0; i -= 1) {
      const unit = base ** i;
      if (Number(n) >= unit) return `${fixed(Number(n) / unit, 2)} ${units[i - 1]}`;
    }
    return "";
  };
  return [of(["kB", "MB", "GB", "TB", "PB", "EB"], 1000), of(["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"], 1024)].filter(Boolean)
    .join(", ");
}

function percent(x) {
  return x > 0 && x < 0.0005 ? "<0.1%" : `${fixed(100 * x, 1)}%`;
}

function times(x) {
  return `${Number(x.toPrecision(4))}x`;
}

function tokens(n) {
  if (n >= 2 ** 20 && n % 2 ** 20 === 0) return `${n / 2 ** 20}M`;
  return n >= 1024 && n % 1024 === 0 ? `${n / 1024}k` : number(n);
}

function table(head, rows) {
  return node("table", { class: "wide" },
    node("thead", {}, node("tr", {}, ...head.map((h) => node("th", { scope: "col" }, h)))),
    node("tbody", {}, ...rows));
}

function row(name, ...cells) {
  return node("tr", {}, node("th", { scope: "row" }, name), ...cells);
}

function columnName(which) {
  return { start: data.start.id, now: "yours", goal: twoModels ? data.goal.id : "" }[which];
}

// The columns of every comparison: where one starts, what is set now, where one goes.
function columns() {
  if (!twoModels) return [["start", startPlace], ["now", state.place]];
  return [["start", startPlace], ["now", state.place], ["goal", goalPlace]];
}
