// A line chart in an SVG: draws what it is given into paths, and says what the top of the picture stands for.
// Colours and strokes are those of the style sheet.

const WIDTH = 600;
const HEIGHT = 160;
const EDGE = 4;
const SPAN_MS = 900_000;
const GAP_MS = 25_000; // where nothing is known for longer there is no line

const SVG = 'http://www.w3.org/2000/svg';

function path(svg, name) {
  const made = document.createElementNS(SVG, 'path');
  made.setAttribute('class', name);
  svg.append(made);
  return made;
}

// The next number above that people read easily: 1, 2 or 5 with zeros.
function rounded(highest) {
  if (!(highest > 0)) return 1;
  const size = 10 ** Math.floor(Math.log10(highest));
  return [1, 2, 5, 10].find((factor) => factor * size >= highest) * size;
}

export class Chart {
  constructor(svg, columns, fixed) {
    this.columns = columns;
    this.fixed = fixed; // the value at the top, where it is always the same
    this.grid = path(svg, 'grid');
    this.lines = columns.map((_, index) => path(svg, `line${index + 1}`));
    this.grid.setAttribute('d', [0, .5, 1].map((part) => `M0 ${this.y(part)}H${WIDTH}`).join(''));
  }

  y(part) { return (HEIGHT - EDGE - part * (HEIGHT - 2 * EDGE)).toFixed(1); }

  // Draws rows of which each begins with its time; returns the value at the top.
  draw(rows) {
    const end = rows.length ? rows[rows.length - 1][0] : 0;
    const highest = Math.max(0, ...rows.flatMap((row) => this.columns.map((column) => row[column] ?? 0)));
    const top = this.fixed ?? rounded(highest);
    this.columns.forEach((column, index) => {
      let line = '';
      let before = -Infinity;
      for (const row of rows) {
        const value = row[column];
        if (value === null) { before = -Infinity; continue; }
        const x = (WIDTH * (1 - (end - row[0]) / SPAN_MS)).toFixed(1);
        line += `${row[0] - before > GAP_MS ? 'M' : 'L'}${x} ${this.y(value / top)}`;
        before = row[0];
      }
      this.lines[index].setAttribute('d', line);
    });
    return top;
  }
}
