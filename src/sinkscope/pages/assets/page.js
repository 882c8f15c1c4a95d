"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches;
  const themeButton = document.getElementById("theme");

  // Figures name CSS variables as colours; Plotly wants the colours themselves.
  const coloured = (value, style) => {
    if (typeof value === "string") return value.startsWith("var(--") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
    if (Array.isArray(value)) return value.map((item) => coloured(item, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, style)]));
  };

  const base = (style) => {
    const of = (name) => style.getPropertyValue(name).trim();
    const line = { gridcolor: of("--rule"), zerolinecolor: of("--rule"), linecolor: of("--muted"), automargin: true, nticks: 6, tickformat: "~g" };
    return {
      autosize: true, margin: { l: 44, r: 10, t: 18, b: 40 }, barmode: "group", hovermode: "closest", showlegend: true,
      dragmode: coarse ? false : "zoom", separators: ".,",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: of("--text") },
      paper_bgcolor: of("--page"), plot_bgcolor: of("--page"),
      hoverlabel: { bgcolor: of("--card"), bordercolor: of("--muted"), font: { color: of("--text") } },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 }, bgcolor: "rgba(0,0,0,0)" },
      xaxis: line, yaxis: line,
    };
  };

  const layoutOf = (figure, style) => {
    const layout = base(style);
    const own = coloured(figure.layout, style);
    return { ...layout, ...own, xaxis: { ...layout.xaxis, ...own.xaxis }, yaxis: { ...layout.yaxis, ...own.yaxis } };
  };

  // Drawing anew also takes a zoom back.
  const draw = (plot) => {
    const style = getComputedStyle(root);
    const figure = figures[plot.dataset.figure];
    return Plotly.react(plot, coloured(figure.traces, style), layoutOf(figure, style), { displayModeBar: false, responsive: true });
  };

  const setTheme = (dark) => {
    root.dataset.theme = dark ? "dark" : "light";
    themeButton.textContent = dark ? "Light theme" : "Dark theme";
    return Promise.all(plots.map(draw));
  };

  // Keys on a focused figure: + and - zoom, arrows move, 0 shows all again.
  const moves = { "+": [0.4, 0], "=": [0.4, 0], "-": [0.625, 0], ArrowLeft: [0.5, -0.2, "xaxis"], ArrowRight: [0.5, 0.2, "xaxis"], ArrowDown: [0.5, -0.2, "yaxis"], ArrowUp: [0.5, 0.2, "yaxis"] };
  const onKey = (event) => {
    const plot = event.currentTarget;
    if (event.target !== plot || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "0") { draw(plot); return; }
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const [half, shift, only] = move;
    const ranges = {};
    for (const name of only ? [only] : ["xaxis", "yaxis"]) {
      const [low, high] = plot._fullLayout[name].range;
      const middle = (low + high) / 2 + shift * (high - low);
      ranges[`${name}.range`] = [middle - half * (high - low), middle + half * (high - low)];
    }
    Plotly.relayout(plot, ranges);
  };

  // A cell of a map leads to its row in the table below, which is added where only the largest are listed.
  const onCell = (plot, point) => {
    const details = plot.closest(".figure, .panel")?.querySelector("details:has(table)");
    if (!details || point.data.type !== "heatmap") return;
    const shown = (value) => (typeof value === "number" ? value.toLocaleString("en-US", { maximumSignificantDigits: 4 }) : String(value).replace(/<br>/g, " ").replace(/[\u2068\u2069]/g, ""));
    const place = [shown(point.y), shown(point.x)];
    const body = details.querySelector("tbody");
    const text = (cell) => cell.textContent.trim();
    let row = [...body.rows].find((row) => [...row.cells].slice(0, 2).map(text).sort().join("|") === [...place].sort().join("|"));
    if (!row) {
      const columns = details.querySelectorAll("thead th").length;
      row = body.insertRow(0);
      const token = columns === 4 && point.text !== undefined ? [shown(point.text)] : [];
      for (const value of [...place, ...token, shown(point.customdata ?? point.z)]) row.insertCell().textContent = value;
    }
    for (const other of details.querySelectorAll("tr.chosen")) other.classList.remove("chosen");
    row.classList.add("chosen");
    details.open = true;
    row.scrollIntoView({ block: "nearest" });
  };

  const save = (url, name) => {
    const link = document.createElement("a");
    link.href = url;
    link.download = `${document.body.dataset.name}-${name}.png`;
    link.click();
  };
  const png = (plot, width) => Plotly.toImage(plot, { format: "png", scale: 2, width: width || plot.clientWidth, height: plot.clientHeight });

  // The chain as one image: its panels side by side, each below its title.
  const savePanels = async (panels) => {
    const [width, height, head] = [640, 520, 64];
    const style = getComputedStyle(root);
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [panels.length * width, height + head];
    const context = canvas.getContext("2d");
    context.fillStyle = style.getPropertyValue("--page");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = style.getPropertyValue("--text");
    context.font = `600 28px ${getComputedStyle(document.body).fontFamily}`;
    for (const [index, panel] of panels.entries()) {
      const image = new Image();
      image.src = await Plotly.toImage(panel.querySelector(".plot"), { format: "png", scale: 2, width: width / 2, height: height / 2 });
      await image.decode();
      context.drawImage(image, index * width, head, width, height);
      context.fillText(panel.querySelector("h3").textContent, index * width + 16, 42);
    }
    save(canvas.toDataURL("image/png"), "chain");
  };

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const plot = button.closest(".figure, .panel")?.querySelector(".plot");
    if (button === themeButton) await setTheme(root.dataset.theme !== "dark");
    else if (button.dataset.action === "png") save(await png(plot), plot.dataset.figure);
    else if (button.dataset.action === "reset") await draw(plot);
    else if (button.dataset.action === "chain-png") await savePanels([...document.querySelectorAll(".panel")]);
  });
  for (const plot of plots) plot.addEventListener("keydown", onKey);
  prefersDark.addEventListener("change", (event) => setTheme(event.matches));

  // Paper is light, and narrower than the window.
  let themeBeforePrint;
  addEventListener("beforeprint", () => {
    themeBeforePrint = root.dataset.theme;
    setTheme(false);
    for (const plot of plots) Plotly.relayout(plot, { width: plot.closest(".wide") ? 680 : 330 });
  });
  addEventListener("afterprint", () => {
    for (const plot of plots) Plotly.relayout(plot, { width: null, autosize: true });
    setTheme(themeBeforePrint === "dark");
  });

  // Read by tests: how many figures stand on the page once all are drawn.
  setTheme(prefersDark.matches).then(() => {
    for (const plot of plots) plot.on("plotly_click", (event) => onCell(plot, event.points[0]));
  }).then(() => { root.dataset.drawn = plots.length; });
})();
