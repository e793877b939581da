"use strict";
// The report of a run that goes on: takes each newer page and changes what differs in place, so that the zoom of the
// schedule, what has the focus, what is folded out and where the page is scrolled to stay as they are.

const SHOWN = 8;  // updates that are followed
OUTCOMES[3] = "in work";
let last = null;  // the window that we chose; another one is the reader's

const own = element => element.id === "live" || element.nodeName === "SCRIPT";

// Make `old` like `fresh`; the same elements stay where they can. Attributes that the reader changes are left alone.
function morph(old, fresh) {
  for (const {name} of [...old.attributes])
    if (!fresh.hasAttribute(name) && !(old.nodeName === "DETAILS" && name === "open")) old.removeAttribute(name);
  for (const {name, value} of fresh.attributes)
    if (old.getAttribute(name) !== value && !(old.nodeName === "DETAILS" && name === "open")) old.setAttribute(name, value);
  const olds = [...old.childNodes], news = [...fresh.childNodes];
  const byId = new Map(olds.filter(node => node.id).map(node => [node.id, node]));
  let at = 0;
  for (const node of news) {
    let known = node.id ? byId.get(node.id) : olds[at];
    if (known && !node.id && known.id) known = null;  // a section that is new stands before it
    if (!known || known.nodeName !== node.nodeName || known.parentNode !== old) {
      old.insertBefore(document.importNode(node, true), olds[at] || null);
      if (known === olds[at] && !(known && known.id)) at++, known && known.remove();
      continue;
    }
    while (olds[at] && olds[at] !== known) olds[at++].remove();
    at++;
    if (node.nodeType !== 1) { if (known.nodeValue !== node.nodeValue) known.nodeValue = node.nodeValue; }
    else if (known.matches(".schedule")) schedule(known, node);
    else if (!own(known) && !known.matches(".what-if")) morph(known, node);
  }
  while (at < olds.length) olds[at++].remove();
}

async function schedule(root, fresh) {
  const text = fresh.querySelector("script.data").textContent, old = root.querySelector("script.data");
  if (old.textContent === text) return;
  old.textContent = text;
  const data = await inflate(text), view = root.view;
  if (!view) return;
  const chosen = name(view);
  view.take(data);
  view.selected = chosen && find(view, chosen);
  if (follows(view)) follow(view);
  else view.show(view.from, view.to);
}

// A bar by what it is of, since its number may change.
function name(view) {
  if (!view.selected) return null;
  const {strip, all, b} = view.selected;
  return {row: strip.row.name, side: strip.side, part: all === strip.main ? "main" : "sync",
          node: view.data.names[all.n[b]].join(), index: all.i[b], turn: all.u[b]};
}

function find(view, {row, side, part, node, index, turn}) {
  const strip = view.strips.find(other => other.row.name === row && other.side === side), all = strip && strip[part];
  for (let b = 0; all && b < all.num; b++)
    if (all.i[b] === index && all.u[b] === turn && view.data.names[all.n[b]].join() === node) return {strip, all, b, count: 1};
  return null;
}

function follows(view) { return !last || (view.from === last[0] && view.to === last[1]); }

// The last updates, or all that there is of a run that has done few.
function follow(view) {
  const ends = view.data.ends.map(([, time]) => time), now = Math.max(...ends.slice(-1), ...view.data.stages.map(s => s[2]));
  const from = ends.length > SHOWN ? ends[ends.length - 1 - SHOWN] : 0;
  view.show(from, Math.max(now, from + 1));
  last = [view.from, view.to];
}

function say(text) {
  const said = document.querySelector("#live .said");
  if (said.textContent !== text) said.textContent = text;
}

function offer() {
  const view = document.querySelector(".schedule")?.view;
  document.querySelector("#latest").hidden = !view || follows(view);
}

async function refresh() {
  const answer = await fetch("./", {cache: "no-store", credentials: "same-origin"});
  if (!answer.ok) throw new Error(await answer.text());
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const figures = new Set(document.querySelectorAll("figure[data-points]"));
  const tables = new Set(document.querySelectorAll(".what-if"));
  document.title = fresh.title;
  morph(document.body, fresh.body);
  for (const figure of document.querySelectorAll("figure[data-points]"))
    figures.has(figure) && figure.reread ? figure.reread() : readings(figure);
  for (const root of document.querySelectorAll(".what-if")) if (!tables.has(root)) whatIf(root);
  for (const root of document.querySelectorAll(".schedule"))
    if (!root.view) {
      root.view = new Schedule(root, await inflate(root.querySelector("script.data").textContent));
      follow(root.view);
    }
}

function listen() {
  const source = new EventSource("events");
  let drawing = Promise.resolve();
  const draw = () => drawing = drawing.then(refresh).then(offer, error => say(`This page could not be renewed: ${error.message}`));
  source.addEventListener("page", event => {
    draw().then(() => {
      // As many as the page shows: metrics.jsonl may have more of them, and the log fewer, than when it was drawn.
      const num = document.querySelector("#main").dataset.updates || 0;
      if (source.readyState !== EventSource.CLOSED) say(`Live: ${num} update${+num === 1 ? "" : "s"} so far.`);
      document.documentElement.dataset.page = event.lastEventId;
    });
  });
  source.addEventListener("ended", () => {
    source.close();
    draw().then(() => { say("The run has ended."); document.documentElement.dataset.live = "ended"; });
  });
  source.onerror = () => { if (source.readyState !== EventSource.CLOSED) say("No answer from penstock watch; trying again."); };
}

function live() {
  if (location.search) history.replaceState(null, "", location.pathname + location.hash);  // the cookie has the token now
  document.querySelector("#latest").addEventListener("click", () => {
    document.querySelectorAll(".schedule").forEach(root => root.view && follow(root.view));
    offer();
  });
  for (const kind of ["click", "wheel", "keyup", "pointerup"]) addEventListener(kind, () => setTimeout(offer), {passive: true});
  document.querySelectorAll(".schedule").forEach(root => root.view && follow(root.view));
  listen();
}

// The report's own script is ready when its schedules are.
(function wait() { document.documentElement.dataset.ready ? live() : setTimeout(wait, 20); })();
