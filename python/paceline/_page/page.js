// Hands the charts of a page to uPlot, and lets keys move their cursors. What is drawn is decided in charts.py.
(() => {
  "use strict";
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const format = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
  const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const say = (value) => (value == null ? "–" : format.format(value));
  const height = 230;
  let plots = [];

  const series = (one, chart) => ({
    label: one.label,
    stroke: colour(one.colour) + (one.faint ? "a0" : ""),
    fill: one.area ? colour(one.colour) : null,
    width: one.area ? 0 : one.faint || one.colour === "ink" ? 1 : 2,
    dash: one.dash,
    points: one.points ? { show: true, size: 5 } : { show: chart.x.length === 1 },
    paths: one.points ? () => null : one.step ? uPlot.paths.stepped({ align: 1 }) : null,
    value: (_, value, __, at) => (at == null ? "–" : say((one.says || one.data)[at])),
  });

  // The moves: a dot at the bottom for each, and in the legend the last one up to the cursor, with its reason.
  const moves = (marks) => ({
    label: "last move",
    scale: "marks",
    stroke: colour("ink"),
    width: 0,
    paths: () => null,
    points: { show: true, size: 9, fill: colour("ink") },
    value: (_, __, ___, at) => {
      const before = at == null ? [] : marks.filter((mark) => mark[0] <= at);
      return before.length ? before[before.length - 1][1] : "–";
    },
  });

  function draw(box, chart) {
    const lines = chart.series.map((one) => series(one, chart));
    const data = [chart.x, ...chart.series.map((one) => one.data)];
    if (chart.marks && chart.marks.length) {
      const dots = chart.x.map(() => null);
      for (const mark of chart.marks) dots[mark[0]] = 0.04;
      lines.push(moves(chart.marks));
      data.push(dots);
    }
    const axis = { stroke: () => colour("ink"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("grid") }, font: "12px system-ui" };
    box.textContent = "";
    const plot = new uPlot(
      {
        width: box.clientWidth,
        height,
        scales: {
          x: { time: false },
          y: { range: (_, low, high) => [chart.low ?? low, chart.high ?? (high > (chart.low ?? low) ? high * 1.05 : 1)] },
          marks: { range: [0, 1] },
        },
        axes: [
          { ...axis, label: chart.of, labelSize: 18, size: 34, labelFont: "12px system-ui" },
          { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => short.format(tick)) },
        ],
        series: [{ label: chart.of, value: (_, value) => value ?? "–" }, ...lines],
        cursor: { sync: { key: box.dataset.run, setSeries: false }, y: false },
      },
      data,
      box,
    );
    for (const row of plot.root.querySelectorAll(".u-series th")) {
      row.tabIndex = 0;
      row.title = "show or hide";
      row.onkeydown = (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          row.click();
        }
        event.stopPropagation();
      };
    }
    return plot;
  }

  function keys(box, event) {
    const plot = plots.find((one) => one.root.parentNode === box);
    const last = plot.data[0].length - 1;
    const by = event.shiftKey ? 10 : 1;
    const at = plot.cursor.idx ?? -1;
    const to = { ArrowLeft: at < 0 ? last : at - by, ArrowRight: at + by, Home: 0, End: last }[event.key];
    if (event.key === "Escape") plot.setScale("x", { min: plot.data[0][0], max: plot.data[0][last] });
    else if (to !== undefined) {
      const x = plot.data[0][Math.min(last, Math.max(0, to))];
      plot.setCursor({ left: plot.valToPos(x, "x"), top: 1 });
    } else return;
    event.preventDefault();
  }

  const boxes = [...document.querySelectorAll("[data-chart]")];
  function drawAll() {
    for (const plot of plots) plot.destroy();
    plots = boxes.map((box) => draw(box, charts[box.dataset.chart]));
  }
  drawAll();
  for (const box of boxes) box.onkeydown = (event) => keys(box, event);
  new ResizeObserver(() => {
    for (const plot of plots) {
      const width = plot.root.parentNode.clientWidth;
      if (width && width !== plot.width) plot.setSize({ width, height });
    }
  }).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  // Canvases are pictures: for paper they are drawn again, in the colours and the width of paper.
  addEventListener("beforeprint", () => {
    root.classList.add("paper");
    drawAll();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("paper");
    drawAll();
  });
})();
