"""Charts, each a function of plain values: Plotly figures without a theme, which the page that shows them puts on."""
