// Charts of /history.json as inline SVG. A value that is not known is a gap in the line.
import { made, show, texts } from "/dom.js";

const WIDTH = 360; // units of the drawing: one for each sample of an hour
const HEIGHT = 100;
const TOP = 20; // the highest value, below its label
const BOTTOM = 97;

const number = (value) => {
  if (value === 0) return "0";
  if (value >= 1000) return Math.round(value).toLocaleString("en");
  return value >= 10 ? value.toFixed(value >= 100 ? 0 : 1) : value.toPrecision(2);
};
const percent = (value) => (100 * value).toFixed(1) + " %";
export const microseconds = (value) =>
  value >= 1e6 ? number(value / 1e6) + " s" : value >= 1000 ? number(value / 1000) + " ms" : number(value) + " µs";
const milliseconds = (value) => microseconds(1000 * value);
const seconds = (value) => number(value) + " s";

// Title, the format of a value, whether the axis always ends at 1, and the series with their names.
const CHARTS = [
  ["Pulls per second", number, false, [["pulls_per_second", ""]]],
  ["Keys per second", number, false, [["keys_per_second", ""]]],
  ["Keys found", percent, true, [["hit_rate", ""]]],
  ["Latency of pulls", microseconds, false, [["p50_us", "p50"], ["p99_us", "p99"]]],
  ["Error replies per second", number, false, [["errors_per_second", ""]]],
  ["Lag behind the log", seconds, false, [["lag_seconds", ""]]],
  ["Published to servable", milliseconds, false, [["freshness_p50_ms", "p50"], ["freshness_p99_ms", "p99"]]],
];
// Charts that only a server with a log has.
const OF_LOG = new Set(["Lag behind the log", "Published to servable"]);

// Return [path of the lines, path of the values that have no neighbour].
function paths(values, top) {
  const x = (index) => WIDTH - values.length + index + 0.5;
  const y = (value) => (BOTTOM - (value / top) * (BOTTOM - TOP)).toFixed(1);
  let line = "", dots = "";
  values.forEach((value, index) => {
    if (value === null) return;
    const begins = index === 0 || values[index - 1] === null;
    const ends = index === values.length - 1 || values[index + 1] === null;
    if (begins && ends) dots += `M${x(index)} ${y(value)}h0`;
    else line += `${begins ? "M" : "L"}${x(index)} ${y(value)}`;
  });
  return [line, dots];
}

function svg(name, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

// Return the description that a screen reader reads in place of the drawing.
function described(title, format, series, minutes) {
  const parts = series.map(([name, values]) => {
    const known = values.filter((value) => value !== null);
    if (!known.length) return `${name} no value`.trim();
    const last = values[values.length - 1];
    const gaps = values.length - known.length;
    return (
      `${name} now ${last === null ? "not known" : format(last)}, lowest ${format(Math.min(...known))}, ` +
      `highest ${format(Math.max(...known))}${gaps ? `, ${gaps} of ${values.length} samples without a value` : ""}`
    ).trim();
  });
  return `${title}, last ${minutes} minutes: ${parts.join("; ")}.`;
}

function figure(title) {
  const caption = made("figcaption", {}, [made("span", {}, [title]), made("span", {})]);
  const drawing = svg("svg", { role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" });
  const plot = made("div", { class: "plot" }, [drawing, made("span", { class: "top" })]);
  const axis = made("div", { class: "axis" }, [made("span", {}), made("span", {}, ["now"])]);
  return made("figure", {}, [caption, plot, axis]);
}

export function showCharts(box, history, hasLog) {
  const chosen = CHARTS.filter(([title]) => hasLog || !OF_LOG.has(title));
  show(box, chosen.map(([title]) => title), figure, (node, title) => {
    const [, format, isShare, names] = CHARTS.find((chart) => chart[0] === title);
    const series = names.map(([key, name]) => [name, history.series[key]]);
    const length = series[0][1].length;
    const minutes = Math.max(1, Math.round((length * history.seconds) / 60));
    const known = series.flatMap(([, values]) => values.filter((value) => value !== null));
    const top = isShare ? 1 : Math.max(...known, 0) || 1;
    const [caption, plot, axis] = node.children;
    const labels = series.map(([name, values], index) => {
      const last = length ? values[length - 1] : null;
      const text = last === null ? "–" : format(last);
      return made("b", { class: name ? (index ? "key two" : "key") : "" }, [name ? `${name} ${text}` : text]);
    });
    caption.lastChild.replaceChildren(...labels.flatMap((label, index) => (index ? [" ", label] : [label])));
    const drawing = plot.firstChild;
    drawing.setAttribute("aria-label", described(title, format, series, minutes));
    drawing.replaceChildren(
      svg("line", { x1: 0, x2: WIDTH, y1: BOTTOM, y2: BOTTOM }),
      ...series.flatMap(([, values], index) => {
        const [line, dots] = paths(values, top);
        const two = index ? "two" : "";
        return [svg("path", { d: line, class: two }), svg("path", { d: dots, class: `${two} dots`.trim() })];
      }),
    );
    texts(plot.lastChild, known.length ? format(top) : "no data");
    texts(axis.firstChild, `${Math.round((WIDTH * history.seconds) / 60)} min ago`);
  });
}
