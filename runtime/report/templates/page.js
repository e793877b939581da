"use strict";
// The report's only script: schedules that zoom and pan, the what-if sliders, the readings of charts. It loads nothing.

const NAMESPACE = "http://www.w3.org/2000/svg";
const KINDS = {publish: "pause: the trainer copies its weights", send: "wire: weights on their way",
               swap: "apply: made live between two steps", save: "checkpoint"};
// Colours of nodes, and hatchings over them, which the style has, too.
const COLORS = 8, HATCHES = 3;
const HATCHING = `<defs>
  <pattern id="h1" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path d="M1 0V5"/></pattern>
  <pattern id="h2" width="4" height="4" patternUnits="userSpaceOnUse"><path d="M1 1.8H2.6"/></pattern>
  <pattern id="h3" width="4" height="4" patternUnits="userSpaceOnUse"><path d="M0 2H4"/></pattern></defs>`;
const OUTCOMES = ["", "failed", "dropped by the filter", "no answer: the log ends here"];
const STAGES = {starting: "starting", before: "accuracy before", train: "training", save: "checkpoint",
                after: "accuracy after"};

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const escape = text => String(text).replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}[c]));

function duration(us, digits = 4) {
  const size = Math.abs(us);
  if (!size) return "0 s";
  const [value, unit] = size >= 1e6 ? [us / 1e6, "s"] : size >= 1e3 ? [us / 1e3, "ms"] : [us, "µs"];
  return `${Number(value.toPrecision(digits))} ${unit}`;
}

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text.trim()), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// Bars ------------------------------------------------------------------------------------------------------

// Columns of differences become columns of values: s start, e end, n name, i index, v version, k track, …
function bars(columns) {
  const num = columns.num, all = {num};
  for (const letter of "sdniuvcxkogl") all[letter] = columns[letter] || new Array(num).fill(0);
  all.e = new Array(num);
  let start = 0, index = 0;
  for (let b = 0; b < num; b++) {
    all.s[b] = start += all.s[b];
    all.i[b] = index += all.i[b];
    all.e[b] = all.s[b] + all.d[b];
  }
  return all;
}

class Schedule {
  constructor(root, data) {
    this.root = root;
    this.chart = root.querySelector(".chart");
    this.tip = root.querySelector(".tip");
    this.status = root.querySelector(".selected");
    this.range = root.querySelector(".range");
    this.predicted = true;
    this.selected = null;
    this.take(data);
    this.from = 0;
    this.to = Math.max(data.end, 1);
    this.listen();
    this.show(...this.opening());
    root.dataset.ready = "yes";
  }

  // What is drawn from now on.
  take(data) {
    this.data = data;
    this.strips = [];
    for (const row of data.rows)
      for (const [side, strip] of [["real", row.real], ["predicted", row.predicted]])
        if (strip) this.strips.push({row, side, ...strip, main: bars(strip.main), sync: bars(strip.sync)});
    this.sides = new Set(this.strips.map(strip => strip.side));
    this.colors = this.legendColors();
    this.legend();
  }

  // By node its colour, and from the ninth on its hatching. Nodes of the evaluation have those of the program's.
  legendColors() {
    const own = name => name.replace(/^evaluate\./, "");
    const names = this.data.names.filter(([, kind]) => !(kind in KINDS)).map(([name]) => name);
    const plain = [...new Set([...names.filter(name => own(name) === name), ...names.map(own)])];
    return new Map(names.concat(plain).map(name => {
      const place = plain.indexOf(own(name)), hatch = Math.floor(place / COLORS) % (HATCHES + 1);
      return [name, {color: `n${place % COLORS}`, hatch: hatch ? `h${hatch}` : ""}];
    }));
  }

  // What is seen first: training, or some updates in its middle where there are many.
  opening() {
    const ends = this.data.ends, trains = this.data.stages.filter(([name]) => name === "train");
    if (ends.length <= 12) return trains.length ? [trains[0][1], trains[trains.length - 1][2]] : [0, this.data.end];
    const middle = Math.floor(ends.length / 2);
    return [ends[Math.max(middle - 4, 0)][1], ends[Math.min(middle + 3, ends.length - 1)][1]];
  }

  legend() {
    const list = this.root.querySelector(".legend");
    const nodes = [...this.colors].filter(([name]) => !name.startsWith("evaluate."));
    const items = nodes.map(([name, {color, hatch}]) => `<li><i class="${color} ${hatch}"></i>${escape(name)}</li>`);
    const present = new Set(this.data.names.map(([, kind]) => kind));
    for (const [kind, text] of Object.entries(KINDS))
      if (present.has(kind)) items.push(`<li><i class="${kind}"></i>${escape(text)}</li>`);
    items.push('<li><i class="n0"></i><i class="n0 odd"></i>weights of even and odd versions</li>');
    if (this.sides.has("predicted")) items.push('<li><i class="n0 guess"></i>predicted</li>');
    list.innerHTML = items.join("");
  }

  // Drawing -------------------------------------------------------------------------------------------------

  layout(width) {
    const longest = Math.max(...this.data.rows.map(row => row.name.length), 9);
    this.gutter = Math.min(longest * 7 + 16, width * 0.3);
    this.width = width;
    let y = 40;
    let row = null;
    for (const strip of this.strips) {
      const guess = strip.side === "predicted";
      strip.hidden = guess && !this.predicted;
      if (strip.hidden) continue;
      if (strip.row !== row) y += row ? 12 : 6;
      row = strip.row;
      strip.top = y;
      strip.height = row.room > 1 ? Math.min(12 * row.room, 84) : guess ? 12 : 18;
      strip.steps = row.tracks.map(tracks => Math.min(strip.height / Math.max(tracks, 1), row.room > 1 ? 12 : 18));
      strip.syncStep = strip.syncTracks ? 6 : 0;
      strip.syncTop = y + strip.height + 1;
      y = strip.syncTop + strip.syncStep * Math.min(strip.syncTracks, 3) + 2;
    }
    this.bottom = y;
    this.height = y + 22;
  }

  // Where a bar of work is in its lane: the evaluation has other tracks than the program.
  track(strip, b) {
    const step = strip.steps[this.data.names[strip.main.n[b]][0].startsWith("evaluate.") ? 1 : 0];
    return [strip.top + strip.main.k[b] * step, step];
  }

  x(time) { return (time - this.from) / (this.to - this.from) * (this.width - this.gutter - 4); }

  show(from, to) {
    const end = Math.max(this.data.end, 1);
    const span = clamp(to - from, Math.min(end, 20), end);
    this.from = clamp(from, 0, end - span);
    this.to = this.from + span;
    this.draw();
  }

  draw(width = this.chart.clientWidth) {
    if (!width) return;
    this.layout(width);
    const inner = [], outer = [];
    let row = null, shaded = false;
    for (const strip of this.strips) {
      if (strip.hidden) continue;
      if (strip.row !== row) {
        row = strip.row;
        shaded = !shaded;
        if (shaded) outer.push(this.band(row));
        outer.push(`<text class="lane" x="8" y="${strip.top + 11}">${escape(row.name)}</text>`);
      } else if (strip.side === "predicted") {
        outer.push(`<text class="side" x="8" y="${strip.top + 10}">predicted</text>`);
      }
      inner.push(this.strip(strip));
    }
    inner.unshift(this.grid());
    inner.push(this.marks());
    const clip = `<svg x="${this.gutter}" y="0" width="${width - this.gutter}" height="${this.height}" ` +
      `overflow="hidden" class="inner">${inner.join("")}</svg>`;
    this.chart.innerHTML = `<svg xmlns="${NAMESPACE}" viewBox="0 0 ${width} ${this.height}" width="100%" ` +
      `aria-hidden="true">${HATCHING}${outer.join("")}${clip}</svg>`;
    this.range.textContent = `${duration(this.from)} – ${duration(this.to)} of ${duration(this.data.end)}`;
  }

  band(row) {
    const strips = this.strips.filter(strip => strip.row === row && !strip.hidden);
    const last = strips[strips.length - 1];
    const bottom = last.syncTop + last.syncStep * Math.min(last.syncTracks, 3) + 4;
    return `<rect class="band" x="0" y="${strips[0].top - 6}" width="${this.width}" height="${bottom - strips[0].top + 6}"/>`;
  }

  strip(strip) {
    const number = this.strips.indexOf(strip), guess = strip.side === "predicted" ? " guess" : "";
    const parts = [];
    this.each(strip, strip.main, (b, count, x, w) => {
      const name = this.data.names[strip.main.n[b]][0];
      const [y, step] = this.track(strip, b), h = Math.max(step - (step > 4 ? 1.5 : 0.3), 1);
      const outcome = strip.main.o[b] ? ` o${strip.main.o[b]}` : "";
      const {color, hatch} = this.colors.get(name);
      const faint = `${guess}${guess && (step < 6 || w < 6) ? " thin" : ""}`, style = `${color}${faint}${outcome}`;
      const pieces = this.stripes(strip, b, count, x, w).map(([px, pw, version]) =>
        `<rect class="${style}${version % 2 ? " odd" : ""}" x="${px.toFixed(2)}" y="${y.toFixed(2)}" ` +
        `width="${pw.toFixed(2)}" height="${h.toFixed(2)}"/>`);
      if (hatch)
        pieces.push(`<rect class="${hatch}${faint}" x="${x.toFixed(2)}" y="${y.toFixed(2)}" ` +
          `width="${w.toFixed(2)}" height="${h.toFixed(2)}"/>`);
      const odd = strip.main.v[b] % 2 ? "odd" : "";
      const text = String(strip.main.i[b]);
      const label = count === 1 && !strip.main.g[b] && h >= 11 && x + w - Math.max(x, 0) > text.length * 6.5 + 6 && !guess
        ? `<text class="${odd}" x="${(Math.max(x, 0) + 4).toFixed(1)}" y="${(y + h / 2 + 3.6).toFixed(1)}">${text}</text>` : "";
      parts.push(`<g class="bar" data-bar="${number}.m.${b}.${count}">${pieces.join("")}${label}</g>`);
    });
    this.each(strip, strip.sync, (b, count, x, w) => {
      const kind = this.data.names[strip.sync.n[b]][1];
      const y = strip.syncTop + Math.min(strip.sync.k[b], 2) * strip.syncStep;
      parts.push(`<g class="bar" data-bar="${number}.s.${b}.${count}"><rect class="${kind}${guess}" x="${x.toFixed(2)}" ` +
        `y="${y}" width="${Math.max(w - (guess ? 0.4 : 0), 1).toFixed(2)}" height="${strip.syncStep - 1.5}"/></g>`);
    });
    return parts.join("");
  }

  // Visible bars; those of a track that are too narrow to be told apart are given as one, with their number.
  each(strip, all, put) {
    const open = new Map();
    const flush = run => put(run.b, run.count, run.x, Math.max(run.end - run.x, 0.8));
    for (let b = 0; b < all.num && all.s[b] <= this.to; b++) {
      if (all.e[b] < this.from) continue;
      const x = this.x(all.s[b]), end = this.x(all.e[b]);
      const run = open.get(all.k[b]);
      const narrow = end - x < 1.5 && !all.o[b];
      if (run && narrow && run.narrow && run.name === all.n[b] && x - run.end < 0.7) {
        run.end = Math.max(run.end, end);
        run.count++;
        continue;
      }
      if (run) flush(run);
      open.set(all.k[b], {b, count: 1, x, end, narrow, name: all.n[b]});
    }
    for (const run of open.values()) flush(run);
  }

  // A bar's pieces: [x, width, version], cut where newer weights went live under it.
  stripes(strip, b, count, x, w) {
    const main = strip.main;
    const gap = Math.min(0.6, w / 4);
    const kind = this.data.names[main.n[b]][1];
    if (count > 1 || main.g[b] || kind !== "group" || main.v[b] < 0 || !strip.swaps.length)
      return [[x, w - gap, Math.max(main.v[b], 0)]];
    const pieces = [];
    let at = x, version = main.v[b];
    for (const [time, newer] of strip.swaps) {
      if (time <= main.s[b] || time >= main.e[b]) continue;
      pieces.push([at, Math.max(this.x(time) - at, 0), version]);
      [at, version] = [this.x(time), newer];
    }
    pieces.push([at, Math.max(x + w - gap - at, 0), version]);
    return pieces;
  }

  grid() {
    const parts = [], span = this.to - this.from, room = Math.max(Math.floor((this.width - this.gutter) / 95), 2);
    const rough = span / room, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(f => f * power).find(f => f >= rough * 0.999);
    for (let tick = Math.ceil(this.from / step) * step; tick <= this.to; tick += step) {
      const x = this.x(tick).toFixed(1);
      parts.push(`<line class="grid" x1="${x}" x2="${x}" y1="34" y2="${this.bottom}"/>`);
      if (+x + 50 < this.width - this.gutter)
        parts.push(`<text class="tick" x="${+x + 3}" y="31">${duration(Math.round(tick))}</text>`);
    }
    return parts.join("");
  }

  marks() {
    const parts = [];
    for (const [name, begin, end] of this.data.stages) {
      if (end < this.from || begin > this.to || end === begin) continue;
      const x = Math.max(this.x(begin), 0), w = Math.min(this.x(end), this.width) - x;
      parts.push(`<rect class="stage" x="${x.toFixed(1)}" y="2" width="${Math.max(w - 1, 0.5).toFixed(1)}" height="15"/>`);
      const text = STAGES[name] || name;
      if (w > text.length * 6.5 + 8) parts.push(`<text class="tick" x="${(x + 5).toFixed(1)}" y="13">${escape(text)}</text>`);
    }
    for (const time of this.data.lives) {
      const x = this.x(time).toFixed(1);
      parts.push(`<line class="life" x1="${x}" x2="${x}" y1="2" y2="${this.bottom}"/>`);
    }
    let free = 0;
    for (const [update, time] of this.data.ends) {
      if (time < this.from || time > this.to) continue;
      const x = this.x(time), label = `v${update + 1}`;
      const labelled = x - label.length * 6.5 - 4 >= free;
      if (labelled || this.data.ends.length < 200)
        parts.push(`<line class="end" x1="${x.toFixed(1)}" x2="${x.toFixed(1)}" y1="34" y2="${this.bottom}"/>`);
      if (labelled) {
        parts.push(`<text class="tick" text-anchor="end" x="${(x - 3).toFixed(1)}" y="${this.bottom + 13}">${label}</text>`);
        free = x + 6;
      }
    }
    const chosen = this.selected && this.box(this.selected);
    if (chosen) parts.push(`<rect class="ring" x="${chosen.x - 1.5}" y="${chosen.y - 1.5}" width="${chosen.w + 3}" height="${chosen.h + 3}"/>`);
    return parts.join("");
  }

  box({strip, all, b}) {
    if (strip.hidden) return null;
    const x = this.x(all.s[b]), w = Math.max(this.x(all.e[b]) - x, 1.5);
    if (all === strip.main) {
      const [y, step] = this.track(strip, b);
      return {x, w, y, h: step - 0.5};
    }
    return {x, w, y: strip.syncTop + Math.min(all.k[b], 2) * strip.syncStep, h: strip.syncStep - 1};
  }

  // Words ---------------------------------------------------------------------------------------------------

  words({strip, all, b, count}) {
    const [name, kind] = this.data.names[all.n[b]];
    const turn = all.u[b] ? `.${all.u[b]}` : "";
    const many = all.g[b] > 1 || count > 1;
    const last = all.g[b] > 1 ? all.i[b] + all.l[b] : all.i[b + count - 1];
    const what = many ? `${all.g[b] || count} × ${name}, ${all.i[b]}–${last}` : `${name}[${all.i[b]}${turn}]`;
    const title = kind in KINDS ? `${KINDS[kind].split(":")[0]}: ${name}, version ${all.i[b]}` : what;
    const lines = [`${strip.row.name}${strip.side === "predicted" ? ", predicted" : ""}`];
    const end = count > 1 ? all.e[b + count - 1] : all.e[b];
    lines.push(`${duration(end - all.s[b])}, from ${duration(all.s[b])} to ${duration(end)}`);
    if (kind === "group" && !many) lines.push(`group ${all.i[b]}${all.u[b] ? `, turn ${all.u[b]}` : ""}`);
    if (kind === "update") lines.push(`update ${all.i[b]}, which makes version ${all.i[b] + 1}`);
    if (kind === "group" && all.v[b] >= 0) lines.push(this.versions(strip, all, b));
    const cause = this.data.causes[all.c[b]];
    if (cause && !many) lines.push(`started when ${cause.replace("#", all.i[b] + all.x[b])}`);
    if (all.o[b]) lines.push(OUTCOMES[all.o[b]]);
    if (all.g[b] > 1) lines.push("merged, since the run is long");
    const other = many ? null : this.counterpart({strip, all, b});
    if (other) {
      const late = all.s[b] - other.all.s[other.b], took = other.all.d[other.b];
      const sign = strip.side === "real" ? 1 : -1;
      const when = late * sign >= 0 ? "later" : "earlier";
      lines.push(`${strip.side === "real" ? "predicted" : "real"}: ${duration(took)}; ` +
        `the run was here ${duration(Math.abs(late))} ${when}`);
    }
    return [title, ...lines];
  }

  versions(strip, all, b) {
    const later = strip.swaps.filter(([time]) => time > all.s[b] && time < all.e[b]).map(([, version]) => version);
    return `weights of version ${[all.v[b], ...later].join(", then ")}`;
  }

  // The same firing on the other side: of the real one the predicted, and the other way round.
  counterpart({strip, all, b}) {
    const side = strip.side === "real" ? "predicted" : "real";
    for (const other of this.strips) {
      if (other.side !== side) continue;
      if (other.row !== strip.row && other.row.pool !== strip.row.pool) continue;
      other.index ||= new Map(["main", "sync"].flatMap(part => {
        const them = other[part];
        return Array.from({length: them.num}, (_, c) => [this.key(them, c), {strip: other, all: them, b: c}]);
      }));
      const found = other.index.get(this.key(all, b));
      if (found && (other.row === strip.row || !this.strips.some(s => s.side === side && s.row === strip.row && s.index
          && s.index.has(this.key(all, b))))) return found;
    }
    return null;
  }

  key(all, b) { return `${all.n[b]}.${all.i[b]}.${all.u[b]}`; }

  // Hands ---------------------------------------------------------------------------------------------------

  listen() {
    const chart = this.chart;
    this.root.querySelector(".toolbar").addEventListener("click", event => {
      const button = event.target.closest("button");
      if (button) this.act(button.dataset.do);
    });
    const box = this.root.querySelector("input[data-do=predicted]");
    if (box) box.addEventListener("change", () => { this.predicted = box.checked; this.draw(); });
    chart.addEventListener("wheel", event => this.wheel(event), {passive: false});
    chart.addEventListener("pointerdown", event => this.grab(event));
    chart.addEventListener("pointermove", event => this.hover(event));
    chart.addEventListener("pointerleave", () => this.hide());
    chart.addEventListener("keydown", event => this.press(event));
    chart.addEventListener("focus", () => { if (chart.matches(":focus-visible") && !this.selected) this.select(this.first()); });
    chart.addEventListener("blur", () => this.hide());
    new ResizeObserver(() => { if (chart.clientWidth !== this.width) this.draw(); }).observe(chart);
    addEventListener("beforeprint", () => this.draw(1000));
    addEventListener("afterprint", () => this.draw());
  }

  act(what) {
    const span = this.to - this.from;
    if (what === "in") this.zoom(0.5, this.middle());
    if (what === "out") this.zoom(2, this.middle());
    if (what === "left") this.show(this.from - span / 4, this.to - span / 4);
    if (what === "right") this.show(this.from + span / 4, this.to + span / 4);
    if (what === "all") this.show(0, this.data.end);
    if (what === "train") {
      const trains = this.data.stages.filter(([name]) => name === "train");
      if (trains.length) this.show(trains[0][1], trains[trains.length - 1][2]);
    }
  }

  // What zooming holds on to: the chosen bar while it is in sight.
  middle() {
    const {from, to} = this;
    if (!this.inSight()) return (from + to) / 2;
    const {all, b} = this.selected;
    return (Math.max(all.s[b], from) + Math.min(all.e[b], to)) / 2;
  }

  inSight() {
    const bar = this.selected;
    return bar && bar.all.e[bar.b] > this.from && bar.all.s[bar.b] < this.to;
  }

  zoom(factor, time) {
    const before = (time - this.from) / (this.to - this.from), span = (this.to - this.from) * factor;
    this.show(time - before * span, time + (1 - before) * span);
  }

  time(event) {
    const at = event.clientX - this.chart.getBoundingClientRect().left - this.gutter;
    return this.from + at / (this.width - this.gutter - 4) * (this.to - this.from);
  }

  wheel(event) {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const all = this.to - this.from >= this.data.end;
    if (all && (sideways || event.deltaY > 0)) return;  // nothing more to see: let the page scroll
    event.preventDefault();
    const span = this.to - this.from;
    if (sideways) {
      const by = (event.deltaX || event.deltaY) / (this.width - this.gutter) * span;
      this.show(this.from + by, this.to + by);
    } else {
      this.zoom(Math.exp(clamp(event.deltaY, -120, 120) / 300), this.time(event));
    }
    this.hide();
  }

  grab(event) {
    if (event.button !== 0) return;
    const from = this.from, to = this.to, start = event.clientX;
    let moved = false;
    const move = now => {
      if (!moved && Math.abs(now.clientX - start) < 4) return;
      moved = true;
      this.dragging = true;
      this.hide();
      const by = (start - now.clientX) / (this.width - this.gutter) * (to - from);
      this.show(from + by, to + by);
    };
    const drop = now => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", drop);
      removeEventListener("pointercancel", drop);
      this.dragging = false;
      const found = moved ? null : this.barAt(now);
      if (found) this.select(found, now);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", drop);
    addEventListener("pointercancel", drop);
  }

  barAt(event) {
    const bar = event.target.closest && event.target.closest("[data-bar]");
    if (!bar || !this.chart.contains(bar)) return null;
    const [number, part, b, count] = bar.dataset.bar.split(".");
    const strip = this.strips[+number];
    return {strip, all: part === "m" ? strip.main : strip.sync, b: +b, count: +count};
  }

  hover(event) {
    if (this.dragging) return;
    const found = this.barAt(event);
    if (!found) return this.hide();
    this.tell(found, event.clientX, event.clientY);
  }

  tell(found, clientX, clientY) {
    const [title, ...lines] = this.words(found);
    this.tip.innerHTML = `<b>${escape(title)}</b>${lines.map(line => `<br>${escape(line)}`).join("")}`;
    this.tip.hidden = false;
    const frame = this.chart.parentElement.getBoundingClientRect();
    const x = clamp(clientX - frame.left + 14, 0, Math.max(frame.width - this.tip.offsetWidth - 4, 0));
    const below = clientY - frame.top + 18;
    const above = clientY + this.tip.offsetHeight + 30 > innerHeight;
    this.tip.style.left = `${x}px`;
    this.tip.style.top = `${above ? below - this.tip.offsetHeight - 30 : below}px`;
  }

  hide() { this.tip.hidden = true; }

  first() {
    for (const strip of this.strips) {
      const all = strip.main;
      for (let b = 0; b < all.num; b++) if (all.e[b] > this.from && all.s[b] < this.to) return {strip, all, b, count: 1};
    }
    return null;
  }

  select(found, event) {
    this.selected = found;
    if (!found) return;
    const {all, b} = found, span = this.to - this.from;
    if (all.s[b] < this.from || all.e[b] > this.to) {
      const middle = (all.s[b] + all.e[b]) / 2;
      this.show(middle - span / 2, middle + span / 2);
    } else {
      this.draw();
    }
    this.status.textContent = this.words({...found, count: 1}).join(". ") + ".";
    if (!event) this.tellChosen();
  }

  // Beside the chosen bar, as long as it is in sight.
  tellChosen() {
    const box = this.inSight() && this.box(this.selected), frame = this.chart.getBoundingClientRect();
    if (!box) return this.hide();
    this.tell({...this.selected, count: 1}, frame.left + this.gutter + Math.max(box.x, 0), frame.top + box.y + box.h);
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key], lane = {ArrowDown: 1, ArrowUp: -1}[event.key];
    const act = {"+": "in", "=": "in", "-": "out", "_": "out", PageUp: "left", PageDown: "right", "0": "all", t: "train"}[event.key];
    if (step) this.select(this.beside(step));
    else if (lane) this.select(this.across(lane));
    else if (act) this.act(act);
    else if (event.key === "Home") this.show(0, this.to - this.from);
    else if (event.key === "End") this.show(this.data.end - (this.to - this.from), this.data.end);
    else if (event.key === "Escape") { this.selected = null; this.hide(); this.draw(); }
    else return;
    if (!step && !lane) this.tellChosen();
    event.preventDefault();
  }

  beside(step) {
    if (!this.selected) return this.first();
    const {strip, all, b} = this.selected;
    return {strip, all, b: clamp(b + step, 0, all.num - 1), count: 1};
  }

  // The bar that is in work at the same time in the next lane of work or syncs.
  across(step) {
    if (!this.selected) return this.first();
    const rows = this.strips.filter(strip => !strip.hidden)
      .flatMap(strip => [{strip, all: strip.main}, {strip, all: strip.sync}]).filter(({all}) => all.num);
    const here = rows.findIndex(({all}) => all === this.selected.all);
    const next = rows[clamp(here + step, 0, rows.length - 1)];
    const time = this.selected.all.s[this.selected.b];
    let best = 0;
    for (let b = 1; b < next.all.num; b++)
      if (Math.abs(next.all.s[b] - time) < Math.abs(next.all.s[best] - time)) best = b;
    return {...next, b: best, count: 1};
  }
}

// What if -----------------------------------------------------------------------------------------------------

function whatIf(root) {
  const table = JSON.parse(root.querySelector("script").textContent);
  const [lag, size] = ["lag", "replicas"].map(name => root.querySelector(`input[name=${name}]`));
  const said = root.querySelector("output.answer");
  const sizes = [...new Set(table.cases.map(c => c.replicas))].sort((a, b) => a - b);
  const lags = [...new Set(table.cases.map(c => c.lag))].sort((a, b) => a - b);
  const find = (l, s) => table.cases.find(c => c.lag === l && c.replicas === s);
  const now = find(table.lag, table.replicas);
  function answer() {
    const [l, s] = [lags[+lag.value], sizes[+size.value]], found = find(l, s);
    lag.nextElementSibling.textContent = l;
    size.nextElementSibling.textContent = s;
    for (const [input, value] of [[lag, `lag ${l}`], [size, `${s} replicas`]]) input.setAttribute("aria-valuetext", value);
    for (const cell of root.querySelectorAll("td[data-case]"))
      cell.classList.toggle("chosen", cell.dataset.case === `${l}.${s}`);
    if (!found || found.period_s === null || !now || !now.period_s) {
      said.innerHTML = "The simulator has no answer for this: such a lag is refused by the program, or time ran out.";
      return;
    }
    const gain = now.period_s / found.period_s - 1, same = l === table.lag && s === table.replicas;
    const change = same ? "the lag and replicas of the run, simulated" : Math.abs(gain) < 0.005 ? "no faster and no slower than the run's"
      : `<b>${(100 * Math.abs(gain)).toFixed(gain > 1 ? 0 : 1)} % ${gain > 0 ? "more" : "fewer"} updates per hour</b>`;
    const busy = Object.entries(found.busy).map(([pool, share]) => `${escape(pool)} ${(100 * share).toFixed(0)} %`);
    // The run's own case tells by how much the simulator is off.
    const off = table.measured_s ? table.measured_s / now.period_s : 1;
    const [low, high] = [Math.min(1, off), Math.max(1, off)].map(share => duration(found.period_s * share * 1e6, 3));
    const range = table.measured_s ? ` (${low === high ? "" : `${low} to ${high}, `}calibrated by this run)` : " (not calibrated: the run is too short)";
    said.innerHTML = `<span class="big">${duration(found.period_s * 1e6, 3)}</span> per update${range}: ${change}. ` +
      `Mean lag ${found.lag_mean.toFixed(2)}; busy: ${busy.join(", ")}.`;
  }
  for (const input of [lag, size]) input.addEventListener("input", answer);
  answer();
}

// Readings ----------------------------------------------------------------------------------------------------

function readings(figure) {
  const svg = figure.querySelector("svg"), said = figure.querySelector(".reading");
  let points, left, right, low, high, line, wrote, at = -1;
  // The chart may be drawn anew while somebody reads it.
  figure.reread = () => {
    points = JSON.parse(figure.dataset.points);
    [left, right, low, high] = JSON.parse(figure.dataset.frame);
    line = svg.querySelector(".cursor");
    wrote = said.innerHTML;
    if (at >= 0) read(at);
  };
  figure.reread();
  function read(place) {
    at = clamp(place, 0, points.length - 1);
    const [x, ...ys] = points[at];
    const px = left + (right - left) * (high > low ? (x - low) / (high - low) : 0.5);
    line.setAttribute("x1", px);
    line.setAttribute("x2", px);
    line.style.visibility = "visible";
    const values = ys.map(y => y === null ? "–" : Number(y.toPrecision(4))).join(" / ");
    said.textContent = `${figure.dataset.x} ${Number(x.toPrecision(5))}: ${values}`;
  }
  function leave() {
    line.style.visibility = "hidden";
    said.innerHTML = wrote;
    at = -1;
  }
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const wanted = low + (x - left) / (right - left) * (high - low);
    let best = 0;
    points.forEach((p, i) => { if (Math.abs(p[0] - wanted) < Math.abs(points[best][0] - wanted)) best = i; });
    read(best);
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9}[event.key];
    if (!step) return;
    event.preventDefault();
    read(at + step);
  });
}

async function begin() {
  for (const root of document.querySelectorAll(".schedule")) {
    try {
      root.view = new Schedule(root, await inflate(root.querySelector("script.data").textContent));
    } catch (error) {
      root.querySelector(".selected").textContent = `This browser cannot show the schedule (${error.message}).`;
    }
  }
  document.querySelectorAll(".what-if").forEach(whatIf);
  document.querySelectorAll("figure[data-points]").forEach(readings);
  document.documentElement.dataset.ready = "yes";
}

begin();
