// A line chart in SVG: lines over a grid with ticks, and the values at the pointer. The style sheet sets colours and
// strokes.

const SVG = 'http://www.w3.org/2000/svg';
const ROOM = { left: 54, right: 14, top: 10, bottom: 24 }; // around the lines, for the labels
const MIN_GAP_MS = 25_000; // longer gaps between samples interrupt the line
const TICKS_MS = [1, 2, 5, 10, 15, 30, 60, 120, 180, 240, 360].map((minutes) => minutes * 60_000);
const PX_PER_TICK = 56;

const clock = (style) => new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit', ...style });
const ofTick = clock({});
const ofMoment = clock({ second: '2-digit' });
const compact = new Intl.NumberFormat('en', { notation: 'compact', maximumSignificantDigits: 3 });

// Formats a value with three significant digits, or all digits before the point if there are more.
export const plain = (value) => (value < 100 ? value.toPrecision(3) / 1 : Math.round(value)).toLocaleString('en');

function add(parent, name, attributes, text = '') {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  parent.append(made);
  return made;
}

// Rounds up to a number that is easy to read.
function rounded(least) {
  const size = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 2.5, 5, 10].find((factor) => factor * size >= least * .999) * size;
}

export class Chart {
  // A figure element. Rows begin with their time in ms. `columns`: indexes of the drawn values; `format`: formats a
  // value; `top`: fixed maximum of the grid, if any; `live`: the newest row is current.
  constructor(figure, { columns, format = plain, top, live = true }) {
    Object.assign(this, { columns, format, fixed: top, live, rows: [], at: null });
    this.svg = figure.querySelector('svg');
    this.moment = figure.querySelector('.moment');
    this.values = [...figure.querySelectorAll('.key b')];
    this.svg.addEventListener('pointermove', (event) => this.point(event));
    this.svg.addEventListener('pointerleave', () => { this.at = null; this.show(); });
    new ResizeObserver(() => this.paint()).observe(this.svg);
  }

  draw(rows, spanMs, stepMs) {
    Object.assign(this, { rows, spanMs, gapMs: Math.max(MIN_GAP_MS, 2.5 * stepMs) });
    this.end = rows.length ? rows[rows.length - 1][0] : Date.now();
    this.paint();
  }

  paint() {
    if (!this.spanMs) return;
    this.width = this.svg.clientWidth;
    this.height = this.svg.clientHeight;
    this.svg.setAttribute('viewBox', `0 0 ${this.width} ${this.height}`);
    this.svg.replaceChildren();
    const highest = Math.max(0, ...this.rows.flatMap((row) => this.columns.map((column) => row[column] ?? 0)));
    const step = rounded((this.fixed ?? (highest || 1)) / 4);
    this.top = this.fixed ?? step * Math.ceil((highest || 1) / step * .999);
    this.grid(step);
    this.columns.forEach((column, index) => add(this.svg, 'path', { class: `line${index + 1}`, d: this.line(column) }));
    this.cursor = add(this.svg, 'path', { class: 'cursor' });
    this.show();
  }

  grid(step) {
    for (let value = 0; value <= this.top * 1.001; value += step) {
      const y = this.y(value);
      add(this.svg, 'path', { class: 'grid', d: `M${ROOM.left} ${y}H${this.width - ROOM.right}` });
      const text = this.fixed ? this.format(value) : compact.format(value);
      add(this.svg, 'text', { class: 'tick', x: ROOM.left - 8, y, 'text-anchor': 'end', dy: '.35em' }, text);
    }
    const most = Math.max(2, Math.floor((this.width - ROOM.left - ROOM.right) / PX_PER_TICK));
    const every = TICKS_MS.find((ms) => this.spanMs / ms <= most) ?? TICKS_MS.at(-1);
    const zone = new Date(this.end).getTimezoneOffset() * 60_000; // ticks at whole hours of local time
    const start = this.end - this.spanMs;
    for (let at = Math.ceil((start - zone) / every) * every + zone; at <= this.end; at += every) {
      const x = this.x(at);
      add(this.svg, 'path', { class: 'grid', d: `M${x} ${this.y(0)}v4` });
      add(this.svg, 'text', { class: 'tick', x, y: this.height - 5, 'text-anchor': 'middle' }, ofTick.format(at));
    }
  }

  line(column) {
    let line = '';
    let before = -Infinity;
    for (const row of this.rows) {
      const value = row[column];
      if (value === null) { before = -Infinity; continue; }
      line += `${row[0] - before > this.gapMs ? 'M' : 'L'}${this.x(row[0])} ${this.y(value)}`;
      before = row[0];
    }
    return line;
  }

  x(at) {
    const part = 1 - (this.end - at) / this.spanMs;
    return (ROOM.left + part * (this.width - ROOM.left - ROOM.right)).toFixed(1);
  }

  y(value) {
    const part = value / this.top;
    return (this.height - ROOM.bottom - part * (this.height - ROOM.top - ROOM.bottom)).toFixed(1);
  }

  point(event) {
    const { left, width } = this.svg.getBoundingClientRect();
    const part = (event.clientX - left - ROOM.left) / (width - ROOM.left - ROOM.right);
    this.at = this.end - (1 - part) * this.spanMs;
    this.show();
  }

  // Shows the values of the row nearest to the pointer, else of the newest row.
  show() {
    if (!this.rows.length) return;
    const distance = (row) => Math.abs(row[0] - (this.at ?? this.end));
    const row = this.rows.reduce((best, one) => (distance(one) <= distance(best) ? one : best));
    this.values.forEach((value, index) => {
      const found = row[this.columns[index]];
      value.textContent = found === null ? '–' : this.format(found);
    });
    this.moment.textContent = this.at === null && this.live ? 'now' : `at ${ofMoment.format(row[0])}`;
    const x = this.x(row[0]);
    this.cursor?.setAttribute('d', this.at === null ? '' : `M${x} ${this.y(0)}V${this.y(this.top)}`);
  }
}
