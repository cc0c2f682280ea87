// The Stats tab. Saves a plot as SVG or PNG, made from the picture on the page: on white, with the
// colours of a light page, whatever the page looks like now. Keeps open what a person unfolded.
import { download } from "./ui.js";

const SCALE = 2; // pixels of the PNG for one unit of the picture
const INK = "#1f2937";

function standalone(plot) {
  const copy = plot.cloneNode(true);
  const [, , width, height] = plot.getAttribute("viewBox").split(" ").map(Number);
  copy.setAttribute("width", String(width));
  copy.setAttribute("height", String(height));
  copy.setAttribute("color", INK);
  copy.removeAttribute("class");
  const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of [["width", "100%"], ["height", "100%"], ["fill", "#ffffff"]]) {
    ground.setAttribute(name, value);
  }
  copy.prepend(ground);
  return { text: new XMLSerializer().serializeToString(copy), width, height };
}

function offer(blob, name) {
  const address = URL.createObjectURL(blob);
  download(address, name);
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

async function savePng(picture, name) {
  const image = new Image();
  const encoded = btoa(String.fromCharCode(...new TextEncoder().encode(picture.text)));
  image.src = `data:image/svg+xml;base64,${encoded}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = picture.width * SCALE;
  canvas.height = picture.height * SCALE;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => offer(blob, `${name}.png`), "image/png");
}

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("button.ls-save");
  const plot = button?.closest("figure")?.querySelector("svg.ls-plot");
  if (!plot) return;
  const name = `localspec-${button.closest("figure").dataset.name}`;
  const picture = standalone(plot);
  if (button.dataset.as === "png") savePng(picture, name);
  else offer(new Blob([picture.text], { type: "image/svg+xml" }), `${name}.svg`);
});

// A fold that a person opened stays open when its content is drawn anew. Gradio draws as many rows as
// before by changing them in place, and then takes `open` away.
document.addEventListener("click", (event) => {
  const fold = event.target.closest?.("details.ls-fold > summary")?.parentElement;
  const box = fold?.closest("#ls-plots-box, #ls-figures, #ls-turns");
  if (!box) return;
  if (!box.dataset.fold) {
    new MutationObserver(() => {
      const drawn = box.querySelector("details.ls-fold");
      if (drawn && !drawn.open && box.dataset.fold === "open") drawn.open = true;
    }).observe(box, { childList: true, subtree: true, attributeFilter: ["open"] });
  }
  box.dataset.fold = fold.open ? "closed" : "open"; // the click has not changed it yet
});
