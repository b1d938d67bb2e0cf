// Draws a page as SVG: boxes, lines of text and charts as Chromium has laid them out, in both color schemes.

// shapes returns what the page shows, as elements with {fill} and {stroke} in place of colors. It runs in the page.
function shapes() {
  const list = [], clear = "rgba(0, 0, 0, 0)";
  const measure = document.createElement("canvas").getContext("2d");
  const font = (s) => `${s.fontWeight} ${s.fontSize} ${s.fontFamily}`;
  const escape = (s) => s.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  const n = (x) => Math.round(x * 10) / 10;
  const add = (name, attributes, paint, text) => list.push({
    markup: `<${name} ${Object.entries(attributes).map(([k, v]) => `${k}="${typeof v === "number" ? n(v) : v}"`).join(" ")}`, paint, text: text && escape(text),
  });
  const write = (s, text, x, top, width) => {
    measure.font = font(s);
    add("text", {
      x, y: top + measure.measureText(text).fontBoundingBoxAscent, textLength: width, "font-size": parseFloat(s.fontSize), "font-weight": s.fontWeight,
      ...(s.fontFamily.includes("mono") && { class: "m" }),
    }, { fill: s.color }, text);
  };
  // label writes a text that is no node, in the middle of a box.
  const label = (s, text, x, r) => {
    measure.font = font(s);
    const m = measure.measureText(text);
    write(s, text, x, r.y + (r.height - m.fontBoundingBoxAscent - m.fontBoundingBoxDescent) / 2, m.width);
  };
  const box = (s, r) => {
    const width = parseFloat(s.borderTopWidth), left = parseFloat(s.borderLeftWidth), bottom = parseFloat(s.borderBottomWidth);
    const radius = s.borderRadius.endsWith("%") ? r.width / 2 : parseFloat(s.borderRadius), framed = width && bottom && left;
    if (s.backgroundColor !== clear || framed) {
      add("rect", { x: r.x + width / 2, y: r.y + width / 2, width: r.width - width, height: r.height - width, rx: radius, ...(framed && { "stroke-width": width }) },
        { fill: s.backgroundColor, ...(framed && { stroke: s.borderTopColor }) });
    }
    if (left > width) add("rect", { x: r.x, y: r.y + radius / 2, width: left, height: r.height - radius }, { fill: s.borderLeftColor });
    if (bottom && !framed && s.borderBottomColor !== clear) add("rect", { x: r.x, y: r.bottom - bottom, width: r.width, height: bottom }, { fill: s.borderBottomColor });
    if (width && !framed && s.borderTopColor !== clear) add("rect", { x: r.x, y: r.y, width: r.width, height: width }, { fill: s.borderTopColor });
  };
  // lines writes a text node: its words by the line on which they stand.
  const lines = (node, s, bottom) => {
    const range = document.createRange(), rows = new Map();
    for (const word of node.data.matchAll(/\S+/g)) {
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const r = range.getBoundingClientRect();
      if (r.width && r.bottom <= bottom + 2) rows.set(r.top, [...(rows.get(r.top) || []), { text: word[0], left: r.left, right: r.right }]);
    }
    for (const [top, words] of rows) {
      write(s, words.map((w) => w.text).join(" "), words[0].left, top, words.at(-1).right - words[0].left);
    }
  };
  const chart = (e, s) => {
    const m = e.getScreenCTM(), at = e.cloneNode();
    for (const a of [...at.attributes]) if (!["d", "points", "x", "y", "width", "height"].includes(a.name)) at.removeAttribute(a.name);
    add(e.tagName, {
      ...Object.fromEntries([...at.attributes].map((a) => [a.name, a.value])), transform: `matrix(${[m.a, m.b, m.c, m.d, m.e, m.f].map((x) => x.toFixed(3)).join(" ")})`,
      opacity: s.opacity, "stroke-width": s.strokeWidth, "vector-effect": "non-scaling-stroke",
    }, { fill: s.fill, stroke: s.stroke });
  };
  const walk = (e, bottom) => {
    const s = getComputedStyle(e), r = e.getBoundingClientRect();
    if (s.display === "none" || r.right < 0 || r.top >= innerHeight) return;
    if (e instanceof SVGGeometryElement) return chart(e, s);
    box(s, r);
    if (s.overflowY === "hidden") bottom = Math.min(bottom, r.bottom);
    if (e.placeholder) label(s, e.placeholder, r.x + parseFloat(s.paddingLeft), r);
    const after = getComputedStyle(e, "::after"), text = after.content.match(/^"(.+)"$/)?.[1];
    if (text && after.display !== "none") label(after, text, r.x + parseFloat(after.left), { y: r.y + parseFloat(after.top), height: parseFloat(after.height) });
    for (const child of e.childNodes) child.nodeType === Node.TEXT_NODE ? lines(child, s, bottom) : child.nodeType === Node.ELEMENT_NODE && walk(child, bottom);
  };
  walk(document.body, innerHeight);
  return list;
}

// draw returns the page as an SVG document that follows the color scheme of its reader.
export async function draw(page) {
  const { width, height } = page.viewportSize();
  const light = await page.evaluate(shapes);
  await page.emulateMedia({ colorScheme: "dark" });
  const dark = await page.evaluate(shapes);
  const classes = new Map();
  const name = (property, i) => {
    const key = [property, light[i].paint[property], dark[i].paint[property]].join("|");
    if (!classes.has(key)) classes.set(key, `${property[0]}${classes.size}`);
    return classes.get(key);
  };
  const body = light.map(({ markup, paint, text }, i) => {
    const names = Object.keys(paint).map((property) => name(property, i)).join(" ");
    const open = markup.includes(' class="') ? markup.replace(' class="', ` class="${names} `) : `${markup} class="${names}"`;
    return text === undefined ? `${open}/>` : `${open}>${text}</text>`;
  });
  const rules = (scheme) => [...classes].map(([key, c]) => {
    const [property, ...colors] = key.split("|");
    return `.${c}{${property}:${colors[scheme]}}`;
  }).join("");
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" role="img" aria-label="${await page.title()}">
<style>text{font-family:system-ui,"Segoe UI",Roboto,sans-serif}.m{font-family:monospace}${rules(0)}@media(prefers-color-scheme:dark){${rules(1)}}</style>
${body.join("\n")}
</svg>
`;
}
