"""A real browser, where there is one: what it finds wrong with pages at the widths of a phone, a desk and paper."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

WIDTHS = (400, 1200)
PAPER = 700  # CSS pixels between the margins of A4
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Each page stands in a frame of each width; a box that scrolls may be wide on a screen, not on paper.
_MEASURE = """
const found = [];
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, root = page.scrollingElement, paper = frame.dataset.paper === "1";
  const boxes = [...page.querySelectorAll(".scrolling")].filter(box => box.scrollWidth > box.clientWidth + 1);
  const outside = [...page.querySelectorAll("figure svg text")].filter(text => {
    const a = text.getBoundingClientRect(), b = text.closest("svg").getBoundingClientRect();
    return a.left < b.left - 1 || a.right > b.right + 1; });
  found.push({page: frame.title, width: root.clientWidth, title: page.title, scroll: root.scrollWidth,
    boxes: paper ? boxes.length : 0, outside: outside.map(text => text.textContent) });
}
document.body.innerHTML = "";
document.body.append(Object.assign(document.createElement("pre"), {id: "found", textContent: JSON.stringify(found)}));
"""


def find() -> str | None:
    """Return the path of a Chromium, None without one."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def look_at(pages: dict[str, Path], folder: Path) -> tuple[list[dict], list[str]]:
    """Return what was measured of each page at each width, and the lines of the browser's console."""
    frames = []
    for name, path in pages.items():
        source = path.read_text(encoding="utf-8")
        for width, paper in [*((width, False) for width in WIDTHS), (PAPER, True)]:
            shown = source.replace("@media print", "@media all") if paper else source
            frames.append(f'<iframe title="{html.escape(name)}" width="{width}" height="800" style="border:0" '
                          f'data-paper="{int(paper)}" srcdoc="{html.escape(shown)}"></iframe>')
    wrapper = folder / "wrapper.html"
    wrapper.write_text(f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"></head><body>{"".join(frames)}'
                       f"<script>onload = () => {{ {_MEASURE} }}</script></body></html>", encoding="utf-8")
    command = [find(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
               "--no-first-run", f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--dump-dom",
               "--virtual-time-budget=10000", wrapper.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    told = re.search(r'<pre id="found">(.*?)</pre>', result.stdout, re.DOTALL)
    assert told, f"the browser told nothing:\n{result.stderr[-2000:]}"
    return json.loads(html.unescape(told[1])), [line for line in result.stderr.splitlines() if "CONSOLE" in line]
