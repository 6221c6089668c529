// Shows what /api/status and /api/step answer, once a second.
//
// Invariants: what stands in the data reaches the page through textContent alone; one request of a
// kind is under way at a time and has a deadline; a coordinator that does not answer is asked again
// ever more slowly, without end.

import { draw, isFew } from "./grid.js";

const POLL_MS = 1000, HIDDEN_MS = 10000, LONGEST_MS = 8000, DEADLINE_MS = 6000;
const MOST_BARS = 256, LEAST_BAR = 34, FIRST_WORKERS = 16, FIRST_RANKS = 5;
const QUIET = 0.02;
const MARKS = { ok: "\u2713", idle: "\u2026", warning: "!", error: "\u2715", lost: "?" };
const LEVEL_MARKS = { info: "\u00b7", warning: "!", error: "\u2715" };
const $ = (id) => document.getElementById(id);
const seen = { status: null, grid: null, gridKey: "", heardAt: 0, tries: 0, nextAt: 0, problem: "" };
let allWorkers = false, chosenBar = 0, bars = [], polling = false, timer = 0;

// ---- words -------------------------------------------------------------------------------------

const count = (value) => value.toLocaleString("en-US");
const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;
const many = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

function rate(value) {
  if (value === 0) return "0";
  return value >= 100 ? count(Math.round(value)) : value.toPrecision(value >= 1 ? 3 : 2);
}

function size(bytes) {
  let unit = 0;
  for (; bytes >= 999.5 && unit < 4; unit++) bytes /= 1000;
  const digits = unit === 0 || bytes >= 100 ? 0 : bytes >= 10 ? 1 : 2;
  return `${bytes.toFixed(digits)} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

function span(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.round(seconds / 86400)} days`;
}

// ---- elements ----------------------------------------------------------------------------------

function text(node, words) {
  if (node.textContent !== words) node.textContent = words;
}

function make(name, ...inside) {
  const node = document.createElement(name);
  node.append(...inside); // strings become text nodes
  return node;
}

function list(id, items, draw) {
  $(id).replaceChildren(...items.map(draw));
}

/** Rows are kept by their key, so that what a person reads or has marked stays where it is. */
function rows(table, items, key, cells) {
  const body = table.tBodies[0];
  const kept = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  items.forEach((item, at) => {
    const row = kept.get(String(key(item))) ?? make("tr");
    kept.delete(String(key(item)));
    row.dataset.key = key(item);
    cells(item).forEach((cell, column) => {
      const td = row.cells[column] ?? row.appendChild(make("td"));
      const given = typeof cell === "string" ? { text: cell } : cell;
      td.className = given.class ?? "";
      if (given.part !== undefined) meter(td, given);
      else if (given.small !== undefined) {
        if (td.firstElementChild === null) td.replaceChildren(make("span"), " ", make("small"));
        text(td.firstElementChild, given.text);
        text(td.lastElementChild, given.small);
      } else text(td, given.text);
    });
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] ?? null);
  });
  for (const row of kept.values()) row.remove();
  table.hidden = items.length === 0;
}

function meter(td, { part, text: words }) {
  if (td.firstElementChild === null) {
    const box = make("div", make("i"), make("span"));
    box.className = "meter";
    box.firstElementChild.setAttribute("aria-hidden", "true");
    td.append(box);
  }
  td.className = "wide";
  td.firstElementChild.firstElementChild.style.setProperty("--part", `${100 * Math.min(1, part)}%`);
  text(td.firstElementChild.lastElementChild, words);
}

// ---- head --------------------------------------------------------------------------------------

function showHead(status) {
  const session = status.session;
  text($("job"), status.job ?? "dataservice");
  const end = session && session.end_step >= 0 ? ` of ${count(session.end_step)}` : "";
  text($("run"), !session ? "" : `run ${session.run_id.slice(0, 12)}: step ${count(session.done_step)}${end}, ` +
    `${many(session.dp_size, "rank")} x ${many(session.micro_steps, "micro-step")}`);
  text($("about"), [`dataservice ${status.version}`, `coordinator up for ${span(status.now_s - status.started_s)}`,
    ...(status.samples === undefined ? [] : [`${count(status.samples)} samples`, `plan ${status.plan_digest.slice(0, 12)}`,
      status.decoder && `decoder ${status.decoder}`])].filter(Boolean).join(" \u00b7 "));
}

function showVerdict(level, words, why) {
  $("verdict").dataset.level = level === "lost" ? "error" : level;
  text($("verdict-mark"), MARKS[level]);
  text($("verdict-text"), words);
  text($("verdict-why"), why);
  const job = seen.status?.job;
  document.title = `${MARKS[level]} ${words}${job ? ` - ${job}` : ""}`;
}

function showHeard() {
  const ago = (performance.now() - seen.heardAt) / 1000;
  const lost = seen.tries > 0;
  document.body.classList.toggle("lost", lost);
  if (!lost) return text($("heard-text"), seen.status ? "live, once a second" : "connecting");
  const next = Math.max(0, Math.ceil((seen.nextAt - performance.now()) / 1000));
  const last = seen.status ? `last heard ${span(ago)} ago` : "not heard yet";
  text($("heard-text"), last);
  // the seconds are not for the verdict, which is read aloud whenever it changes
  showVerdict("lost", seen.problem, seen.status ? "The figures below are of then. It is asked again until it answers." : "It is asked again until it answers.");
  $("heard").title = next ? `asked again in ${next} s` : "asking";
}

function showTiles(status) {
  const { rates, workers = [] } = status;
  text($("steps-rate"), rates ? rate(rates.steps_per_s) : "-");
  text($("packs-rate"), rates ? rate(rates.packs_per_s) : "-");
  text($("images-rate"), rates ? rate(rates.images_per_s) : "-");
  text($("decoded-rate"), rates && rates.decoded_bytes_per_s !== null ? `${size(rates.decoded_bytes_per_s)} of pixels/s` : "");
  text($("ready-packs"), rates ? count(sum(workers, "ready_packs")) : "-");
  text($("ready-bytes"), rates ? `${size(sum(workers, "ready_bytes"))} on ${many(workers.length, "worker")}` : "");
  text($("fill"), status.fill == null ? "-" : percent(status.fill, 1));
  text($("pack-length"), status.pack_length ? `of ${count(status.pack_length)} tokens` : "");
}

const sum = (items, name) => items.reduce((total, item) => total + item[name], 0);

// ---- waits -------------------------------------------------------------------------------------

const shade = (share) => (share < QUIET ? 0 : share < 0.1 ? 1 : share < 0.3 ? 2 : 3);

function showWaits(status) {
  const session = status.session;
  const shares = session?.waited_share ?? [];
  $("waits-body").hidden = shares.length === 0;
  $("waits-empty").hidden = shares.length > 0;
  if (!shares.length) {
    return text($("waits-empty"), status.state === "opening" ? "The service is opening its index."
      : status.opening ? "The run is opening." : "No trainer has come yet.");
  }
  const fold = Math.ceil(shares.length / MOST_BARS);
  bars = [];
  for (let first = 0; first < shares.length; first += fold) {
    const group = shares.slice(first, first + fold);
    const share = Math.max(...group);
    bars.push({ first, last: first + group.length - 1, share, worst: first + group.indexOf(share) });
  }
  const top = [0.1, 0.25, 0.5, 1].find((most) => most >= Math.max(...shares)) ?? 1;
  text($("waits-top"), percent(top));
  text($("last-rank"), shares.length > 1 ? `rank ${count(shares.length - 1)}` : "");
  text($("waits-lead"), "Share of the last 30 s that each data-parallel rank waited for its next batch" +
    (fold > 1 ? `; a bar is the one of ${fold} ranks that waited most.` : "."));
  const strip = $("strip"), few = strip.clientWidth / bars.length >= LEAST_BAR;
  strip.classList.toggle("few", few);
  while (strip.childElementCount > bars.length) strip.lastElementChild.remove();
  while (strip.childElementCount < bars.length) strip.append(make("div", make("span"), make("i")));
  bars.forEach((bar, at) => {
    const [label, fill] = strip.children[at].children;
    text(label, few ? percent(bar.share) : "");
    fill.style.height = `${(few ? 80 : 100) * Math.min(1, bar.share / top)}%`; // room for the number
    fill.dataset.shade = shade(bar.share);
  });
  strip.setAttribute("aria-valuemax", bars.length - 1);
  chosenBar = Math.min(chosenBar, bars.length - 1);
  if (strip.querySelector(".chosen")) choose(chosenBar);
  showRanks(session, shares);
}

function showRanks(session, shares) {
  const order = shares.map((_, rank) => rank).sort((a, b) => shares[b] - shares[a] || a - b).slice(0, FIRST_RANKS);
  rows($("ranks"), order.filter((rank) => shares[rank] >= QUIET), (rank) => rank, (rank) => [
    String(rank), percent(shares[rank], 1), percent(session.waited_workers_share[rank], 1),
    `${count(Math.round(session.waited_s[rank]))} s`, place(session, rank), `${span(session.heard_s_ago[rank])} ago`]);
}

const place = (session, rank) => session.closed[rank] ? "closed" : `${session.done[rank][0]}.${session.done[rank][1]}`;

function choose(at) {
  chosenBar = Math.max(0, Math.min(bars.length - 1, at));
  const strip = $("strip"), bar = bars[chosenBar], session = seen.status?.session;
  if (!bar || !session) return;
  strip.querySelector(".chosen")?.classList.remove("chosen");
  strip.children[chosenBar].classList.add("chosen");
  const rank = bar.worst;
  const whom = bar.first === bar.last ? "" : `, the most of ranks ${bar.first} to ${bar.last}`;
  const words = `rank ${rank}${whom}: waits ${percent(bar.share, 1)} of its time, ` +
    `${percent(session.waited_workers_share[rank], 1)} for workers; at step ${place(session, rank)}, heard ${span(session.heard_s_ago[rank])} ago`;
  strip.setAttribute("aria-valuenow", chosenBar);
  strip.setAttribute("aria-valuetext", words);
  text($("rank-detail"), words);
}

function barAt(event) {
  const box = $("strip").getBoundingClientRect();
  return Math.floor(((event.clientX - box.left) / box.width) * bars.length);
}

// ---- balance -----------------------------------------------------------------------------------

function showGrid(grid) {
  const none = !grid || grid.step === null;
  $("grid-body").hidden = none;
  $("grid-empty").hidden = !none;
  text($("grid-step"), none ? "" : `step ${count(grid.step)}`);
  text($("idle"), none ? "-" : percent(grid.idle_share, 1));
  text($("idle-arrival"), none ? "" : `${percent(grid.idle_share_arrival, 1)} before balancing`);
  if (none) return;
  const most = Math.max(1, ...[...grid.cost, ...grid.cost_arrival].map((row) => Math.max(...row)));
  draw($("before"), grid.cost_arrival, most);
  draw($("after"), grid.cost, most);
  text($("before-words"), `idle ${percent(grid.idle_share_arrival, 1)}`);
  text($("after-words"), `idle ${percent(grid.idle_share, 1)}`);
  const sizes = `Cost of ${grid.micro_steps} micro-steps by ${grid.dp_size} ranks`;
  $("before").setAttribute("aria-label", `${sizes} as it would arrive: idle share ${percent(grid.idle_share_arrival, 1)}`);
  $("after").setAttribute("aria-label", `${sizes} as placed: idle share ${percent(grid.idle_share, 1)}`);
  text($("grid-most"), ["costliest cell", isFew($("after"), grid.cost) && "numbers are multiples of the mean cell",
    grid.sync_domain < grid.dp_size && `${grid.sync_domain} ranks meet at every micro-step`].filter(Boolean).join("; "));
  rows($("rows"), grid.cost.map((_, at) => at), (at) => at, (at) => [
    String(at), multiple(grid.cost_arrival[at]), multiple(grid.cost[at]),
    count(grid.images[at].reduce((a, b) => a + b, 0))]);
}

function multiple(row) {
  const mean = row.reduce((a, b) => a + b, 0) / row.length;
  return mean ? `${(Math.max(...row) / mean).toFixed(2)} x` : "-";
}

// ---- workers and stagers -----------------------------------------------------------------------

function stateOf(worker) {
  if (worker.retiring) return { text: `retires: ${worker.retiring}`, class: "warn" };
  const hung = worker.stuck_reads + worker.stuck_decodes;
  if (hung) return { text: `${hung} hang`, class: "warn" };
  return worker.draining ? { text: "drains", class: "warn" } : "serves";
}

function showWorkers(status) {
  const workers = status.workers ?? [], known = status.workers !== undefined;
  text($("workers-count"), known ? `${count(workers.length)} of ${count(status.target_workers)} wanted` : "");
  text($("scaling"), [status.scaling?.reason, status.workers_without_room &&
    `Ray has no room for ${status.workers_without_room}`].filter(Boolean).join("; "));
  $("workers-empty").hidden = workers.length > 0;
  const odd = (worker) => typeof stateOf(worker) !== "string";
  const order = [...workers].sort((a, b) => odd(b) - odd(a) || a.id.localeCompare(b.id, "en", { numeric: true }));
  const most = Math.max(1, ...workers.map((worker) => worker.ready_bytes));
  rows($("workers"), allWorkers ? order : order.slice(0, FIRST_WORKERS), (worker) => worker.id, (worker) => {
    const read = worker.read_staged_bytes + worker.read_origin_bytes;
    return [{ text: worker.id, small: worker.node.slice(0, 8) }, stateOf(worker),
      { part: worker.ready_bytes / most, text: `${count(worker.ready_packs)} (${size(worker.ready_bytes)})` },
      count(worker.queued_packs), rate(worker.images_per_s), percent(worker.busy_share),
      count(worker.served_packs), worker.memory_bytes ? size(worker.memory_bytes) : "-",
      read ? percent(worker.read_staged_bytes / read) : "-"];
  });
  $("more-workers").hidden = workers.length <= FIRST_WORKERS;
  text($("more-workers"), allWorkers ? "Show fewer" : `Show all ${count(workers.length)} workers`);
}

function showStaging(status) {
  const stagers = status.stagers ?? [];
  $("staging-empty").hidden = stagers.length > 0;
  text($("staging-rate"), stagers.length ? `${size(status.rates.staged_bytes_per_s)}/s` : "");
  rows($("stagers"), stagers, (stager) => stager.node, (stager) => {
    const troubles = [stager.last_error, stager.read_through_shards &&
      `no room for ${many(stager.read_through_shards, "shard")}`, stager.stalls && many(stager.stalls, "stall")];
    return [{ text: stager.host, small: stager.node === stager.host ? "" : stager.node.slice(0, 8) },
      { part: stager.cached_bytes / Math.max(1, stager.budget_bytes), text: `${size(stager.cached_bytes)} of ${size(stager.budget_bytes)}` },
      stager.missing_bytes ? { text: size(stager.missing_bytes), small: many(stager.missing_shards, "shard") } : "nothing",
      stager.bytes_per_s ? size(stager.bytes_per_s) : "-", stager.left_s === null ? "unknown" : stager.left_s ? span(stager.left_s) : "done",
      stager.hit_rate === null ? "-" : percent(stager.hit_rate), count(stager.lanes.length),
      { text: troubles.filter(Boolean).join("; "), class: "words" }];
  });
}

// ---- holes and events --------------------------------------------------------------------------

function showHoles(status) {
  const holes = status.holes ?? 0;
  text($("holes-count"), holes ? count(holes) : "");
  $("holes-empty").hidden = holes > 0;
  $("holes-body").hidden = holes === 0;
  if (!holes) return;
  const counted = ([words, number]) => make("li", make("b", count(number)), make("span", words));
  list("reasons", Object.entries(status.holes_by_reason), counted);
  list("shards", Object.entries(status.worst_shards), counted);
  const examples = Object.entries(status.hole_reasons).slice(0, 20);
  list("examples", examples, ([key, why]) => make("li", `${key}: ${why}`));
  text($("quarantine"), status.quarantine ? `Every hole: ${status.quarantine}` : "");
}

let lastEvents = "";
function showEvents(events) {
  const now = JSON.stringify(events.at(-1) ?? null) + events.length;
  if (now === lastEvents) return;
  lastEvents = now;
  $("events-empty").hidden = events.length > 0;
  list("events", [...events].reverse(), (event) => {
    const at = new Date(event.at_s * 1000), time = make("time", at.toLocaleTimeString("en-GB"));
    time.dateTime = time.title = at.toISOString();
    const mark = make("b", LEVEL_MARKS[event.level] ?? "");
    mark.setAttribute("aria-label", event.level);
    const more = event.count > 1 ? ` (and ${count(event.count - 1)} more like it)` : "";
    const item = make("li", time, mark, make("span", event.text + more));
    item.dataset.level = event.level;
    return item;
  });
}

// ---- asking ------------------------------------------------------------------------------------

function show(status) {
  showHead(status);
  showVerdict(status.verdict.level, status.verdict.text, status.verdict.why);
  for (const part of [showTiles, showWaits, showWorkers, showStaging, showHoles]) part(status);
  showEvents(status.events);
}

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(DEADLINE_MS) })
    .catch(() => { throw new Error("The coordinator does not answer"); });
  if (answer.status === 401) throw new Error("The coordinator wants its token: load the page anew and give it as password");
  if (!answer.ok) throw new Error(`The coordinator answers with an error (${answer.status}); its log says more`);
  return answer.json();
}

async function poll() {
  if (polling) return;
  polling = true;
  clearTimeout(timer);
  try {
    const status = await ask("api/status");
    const session = status.session;
    const gridKey = session ? `${status.started_s} ${session.generation} ${session.done_step} ${session.next_step}` : "";
    if (gridKey !== seen.gridKey) {
      seen.grid = session ? await ask("api/step") : null;
      seen.gridKey = gridKey;
      showGrid(seen.grid);
    }
    Object.assign(seen, { status, heardAt: performance.now(), tries: 0, problem: "" });
    show(status);
  } catch (error) {
    seen.tries += 1;
    seen.problem = error.message;
  } finally {
    polling = false;
    const wait = document.hidden ? HIDDEN_MS : Math.min(LONGEST_MS, POLL_MS * 2 ** Math.max(0, seen.tries - 1));
    seen.nextAt = performance.now() + wait;
    timer = setTimeout(poll, wait);
    document.body.dataset.polls = Number(document.body.dataset.polls ?? 0) + 1;
    showHeard();
  }
}

$("strip").addEventListener("pointermove", (event) => choose(barAt(event)));
$("strip").addEventListener("keydown", (event) => {
  const to = { ArrowLeft: chosenBar - 1, ArrowRight: chosenBar + 1, ArrowDown: chosenBar - 1,
    ArrowUp: chosenBar + 1, Home: 0, End: bars.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  choose(to);
});
$("strip").addEventListener("focus", () => choose(chosenBar));
$("more-workers").addEventListener("click", () => {
  allWorkers = !allWorkers;
  if (seen.status) showWorkers(seen.status);
});
window.addEventListener("resize", () => {
  showGrid(seen.grid);
  if (seen.status) showWaits(seen.status);
});
document.addEventListener("visibilitychange", () => document.hidden || poll());
setInterval(showHeard, 1000);
poll();
