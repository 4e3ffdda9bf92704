"use strict";
// Draws the curves of #data with Plotly. Colours are the page's CSS variables, so both themes are in page.css alone.

const { runs, lines } = JSON.parse(document.getElementById("data").textContent);
const SINGLE = lines.length === 1;
const GIB = 2 ** 30;
const FONT = getComputedStyle(document.body).fontFamily;
const CHARTS = [
  { key: "loss", title: "Training loss", smooth: true, log: true, format: ".4f" },
  { key: "difference", title: "Loss above the first run's", smooth: true, format: "+.4f", of: "loss" },
  { key: "validation_loss", title: "Validation loss", markers: true, log: true, format: ".4f" },
  { key: "grad_norm", title: "Gradient norm", smooth: true, log: true, format: ".3f" },
  { key: "lr", title: "Learning rate", format: ".3g", ticks: "~g" },
  { key: "tokens_per_second", title: "Throughput", unit: "tokens/s per device", smooth: true, format: ",.0f", zero: true },
  { key: "mfu", title: "MFU", smooth: true, format: ".1%", ticks: ".0%", zero: true },
  { key: "peak_memory_bytes", title: "Peak memory", unit: "GiB", scale: 1 / GIB, format: ".2f", zero: true },
  { key: "data_wait_share", title: "Data wait", unit: "fraction of time", smooth: true, format: ".2%", ticks: "~%", zero: true },
  { key: "slowest_rank_ratio", title: "Slowest rank", unit: "time of its own, of the others' median", smooth: true, format: ".2f", ticks: "~g" },
  { key: "slowest_rank_wait_share", title: "Wait for the slowest rank", unit: "fraction of time", smooth: true, format: ".1%", ticks: "~%", zero: true },
  { key: "slowest_rank", title: "Which rank is slowest", unit: "rank", markers: true, format: ",d", zero: true },
  { key: "expert_load_max", title: "Largest load of an expert", unit: "of the layer's mean", smooth: true, format: ".2f", ticks: "~g", zero: true },
  { key: "expert_load_min", title: "Smallest load of an expert", unit: "of the layer's mean", smooth: true, format: ".2f", ticks: "~g", zero: true },
  { key: "router_entropy", title: "Entropy of the router", unit: "nats", smooth: true, format: ".3f", ticks: "~g", zero: true },
  { key: "skipped_updates", title: "Skipped updates", unit: "so far", format: ",d", zero: true, onlyAboveZero: true },
];
const state = { smoothing: 0, tokens: false, log: false, hidden: new Set() };

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (line) => css(`--c${line % 8}`);
const fade = (hex, alpha) => hex + Math.round(255 * alpha).toString(16).padStart(2, "0");
// Plotly takes names for a kind of HTML.
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const short = (text, length) => (text.length > length ? `…${text.slice(1 - length)}` : text);

function create(tag, parent, properties = {}) {
  const element = Object.assign(document.createElement(tag), properties);
  parent.append(element);
  return element;
}

// The mean with weights that fall exponentially to both sides, so that a curve that falls is not above itself; gaps stay.
function smoothed(values) {
  const sums = new Array(values.length).fill(0);
  const weights = new Array(values.length).fill(0);
  const pass = (from, step) => {
    let sum = 0;
    let weight = 0;
    for (let at = from; at >= 0 && at < values.length; at += step) {
      sums[at] += sum;
      weights[at] += weight;
      if (values[at] !== null) [sum, weight] = [sum + values[at], weight + 1];
      [sum, weight] = [state.smoothing * sum, state.smoothing * weight];
    }
  };
  pass(0, 1);
  pass(values.length - 1, -1);
  return values.map((value, at) => (value === null ? null : (sums[at] + value) / (weights[at] + 1)));
}

const scaleX = (run) => (state.tokens && run.tokens_per_step ? run.tokens_per_step : 1);
const overX = (run, steps) => (scaleX(run) === 1 ? steps : steps.map((step) => step * scaleX(run)));

// Of each line but the first: its curve minus the first one's at the same place, which equal losses hide.
function differences(chart) {
  const curves = lines.map((line, number) => tracesOf({ ...chart, key: chart.of }, line, number).at(-1));
  const first = curves[0];
  return curves.flatMap((curve, number) => {
    if (!number || !first || !curve) return [];
    let at = 0;
    const y = curve.x.map((x, place) => {
      while (at < first.x.length - 2 && first.x[at + 1] < x) at += 1;
      const [left, right, low, high] = [first.x[at], first.x[at + 1] ?? first.x[at], first.y[at], first.y[at + 1] ?? first.y[at]];
      if (curve.y[place] === null || low === null || high === null || x < left || x > right) return null;
      return curve.y[place] - (low + (high - low) * (right > left ? (x - left) / (right - left) : 0));
    });
    return [{ ...curve, y, hovertemplate: `%{y:${chart.format}}<extra>${plain(lines[number].name)}</extra>` }];
  });
}

function tracesOf(chart, line, number) {
  const members = line.members.map((index) => runs[index]);
  const band = line.bands[chart.key];
  const scaled = (values) => (chart.scale ? values.map((value) => (value === null ? null : value * chart.scale)) : values);
  const base = { type: "scatter", visible: !state.hidden.has(number), name: plain(line.name) };
  const hover = (name) => `%{y:${chart.format}}<extra>${plain(name)}</extra>`;
  const stroke = (width, alpha) => ({ color: fade(color(number), alpha), width });
  const mode = chart.markers ? "lines+markers" : "lines";
  const dots = { size: 5, color: color(number) };
  if (band) {
    const rows = band.rows.map((row) => (chart.smooth ? smoothed(scaled(row)) : scaled(row)));
    const across = (f) => band.x.map((_, at) => {
      const finite = rows.map((row) => row[at]).filter((value) => value !== null);
      return finite.length ? f(finite) : null;
    });
    const x = overX(members[0], band.x);
    const edge = { ...base, x, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    const mean = across((finite) => finite.reduce((sum, value) => sum + value) / finite.length);
    return [
      { ...edge, y: across((finite) => Math.min(...finite)) },
      { ...edge, y: across((finite) => Math.max(...finite)), fill: "tonexty", fillcolor: fade(color(number), 0.22) },
      { ...base, x, y: mean, mode, marker: dots, line: stroke(2, 1), hovertemplate: hover(`${line.name}, mean`) },
    ];
  }
  return members.flatMap((run) => {
    const series = run.series[chart.key];
    if (!series) return [];
    const x = overX(run, series.x);
    const y = scaled(series.y);
    if (!chart.smooth || state.smoothing === 0) {
      const marker = x.length === 1 ? { mode: "markers" } : { mode };
      return [{ ...base, ...marker, x, y, marker: dots, line: stroke(1.6, 1), hovertemplate: hover(run.name) }];
    }
    const meanX = series.mean_x ? overX(run, series.mean_x) : x;
    const meanY = smoothed(series.mean_y ? scaled(series.mean_y) : y);
    return [
      { ...base, x, y, mode: "lines", line: stroke(1, 0.3), ...(SINGLE ? { hovertemplate: hover(chart.title) } : { hoverinfo: "skip" }) },
      { ...base, x: meanX, y: meanY, mode: "lines", line: stroke(2, 1), hovertemplate: hover(SINGLE ? "smoothed" : run.name) },
    ];
  });
}

// Below the loss, on the same axis: a row for each kind of mark, or for each line where there are several.
function marksOf(line) {
  const kinds = [
    { name: "checkpoints", symbol: "diamond", color: "--accent", steps: (run) => run.checkpoints.map((step) => [step, `checkpoint after step ${step.toLocaleString("en")}`]) },
    { name: "restarts", symbol: "triangle-right", color: "--c1", steps: (run) => run.starts.slice(1).map((start) => [start.step, start.title]) },
    { name: "stages", symbol: "line-ns-open", color: "--c2", steps: (run) => run.stages.map(({ step, name }) => [step, `${name} from step ${step.toLocaleString("en")} on`]) },
    { name: "busy", symbol: "circle", color: "--c3", steps: (run) => run.busy.map((step) => [step, `machine busy in step ${step.toLocaleString("en")}`]) },
    { name: "skipped", symbol: "x", color: "--c6", steps: (run) => run.skipped.map((step) => [step, `update of step ${step.toLocaleString("en")} skipped`]) },
    { name: "not finite", symbol: "cross", color: "--c6", steps: (run) => run.not_finite.map((step) => [step, `loss of step ${step.toLocaleString("en")} not finite`]) },
  ];
  return kinds
    .map((kind) => ({
      ...kind,
      at: line.members.flatMap((index) => kind.steps(runs[index]).map(([step, text]) => [step * scaleX(runs[index]), text])),
    }))
    .filter((kind) => kind.at.length);
}

const phasesOf = (line) => line.members.flatMap((index) => runs[index].phases.map((phase) => ({ ...phase, run: runs[index] })));

function strip() {
  const rows = [];
  lines.forEach((line, number) => {
    if (state.hidden.has(number)) return;
    const marks = marksOf(line);
    const phases = phasesOf(line);
    if (!SINGLE) {
      if (marks.length || phases.length) rows.push({ name: line.name, marks, phases, number });
      return;
    }
    if (phases.length) rows.push({ name: "precision", marks: [], phases, number });
    marks.forEach((mark) => rows.push({ name: mark.name, marks: [mark], phases: [], number }));
  });
  return rows;
}

function stripTraces(rows) {
  return rows.flatMap((row, at) => row.marks.map((mark) => ({
    type: "scatter", mode: "markers", yaxis: "y2", hovertemplate: "%{text}<extra></extra>",
    x: mark.at.map(([x]) => x), y: mark.at.map(() => at), text: mark.at.map(([, text]) => plain(text)),
    // In a row of all kinds a restart is an upright line, to be seen beside the checkpoint of its step.
    marker: !SINGLE && mark.name === "restarts"
      ? { symbol: "line-ns", size: 16, line: { width: 3, color: color(row.number) } }
      : { symbol: mark.symbol, size: 8, color: SINGLE ? css(mark.color) : color(row.number) },
  })));
}

function stripShapes(rows) {
  const shapes = [];
  const annotations = [];
  rows.forEach((row, at) => row.phases.forEach((phase) => {
    const [x0, x1] = [phase.from * scaleX(phase.run), phase.to * scaleX(phase.run)];
    const fill = css(phase.low ? "--low" : "--high");
    shapes.push({ type: "rect", layer: "below", xref: "x", yref: "y2", x0, x1, y0: at - 0.42, y1: at + 0.42, fillcolor: fill, line: { width: 1, color: css("--card") } });
    if (SINGLE) annotations.push({ xref: "x", yref: "y2", x: (x0 + x1) / 2, y: at, text: plain(phase.name), showarrow: false, font: { size: 11, color: css(phase.low ? "--low-text" : "--high-text") } });
  }));
  return { shapes, annotations };
}

// Restarts, stages and phases of the one line, through a whole chart.
function background() {
  if (!SINGLE) return [];
  const line = lines[0];
  const upright = { xref: "x", yref: "y domain", y0: 0, y1: 1, layer: "below" };
  const tints = phasesOf(line).filter((phase) => phase.low).map((phase) => (
    { ...upright, type: "rect", x0: phase.from * scaleX(phase.run), x1: phase.to * scaleX(phase.run), fillcolor: css("--tint"), line: { width: 0 } }));
  const restarts = line.members.flatMap((index) => runs[index].starts.slice(1).map((start) => start.step * scaleX(runs[index])));
  const stages = line.members.flatMap((index) => runs[index].stages.map(({ step, name }) => ({ x: step * scaleX(runs[index]), name })));
  return [
    ...tints,
    ...restarts.map((x) => ({ ...upright, type: "line", x0: x, x1: x, line: { width: 1, dash: "dot", color: css("--c1") } })),
    ...stages.map(({ x, name }) => ({
      ...upright, type: "line", x0: x, x1: x, line: { width: 1, color: css("--c2") },
      label: { text: plain(name), textangle: 0, textposition: "end", xanchor: "left", yanchor: "top", font: { size: 10, color: css("--quiet") } },
    })),
  ];
}

function layoutOf(chart, rows) {
  const grid = { gridcolor: css("--line"), zeroline: false, linecolor: css("--line"), tickfont: { size: 11 } };
  const first = chart.key === CHARTS[0].key;
  const stripHeight = rows.length * (SINGLE ? 22 : 20);
  const height = first ? 380 + stripHeight : 220;
  const inside = height - 8 - 40;
  const share = rows.length ? stripHeight / inside : 0;
  const { shapes, annotations } = stripShapes(rows);
  return {
    height, autosize: true, showlegend: false, hovermode: "x unified", dragmode: "zoom",
    margin: { l: first && rows.length ? 92 : 58, r: 18, t: 8, b: 40 },
    paper_bgcolor: css("--card"), plot_bgcolor: css("--card"),
    font: { family: FONT, size: 12, color: css("--quiet") },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text"), family: FONT } },
    xaxis: { ...grid, spikecolor: css("--quiet"), spikethickness: -1, spikedash: "solid", title: { text: state.tokens ? "tokens" : "step", standoff: 6, font: { size: 11 } }, tickformat: state.tokens ? ".3s" : ",d", hoverformat: state.tokens ? ".4s" : ",d", anchor: rows.length ? "y2" : "y", range: fullRange() },
    // A drag zooms the steps; the values follow (`fittedY`).
    yaxis: { ...grid, fixedrange: true, type: state.log && chart.log ? "log" : "linear", rangemode: chart.zero ? "tozero" : "normal", tickformat: chart.ticks, nticks: first ? 8 : 5, domain: [share ? share + 0.05 : 0, 1], ...(state.log && chart.log ? { dtick: "D2", minor: {} } : {}) },
    ...(rows.length ? { yaxis2: { domain: [0, share], range: [rows.length - 0.5, -0.5], fixedrange: true, tickvals: rows.map((_, at) => at), ticktext: rows.map((row) => plain(short(row.name, 14))), showgrid: false, zeroline: false, tickfont: { size: 11 } } } : {}),
    shapes: [...background(), ...shapes], annotations,
  };
}

function fullRange() {
  const ends = runs.map((run) => run.last_step * scaleX(run));
  const end = Math.max(...ends, 1);
  return [-0.01 * end, 1.01 * end];
}

const CONFIG = { responsive: true, displayModeBar: false, doubleClick: "reset" };
const divs = new Map();

function tracesOfChart(chart) {
  if (chart.of) return differences(chart);
  return lines.flatMap((line, number) => tracesOf(chart, line, number));
}

function draw() {
  const rows = strip();
  const drawn = [...divs].map(([chart, div]) => {
    const mine = chart.key === CHARTS[0].key ? rows : [];
    return Plotly.react(div, [...tracesOfChart(chart), ...stripTraces(mine)], layoutOf(chart, mine), CONFIG);
  });
  return Promise.all([...drawn, ...heatMaps()]);
}

// A zoom in one chart is a zoom in all, and the others show what there is between the two ends as large as they can.
let following = false;
async function follow(change) {
  if (following) return;
  const range = change["xaxis.range"] ?? (("xaxis.range[0]" in change) ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : null);
  const whole = change["xaxis.autorange"];
  if (!range && !whole) return;
  following = true;
  await Promise.all([...divs].map(([chart, div]) => {
    if (whole) return Plotly.relayout(div, { "xaxis.range": fullRange(), "yaxis.autorange": true });
    return Plotly.relayout(div, { "xaxis.range": [...range], ...fittedY(chart, div, range) });
  }));
  following = false;
}

function fittedY(chart, div, [left, right]) {
  let [low, high] = [Infinity, -Infinity];
  for (const trace of div.data) {
    if (trace.yaxis === "y2" || trace.visible === false) continue;
    trace.x.forEach((x, at) => {
      const y = trace.y[at];
      if (x >= left && x <= right && y !== null) [low, high] = [Math.min(low, y), Math.max(high, y)];
    });
  }
  if (low > high) return {};
  if (chart.zero) low = Math.min(low, 0);
  if (div.layout.yaxis.type === "log") [low, high] = [Math.log10(low), Math.log10(high)];
  const room = 0.05 * (high - low || Math.abs(high) || 1);
  return { "yaxis.range": [chart.zero ? low : low - room, high + room] };
}

function heatMaps() {
  return [...document.querySelectorAll(".heat")].map((div) => {
    const { rows, columns, panels } = runs.find((run) => run.numerics && run.name === div.dataset.name).numerics;
    const cells = rows.length * columns.length * panels.length;
    const known = panels.flatMap((panel) => panel.sqnr_db.flat()).filter((value) => value !== null);
    const axes = {};
    const traces = panels.map((panel, at) => {
      const suffix = at ? at + 1 : "";
      const [start, end] = [at / panels.length, (at + 1) / panels.length - 0.02];
      axes[`xaxis${suffix}`] = { domain: [start, end], title: { text: plain(panel.product.replaceAll("_", " ")), standoff: 8, font: { size: 13, color: css("--text") } }, side: "top", tickangle: -40, ticks: "", tickfont: { size: 11 }, showgrid: false, automargin: true };
      return {
        type: "heatmap", xaxis: `x${suffix}`, x: columns.map((name) => plain(name.split(".").at(-1))), y: rows.map(plain), z: panel.sqnr_db,
        // At least 10 to 50 dB, or layers that hardly differ would look as different as can be.
        zmin: Math.min(10, ...known), zmax: Math.max(50, ...known), colorscale: "Viridis", xgap: 1, ygap: 1, hoverongaps: false,
        showscale: at === 0, colorbar: { title: { text: "dB" }, thickness: 12, outlinewidth: 0, len: 1 },
        texttemplate: cells <= 600 ? "%{z:.0f}" : "", textfont: { size: 11 },
        customdata: panel.saturated.map((row, i) => row.map((value, j) => [value, panel.flushed[i][j]])),
        hovertemplate: "%{y}.%{x}: %{z:.1f} dB<br>%{customdata[0]:.2%} saturated, %{customdata[1]:.2%} flushed to zero<extra></extra>",
      };
    });
    return Plotly.react(div, traces, {
      ...axes,
      yaxis: { autorange: "reversed", ticks: "", tickfont: { size: 11 }, showgrid: false, automargin: true, type: "category" },
      height: 130 + Math.min(1600, 24 * rows.length), autosize: true, margin: { l: 70, r: 10, t: 90, b: 14 },
      paper_bgcolor: css("--card"), plot_bgcolor: css("--card"), font: { family: FONT, size: 12, color: css("--quiet") },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text"), family: FONT } },
    }, CONFIG);
  });
}

function addCharts() {
  CHARTS.forEach((chart, at) => {
    const curves = runs.map((run) => run.series[chart.of ?? chart.key]).filter(Boolean);
    if (!curves.length || (chart.of && lines.length < 2) || (chart.onlyAboveZero && !curves.some((series) => series.y.some((value) => value > 0)))) return;
    const main = document.getElementById("main");
    const figure = at === 0 ? main : create("figure", document.getElementById("small"), { className: "card" });
    const caption = create("figcaption", figure, { textContent: chart.title });
    create("span", caption, { textContent: chart.unit ?? "" });
    const div = create("div", figure, { className: "chart" });
    div.dataset.key = chart.key;
    divs.set(chart, div);
  });
  if (!document.getElementById("main").childElementCount) document.getElementById("main").remove();
}

function addControls() {
  const legend = document.getElementById("legend");
  if (lines.length > 1) {
    lines.forEach((line, number) => {
      const button = create("button", legend, { type: "button", title: line.members.map((index) => runs[index].name).join(", ") });
      button.setAttribute("aria-pressed", "true");
      create("i", button, { className: `swatch c${number % 8}` });
      button.append(line.name);
      button.onclick = () => {
        const shown = state.hidden.delete(number) || !state.hidden.add(number);
        button.setAttribute("aria-pressed", String(shown));
        draw();
      };
    });
  }
  const smoothing = document.getElementById("smoothing");
  const longest = Math.max(...runs.map((run) => run.series.loss?.x.length ?? 0));
  smoothing.value = longest < 30 ? 0 : longest < 300 ? 0.7 : 0.95;
  const smooth = () => {
    state.smoothing = Number(smoothing.value);
    document.getElementById("smoothing-value").textContent = smoothing.value;
  };
  smooth();
  smoothing.oninput = () => { smooth(); draw(); };
  const axis = document.getElementById("axis");
  axis.disabled = !runs.every((run) => run.tokens_per_step);
  axis.onchange = () => { state.tokens = axis.value === "tokens"; draw(); };
  const log = document.getElementById("log");
  log.onchange = () => { state.log = log.checked; draw(); };
  document.getElementById("reset").onclick = () => follow({ "xaxis.autorange": true });
  const show = (theme) => { document.documentElement.dataset.theme = theme; draw(); };
  document.getElementById("theme").onclick = () => show(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  matchMedia("(prefers-color-scheme: dark)").onchange = (event) => show(event.matches ? "dark" : "light");
}

addCharts();
addControls();
draw().then(() => {
  divs.forEach((div) => div.on("plotly_relayout", follow));
  document.documentElement.dataset.drawn = "yes"; // for whoever waits for it, as tests do
});
