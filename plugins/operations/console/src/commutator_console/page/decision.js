// Why a request went where it went: the candidates' scores as bars, and its prompt as blocks.

import { element, number } from "./charts.js";

const MOST_SQUARES = 320;

/** Bars of the first term of each candidate's scores, with all terms as words below. */
export function scoreBars(chosen, scores, leftOut) {
  const found = Object.entries(scores);
  if (!found.length) return [element("p", { class: "muted", textContent: "This policy compares no scores." })];
  const [[, terms]] = found, by = Object.keys(terms)[0];
  const values = found.map(([, one]) => one[by] ?? 0), most = Math.max(1e-9, ...values);
  const rows = found.map(([worker, one], at) => {
    const fill = element("i", { class: worker === chosen ? "k0" : "k4" });
    fill.style.width = `${(100 * Math.max(0, values[at]) / most).toFixed(1)}%`;
    const rest = Object.entries(one).slice(1).map(([name, value]) => `${words(name)} ${number(value)}`);
    return element("li", { class: worker === chosen ? "chosen" : "" },
      element("span", { class: "id", textContent: worker }), element("div", { class: "bar" }, fill),
      element("strong", { textContent: number(values[at]) }), element("span", { class: "more", textContent: rest.join(" · ") }));
  });
  const nodes = [element("p", { class: "muted", textContent: `By ${words(by)}:` }), element("ul", { class: "scores" }, ...rows)];
  if (leftOut) nodes.push(element("p", { class: "muted", textContent: `and ${number(leftOut)} more candidates` }));
  return nodes;
}

const words = (name) => name.replaceAll("_", " ");

/** The prompt's blocks in order, coloured by where they were found: parts are [name, class, blocks]. */
export function promptBlocks(blockSize, parts) {
  const there = parts.filter(([, , count]) => count > 0);
  const total = there.reduce((sum, [, , count]) => sum + count, 0);
  if (!total) return [];
  const each = Math.ceil(total / MOST_SQUARES);
  const squares = there.flatMap(([, kind, count]) => Array.from({ length: Math.max(1, Math.round(count / each)) }, () => element("i", { class: kind })));
  const legend = there.map(([name, kind, count]) => element("li", { class: kind, textContent: `${name}: ${number(count)}` }));
  const size = each > 1 ? `, ${number(each)} for each square` : "";
  return [
    element("p", { class: "muted", textContent: `The prompt's ${number(total)} blocks of ${number(blockSize)} tokens${size}:` }),
    element("div", { class: "blocks", ariaHidden: "true" }, ...squares),
    element("ul", { class: "legend" }, ...legend),
  ];
}

const PLACES = { device: "k0", host: "k1", disk: "k2", external: "k3" };

/** Parts for `promptBlocks`: what of a prompt was cached, by place as far as `overlap` tells, and the rest. */
export function partsOf(promptTokens, cachedTokens, blockSize, { overlap = {}, elsewhere = "" } = {}) {
  const total = Math.ceil(promptTokens / blockSize);
  let left = Math.min(total, Math.floor((cachedTokens ?? 0) / blockSize));
  const parts = [];
  for (const [place, kind] of Object.entries(PLACES)) {
    const count = Math.min(left, overlap[place] ?? 0);
    parts.push([`found on ${place}`, kind, count]);
    left -= count;
  }
  parts.push([Object.values(overlap).some(Boolean) ? "found, too" : "found in a cache", "k0", left]);
  const found = parts.reduce((sum, [, , count]) => sum + count, 0);
  parts.push([elsewhere ? `computed at ${elsewhere}` : "computed", "k4", total - found]);
  return parts;
}
