// Keeps the overview up to date: the past for the charts, then with each event the parts of the page as the node
// would show them now. Without it the page stays as it was loaded.
import { Chart } from './chart.js';

const SPAN_MS = 900_000;
const SILENCE_MS = 8_000;
const REFUSED_MS = 20_000;

const PER_S = 1, LATENCY = 4, RATIO = 7, BUCKETS = 8; // where a row has what; it begins with its time
const charts = {
  checks: { columns: [PER_S, PER_S + 1, PER_S + 2], unit: '' },
  latency: { columns: [LATENCY, LATENCY + 1, LATENCY + 2], unit: ' ms' },
  ratio: { columns: [RATIO], unit: '', fixed: 1, label: '100 %' },
  buckets: { columns: [BUCKETS], unit: '' },
};
for (const [name, chart] of Object.entries(charts)) {
  const svg = document.querySelector(`[data-chart="${name}"]`);
  chart.drawn = new Chart(svg, chart.columns, chart.fixed);
  chart.highest = document.querySelector(`[data-highest="${name}"]`);
}

let rows = [];

function draw() {
  for (const chart of Object.values(charts)) {
    const top = chart.drawn.draw(rows);
    chart.highest.textContent = chart.label ?? top.toLocaleString('en') + chart.unit;
  }
}

// Makes a part of the page equal to another one, and leaves alone what is equal already: focus, selection and opened
// details stay.
function renew(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeName !== fresh.nodeName || old.childNodes.length !== fresh.childNodes.length) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== 'open') old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const children = [...fresh.childNodes];
  [...old.childNodes].forEach((child, index) => renew(child, children[index]));
}

function renewPart(id, html) {
  const old = document.getElementById(id);
  const fresh = old.cloneNode(false);
  fresh.innerHTML = html;
  renew(old, fresh);
}

const state = document.getElementById('live');
let last = 0;

function say(text) {
  if (state.textContent !== text) state.textContent = text;
}

function take(event) {
  const { row, parts } = JSON.parse(event.data);
  // Nothing is drawn for who does not look; what is missed comes with the next event.
  last = Date.now();
  say('Live, every two seconds.');
  if (!rows.length || row[0] > rows[rows.length - 1][0]) rows.push(row);
  rows = rows.filter(([at]) => at > row[0] - SPAN_MS);
  if (document.hidden) return;
  for (const [id, html] of Object.entries(parts)) renewPart(id, html);
  draw();
}

// A browser opens a stream again that broke, but not one that was refused: by a balancer without a node for a moment,
// or because this visitor has to log in again.
function watch() {
  const events = new EventSource(state.dataset.events);
  events.addEventListener('open', () => { rows = []; });
  events.addEventListener('past', (event) => {
    rows.push(...JSON.parse(event.data));
    draw();
  });
  events.addEventListener('now', take);
  events.addEventListener('error', () => {
    if (events.readyState !== EventSource.CLOSED) return;
    last = 0;
    say('Not live: load the page again, or wait.');
    setTimeout(watch, REFUSED_MS);
  });
}

setInterval(() => {
  if (last && Date.now() - last > SILENCE_MS) say('No news from this node: what is shown is old.');
}, 1_000);
watch();
