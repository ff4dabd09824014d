// Everything is drawn from `state`, and the address follows it.

let written = "";

function draw() {
  fitted();
  const focus = document.activeElement?.dataset?.focus;
  showControls();
  showNumbers();
  showSteps();
  showBlocks();
  showBars();
  showCache();
  showRope();
  // What was drawn anew is another element: a keyboard must not lose its place.
  if (focus) [...document.querySelectorAll("[data-focus]")].find((e) => e.dataset.focus === focus)?.focus();
  written = toAddress(state);
  if (written !== location.hash) history.replaceState(null, "", written);
}

function readAddress() {
  if (location.hash !== written) {
    Object.assign(state, fromAddress(location.hash));
    draw();
  }
}

makeControls();
makeRope();
Object.assign(state, fromAddress(location.hash));
draw();
window.addEventListener("hashchange", readAddress);

window.addEventListener("resize", () => { if (fitted()) draw(); });

window.addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
});

const [equal, all] = proven();
const proof = byId("proof");
proof.textContent = equal === all
  ? `On opening, ${all} of ${all} models here cost exactly what llamactl computed for them.`
  : `${all - equal} of ${all} models here do not cost what llamactl computed for them: do not trust this page.`;
proof.className = equal === all ? "good" : "bad";
document.documentElement.dataset.ready = equal === all ? "yes" : "no";
