// The last minutes as a line of requests, with what happened as marks on it.

import { clock, number, setText, shape } from "./charts.js";

export const LENGTH_S = 900;
const MARKS = {
  "worker up": ["good", "▲"], "worker down": ["bad", "✕"], migration: ["moved", "→"], drain: ["warned", "▼"], role: ["warned", "⇄"],
  planner: ["planned", "◆"], roll: ["planned", "●"],
};
const STEPS_S = [15, 30, 60, 120, 300];

/** Keeps samples and marks of the last `LENGTH_S`, and draws them into `svg`. */
export function createTimeline(svg, caption, since) {
  const samples = [], marks = new Map();
  return {
    /** `events` are [{time_unix_s, kind, text}], also ones that were given before. */
    add(nowS, perS, badPerS, events) {
      samples.push([nowS, perS ?? 0, badPerS ?? 0]);
      while (samples[0][0] < nowS - LENGTH_S) samples.shift();
      for (const one of events) marks.set(`${one.kind}\n${one.text}\n${one.time_unix_s.toFixed(3)}`, one);
      for (const [key, one] of marks) if (one.time_unix_s < nowS - LENGTH_S) marks.delete(key);
      draw(nowS);
    },
    forget() {
      samples.length = 0;
      marks.clear();
    },
  };

  function draw(nowS) {
    const width = Math.max(300, Math.round(svg.getBoundingClientRect().width) || 900), height = 96, foot = 18, top = 16;
    const fromS = Math.min(nowS - 5, Math.max(samples[0][0], nowS - LENGTH_S));
    const x = (timeS) => ((timeS - fromS) / (nowS - fromS)) * width;
    const most = Math.max(1e-9, ...samples.map(([, perS, bad]) => Math.max(perS, bad)));
    const y = (value) => height - foot - (value / most) * (height - foot - top);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const line = (at) => samples.map((one, index) => `${index ? "L" : "M"}${x(one[0]).toFixed(1)} ${y(one[at]).toFixed(1)}`).join("");
    const drawn = [];
    const step = STEPS_S.find((one) => (nowS - fromS) / one <= width / 110) ?? 300;
    for (let tick = Math.ceil(fromS / step) * step; tick < nowS; tick += step) {
      if (x(tick) < 34 || x(tick) > width - 34) continue;
      drawn.push(shape("line", { class: "tick", x1: x(tick), x2: x(tick), y1: top, y2: height - foot }));
      drawn.push(shape("text", { class: "small in", x: x(tick), y: height - 4 }, clock(tick)));
    }
    if (samples.length > 1) {
      const base = height - foot;
      drawn.push(shape("path", { class: "area", d: `${line(1)}L${x(samples.at(-1)[0])} ${base}L${x(samples[0][0])} ${base}Z` }));
      drawn.push(shape("path", { class: "line", d: line(1) }));
      if (samples.some((one) => one[2] > 0)) drawn.push(shape("path", { class: "line failing", d: line(2) }));
    }
    const said = [];
    for (const one of [...marks.values()].filter((one) => one.time_unix_s >= fromS).sort((a, b) => a.time_unix_s - b.time_unix_s)) {
      const [kind, sign] = MARKS[one.kind] ?? ["planned", "•"], at = Math.min(width - 6, Math.max(6, x(one.time_unix_s)));
      const mark = shape("g", { class: `mark ${kind}` });
      const title = shape("title", {}, `${clock(one.time_unix_s)} ${one.kind}: ${one.text}`);
      mark.append(title, shape("line", { x1: at, x2: at, y1: top, y2: height - foot }), shape("text", { x: at, y: top - 3 }, sign));
      drawn.push(mark);
      said.push(`${clock(one.time_unix_s)} ${one.kind}: ${one.text}`);
    }
    svg.replaceChildren(...drawn);
    setText(since, `since ${clock(fromS)}, ${most > 1e-9 ? `at most ${number(most)} requests/s` : "no requests yet"}`);
    setText(caption, `Requests a second, at most ${number(most)}. ${said.slice(-20).join("; ")}`);
  }
}
