// Everything is drawn from `state`, and the address follows it.

let written = "";

function draw() {
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

let wide = window.innerWidth;
window.addEventListener("resize", () => {
  // A phone's bars come and go, and change the height alone; what is being typed is not drawn over.
  if (window.innerWidth !== wide && document.activeElement?.type !== "number") draw();
  wide = window.innerWidth;
});

let unfolded = [];
window.addEventListener("beforeprint", () => {
  unfolded = [...document.querySelectorAll("details:not([open])")];
  for (const folded of unfolded) folded.open = true;
});
window.addEventListener("afterprint", () => {
  for (const folded of unfolded.splice(0)) folded.open = false;
});

const [equal, all] = proven();
const proof = byId("proof");
proof.textContent = equal === all
  ? `On opening, ${all} of ${all} models here cost exactly what llamactl computed for them.`
  : `${all - equal} of ${all} models here do not cost what llamactl computed for them: do not trust this page.`;
proof.className = equal === all ? "good" : "bad";
document.documentElement.dataset.ready = equal === all ? "yes" : "no";
