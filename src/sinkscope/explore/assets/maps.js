"use strict";
// Maps and curves. Everything is drawn from numbers; text goes into text nodes alone.

const SVG = "http://www.w3.org/2000/svg";

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function drawn(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function shown(value, signed = false) {
  if (value === null || value === undefined) return "\u2013";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 0.001 || size >= 1e5) ? size.toExponential(1) : String(Number(size.toPrecision(3)));
  return (value < 0 ? "\u2212" : signed ? "+" : "") + text;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The share of the colour scale that a value takes, 0 to 1. Attention is a share already; the rest spans decades.
function scaleOf(rows, quantity) {
  if (quantity === "attention_received") return (value) => Math.sqrt(Math.min(1, Math.max(0, value)));
  const known = rows.flat().filter((value) => value > 0);
  const least = Math.log(known.reduce((a, b) => Math.min(a, b), Infinity));
  const most = Math.log(known.reduce((a, b) => Math.max(a, b), 0));
  return (value) => (value > 0 && most > least ? (Math.log(value) - least) / (most - least) : 0);
}

// A map of layers by something, layer 0 at the bottom as in reports. Arrow keys move a mark over it, whose value is told; the table holds all of them.
// part: {now, before}; options: {quantity, change, columns: number -> name, choose: number -> void}
function drawMap(place, part, options) {
  place.replaceChildren();
  if (!part.now) {
    place.append(element("p", { class: "muted" }, "This finished trace keeps the attention by head for its sinks only."));
    return;
  }
  const { now, before } = part, { columns, choose } = options;
  const change = options.change && before !== null;
  const differs = (layer, column) => now[layer][column] - before[layer][column];
  const numLayers = now.length, numColumns = now[0].length;
  const flipped = (layer) => numLayers - 1 - layer;
  const canvas = element("canvas", { tabIndex: 0, role: "img", width: String(numColumns), height: String(numLayers) });
  canvas.setAttribute("aria-label", `${options.label}; arrow keys read its cells, the table below lists them`);
  canvas.style.height = `${Math.max(128, Math.min(360, 12 * numLayers))}px`;
  const told = element("output", { class: "muted cell" });
  const paint = canvas.getContext("2d");
  const share = scaleOf(before ? [...now, ...before] : now, options.quantity);
  let most = 0;
  if (change) now.forEach((row, layer) => row.forEach((_, at) => { most = Math.max(most, Math.abs(differs(layer, at)) || 0); }));
  const ramp = [0, 1, 2, 3, 4].map((number) => rgb(colour(`--map-${number}`)));
  const [card, up, down] = ["--card", "--series-2", "--series-1"].map((name) => rgb(colour(name)));
  const image = paint.createImageData(numColumns, numLayers);
  now.forEach((row, layer) => row.forEach((value, at) => {
    let here = card;
    if (change) {
      const by = most ? differs(layer, at) / most : 0;
      here = mixed(card, by > 0 ? up : down, Math.sqrt(Math.abs(by)));
    } else if (value !== null) {
      const along = 4 * share(value), step = Math.min(3, Math.floor(along));
      here = mixed(ramp[step], ramp[step + 1], along - step);
    }
    image.data.set([...here, 255], 4 * (flipped(layer) * numColumns + at));
  }));
  paint.putImageData(image, 0, 0);
  const name = (layer, at) => {
    const was = before === null ? "" : `, baseline ${shown(before[layer][at])}, change ${shown(differs(layer, at), true)}`;
    return `layer ${layer}, ${columns(at)}: ${shown(now[layer][at])}${was}`;
  };
  let mark = [0, 0];
  const tell = () => { told.textContent = canvas.title = name(...mark); };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const at = Math.floor(((event.clientX - box.left) / box.width) * numColumns);
    const line = Math.floor(((event.clientY - box.top) / box.height) * numLayers);
    mark = [flipped(Math.min(numLayers - 1, Math.max(0, line))), Math.min(numColumns - 1, Math.max(0, at))];
    tell();
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (step) {
      mark = [(mark[0] + step[0] + numLayers) % numLayers, (mark[1] + step[1] + numColumns) % numColumns];
      tell();
      event.preventDefault();
    } else if (event.key === "Enter" && choose) choose(mark[1]);
  });
  canvas.addEventListener("focus", tell);
  if (choose) canvas.addEventListener("click", () => choose(mark[1]));
  // The table is made when it is opened: a map has thousands of cells.
  const listed = element("details", {}, element("summary", {}, "Table"));
  listed.addEventListener("toggle", () => {
    if (!listed.open || listed.querySelector("table")) return;
    const head = element("tr", {}, element("th", { scope: "col" }, "layer"));
    for (let at = 0; at < numColumns; at++) head.append(element("th", { scope: "col" }, columns(at)));
    const body = now.map((row, layer) => {
      const line = element("tr", {}, element("th", { scope: "row" }, String(layer)));
      row.forEach((value, at) => line.append(element("td", { class: "number" }, change ? shown(differs(layer, at), true) : shown(value))));
      return line;
    });
    listed.append(element("div", { class: "scroll", tabIndex: 0 }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body))));
  });
  const ends = numLayers > 1 ? [numLayers - 1, 0] : [0];
  const axis = element("div", { class: "axis muted" }, ...ends.map((layer) => element("span", {}, `layer ${layer}`)));
  place.append(element("div", { class: "framed" }, axis, canvas), told, listed);
}

function rgb(text) {
  const hex = text.slice(1);
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

const mixed = (from, to, share) => from.map((value, at) => Math.round(value + (to[at] - value) * share));

// One panel of the chain: curves over layers, on a log scale unless it is attention.
function drawPanel(panel) {
  const wide = 200, high = 90;
  const series = [["rest", panel.elsewhere], ["was", panel.before], ["now", panel.now]].filter(([, values]) => values);
  const isShare = panel.quantity === "attention_received";
  const height = (value) => (isShare ? value : value > 0 ? Math.log10(value) : null);
  const known = series.flatMap(([, values]) => values.map(height)).filter((value) => value !== null);
  const least = isShare ? 0 : Math.min(...known), most = isShare ? 1 : Math.max(...known);
  const picture = drawn("svg", { viewBox: `-4 -6 ${wide + 8} ${high + 12}`, role: "img", "aria-label": `${panel.meaning}, by layer` });
  for (const [look, values] of series) {
    let path = "", pen = "M";
    values.forEach((value, layer) => {
      const at = height(value);
      if (at === null) { pen = "M"; return; }
      const x = (wide * layer) / Math.max(1, values.length - 1);
      const y = high - (high * (at - least)) / (most - least || 1);
      path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = "L";
    });
    picture.append(drawn("path", { d: path, class: look }));
  }
  const rows = panel.now.map((value, layer) => element("tr", {}, element("th", { scope: "row" }, String(layer)),
    ...series.map(([, values]) => element("td", { class: "number" }, shown(values[layer])))));
  const heads = ["layer", ...series.map(([look]) => ({ rest: "others", was: "baseline", now: "now" })[look])];
  const ends = !known.length ? "not read here" : isShare ? "0 to 1" : `${shown(10 ** least)} to ${shown(10 ** most)}, log`;
  return element("div", { class: "panel" }, element("p", { class: "caption" }, panel.meaning), picture,
    element("p", { class: "caption muted" }, ends),
    element("details", {}, element("summary", {}, "Table"), element("table", {},
      element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))), element("tbody", {}, ...rows))));
}
