// Draws the figures that stand in the page as JSON, fitted to the page's width, in light or dark.
(function () {
  const NARROW = 520; // pixels: names are wrapped, labels stacked
  const THIN = 1.6; // pixels: a shorter bar is drawn as its share of a column
  const COLUMN = 4; // pixels
  const root = document.documentElement;
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const templates = read("templates");
  const charts = [...document.querySelectorAll(".chart")].map((box) => ({ box, figure: read(box.dataset.figure) }));
  const theme = () => root.dataset.theme || (night.matches ? "dark" : "light");

  function draw({ box, figure }, name) {
    const width = box.clientWidth, narrow = width < NARROW;
    const { data, layout } = structuredClone(figure);
    const kind = (layout.meta || {}).kind;
    Object.assign(layout, { template: templates[name || theme()], width, uirevision: "kept" });
    layout.margin = { ...templates.light.layout.margin, ...layout.margin };
    fitLegend(data, layout, width, narrow);
    if (narrow) fitNarrow(data, layout, width, kind);
    box.style.minHeight = (layout.height || 0) + "px";
    const shown = kind === "lanes" ? mixed(data, seen(box, data), width - 120) : data;
    const options = { displaylogo: false, scrollZoom: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
    return Plotly.react(box, shown, layout, narrow ? { ...options, displayModeBar: false } : options);
  }

  // A legend of several rows needs room above the plot.
  function fitLegend(data, layout, width, narrow) {
    const names = data.filter((t) => t.showlegend !== false && t.name).map((t) => t.name);
    if (layout.showlegend === false || names.length < 2) return;
    const letter = narrow ? 5.2 : 6.3, room = width - 110; // beside the names of the y axis
    const widths = names.map((n) => 46 + letter * n.length), total = widths.reduce((a, b) => a + b, 0);
    const each = Math.max(1, Math.floor(room / Math.max(...widths)));
    const rows = total < room ? 1 : Math.ceil(names.length / each);
    layout.margin.t = 18 + 20 * rows;
    layout.height += 20 * (rows - 1);
    layout.legend = { ...layout.legend, maxheight: 400, ...(narrow ? { font: { size: 9.5 } } : {}) };
  }

  function fitNarrow(data, layout, width, kind) {
    const names = (layout.yaxis || {}).ticktext;
    if (names) {
      const shown = kind === "lanes" ? names.map((n) => n.replace(/ \(.*\)$/, "")) : names.map(wrapped);
      if (kind !== "lanes" && shown.some((n) => n.includes("<br>"))) layout.height += 5 * names.length;
      Object.assign(layout.yaxis, { ticktext: shown, tickfont: { size: 10 } });
    }
    const labels = (layout.annotations || []).filter((a) => a.yref === "paper" && a.yanchor === "bottom");
    labels.forEach((a, i) => Object.assign(a, { yshift: 15 * i, x: 1, xref: "paper", xanchor: "right" }));
    if (labels.length > 1) layout.margin.t = 14 + 15 * labels.length;
    if (labels.length > 1) layout.height += 15 * (labels.length - 1);
    Object.entries(layout).filter(([k]) => k.startsWith("xaxis")).forEach(([, axis]) => {
      const title = (axis.title || {}).text || "";
      if (title.length < 36 || !title.includes(" (")) return;
      axis.title.text = title.replace(" (", "<br>(");
      layout.height += 16;
    });
    if (kind !== "parts" && kind !== "tornado") return;
    const ends = data.flatMap((t) => t.x.filter(Number.isFinite));
    const low = Math.min(0, ...ends), high = Math.max(0, ...ends);
    data.forEach((t) => Object.assign(t, { textposition: "outside", textfont: { size: 10.5 } }));
    const left = textRoom(data, (x) => x < 0), right = textRoom(data, (x) => x >= 0);
    const each = (high - low) / Math.max(width - 135 - left - right, 60);
    layout.xaxis.range = [low - each * left, high + each * right];
  }

  // Pixels that the numbers at the ends of bars take on one side.
  function textRoom(data, side) {
    const texts = data.flatMap((t) => (t.text || []).filter((_, i) => side(t.x[i])));
    return texts.length ? 10 + 6 * Math.max(...texts.map((text) => text.length)) : 0;
  }

  // A name in lines of at most 16 characters; tags stay whole.
  function wrapped(name) {
    const lines = [""];
    for (const word of String(name).replace(/\s*<b>/, " <b>").split(/ +(?![^<]*>)/)) {
      const last = lines[lines.length - 1], plain = (last + " " + word).replace(/<[^>]*>/g, "");
      if (last && plain.length > 16) lines.push(word);
      else lines[lines.length - 1] = last ? last + " " + word : word;
    }
    return lines.join("<br>");
  }

  // The stretch of time in view: what was zoomed to, or all of it.
  function seen(box, data) {
    const axis = (box._fullLayout || {}).xaxis;
    if (axis && axis.autorange === false) return axis.range;
    const ends = data.flatMap((t) => t.base.map((b, i) => b + t.x[i]));
    return [data.reduce((a, t) => t.base.reduce((x, y) => Math.min(x, y), a), Infinity), ends.reduce((a, b) => Math.max(a, b), 0)];
  }

  // Bars too short to be told apart become columns, in which each group is as high as its share of the time.
  function mixed(traces, [low, high], pixels) {
    const pixel = (high - low) / pixels, cell = COLUMN * pixel, columns = new Map();
    const out = traces.map((t) => ({ ...t, base: [], x: [], y: [], width: [], hovertext: [] }));
    const put = (g, ...bar) => ["base", "x", "y", "width", "hovertext"].forEach((k, i) => out[g][k].push(bar[i]));
    traces.forEach((t, g) => t.x.forEach((length, i) => {
      const start = t.base[i], first = Math.floor((start - low) / cell), last = Math.floor((start + length - low) / cell);
      if (length >= THIN * pixel || last < 0 || first > pixels / COLUMN) return put(g, start, length, t.y[i], t.width, t.hovertext[i]);
      for (let at = first; at <= last; at++) {
        const key = t.y[i] + " " + at, from = Math.max(start, low + at * cell);
        const part = Math.min(start + length, low + (at + 1) * cell) - from;
        if (!columns.has(key)) columns.set(key, { lane: t.y[i], at, thick: t.width, bars: [] });
        columns.get(key).bars.push([g, [from, part, t.y[i], t.width, t.hovertext[i]]]);
      }
    }));
    for (const { lane, at, thick, bars } of columns.values()) {
      if (bars.length < 2) { put(bars[0][0], ...bars[0][1]); continue; }
      const sums = new Map();
      bars.forEach(([g, own]) => sums.set(g, (sums.get(g) || 0) + own[1]));
      const whole = Math.max(cell, [...sums.values()].reduce((a, b) => a + b, 0));
      let top = lane - thick / 2;
      for (const [g, time] of [...sums].sort((a, b) => a[0] - b[0])) {
        const high_ = (thick * time) / whole;
        put(g, low + at * cell, cell, top + high_ / 2, high_, `${traces[g].name}: ${((100 * time) / whole).toFixed(0)}% of this stretch`);
        top += high_;
      }
    }
    return out;
  }

  function copyTable(button) {
    const quoted = (cell) => { const text = cell.textContent.trim(); return /[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text; };
    const rows = [...button.parentElement.querySelectorAll("tr")].map((row) => [...row.cells].map(quoted).join(","));
    const done = () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy CSV"; }, 1500); };
    const area = document.createElement("textarea");
    area.value = rows.join("\n");
    document.body.append(area);
    area.select();
    if (document.execCommand("copy")) done();
    area.remove();
  }

  const all = (name) => charts.map((chart) => draw(chart, name));
  const details = () => [...document.querySelectorAll("details")];
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    all();
  });
  document.querySelectorAll(".csv").forEach((button) => button.addEventListener("click", () => copyTable(button)));
  night.addEventListener("change", () => root.dataset.theme || all());
  window.addEventListener("beforeprint", () => { details().forEach((d) => { d.dataset.was = d.open; d.open = true; }); all("light"); });
  window.addEventListener("afterprint", () => { details().forEach((d) => { d.open = d.dataset.was === "true"; }); all(); });
  let waiting, width = window.innerWidth;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { if (window.innerWidth !== width) { width = window.innerWidth; all(); } }, 120);
  });
  Promise.all(all()).then(() => {
    charts.filter((c) => (c.figure.layout.meta || {}).kind === "lanes").forEach((c) => c.box.on("plotly_relayout", () => draw(c)));
    root.dataset.drawn = charts.length;
  });
})();
