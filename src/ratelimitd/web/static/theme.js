// Informs the style sheet that scripts run and which colour scheme is selected: the system's or one chosen here. Runs
// before the page is shown, so that it does not flash in another scheme.
const CHOICES = ['system', 'light', 'dark'];
const root = document.documentElement;

function chosen() {
  try {
    const found = localStorage.getItem('theme');
    return CHOICES.includes(found) ? found : 'system';
  } catch {
    return 'system'; // storage is off
  }
}

function show(choice) {
  if (choice === 'system') root.removeAttribute('data-theme');
  else root.setAttribute('data-theme', choice);
}

root.classList.add('scripts');
show(chosen());

document.addEventListener('DOMContentLoaded', () => {
  const button = document.getElementById('theme');
  const label = () => { button.textContent = `Theme: ${chosen()}`; };
  button.addEventListener('click', () => {
    const next = CHOICES[(CHOICES.indexOf(chosen()) + 1) % CHOICES.length];
    try { localStorage.setItem('theme', next); } catch { /* storage is off: the page stays as it is */ }
    show(chosen());
    label();
  });
  label();
  button.hidden = false;
});
