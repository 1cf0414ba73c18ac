// Small pieces of DOM and SVG. Everything that comes from elsewhere becomes a text node.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name === "data") Object.assign(made.dataset, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

export function shape(tag, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

/** Set text only where it changed: a thousand rows are looked at every second. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A line and the area below it; `more` is a second, thinner line at the same scale. */
export function sparkline(svg, values, more = []) {
  const width = 120, height = 40, step = width / Math.max(1, values.length - 1);
  const top = Math.max(1e-9, ...values.filter(Number.isFinite), ...more.filter(Number.isFinite)) * 1.12;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const path = (points) => {
    let text = "", pen = false;
    points.forEach((value, at) => {
      if (!Number.isFinite(value)) { pen = false; return; }
      const x = width - (points.length - 1 - at) * step, y = height - 2 - (value / top) * (height - 6);
      text += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = true;
    });
    return text;
  };
  const line = path(values);
  const drawn = [];
  if (line && !line.slice(1).includes("M") && values.length > 1) {
    const at = (index) => (width - (values.length - 1 - index) * step).toFixed(1);
    const from = at(values.findIndex(Number.isFinite)), to = at(values.findLastIndex(Number.isFinite));
    drawn.push(shape("path", { class: "area", d: `${line}L${to} ${height}L${from} ${height}Z` }));
  }
  if (more.length) drawn.push(shape("path", { class: "line second", d: path(more) }));
  drawn.push(shape("path", { class: "line", d: line }));
  svg.replaceChildren(...drawn);
}

/** Coloured parts of a whole: [[class, fraction], ...]. */
export function bar(node, parts) {
  while (node.children.length > parts.length) node.lastChild.remove();
  while (node.children.length < parts.length) node.append(element("i"));
  parts.forEach(([name, part], at) => {
    const one = node.children[at];
    if (one.className !== name) one.className = name;
    const width = `${(100 * Math.min(1, Math.max(0, part || 0))).toFixed(1)}%`;
    if (one.style.width !== width) one.style.width = width;
  });
}

/** The device and the tiers as boxes, and what moves between them as arcs. */
export function flowDiagram(svg, caption, nodes, edges) {
  const boxWidth = 78, boxHeight = 50, gap = nodes.length > 3 ? 44 : 66;
  const width = nodes.length * boxWidth + (nodes.length - 1) * gap + 8;
  const span = nodes.length - 1, y = 50 + 15 * (span - 1), height = 2 * y + boxHeight;
  svg.setAttribute("viewBox", `0 0 ${Math.max(width, 250)} ${height}`);
  const left = (Math.max(width, 250) - width) / 2 + 4;
  const place = new Map(nodes.map((node, at) => [node.name, at]));
  const middle = (at) => left + at * (boxWidth + gap) + boxWidth / 2;
  const drawn = [], labels = [], said = [];
  for (const edge of edges) {
    const from = place.get(edge.source), to = place.get(edge.target);
    if (from === undefined || to === undefined || from === to) continue;
    const down = to > from, busy = edge.rate > 0;
    const side = down ? 9 : -9;
    const x1 = middle(from) + side, x2 = middle(to) + (down ? -9 : 9);
    const base = down ? y : y + boxHeight, reach = 34 + 26 * (Math.abs(to - from) - 1);
    const control = down ? base - reach : base + reach; // the arc's top is half as high
    const thickness = busy ? Math.min(5, 1.6 + Math.log10(1 + edge.rate)) : 1.2;
    const path = shape("path", { class: busy ? "edge busy" : "edge", d: `M${x1} ${base}Q${(x1 + x2) / 2} ${control} ${x2} ${base}`, "stroke-width": thickness });
    path.style.strokeWidth = thickness;
    drawn.push(path);
    if (busy) {
      const tip = base, flat = down ? -6 : 6;
      drawn.push(shape("path", { class: "tip", d: `M${x2 - 4} ${tip + flat}L${x2} ${tip}L${x2 + 4} ${tip + flat}`, fill: "none", stroke: "currentColor" }));
      // Between neighbours below the arc's top, otherwise above it: so no other arc crosses it.
      const near = Math.abs(to - from) === 1, top = (near ? reach / 2 - 13 : reach / 2 + 5) * (down ? -1 : 1);
      labels.push(shape("text", { x: (x1 + x2) / 2, y: base + top + (down ? 0 : 8) }, edge.label));
      said.push(`${edge.source} to ${edge.target}: ${edge.label} blocks`);
    }
  }
  nodes.forEach((node, at) => {
    const x = middle(at) - boxWidth / 2, filled = Math.min(1, node.part || 0);
    drawn.push(shape("rect", { class: "node", x, y, width: boxWidth, height: boxHeight, rx: 9 }));
    if (filled > 0) drawn.push(shape("rect", { class: `fill f${Math.min(at, 4)}`, x: x + 1, y: y + 1 + (boxHeight - 2) * (1 - filled), width: boxWidth - 2, height: (boxHeight - 2) * filled, rx: 8 }));
    drawn.push(shape("text", { x: middle(at), y: y + 22, class: "in" }, node.name.length > 11 ? `${node.name.slice(0, 10)}…` : node.name));
    drawn.push(shape("text", { x: middle(at), y: y + 37, class: "small in" }, node.note));
    said.push(`${node.name}: ${node.note}`);
  });
  svg.replaceChildren(...drawn, ...labels);
  setText(caption, said.join("; "));
}

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function number(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** [digits, unit] */
export function seconds(value) {
  if (!known(value)) return ["–", ""];
  if (value >= 10) return [value.toFixed(1), "s"];
  if (value >= 1) return [value.toFixed(2), "s"];
  return [value >= 0.01 ? (value * 1e3).toFixed(0) : (value * 1e3).toFixed(1), "ms"];
}

export const time = (value) => seconds(value).join(" ").trim();
export const percent = (part) => (known(part) ? `${Math.round(100 * part)}%` : "–");
export const bytes = (value) => {
  if (!known(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${value >= 100 || at === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[at]}`;
};
export const clock = (unixS) => new Date(unixS * 1000).toLocaleTimeString([], { hour12: false });
