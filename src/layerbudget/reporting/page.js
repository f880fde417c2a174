"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
const N = D.network, G = D.grid || null;
const esc = t => String(t).replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}[c]));
const num = v => v == null ? "–" : Math.abs(v) >= 1e4 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(3));
const figure = name => document.querySelector(`figure[data-chart="${name}"]`);
const width = f => Math.max(280, f.clientWidth);
const ticks = (lo, hi, n) => {
  if (!(hi > lo)) hi = lo + 1;
  const raw = (hi - lo) / n, mag = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(m => m * mag).find(s => s >= raw), out = [];
  for (let k = Math.ceil(lo / step); k * step <= hi + step * 1e-9; k++) out.push(+(k * step).toPrecision(12) || 0);
  return out;
};
// A tick in as few digits as tell it from the others.
const mark = (t, all) => {
  for (let p = 3; p < 8; p++) if (new Set(all.map(v => v.toPrecision(p))).size === all.length) return p === 3 ? num(t) : String(+t.toPrecision(p));
  return num(t);
};
// The number of a layer under its first block, as far as there is room.
function layers(names, x, y) {
  let out = "", last = -99, before = null;
  names.forEach((name, k) => {
    const label = short(name).split(" ")[0].split(".").pop();
    if (label !== before && x(k) - last > 8 + 7 * Math.min(label.length, 8)) {
      out += `<text class="soft" text-anchor="${k ? "middle" : "start"}" x="${k ? x(k) : x(0) - 5}" y="${y}">${esc(label.length > 8 ? label.slice(0, 7) + "…" : label)}<title>${esc(name)}</title></text>`;
      last = k ? x(k) : x(0) + 6.5 * Math.min(label.length, 8);
    }
    before = label;
  });
  return out;
}
// Blocks as they are read: layer by layer, matrices in their order; what stands in several layers comes last.
const order = (() => {
  const place = new Map();
  for (const [r, c, k] of N ? N.cells : []) place.set(k, place.has(k) && Math.floor(place.get(k) / 1e4) !== r ? 1e9 : r * 1e4 + c);
  return (N ? N.names : []).map((_, k) => k).sort((a, b) => (place.get(a) ?? 1e9) - (place.get(b) ?? 1e9));
})();
const short = name => name.replace(/^.*?\.(\d+)(\.|$)/, "$1 ").trim();

// --- what is shown now: the plan itself, or a place of the grid
const state = {own: !!(D.value), budget: G ? G.start : 0};
function shown() {
  if (state.own || !G) return {values: D.value, cap: D.water && D.water.cap, uniform: D.water && D.water.uniform, share: D.water && D.water.share, told: D.water && D.water.told};
  return G.plans[state.budget];
}
const capOf = (now, k) => Array.isArray(now.cap) ? now.cap[k] : now.cap;
// The format of a block in the plan itself; plans at other budgets say bits alone.
const named = k => D.formats && (state.own || !G) ? `${D.formats[k]}, ` : "";
function ceiling() {
  if (D.word === "sparsity" || (G && G.kind === "sparsity")) return 1;
  const now = shown();
  return now.values ? Math.max(...now.values, 1) : 1;
}

function network() {
  const f = figure("network");
  if (!f) return;
  const now = shown(), values = now.values || (D.gains ? D.gains.gain : null);
  if (!values) return;
  const low = Math.min(...values.filter(v => v != null)), high = Math.max(...values.filter(v => v != null));
  const part = v => high > low ? (v - low) / (high - low) : .5;
  if (!f.dataset.made) {
    f.dataset.made = 1;
    f.removeAttribute("role");
    const cells = new Map(N.cells.map(([r, c, k]) => [r + "," + c, k]));
    let h = `<div class="net" style="grid-template-columns:auto repeat(${N.columns.length},minmax(2.1rem,1fr))"><span></span>`;
    h += N.columns.map(c => `<span class="col" title="${esc(c)}">${esc(c.replace("_proj", ""))}</span>`).join("");
    N.rows.forEach((r, i) => {
      h += `<span class="row">${esc(r)}</span>`;
      N.columns.forEach((c, j) => {
        const k = cells.get(i + "," + j);
        h += k == null ? "<span></span>" : `<div class="cell" role="button" tabindex="${i + j ? -1 : 0}" data-k="${k}" data-r="${i}" data-c="${j}"></div>`;
      });
    });
    f.innerHTML = h + `</div><div class="legend"><span class="lo"></span><span class="ramp"></span><span class="hi"></span><span>${esc(D.word)}</span></div><p class="tip" aria-live="polite"></p>`;
    const tell = e => {
      const k = e.target.dataset && e.target.dataset.k;
      if (k == null) return;
      const v = (shown().values || D.gains.gain)[k];
      f.querySelector(".tip").textContent = `${N.names[k]}: ${named(k)}${num(v)} ${D.word}, ${N.numel[k].toLocaleString("en")} parameters${D.damage && named(k) ? `, predicted damage ${num(D.damage[k])} nats per token` : ""}`;
    };
    f.addEventListener("pointerover", tell);
    f.addEventListener("focusin", tell);
    f.addEventListener("keydown", e => {
      const d = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[e.key];
      if (!d || e.target.dataset.r == null) return;
      const next = f.querySelector(`[data-r="${+e.target.dataset.r + d[0]}"][data-c="${+e.target.dataset.c + d[1]}"]`);
      if (next) { e.target.tabIndex = -1; next.tabIndex = 0; next.focus(); e.preventDefault(); }
    });
  }
  f.querySelector(".lo").textContent = num(low);
  f.querySelector(".hi").textContent = num(high);
  for (const cell of f.querySelectorAll(".cell")) {
    const v = values[cell.dataset.k], p = v == null ? 0 : part(v);
    cell.style.background = `color-mix(in oklab, var(--hi) ${(100 * p).toFixed(1)}%, var(--lo))`;
    cell.classList.toggle("dark", p > .62);
    cell.textContent = v == null ? "–" : named(cell.dataset.k) ? D.formats[cell.dataset.k] : D.word === "sparsity" ? Math.round(100 * v) : num(v);
    cell.setAttribute("aria-label", `${N.names[cell.dataset.k]}: ${named(cell.dataset.k)}${num(v)}`);
  }
  fit(f.querySelectorAll(".cell"));
}

// All cells in the size in which the longest word fits.
function fit(cells) {
  cells.forEach(c => { c.style.fontSize = ""; });
  const full = Math.max(0, ...[...cells].map(c => c.scrollWidth / c.clientWidth || 0));
  if (full > 1) cells.forEach(c => { c.style.fontSize = `${Math.max(6, Math.floor(10 * parseFloat(getComputedStyle(c).fontSize) / full) / 10)}px`; });
}

function water() {
  const f = figure("water");
  if (!f) return;
  const now = shown();
  if (!now.values) return;
  const W = width(f), H = 250, L = 44, B = 34, T = 22, K = now.values.length, top = ceiling() * 1.04;
  const w = (W - L - 6) / K, gap = w > 6 ? Math.min(4, w * .2) : .5, y = v => T + (H - T - B) * (1 - v / top);
  if (f.dataset.w != W + "x" + K) {
    f.dataset.w = W + "x" + K;
    f.innerHTML = `<svg viewBox="0 0 ${W} ${H}"><g class="ax"></g><g class="bars">` +
      order.map((_, k) => `<rect class="vessel" x="${L + k * w + gap / 2}" width="${Math.max(.5, w - gap)}" fill="none" stroke="var(--line)"/><rect class="bar" x="${L + k * w + gap / 2}" width="${Math.max(.5, w - gap)}" rx="2" fill="var(--hi)"><title></title></rect>`).join("") +
      `</g><line class="uni" x1="${L}" x2="${W - 4}" stroke="var(--warm)" stroke-width="1.5" stroke-dasharray="5 4"/><line class="key" x1="${W - 34}" x2="${W - 4}" y1="6" y2="6" stroke="var(--warm)" stroke-width="1.5" stroke-dasharray="5 4"/><text class="unit" text-anchor="end" x="${W - 40}" y="10"></text></svg>`;
  }
  let ax = "";
  for (const t of ticks(0, top, 5)) ax += `<line class="axis" x1="${L}" x2="${W - 4}" y1="${y(t)}" y2="${y(t)}"/><text class="soft" text-anchor="end" x="${L - 6}" y="${y(t) + 4}">${num(t)}</text>`;
  ax += layers(order.map(k => N.names[k]), k => L + (k + .5) * w, H - B + 16);
  ax += `<text class="soft" x="${L}" y="${H - 3}">block, in the model's order</text>`;
  f.querySelector(".ax").innerHTML = ax;
  f.querySelectorAll(".bar").forEach((bar, k) => {
    const v = Math.max(0, now.values[order[k]]);
    bar.setAttribute("y", y(v));
    bar.setAttribute("height", Math.max(0, y(0) - y(v)));
    bar.firstChild.textContent = `${N.names[order[k]]}: ${num(v)}`;
  });
  f.querySelectorAll(".vessel").forEach((v, k) => {
    v.setAttribute("y", now.cap ? y(capOf(now, order[k])) : y(0));
    v.setAttribute("height", now.cap ? y(0) - y(capOf(now, order[k])) : 0);
  });
  const line = f.querySelector(".uni"), label = f.querySelector(".unit");
  f.querySelector(".key").style.display = line.style.display = label.style.display = now.uniform == null ? "none" : "";
  if (now.uniform != null) {
    line.setAttribute("y1", y(now.uniform)); line.setAttribute("y2", y(now.uniform));
    label.textContent = `uniform ${num(now.uniform)}`;
  }
}

function say() {
  const said = document.getElementById("said");
  if (!said || !G) return;
  const now = shown(), v = now.values;
  document.querySelector("output[for=budget]").textContent = num(state.own && G.own != null ? G.own : G.budgets[state.budget]);
  const mean = v.reduce((a, b) => a + b, 0) / v.length, sd = Math.sqrt(v.reduce((a, b) => a + (b - mean) ** 2, 0) / v.length);
  const capped = now.cap ? v.filter((x, k) => x >= capOf(now, k) - 1e-6).length : 0;
  said.textContent = (state.own ? "The plan of this folder: " : now.told ? `${G.place} ${num(G.budgets[state.budget])}: ` : "Solved for these settings: ") +
    `from ${num(Math.min(...v))} to ${num(Math.max(...v))}${D.formats ? " " + D.word : `, standard deviation ${num(sd)}`}` +
    (capped ? `, ${capped} of ${v.length} at the cap` : "") + (now.share != null ? `; uniform has ${(100 * now.share).toFixed(1)} % of the gain` : "") + (now.told ? `; ${now.told}` : "") + ".";
  const own = document.getElementById("own");
  if (own) own.hidden = state.own || !D.value;
}

function gains() {
  const f = figure("gains");
  if (!f) return;
  const g = D.gains, K = g.gain.length, W = width(f), H = 210, L = 56, B = 34, T = 10;
  const tops = g.gain.map((v, k) => (v || 0) + (g.error[k] || 0)), top = Math.max(...tops, ...g.floor.map(v => v || 0)) * 1.05 || 1;
  const low = Math.min(0, ...g.gain.map(v => v || 0)), y = v => T + (H - T - B) * (1 - (v - low) / (top - low)), w = (W - L - 6) / K, gap = w > 6 ? Math.min(4, w * .2) : .5;
  let h = "";
  for (const t of ticks(low, top, 4)) h += `<line class="axis" x1="${L}" x2="${W - 4}" y1="${y(t)}" y2="${y(t)}"/><text class="soft" text-anchor="end" x="${L - 6}" y="${y(t) + 4}">${num(t)}</text>`;
  const read = N && String(N.names) === String(g.names) ? order : g.names.map((_, k) => k);
  h += layers(read.map(k => g.names[k]), k => L + (k + .5) * w, H - B + 16);
  read.forEach((k, i) => {
    const v = g.gain[k];
    if (v == null) return;
    const x = L + i * w + gap / 2, c = x + (w - gap) / 2;
    h += `<rect x="${x}" width="${Math.max(.5, w - gap)}" y="${y(Math.max(v, 0))}" height="${Math.abs(y(0) - y(v))}" rx="2" fill="var(--hi)" opacity=".85"><title>${esc(g.names[k])}: ${num(v)}</title></rect>`;
    if (g.error[k]) h += `<line x1="${c}" x2="${c}" y1="${y(v - g.error[k])}" y2="${y(v + g.error[k])}" stroke="var(--ink)"/>`;
    if (g.floor[k] != null) h += `<line x1="${x}" x2="${x + w - gap}" y1="${y(g.floor[k])}" y2="${y(g.floor[k])}" stroke="var(--warm)" stroke-width="2"/>`;
  });
  h += `<text class="soft" x="${L}" y="${H - 3}">${esc(g.unit)}, by block</text>`;
  f.innerHTML = `<svg viewBox="0 0 ${W} ${H}">${h}</svg>`;
}

function memory() {
  const f = figure("memory");
  if (!f) return;
  const M = D.memory, P = M.points, W = width(f), L = 78, R = 96, row = 26, H = 30 + P.length * row;
  const colours = ["var(--hi)", "var(--warm)", "var(--soft)", "var(--line)", "var(--ink)"];
  const top = Math.max(...P.map(p => p.parts.reduce((a, b) => a + b, 0))), x = v => L + (W - L - R) * v / top;
  let h = ticks(0, top, W < 500 ? 3 : 6).map((t, _, all) => `<line class="axis" x1="${x(t)}" x2="${x(t)}" y1="4" y2="${H - 24}"/><text class="soft" text-anchor="middle" x="${x(t)}" y="${H - 8}">${mark(t, all)}</text>`).join("");
  P.forEach((p, i) => {
    const y = 6 + i * row;
    let at = 0;
    h += `<text text-anchor="end" x="${L - 8}" y="${y + 14}"${p.own ? ' font-weight="700"' : ""}>${p.own ? "▸ " : ""}${esc(p.label)}</text>`;
    p.parts.forEach((v, k) => {
      h += `<rect class="part" x="${x(at)}" width="${Math.max(0, x(at + v) - x(at))}" y="${y}" height="18" fill="${colours[k]}"><title>${esc(M.names[k])}: ${num(v)} ${M.unit}</title></rect>`;
      at += v;
    });
    h += `<text x="${x(at) + 8}" y="${y + 14}">${num(p.predicted)}</text>`;
  });
  const key = M.names.map((n, k) => `<span><span style="display:inline-block;width:.8em;height:.8em;background:${colours[k]}"></span> ${esc(n)}</span>`).join(" ");
  f.innerHTML = `<svg viewBox="0 0 ${W} ${H}">${h}</svg><p class="tip">${key} · bytes in ${M.unit}; right of the bars the predicted nats per token</p>`;
}

function forecast() {
  const f = figure("forecast");
  if (!f) return;
  const F = D.forecast, P = F.points, W = width(f), L = beside(P, W, 210), row = 26, H = 30 + P.length * row;
  const seen = P.flatMap(p => [p.predicted, p.measured, p.measured - (p.error || 0), p.measured + (p.error || 0)]).filter(v => v != null);
  const wide = Math.min(...P.map(p => p.measured)) > 0 && Math.max(...P.map(p => p.measured)) / Math.min(...P.map(p => p.measured)) > 50;
  const least = Math.min(...P.map(p => p.measured).concat(P.map(p => p.predicted).filter(v => v > 0))) / 1.5;
  const at = wide ? v => Math.log10(Math.max(v, least)) : v => v, lo = wide ? at(least) : Math.min(0, ...seen), hi = at(Math.max(...seen));
  const x = v => L + (W - L - 66) * (at(v) - lo) / (hi - lo || 1);
  const places = wide ? ticks(Math.ceil(lo), hi, 6).filter(Number.isInteger).map(v => 10 ** v) : ticks(lo, hi, W < 500 ? 3 : 6);
  let h = places.map((t, _, all) => `<line class="axis" x1="${x(t)}" x2="${x(t)}" y1="4" y2="${H - 24}"/><text class="soft" text-anchor="middle" x="${x(t)}" y="${H - 8}">${wide ? t.toExponential(0) : mark(t, all)}</text>`).join("");
  P.forEach((p, i) => {
    const y = 18 + i * row, e = p.error || 0, ends = [p.measured + e, p.predicted ?? p.measured];
    h += called(p.label, L, y);
    if (e) h += `<line x1="${x(p.measured - e)}" x2="${x(p.measured + e)}" y1="${y}" y2="${y}" stroke="var(--hi)" stroke-width="2"/>`;
    h += `<circle class="measured" cx="${x(p.measured)}" cy="${y}" r="5" fill="var(--hi)"><title>measured ${num(p.measured)}</title></circle>`;
    if (p.predicted != null) h += `<circle class="predicted" cx="${x(p.predicted)}" cy="${y}" r="6" fill="none" stroke="var(--warm)" stroke-width="2"><title>predicted ${num(p.predicted)}</title></circle>`;
    h += `<text x="${x(Math.max(...ends)) + 12}" y="${y + 4}">${num(p.measured)}</text>`;
  });
  f.innerHTML = `<svg viewBox="0 0 ${W} ${H}">${h}</svg><p class="tip">${esc(F.note)}</p>`;
}

// Names at the left of a chart: as wide as they need, up to a share of the chart; a longer one takes two lines.
const beside = (points, W, most) => Math.min(most, W * .46, 16 + 6.6 * Math.max(...points.map(p => p.label.length)));
function called(label, L, y) {
  const most = Math.floor((L - 8) / 6.4), at = label.length > most ? label.lastIndexOf(" ", most) : -1;
  const lines = at > 0 ? [label.slice(0, at), label.slice(at + 1)] : [label];
  const spans = lines.map((t, i) => `<tspan x="${L - 10}" dy="${i * 12}">${esc(t.length > most ? t.slice(0, most - 1) + "…" : t)}</tspan>`);
  return `<text text-anchor="end" y="${y + 10 - 6 * lines.length}">${spans.join("")}<title>${esc(label)}</title></text>`;
}

function results() {
  const f = figure("results");
  if (!f) return;
  const R = D.results, P = R.points, W = width(f), L = beside(P, W, 230), row = 26, H = 30 + P.length * row;
  const lo = Math.min(...P.map(p => Math.min(p.value - p.error, ...(p.by || [])))), hi = Math.max(...P.map(p => Math.max(p.value + p.error, ...(p.by || []))));
  const pad = (hi - lo || 1) * .08, x = v => L + (W - L - 58) * (v - lo + pad) / (hi - lo + 2 * pad);
  let h = ticks(lo - pad, hi + pad, W < 500 ? 3 : 6).map((t, _, all) => `<line class="axis" x1="${x(t)}" x2="${x(t)}" y1="4" y2="${H - 24}"/><text class="soft" text-anchor="middle" x="${x(t)}" y="${H - 8}">${mark(t, all)}</text>`).join("");
  P.forEach((p, i) => {
    const y = 18 + i * row, col = /uniform|permuted|before|dense/.test(p.label) ? "var(--soft)" : "var(--hi)";
    h += called(p.label, L, y);
    h += `<line x1="${x(p.value - p.error)}" x2="${x(p.value + p.error)}" y1="${y}" y2="${y}" stroke="${col}" stroke-width="2"/><circle cx="${x(p.value)}" cy="${y}" r="5" fill="${col}"/>`;
    (p.by || []).forEach(v => { h += `<circle cx="${x(v)}" cy="${y}" r="2.2" fill="var(--ink)" opacity=".6"/>`; });
    h += `<text x="${x(p.value + p.error) + 8}" y="${y + 4}">${+p.value.toPrecision(4)}</text>`;
  });
  f.innerHTML = `<svg viewBox="0 0 ${W} ${H}">${h}</svg><p class="tip">${esc(R.unit)}; ${R.better} is better</p>`;
}

function paired() {
  const f = figure("paired");
  if (!f) return;
  const P = D.paired.items, W = width(f), L = beside(P, W, 230), row = 28, H = 30 + P.length * row;
  const lo = Math.min(0, ...P.map(p => p.low)), hi = Math.max(0, ...P.map(p => p.high)), pad = (hi - lo || 1) * .08;
  const x = v => L + (W - L - 14) * (v - lo + pad) / (hi - lo + 2 * pad);
  let h = ticks(lo - pad, hi + pad, W < 500 ? 3 : 6).map((t, _, all) => `<line class="axis" x1="${x(t)}" x2="${x(t)}" y1="4" y2="${H - 24}"/><text class="soft" text-anchor="middle" x="${x(t)}" y="${H - 8}">${mark(t, all)}</text>`).join("");
  h += `<line x1="${x(0)}" x2="${x(0)}" y1="2" y2="${H - 24}" stroke="var(--ink)"/>`;
  P.forEach((p, i) => {
    const y = 18 + i * row, sure = !p.detail && (p.low > 0 || p.high < 0), col = sure ? "var(--hi)" : "var(--soft)";
    h += called(p.label, L, y);
    h += `<line x1="${x(p.low)}" x2="${x(p.high)}" y1="${y}" y2="${y}" stroke="${col}" stroke-width="3" stroke-linecap="round"/><circle cx="${x(p.value)}" cy="${y}" r="5" fill="${col}"><title>${num(p.value)} (${num(p.low)} to ${num(p.high)})</title></circle>`;
  });
  const words = P.map(p => p.sentence).filter(Boolean).map(s => `<p class="tip">${esc(s)}</p>`).join("");
  f.innerHTML = `<svg viewBox="0 0 ${W} ${H}">${h}</svg><p class="tip">difference in ${esc(D.paired.unit)}</p>${words}`;
}

function moving() { network(); water(); say(); }
function all() { moving(); memory(); forecast(); gains(); results(); paired(); }
const slider = document.getElementById("budget"), own = document.getElementById("own");
if (slider) slider.addEventListener("input", () => { state.budget = +slider.value; state.own = false; moving(); });
if (own) own.addEventListener("click", () => {
  if (!D.value) return;
  state.own = true;
  slider.value = state.budget = G.start;
  moving();
});
for (const c of document.querySelectorAll("pre code"))  // a flag is not broken at its dashes
  c.innerHTML = c.innerHTML.replace(/\S+/g, w => w.length < 40 ? `<span class="word">${w}</span>` : w);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => { d.open = true; }));
let waiting = 0;
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(all, 80); });
all();
