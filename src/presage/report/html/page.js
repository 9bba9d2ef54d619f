// Draws the figures that stand in the page as JSON, in the colours of the day or the night, and in daylight on paper.
(function () {
  const templates = JSON.parse(document.getElementById("templates").textContent);
  const root = document.documentElement;
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  const charts = [...document.querySelectorAll(".chart")];
  const options = { responsive: true, displaylogo: false, scrollZoom: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };

  const theme = () => root.dataset.theme || (night.matches ? "dark" : "light");
  const paint = (name) => charts.map((chart) => Plotly.relayout(chart, { template: templates[name] }));

  function draw(chart) {
    const figure = JSON.parse(document.getElementById(chart.dataset.figure).textContent);
    figure.layout.template = templates[theme()];
    if (figure.layout.height) chart.style.minHeight = figure.layout.height + "px";
    return Plotly.newPlot(chart, figure.data, figure.layout, options);
  }

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    paint(theme());
  });
  night.addEventListener("change", () => root.dataset.theme || paint(theme()));
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((d) => { d.dataset.was = d.open; d.open = true; });
    paint("light");
  });
  window.addEventListener("afterprint", () => {
    document.querySelectorAll("details").forEach((d) => { d.open = d.dataset.was === "true"; });
    paint(theme());
  });
  Promise.all(charts.map(draw)).then(() => { root.dataset.drawn = charts.length; });
})();
