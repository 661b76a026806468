// The status page. It reads /status.json every few seconds and /history.json for the charts; the
// server judges what is wrong (petps/server/problems.py), the page only shows it.
import { microseconds, showCharts } from "/charts.js";
import { made, show, showTable, texts } from "/dom.js";
import { bindSwitch, switches } from "/switch.js";

const STATUS_MS = 3000;
const HISTORY_MS = 10000;
const ANSWER_MS = 8000; // in which the server must answer
const MISSED_KEYS_MIN = 100; // as in petps/server/problems.py

const by = (id) => document.getElementById(id);
const count = (value) => Math.round(value).toLocaleString("en");
const rate = (value) => (value > 0 && value < 10 ? value.toFixed(1) : count(value));
const percent = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %");
const latency = (value) => (value === null || value === undefined ? "–" : microseconds(value));
const clock = (unix) => new Date(1000 * unix).toISOString().slice(11, 19);
const date = (unix) => new Date(1000 * unix).toISOString().slice(0, 10);
const today = (unix) => (date(unix) === date(Date.now() / 1000) ? clock(unix) : `${date(unix)} ${clock(unix)}`);

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  return value.toFixed(unit ? 1 : 0) + " " + units[unit];
}

function span(seconds) {
  for (const [name, length] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (seconds >= 2 * length) return `${Math.floor(seconds / length)} ${name}`;
  return `${Math.max(0, Math.floor(seconds))} s`;
}

// ---- what is wrong

let announced = "";

// Show a sentence. A screen reader reads it again only if `identity` differs from the last one.
function say(sentence, severity, identity) {
  texts(by("headline"), sentence);
  by("now").className = severity;
  if (announced !== identity) {
    announced = identity;
    by("announcement").textContent = sentence;
  }
}

function showProblems(status, now) {
  const problems = new Map(status.problems.map((problem) => [problem.key, problem]));
  const severity = status.problems.length ? status.problems[0].severity : "good";
  say(status.headline, severity, [...problems.keys()].join("\n"));
  const item = () =>
    made("li", {}, [
      made("p", {}, [made("span", { class: "mark" }), made("span"), " ", made("span", { class: "soft" })]),
      made("p", { class: "remedy" }, [made("span"), " ", made("a")]),
    ]);
  show(by("problems"), [...problems.keys()], item, (node, key) => {
    const problem = problems.get(key);
    const [mark, text, since] = [...node.firstChild.children];
    const [remedy, link] = [...node.lastChild.children];
    node.className = problem.severity;
    texts(mark, problem.severity);
    texts(text, problems.size === 1 ? "" : problem.text);
    texts(since, `since ${today(problem.since)} (${span(now - problem.since)})`);
    texts(remedy, problem.remedy);
    texts(link, `Read ${problem.page}`);
    if (link.getAttribute("href") !== `/docs/${problem.page}`) link.setAttribute("href", `/docs/${problem.page}`);
  });
  document.title = `${problems.size ? `(${problems.size}) ` : ""}petps ${status.host}:${status.port}`;
}

function showEvents(events) {
  const keyed = new Map(events.map((event) => [`${event.at} ${event.key}`, event]));
  const item = () => made("li", {}, [made("time"), " ", made("span", { class: "mark" }), made("span")]);
  show(by("events"), [...keyed.keys()], item, (node, key) => {
    const event = keyed.get(key);
    const [time, mark, text] = [...node.children];
    const isIncident = event.key.startsWith("incident:");
    let when = today(event.at);
    if (event.until !== null) when += ` to ${today(event.until)}`;
    else if (!isIncident) when += " until now";
    else if (event.times > 1) when += ` to ${today(event.last_at)}, ${event.times} times`;
    texts(time, when);
    node.className = event.until === null && !isIncident ? event.severity : "";
    texts(mark, isIncident ? "incident" : event.severity);
    texts(text, event.text);
  });
  if (!events.length) by("events").replaceChildren(made("li", {}, ["None since the start of the server."]));
}

// ---- numbers

function showTiles(status) {
  const recent = status.recent;
  const pull = recent.latency.pull ?? {};
  const tiles = new Map([
    ["pulls / s", rate(recent.pulls_per_second)],
    ["keys / s", rate(recent.keys_per_second)],
    ["keys found", recent.hit_rate === null ? "no pulls" : percent(recent.hit_rate)],
    ["pull p50", latency(pull.p50_us)],
    ["pull p99", latency(pull.p99_us)],
    ["error replies", count(recent.counts.errors)],
    ["pushes / s", rate(recent.pushes_per_second)],
    ["sent / s", bytes(recent.bytes_sent_per_second)],
    ["connections", count(status.stats.connections)],
  ]);
  texts(by("recent-title"), recent.seconds < 55 ? `Last ${Math.round(recent.seconds)} seconds` : "Last minute");
  show(by("tiles"), [...tiles.keys()], (key) => made("div", {}, [made("dt", {}, [key]), made("dd")]), (node, key) =>
    texts(node.lastChild, tiles.get(key)));
}

const bars = new Map();

function load(table) {
  const share = table.capacity ? table.rows / table.capacity : 0;
  if (!bars.has(table.id)) bars.set(table.id, made("span", {}, ["", made("span", { class: "bar" }, [made("i")])]));
  const node = bars.get(table.id);
  const text = percent(share);
  if (node.firstChild.data !== text) node.firstChild.data = text;
  node.lastChild.firstChild.style.width = `${Math.min(100, 100 * share)}%`;
  return [node, share > 0.85 ? "warn" : ""];
}

function showTables(status) {
  const rows = new Map();
  for (const table of status.tables) {
    const recent = status.recent.tables[table.id];
    const keys = recent ? recent.keys : 0;
    const latest = status.recent.latest.tables[table.id] ?? { keys: 0, misses: 0 };
    const isAllMissed = latest.keys >= MISSED_KEYS_MIN && latest.misses >= latest.keys;
    let found = keys ? percent(recent.hit_rate) : "no pulls";
    if (isAllMissed) found += " – all missing now";
    const late = table.expiry_delay < 0 ? "?" : span(table.expiry_delay);
    rows.set(String(table.id), [
      table.name,
      table.instance,
      [found, isAllMissed || (keys >= MISSED_KEYS_MIN && recent.misses >= keys) ? "bad" : ""],
      recent ? rate(recent.pulls_per_second) : "0",
      recent ? rate(recent.keys_per_second) : "0",
      recent ? latency(recent.p50_us) : "–",
      recent ? latency(recent.p99_us) : "–",
      count(table.rows),
      load(table),
      count(table.capacity),
      `${table.dim} × ${table.dtype}`,
      table.feed,
      table.expire_after ? `${span(table.expire_after)}, late by ${late}` : "never",
      [count(table.missing_rows), table.missing_rows ? "bad" : ""],
    ]);
  }
  showTable(
    by("tables"),
    [["table"], ["instance", "text"], ["found"], ["pulls / s"], ["keys / s"], ["p50"], ["p99"], ["rows"], ["load"],
     ["capacity"], ["row"], ["fed by", "text"], ["expires"], ["damaged"]],
    rows,
  );
}

function showOperations(status) {
  const rows = new Map(
    Object.entries(status.recent.latency)
      .filter(([, values]) => values.count)
      .map(([name, values]) => [name, [name, count(values.count), latency(values.p50_us), latency(values.p99_us)]]),
  );
  if (!rows.size) rows.set("none", ["none", "0", "–", "–"]);
  showTable(by("operations"), [["operation"], ["number"], ["p50"], ["p99"]], rows);
}

function showIngest(ingest) {
  by("ingest").hidden = !ingest;
  if (!ingest) return;
  const ms = (value) => (value === null ? "–" : latency(1000 * value));
  texts(
    by("ingest-state"),
    `Model ${ingest.model} from ${ingest.log}, version ${count(ingest.version)}; ` +
      `published to servable p50 ${ms(ingest.freshness.p50_ms)}, p99 ${ms(ingest.freshness.p99_ms)}.`,
  );
  const rows = new Map();
  for (const part of ingest.partitions) {
    const isFollowed = ["following", "passing"].includes(part.state);
    rows.set(String(part.partition), [
      String(part.partition),
      [part.reason ? `${part.state}: ${part.reason}` : part.state, isFollowed ? "" : "bad"],
      part.lag_seconds === null ? "not known" : part.lag_seconds.toFixed(1) + " s",
      part.lag_records === null ? "not known" : count(part.lag_records),
      ms(part.freshness.p50_ms),
      ms(part.freshness.p99_ms),
      count(part.version),
      String(part.run),
      count(part.seq),
      count(part.gaps),
      count(part.duplicates),
      count(part.dead_letters),
    ]);
  }
  showTable(
    by("partitions"),
    [["partition"], ["state", "text long"], ["lag"], ["messages behind"], ["fresh p50"], ["fresh p99"], ["version"], ["run"],
     ["seq"], ["gaps"], ["duplicates"], ["dead letters"]],
    rows,
  );
}

function showInstances(status) {
  const rows = new Map();
  for (const instance of status.instances) {
    const ofInstance = status.tables.filter((table) => table.instance === instance.name);
    rows.set(String(instance.id), [
      instance.name,
      instance.state,
      instance.aliases.join(", ") || "–",
      count(instance.applied_version),
      String(instance.run),
      count(ofInstance.reduce((sum, table) => sum + table.rows, 0)),
      switches(status, instance),
    ]);
  }
  showTable(
    by("instances"),
    [["instance"], ["state", "text"], ["alias", "text"], ["version"], ["run"], ["rows"], ["switch", "text long"]],
    rows,
  );
  if (!status.can_switch)
    texts(
      by("versions-note"),
      "An alias names the instance that clients get. This page cannot switch, because the server has no access " +
        "file: run petps alias POOL INSTANCE on its machine.",
    );
}

function showMembers(members) {
  by("members-section").hidden = !members.length;
  const rows = new Map();
  for (const member of members) {
    const answer = member.answers === null ? "not asked yet" : member.answers ? "answers" : `no: ${member.fault}`;
    rows.set(member.address, [
      member.address,
      member.partitions,
      [answer, member.answers === false ? "bad" : ""],
      member.asked_at === null ? "–" : clock(member.asked_at),
    ]);
  }
  showTable(by("members"), [["server"], ["partitions", "text"], ["answers", "text"], ["asked at"]], rows);
}

function showStatus(status) {
  const pool = status.pool;
  texts(
    by("where"),
    `${status.host}:${status.port} · pool ${pool.path || "in memory"} · ${pool.medium}, ${pool.durability} · ` +
      `${bytes(pool.bytes)} · up ${span(status.uptime_s)}${pool.walked ? "" : " · walking"}`,
  );
  showProblems(status, status.now);
  showTiles(status);
  showTables(status);
  showOperations(status);
  showIngest(status.ingest);
  showInstances(status);
  showMembers(status.members);
  showEvents(status.events);
}

// ---- reading

let answeredAt = null; // Date.now() of the newest status
let lost = ""; // why there is none now
let hasLog = false;

async function read(path) {
  const reply = await fetch(path, { signal: AbortSignal.timeout(ANSWER_MS) });
  if (!reply.ok) throw new Error(`${reply.status}: ${(await reply.text()).trim() || reply.statusText}`);
  return reply.json();
}

function showAge() {
  const age = answeredAt === null ? null : (Date.now() - answeredAt) / 1000;
  document.body.classList.toggle("stale", Boolean(lost));
  if (!lost) {
    texts(by("age"), age === null ? "connecting" : `answered ${span(age)} ago`);
    return;
  }
  const since = age === null ? "" : ` since ${clock(answeredAt / 1000)} UTC (${span(age)})`;
  const below = age === null ? "" : " What is below is from then.";
  texts(by("age"), age === null ? "no answer yet" : `data is ${span(age)} old`);
  document.title = "(!) petps does not answer";
  say(`The server does not answer${since}: ${lost}.${below}`, "critical", "lost");
}

async function refresh() {
  try {
    const status = await read("/status.json");
    hasLog = Boolean(status.ingest);
    showStatus(status);
    answeredAt = Date.now();
    lost = "";
  } catch (error) {
    lost = error.name === "TimeoutError" ? `nothing within ${ANSWER_MS / 1000} s` : error.message.replace(/\.$/, "");
  }
  showAge();
}

async function refreshHistory() {
  try {
    const history = await read("/history.json");
    const length = history.series.pulls_per_second.length;
    showCharts(by("charts"), history, hasLog);
    texts(
      by("charts-note"),
      length
        ? `Samples of ${history.seconds} s up to ${clock(history.ended_at)}. The server keeps an hour, since its start.`
        : `The first sample comes ${history.seconds} s after the start of the server.`,
    );
  } catch {
    texts(by("charts-note"), "The server does not answer, so the charts are old.");
  }
}

async function forever(work, pause) {
  for (;;) {
    await work();
    await new Promise((done) => setTimeout(done, pause));
  }
}

document.addEventListener("visibilitychange", () => document.hidden || refresh());
bindSwitch(refresh);
setInterval(showAge, 1000);
await refresh();
forever(refreshHistory, HISTORY_MS);
await new Promise((done) => setTimeout(done, STATUS_MS));
forever(refresh, STATUS_MS);
