"""What axe-core finds on a page, what a keyboard reaches, and what does not fit at each width that people have."""

from __future__ import annotations

from importlib.resources import files

from playwright.sync_api import Page

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")

GRAVE = {"serious", "critical"}

FOCUSED = """
() => {
  const element = document.activeElement
  if (element === document.body) return null
  const look = getComputedStyle(element)
  const seen = element.checkVisibility() && look.outlineStyle !== 'none' && parseFloat(look.outlineWidth) > 0
  const label = element.labels?.[0]?.innerText ?? element.getAttribute('aria-label') ?? element.innerText
  const place = [...document.querySelectorAll('*')].indexOf(element)
  return [label.trim().split('\\n')[0], seen, place]
}
"""


def violations(page: Page) -> list[str]:
    """What keeps somebody from using the page: the rule of axe-core, and the elements that break it."""
    page.evaluate(AXE)
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    return [
        f"{violation['id']} ({violation['impact']}): {node['html']}: {node['failureSummary']}"
        for violation in found
        if violation["impact"] in GRAVE
        for node in violation["nodes"]
    ]


def tab_stops(page: Page) -> list[tuple[str, bool]]:
    """Press Tab from the top of the page to its end: what each stop is called, and whether one sees the focus."""
    stops: dict[int, tuple[str, bool]] = {}
    last = -1
    while True:
        page.keyboard.press("Tab")
        stop = page.evaluate(FOCUSED)
        # Behind the last comes the first again, or nothing. A date has a stop for each of its parts.
        if stop is None or (stop[2] in stops and stop[2] != last):
            return [*stops.values()]
        last = stop[2]
        stops.setdefault(last, (stop[0], stop[1]))


WIDTHS = {"phone": 375, "tablet": 768, "desktop": 1280, "wide": 1920}

CLIPPED = """
() => {
  const root = document.documentElement
  const found = root.scrollWidth > root.clientWidth ? ['the page'] : []
  for (const table of document.querySelectorAll('table')) {
    const frame = table.parentElement
    if (frame.scrollWidth > frame.clientWidth) found.push(`table ${table.caption.textContent}`)
  }
  const actions = 'main :is(a, button, input:not([type=hidden]), select, textarea)'
  for (const action of document.querySelectorAll(actions)) {
    if (!action.checkVisibility()) continue
    const { left, right, width } = action.getBoundingClientRect()
    if (!width || left < 0 || right > root.clientWidth + .5) found.push(`action ${action.textContent}`)
  }
  return found
}
"""
"""Tables wider than their frames, and links, buttons and fields that are not within the window."""


def clipped(page: Page) -> list[str]:
    """What is cut off at any of the widths, with the width."""
    found = []
    for name, width in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": 900})
        found += [f"{name}: {what}" for what in page.evaluate(CLIPPED)]
    return found
