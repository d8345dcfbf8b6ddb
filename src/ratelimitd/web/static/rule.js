// The chart of one rule, as of the loading of its page.
import { Chart } from './chart.js';

const charts = document.querySelector('.charts');
if (charts) {
  const { rows, spanMs, stepMs } = charts.dataset;
  const chart = new Chart(charts.querySelector('.chart'), { columns: [1, 2], live: false });
  chart.draw(JSON.parse(rows), Number(spanMs), Number(stepMs));
}
