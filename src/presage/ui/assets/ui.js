// What the page does by itself: themes, links, copies of plans, and when to ask for draws. No numbers are made here.
(function () {
  const root = document.documentElement;
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  const same = () => window.dash_clientside.no_update;
  const asked = () => (window.dash_clientside.callback_context.triggered || []).map((t) => t.prop_id);
  const theme = () => root.dataset.theme || (night.matches ? "dark" : "light");
  const templates = () => window.presageTemplates;

  // Charts of both plans with one x axis, in the colours of the day.
  function draw(figures) {
    const there = figures.filter(Boolean);
    const spans = there.map((f) => (f.layout.meta || {}).span).filter(Boolean);
    const units = there.map((f) => ["xaxis", "xaxis2"].map((a) => (((f.layout[a] || {}).title || {}).text || "")).join());
    const alike = new Set(units).size === 1; // seconds beside days have no axis in common
    return figures.map((f) => {
      if (!f) return { data: [], layout: { xaxis: { visible: false }, yaxis: { visible: false }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" } };
      const layout = Object.assign({}, f.layout, { template: templates()[theme()], autosize: true });
      delete layout.height;
      if (spans.length === 2 && alike) {
        const range = [Math.min(spans[0][0], spans[1][0]), Math.max(spans[0][1], spans[1][1])];
        for (const axis of ["xaxis", "xaxis2"]) if (layout[axis]) layout[axis] = Object.assign({}, layout[axis], { range: range });
      }
      return { data: f.data, layout: layout };
    });
  }
  const of = (name) => (a, b) => draw([a && a[name], b && b[name]]);

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
      draw_parts: of("parts"),
      draw_memory: of("memory"),
      draw_sure: of("figure"),
      draw_run: of("figure"),
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
        if (asked().some((id) => id.startsWith("dropped-close"))) return [true, same(), same(), same(), same()];
        if (!found || !found.card) return [same(), same(), same(), same(), same()];
        window.scrollTo({ top: 0 });
        return [false, found.title, found.card, !found.figure, !found.report];
      },
      drawn_dropped: (found) => draw([found && found.figure])[0],
      report_saved: (_, found) => (found && found.report ? { content: found.report, filename: found.title + ".html", type: "text/html" } : same()),
      drawn_found: (found) => draw([found && found.figure])[0],
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
