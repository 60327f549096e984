"use strict";

// Markdown to DOM nodes. All text becomes text nodes: markup in an answer is shown, never parsed.

/** Return an element. Attributes named on* are listeners; null and false are left out. */
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) {
      node.setAttribute(key, value === true ? "" : value);
    }
  }
  node.append(...children);
  return node;
}

/** Shows Markdown that grows. Blocks whose source is unchanged keep their nodes, and so does the
 *  beginning of code. */
class MarkdownView {
  constructor(node) {
    this.node = node;
    this.shown = []; // {source, node, language} of each block
  }

  update(text) {
    const lines = text.replaceAll("\r\n", "\n").split("\n");
    let index = 0;
    for (const block of blocks(lines)) {
      const source = lines.slice(block.start, block.end).join("\n");
      const old = this.shown[index];
      if (old?.source !== source) {
        let node = old?.node;
        if (node?.grow && old.language === block.language) {
          node.grow(block.code.join("\n"));
        } else {
          node = renderBlock(block, 0);
          if (old) old.node.replaceWith(node);
          else this.node.append(node);
        }
        this.shown[index] = { source, node, language: block.language };
      }
      index++;
    }
    for (const old of this.shown.splice(index)) old.node.remove();
  }
}

const MAX_LINE = 5000; // characters; longer lines are plain text, as patterns would take long
const MAX_INLINE = 20000; // characters of a paragraph with markup
const MAX_DEPTH = 8; // of lists and quotes, and of emphasis
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;

/** Yield the blocks of lines: {kind, start, end, ...}, where lines[start:end] is the source. */
function* blocks(lines) {
  let at = 0;
  while (at < lines.length) {
    const start = at;
    const line = lines[at].length > MAX_LINE ? "" : lines[at];
    let found;
    if (!lines[at].trim()) {
      at++;
    } else if ((found = FENCE.exec(line))) {
      const [mark, indent] = [found[1], line.search(/\S/)];
      const isEnd = (text) => {
        const end = text.trim();
        return end.length >= mark.length && end === mark[0].repeat(end.length);
      };
      for (at++; at < lines.length && !isEnd(lines[at]); at++);
      const code = lines.slice(start + 1, at).map((text) => dedent(text, indent));
      at = Math.min(at + 1, lines.length);
      yield { kind: "code", language: found[2].trim().split(/[\s{]/)[0], code, start, end: at };
    } else if ((found = HEADING.exec(line))) {
      const text = (found[2] ?? "").replace(/(^| )#{1,6} *$/, "");
      yield { kind: "heading", level: found[1].length, text, start, end: ++at };
    } else if (RULE.test(line)) {
      yield { kind: "rule", start, end: ++at };
    } else if (QUOTE.test(line)) {
      const inner = [];
      for (; at < lines.length && (found = QUOTE.exec(lines[at])); at++) inner.push(found[1]);
      yield { kind: "quote", inner, start, end: at };
    } else if (ITEM.test(line)) {
      const list = readList(lines, at);
      at = list.end;
      yield list;
    } else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") &&
        lines[at + 1].includes("|")) {
      const rows = [];
      for (; at < lines.length && lines[at].includes("|"); at++) rows.push(cells(lines[at]));
      yield { kind: "table", rows, start, end: at };
    } else {
      for (at++; at < lines.length && lines[at].trim() && !opensBlock(lines[at]); at++);
      yield { kind: "paragraph", text: lines.slice(start, at).join("\n"), start, end: at };
    }
  }
}

function opensBlock(line) {
  return line.length <= MAX_LINE &&
    [FENCE, HEADING, RULE, QUOTE, /^ *(?:[-*+]|1[.)]) /].some((one) => one.test(line));
}

function dedent(line, count) {
  return line.slice(Math.min(count, line.search(/\S|$/)));
}

/** Read a list. Lines that are indented, or continue a paragraph, belong to the item before. */
function readList(lines, start) {
  const [, base, mark] = ITEM.exec(lines[start]);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let at = start, indent = 0;
  for (; at < lines.length; at++) {
    const line = lines[at];
    const found = line.length > MAX_LINE ? null : ITEM.exec(line);
    const depth = line.search(/\S|$/);
    if (found && depth < base.length + 2) {
      if (/\d/.test(found[2]) !== isOrdered || RULE.test(line)) break;
      indent = Math.min(depth + found[2].length + Math.max(found[3].length, 1), depth + 5);
      items.push([found[4]]);
    } else if (!line.trim() || depth >= base.length + 2) {
      items.at(-1).push(dedent(line, indent));
    } else if (!lines[at - 1].trim() || opensBlock(line)) {
      break;
    } else {
      items.at(-1).push(line);
    }
  }
  while (!lines[at - 1].trim()) at--;
  return { kind: "list", isOrdered, first: parseInt(mark), items, start, end: at };
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/([^\\]|^)\|$/, "$1");
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function renderBlock(block, depth) {
  const inner = (lines) => [...blocks(lines)].map((one) => renderBlock(one, depth + 1));
  const nested = (lines) => (depth < MAX_DEPTH ? inner(lines) : [lines.join("\n")]);
  switch (block.kind) {
    case "code":
      return renderCode(block.code.join("\n"), block.language);
    case "heading": // the page's own headings are h1 and h2
      return el(`h${Math.min(block.level + 2, 6)}`, {}, ...inline(block.text));
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, ...nested(block.inner));
    case "list": {
      const start = block.isOrdered && block.first !== 1 && block.first;
      return el(block.isOrdered ? "ol" : "ul", { start }, ...block.items.map((lines) => {
        const task = /^\[([ xX])\] (.*)$/.exec(lines[0]);
        const content = task ? [task[2], ...lines.slice(1)] : lines;
        const item = el("li", { class: task && "task" }, ...nested(content));
        const first = item.firstChild;
        if (first?.nodeName === "P") first.replaceWith(...first.childNodes);
        if (task) item.prepend(task[1] === " " ? "☐ " : "☑ ");
        return item;
      }));
    }
    case "table": {
      const [head, divider, ...rows] = block.rows;
      const side = divider.map((cell) =>
        cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : undefined);
      const row = (name, texts) => el("tr", {}, ...head.map((_, index) =>
        el(name, { class: side[index] }, ...inline(texts[index] ?? ""))));
      return el("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" },
        el("table", {}, el("thead", {}, row("th", head)),
          el("tbody", {}, ...rows.map((texts) => row("td", texts)))));
    }
    default:
      return el("p", {}, ...inline(block.text));
  }
}

const ADDRESS = "<?(?<url>[^\\s()<>]{0,2000}(?:\\([^\\s()<>]{0,200}\\)[^\\s()<>]{0,200}){0,9})>?";
const INLINE = new RegExp([
  /\\(?<escaped>[!-/:-@[-`{-~])/,
  /(?<!`)(?<ticks>`+)(?!`)(?<code>[^]{1,2000}?)(?<!`)\k<ticks>(?!`)/,
  /(?<picture>!?)\[(?<label>(?:[^[\]]|\[[^[\]]{0,200}\]){0,500})\]/.source +
    `\\(\\s{0,9}${ADDRESS}(?:\\s{1,9}"[^"]{0,500}")?\\)`,
  /<(?<auto>(?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/,
  /(?<![\w/])(?<bare>https?:\/\/[^\s<>"`*]{1,2000})/,
  /(?<mark>(?<!\*)\*\*|(?<!\w)__)(?=\S)(?<strong>[^]{0,2000}?\S)\k<mark>(?!\*)(?!_)/,
  /\*(?![\s*])(?<em>(?:[^*]|\*\*[^*]{1,500}\*\*){1,2000}?)(?<!\s)\*(?!\*)/,
  /(?<!\w)_(?=[^\s_])(?<em2>[^_]{1,2000}?)(?<!\s)_(?!\w)/,
  /~~(?=\S)(?<strike>[^]{1,2000}?)~~/,
  /(?<br> *\n|\\\n|<br ?\/?>)/,
].map((one) => one.source ?? one).join("|"), "g");

/** Return nodes of text with inline markup. */
function inline(text, depth = 0) {
  if (depth > MAX_DEPTH || text.length > MAX_INLINE) return [text];
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const group = found.groups;
    if (found.index > end) nodes.push(text.slice(end, found.index));
    end = found.index + found[0].length;
    const within = (inner) => inline(inner, depth + 1);
    if (group.escaped) nodes.push(group.escaped);
    else if (group.code) nodes.push(el("code", {}, group.code.replace(/^ (.+) $/, "$1")));
    else if (group.url !== undefined) nodes.push(...link(group.url, group, within, found[0]));
    else if (group.auto) nodes.push(...link(group.auto, { label: group.auto }, (one) => [one]));
    else if (group.bare) {
      const url = group.bare.replace(/[.,;:!?'\])]{1,9}$/, "");
      nodes.push(...link(url, { label: url }, (one) => [one]), group.bare.slice(url.length));
    } else if (group.strong) nodes.push(el("strong", {}, ...within(group.strong)));
    else if (group.em ?? group.em2) nodes.push(el("em", {}, ...within(group.em ?? group.em2)));
    else if (group.strike) nodes.push(el("del", {}, ...within(group.strike)));
    else nodes.push(el("br"));
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

/** Return a link to a web or mail address; other addresses stay text. Pictures are not fetched. */
function link(url, { label, picture }, within, source = url) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(url)) return [source];
  const text = picture ? [`picture: ${label || url}`] : within(label || url);
  return [el("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, ...text)];
}

function renderCode(code, language) {
  const text = el("code");
  const pattern = patternOf(language.toLowerCase());
  const button = el("button", {
    class: "small",
    onclick: async () => {
      await copyText(code);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    },
  }, "Copy");
  const node = el("figure", { class: "code" },
    el("figcaption", {}, el("span", {}, language || "text"), button),
    el("pre", { tabindex: 0, "aria-label": `Code, ${language || "text"}` }, text));
  let kept = null, start = 0; // the last token that more code cannot change, and its end
  node.grow = (now) => {
    if (!now.startsWith(code)) [kept, start] = [null, 0]; // a part of the fence was shown
    code = now;
    if (!pattern || code.length > MAX_CODE) return (text.textContent = code);
    while (text.lastChild !== kept) text.lastChild.remove();
    let end = (pattern.lastIndex = start);
    for (const found of code.matchAll(pattern)) {
      const { comment, string, number, word } = found.groups;
      const kind = comment ? "c" : string ? "s" : number ? "n" : KEYWORDS.has(word) && "k";
      if (!kind) continue;
      [kept, start] = [text.lastChild, end];
      text.append(code.slice(end, found.index), el("span", { class: kind }, found[0]));
      end = found.index + found[0].length;
    }
    text.append(code.slice(end));
  };
  node.grow(code);
  return node;
}

/** Copy text. Browsers offer their clipboard only to this machine's pages and to HTTPS. */
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { class: "hidden" });
  document.body.append(area);
  area.value = text;
  area.select();
  document.execCommand("copy");
  area.remove();
}

const COMMENTS = {
  "#": "python py sh bash shell zsh console ruby rb yaml yml toml ini r perl dockerfile makefile",
  "//": "javascript js jsx typescript ts tsx c cpp c++ h java go rust rs kotlin swift csharp cs " +
    "php scala dart css scss json jsonc zig",
  "--": "sql lua haskell hs",
};
const KEYWORDS = new Set((
  "abstract and as assert async await begin break case catch class const continue def default " +
  "defer del do done elif else end enum esac except export extends extern false False fi final " +
  "finally fn for foreach from func function go if impl implements import in interface is lambda " +
  "let match mod module mut namespace new nil None nonlocal not null nullptr or package pass " +
  "private protected pub public raise return self static struct super switch template then this " +
  "throw trait true True try type typedef typeof undefined union unsafe use using val var " +
  "void while with yield SELECT FROM WHERE JOIN ON GROUP ORDER BY LIMIT INSERT INTO UPDATE SET " +
  "DELETE CREATE TABLE AND OR NOT NULL AS"
).split(" "));
const MAX_CODE = 50000; // characters with colours

/** Return a pattern of comments, strings, numbers and words; null for an unknown language. */
function patternOf(language) {
  const comment = Object.keys(COMMENTS).find((key) => COMMENTS[key].split(" ").includes(language));
  if (!comment) return null;
  const rest = comment === "//" ? "//.*|/\\*[^]*?(?:\\*/|$)" : `${comment}.*`;
  return new RegExp(
    `(?<comment>(?<![\\w$&])(?:${rest}))|(?<string>"""[^]*?(?:"""|$)|"(?:[^"\\\\\\n]|\\\\.)*"?` +
    "|'(?:[^'\\\\\\n]|\\\\.)*'?|`[^`]*`?)|(?<number>\\b\\d[\\w.]*)" +
    "|(?<word>[A-Za-z_$][\\w$]*)", "g");
}
