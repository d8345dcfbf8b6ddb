"""What does not fit into its place on a page, at each width that people have."""

from __future__ import annotations

from playwright.sync_api import Page

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
