// Markdown as nodes: what a model writes becomes elements made here, never HTML that is parsed.

import { element } from "./charts.js";

const INLINE = /(`+)([\s\S]+?)\1(?!`)|\*\*([^\s*](?:[\s\S]*?[^\s*])?)\*\*|\*([^\s*](?:[^*]*[^\s*])?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;

/** The nodes of a line's text. */
function inline(text) {
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , code, strong, emphasis, name, address] = found;
    nodes.push(text.slice(from, found.index));
    from = found.index + whole.length;
    if (code !== undefined) nodes.push(element("code", { textContent: code.trim() || code }));
    else if (strong !== undefined) nodes.push(element("strong", {}, ...inline(strong)));
    else if (emphasis !== undefined) nodes.push(element("em", {}, ...inline(emphasis)));
    else nodes.push(element("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, ...inline(name)));
  }
  nodes.push(text.slice(from));
  return nodes.filter((one) => one !== "");
}

/** A block of code, with its language and a button that copies it. */
function code(language, lines, copies) {
  const text = lines.join("\n");
  const button = element("button", { type: "button", class: "small", textContent: "Copy" });
  button.addEventListener("click", () => copies(text, button));
  const head = element("div", { class: "code-head" }, element("span", { textContent: language || "code" }), button);
  return element("div", { class: "code" }, head, element("pre", { tabIndex: 0 }, element("code", { textContent: text })));
}

/** The nodes of a text; a fence that is still open holds the rest of it. `copies(text, button)` copies. */
export function markdown(text, copies) {
  const lines = text.split("\n"), blocks = [];
  let paragraph = [];
  const close = () => {
    if (paragraph.length) blocks.push(element("p", {}, ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let at = 0; at < lines.length; at += 1) {
    const line = lines[at];
    const fence = FENCE.exec(line), heading = HEADING.exec(line);
    if (fence) {
      close();
      const inside = [], end = new RegExp(`^ {0,3}\\${fence[1][0]}{${fence[1].length},}\\s*$`);
      for (at += 1; at < lines.length && !end.test(lines[at]); at += 1) inside.push(lines[at]);
      blocks.push(code(fence[2], inside, copies));
    } else if (heading) {
      close();
      // The page has its own headings: these are only as bold.
      blocks.push(element("p", { class: "heading" }, element("strong", {}, ...inline(heading[2]))));
    } else if (ITEM.test(line)) {
      close();
      const numbered = /\d/.test(ITEM.exec(line)[2]);
      const list = element(numbered ? "ol" : "ul");
      if (numbered) list.start = Number.parseInt(ITEM.exec(line)[2], 10);
      let item = null, found = null;
      for (; at < lines.length && ((found = ITEM.exec(lines[at])) ? /\d/.test(found[2]) === numbered : /^\s+\S/.test(lines[at])); at += 1) {
        if (found) list.append(item = element("li", { class: found[1].length > 1 ? "inner" : "" }, ...inline(found[3])));
        else item.append("\n", ...inline(lines[at].trim()));
      }
      at -= 1;
      blocks.push(list);
    } else if (QUOTE.test(line)) {
      close();
      const quoted = [];
      for (; at < lines.length && QUOTE.test(lines[at]); at += 1) quoted.push(QUOTE.exec(lines[at])[1]);
      at -= 1;
      blocks.push(element("blockquote", {}, ...inline(quoted.join("\n"))));
    } else if (line.trim() === "") close();
    else paragraph.push(line);
  }
  close();
  return blocks;
}
