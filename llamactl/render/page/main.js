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
  if (window.innerWidth !== wide) draw(); // a phone's bars come and go, and change the height alone
  wide = window.innerWidth;
});

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
