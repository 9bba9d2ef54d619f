// What the page does by itself: themes, links, copies of plans, and when to ask for draws. No numbers are made here.
(function () {
  const root = document.documentElement;
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  const same = () => window.dash_clientside.no_update;
  const asked = () => (window.dash_clientside.callback_context.triggered || []).map((t) => t.prop_id);
  const theme = () => root.dataset.theme || (night.matches ? "dark" : "light");
  const templates = () => window.presageTemplates;

  // Charts in the colours of the day; those of two plans over one another, on one axis and in one unit.
  const NONE = { data: [], layout: { xaxis: { visible: false }, yaxis: { visible: false }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" } };
  const COLOURS = ["#4c78a8", "#d9822b"], SIZES = { us: 1e-6, ms: 1e-3, s: 1, minutes: 60, hours: 3600, days: 86400 };
  const copy = (value) => JSON.parse(JSON.stringify(value));
  function dressed(f) {
    if (!f) return NONE;
    const layout = Object.assign({}, f.layout, { template: templates()[theme()], autosize: true });
    delete layout.height;
    const bars = f.data.filter((t) => t.orientation === "h" && t.text);
    if (window.innerWidth < 700 && bars.length && layout.barmode !== "stack") // room for the numbers beside bars
      layout.xaxis = Object.assign({}, layout.xaxis, { range: [0, 2.5 * Math.max(...bars.flatMap((t) => plain(t.x)))], nticks: 4 });
    return { data: f.data, layout: layout };
  }
  const axes = (f) => ["xaxis2", "xaxis"].map((a) => f.layout[a]).filter(Boolean);
  const unit = (f) => (axes(f).map((a) => ((a.title || {}).text || "").split(" ")[0]).find(Boolean) || "");
  const ARRAYS = { f8: Float64Array, f4: Float32Array, i4: Int32Array, i2: Int16Array, i1: Int8Array, u4: Uint32Array, u2: Uint16Array, u1: Uint8Array };
  const plain = (v) => (v && v.bdata ? Array.from(new ARRAYS[v.dtype](Uint8Array.from(atob(v.bdata), (c) => c.charCodeAt(0)).buffer)) : v);
  const scaled = (values, by) => (values || []).map((x) => (typeof x === "number" ? x * by : x));
  function both(a, b) {
    [a, b] = [copy(a), copy(b)];
    a.data.concat(b.data).forEach((t) => ["x", "y", "width"].forEach((k) => { if (t[k]) t[k] = plain(t[k]); }));
    const by = SIZES[unit(b)] && SIZES[unit(a)] ? SIZES[unit(b)] / SIZES[unit(a)] : 1;
    const spans = [(a.layout.meta || {}).span, scaled((b.layout.meta || {}).span, by)];
    const range = [Math.min(spans[0][0], spans[1][0]), Math.max(spans[0][1], spans[1][1])];
    b.data.forEach((t) => { t.x = scaled(t.x, by); if (t.width) t.width = scaled(t.width, by); });
    (b.layout.shapes || []).concat(b.layout.annotations || []).forEach((s) => ["x", "x0", "x1"].forEach((k) => { if (typeof s[k] === "number") s[k] *= by; }));
    axes(a).forEach((axis) => { axis.range = range; if (axis.title && axis.title.text) axis.title.text = unit(a); });
    return [a, b];
  }
  // Bars of the same parts side by side.
  function together_parts(a, b) {
    [a, b] = both(a, b);
    const of = (f) => f.data[0].customdata, names = of(a).concat(of(b).filter((n) => !of(a).includes(n)));
    const labels = {};
    [a, b].forEach((f) => of(f).forEach((n, i) => { labels[n] = f.layout.yaxis.ticktext[i]; }));
    a.data = [a, b].map((f, i) => Object.assign(f.data[0], { name: "plan " + "AB"[i], y: of(f).map((n) => names.indexOf(n)), marker: { color: COLOURS[i] } }));
    Object.assign(a.layout.yaxis, { tickvals: names.map((_, i) => i), ticktext: names.map((n) => labels[n]) });
    return { data: a.data, layout: Object.assign(a.layout, { barmode: "group", bargap: 0.22, bargroupgap: 0.05, showlegend: true, legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal" }, margin: { t: 44 } }) };
  }
  // Stacks one below the other.
  function together_memory(a, b) {
    [a, b] = both(a, b);
    const seen = a.data.map((t) => t.name);
    a.data.forEach((t) => { t.y = ["A"]; t.legendgroup = t.name; });
    b.data.forEach((t) => Object.assign(t, { y: ["B"], legendgroup: t.name, showlegend: !seen.includes(t.name) }));
    const other = (b.layout.shapes || [])[0].x0 !== (a.layout.shapes || [])[0].x0;
    if (other) { a.layout.shapes.push(...b.layout.shapes); b.layout.annotations.forEach((n) => Object.assign(n, { text: "B: " + n.text, yshift: 16 })); a.layout.annotations.forEach((n) => { n.text = "A: " + n.text; }); a.layout.annotations.push(...b.layout.annotations); }
    a.layout.yaxis = { showticklabels: true, ticks: "", autorange: "reversed", type: "category" };
    return { data: a.data.concat(b.data), layout: Object.assign(a.layout, { bargap: 0.35 }) };
  }
  // Histograms and curves over one another; p50 and p95 are named, a row for each.
  function together_drawn(a, b) {
    if (a.data.length < 2 || b.data.length < 2) return a;
    [a, b] = both(a, b);
    const wide = b.data[0].width[0] ? a.data[0].width[0] / b.data[0].width[0] : 1; // shares of bins of one width
    b.data[0].y = b.data[0].y.map((y) => y * wide);
    const shapes = [], notes = [];
    [a, b].forEach((f, i) => {
      Object.assign(f.data[0], { name: "plan " + "AB"[i], opacity: 0.55 });
      f.data[0].marker.color = COLOURS[i];
      f.data[1].line.color = COLOURS[i];
      (f.layout.annotations || []).forEach((n) => {
        const name = (n.text.match(/<b>(.*?)<.b>/) || [])[1], row = ["p95", "p50"].indexOf(name);
        if (row >= 0) notes.push(Object.assign(n, { text: "<b>" + "AB"[i] + " " + name + "</b>" + n.text.split("</b>")[1], yshift: 15 * (row + 2 * (1 - i)), font: { size: 11, color: COLOURS[i] } }));
        else if (name === "deadline" && i === 0) notes.push(Object.assign(n, { yshift: 60 }));
        if (row < 0 && !(name === "deadline" && i === 0)) return;
        (f.layout.shapes || []).filter((s) => Math.abs(s.x0 - n.x) < 1e-9 * Math.abs(n.x)).forEach((s) => shapes.push(row < 0 ? s : Object.assign(s, { line: { color: COLOURS[i], width: 1.6, dash: "dot" } })));
      });
    });
    const [low, high] = axes(a)[0].range;
    notes.forEach((n) => { n.xanchor = (n.x - low) / (high - low) < 0.6 ? "left" : "right"; });
    const ends = [a, b].map((f) => f.layout.yaxis2.range);
    a.layout.yaxis2.range = [Math.min(ends[0][0], ends[1][0]), ends[0][1]];
    const top = notes.some((n) => n.yshift === 60) ? 92 : 76;
    return { data: a.data.concat(b.data), layout: Object.assign(a.layout, { shapes: shapes, annotations: notes, barmode: "overlay", showlegend: false, margin: { t: top } }) };
  }
  const of = (name, together) => (a, b) => {
    const [one, other] = [a && a[name], b && b[name]];
    const drawn = () => (one && other ? [dressed(together(one, other)), NONE] : [dressed(one), dressed(other)]);
    return new Promise((done) => setTimeout(() => done(drawn()), 40)); // after the answer in words has been painted
  };

  function put(name) {
    if (!name) return same();
    const address = location.pathname + location.search + name;
    if (location.hash !== name) history.replaceState(null, "", address);
    return same();
  }

  // Files: a job or a model becomes the plan whose settings are open, a trace is explained.
  const texts = {};
  const MOST = 64 * 1024 * 1024;
  const tell = (words) => window.dash_clientside.set_props("told", { children: words });
  function send(files, plan) {
    const list = Array.from(files || []);
    if (!list.length) return;
    const name = list.length > 1 ? list.length + " files" : list[0].name;
    const bytes = list.reduce((sum, f) => sum + f.size, 0);
    if (bytes > MOST) return tell(name + " (" + Math.round(bytes / 1e6) + " MB) is too large for the page: use presage trace");
    const form = new FormData();
    form.append("text", texts[plan] || texts.a || "");
    list.forEach((f) => form.append("files", f, f.name));
    tell("Reading " + name + " …");
    root.dataset.reading = "yes";
    fetch("/open", { method: "POST", body: form })
      .then((reply) => (reply.ok ? reply.json() : { wrong: name + " could not be read by this page" }))
      .catch(() => ({ wrong: name + " could not be read: is presage ui still running?" }))
      .then((found) => {
        delete root.dataset.reading;
        if (found.wrong) tell(found.wrong);
        else window.dash_clientside.set_props("dropped", { data: Object.assign(found, { plan: plan }) });
      });
  }
  const open_plan = () => (document.getElementById("controls-b") || { hidden: true }).hidden ? "a" : "b";
  function choose(plan) {
    const input = document.createElement("input");
    input.type = "file";
    input.multiple = true;
    input.onchange = () => send(input.files, plan);
    input.click();
  }

  const waits = {};
  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    presage: {
      // Draws take long: they are asked for when nothing has moved for a while.
      settled: function (step) {
        const id = window.dash_clientside.callback_context.outputs_list.id.plan;
        const turn = (waits[id] = (waits[id] || 0) + 1);
        if (step && step.text) texts[id] = step.text;
        if (!step) return null;
        if (step.wrong || !step.asked) return same();
        return new Promise((done) => setTimeout(() => done(waits[id] === turn ? { text: step.text, asked: step.asked } : same()), 300));
      },
      // Too many draws were waiting: ask again, unless something else has been asked for.
      again: function (sure, run, ask) {
        if (!ask || !((sure && sure.busy) || (run && run.busy))) return same();
        const id = window.dash_clientside.callback_context.outputs_list.id.plan, turn = waits[id];
        return new Promise((done) => setTimeout(() => done(waits[id] === turn ? Object.assign({}, ask, { again: (ask.again || 0) + 1 }) : same()), 1500));
      },
      slid: function (power, gpus) {
        const moved = asked().some((id) => id.includes("slider"));
        if (moved) return [same(), Math.pow(2, power)];
        const near = gpus >= 1 ? Math.min(20, Math.round(Math.log2(gpus))) : power;
        return [near === power ? same() : near, same()];
      },
      themed: function (clicks) {
        if (clicks) root.dataset.theme = theme() === "dark" ? "light" : "dark";
        return theme();
      },
      draw_parts: of("parts", together_parts),
      draw_memory: of("memory", together_memory),
      draw_sure: of("figure", together_drawn),
      draw_run: of("figure", together_drawn),
      linked: function (link, opened) {
        if (!asked().some((id) => id.startsWith("copy-link"))) return opened ? put(link) : same();
        put(link);
        const text = location.href;
        const told = () => "Link copied: it opens these plans on any machine with presage ui";
        return navigator.clipboard ? navigator.clipboard.writeText(text).then(told, () => "Copy the address from the address bar") : "Copy the address from the address bar";
      },
      turned: function (a, b, two) {
        const at = asked();
        const other = two && !at.some((id) => id.startsWith("tab-a"));
        document.getElementById("tab-a").setAttribute("aria-selected", String(!other));
        document.getElementById("tab-b").setAttribute("aria-selected", String(other));
        return ["work " + (two ? "two" : "one"), "side" + (other ? "" : " on"), "side" + (other ? " on" : ""), two ? "Plan B" : "Compare …", other, !other];
      },
      copied: function (copy, tab, two, values, rest) {
        const again = asked().some((id) => id.startsWith("copy-plan"));
        if (!again && two) return [values.map(same), same(), same()];
        return [values, rest, true];
      },
      kept: (_, values, rest) => [values, rest],
      closed: () => false,
      placed: function (found, a, b) {
        const asked = ["tokens", "days", "noise", "failures", "rate", "restart", "spares", "interval"];
        const none = asked.map(same);
        if (!found || !found.knobs_set) return [a.map(same), same(), b.map(same), same(), ...none, found ? found.told : same()];
        const said = Object.keys(found.asked || {}).length ? asked.map((n) => found.asked[n]) : none;
        const plan = [found.knobs_set, found.rest];
        return found.plan === "b" ? [a.map(same), same(), ...plan, ...said, found.told] : [...plan, b.map(same), same(), ...said, found.told];
      },
      carded: function (found) {
        if (asked().some((id) => id.startsWith("dropped-close"))) return [true, same(), same(), same(), same(), same()];
        if (!found || !found.card) return [same(), same(), same(), same(), same(), same()];
        window.scrollTo({ top: 0 });
        return [false, found.title, found.card, found.tables, !found.figure, !found.report];
      },
      drawn_dropped: (found) => dressed(found && found.figure),
      report_saved: (_, found) => (found && found.report ? { content: found.report, filename: found.title + ".html", type: "text/html" } : same()),
      drawn_found: (found) => dressed(found && found.figure),
      chosen: function (clicks, found, a, b) {
        const at = (window.dash_clientside.callback_context.triggered || [])[0];
        const none = [a.map(same), same(), b.map(same), same(), same()];
        if (!at || !at.value || !found) return none;
        const id = JSON.parse(at.prop_id.slice(0, at.prop_id.lastIndexOf("."))), plan = found.plans[id.found];
        if (!plan) return none;
        return id.to === "a" ? [plan.values, plan.rest, b.map(same), same(), same()] : [a.map(same), same(), plan.values, plan.rest, true];
      },
      // A button of a notice: undo, other settings, or a search.
      offered: function (clicks, step, values) {
        const at = (window.dash_clientside.callback_context.triggered || [])[0];
        if (!at || !at.value || !step) return values.map(same);
        const offer = (step.offers || [])[JSON.parse(at.prop_id.slice(0, at.prop_id.lastIndexOf("."))).offer];
        if (offer && offer.search) document.getElementById("best").click();
        return offer && offer.values ? offer.values : values.map(same);
      },
      saved: function (a, b, textA, textB) {
        const which = asked().some((id) => id.startsWith("download-b")) ? ["b", textB] : ["a", textA];
        return which[1] ? { content: which[1], filename: "plan-" + which[0] + ".toml", type: "application/toml" } : same();
      },
    },
  });
  // On narrow screens the settings are a drawer over the answer.
  document.addEventListener("click", (e) => {
    if (!e.target.closest) return;
    if (e.target.closest("#drawer-open")) root.dataset.drawer = "open";
    if (e.target.closest("#drawer-close, #best, #sweep")) delete root.dataset.drawer;
  });
  // Files dropped anywhere on the page, or chosen with a button.
  document.addEventListener("dragover", (e) => e.preventDefault());
  document.addEventListener("drop", (e) => {
    e.preventDefault();
    send(e.dataTransfer && e.dataTransfer.files, open_plan());
  });
  document.addEventListener("click", (e) => {
    const button = e.target.closest && e.target.closest(".open-file");
    if (button) choose(button.id === "open-a" ? "a" : button.id === "open-b" ? "b" : open_plan());
  });
  // The system's own change of theme: as if somebody had switched.
  night.addEventListener("change", () => { if (!root.dataset.theme) window.dash_clientside.set_props("theme", { data: theme() }); });
})();
