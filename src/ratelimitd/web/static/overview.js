// Keeps the overview up to date: receives the history for the charts, then with each event the changed parts of the
// page. Without scripts the page stays as loaded.
import { Chart, plain } from './chart.js';

const SILENCE_MS = 8_000;
const REFUSED_MS = 20_000;

const { spanMs: SPAN_MS, stepMs: STEP_MS } = document.querySelector('.charts').dataset;
const PER_S = 1, LATENCY = 4, RATIO = 7, BUCKETS = 8; // indexes in a row, which begins with its time
const charts = Object.entries({
  checks: { columns: [PER_S, PER_S + 1, PER_S + 2] },
  latency: { columns: [LATENCY, LATENCY + 1, LATENCY + 2], format: (value) => `${plain(value)} ms` },
  ratio: { columns: [RATIO], format: (value) => `${plain(value * 100)} %`, top: 1 },
  buckets: { columns: [BUCKETS] },
}).map(([name, options]) => new Chart(document.querySelector(`[data-chart="${name}"]`), options));

let rows = [];

function draw() {
  for (const chart of charts) chart.draw(rows, Number(SPAN_MS), Number(STEP_MS));
}

// Makes a part of the page equal to another one and keeps equal nodes: focus, selection and opened details stay.
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
  // A hidden page is not drawn; the next event contains what it missed.
  last = Date.now();
  say('Live, every two seconds.');
  // An unfinished sample replaces its version of two seconds ago.
  const stretch = ([at]) => Math.floor(at / STEP_MS);
  rows = rows.filter((one) => one[0] > row[0] - SPAN_MS && stretch(one) < stretch(row));
  rows.push(row);
  if (document.hidden) return;
  for (const [id, html] of Object.entries(parts)) renewPart(id, html);
  draw();
}

// A browser reopens a broken stream, but not a refused one: a balancer may briefly have no node, or the visitor must
// log in again.
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
