"""What the tests look at pages with."""

import unicodedata
from html.parser import HTMLParser
from pathlib import Path

# Tags, quotes and references; marks of direction; controls; what is not seen; half a character. And how it is shown.
_TAGS = """</td></title></style></pre><script>alert('x')</script><img src="x" onerror='y'>&lt; $\\frac{|"""
HOSTILE = _TAGS + "\u202e\u2066\u061c|\x00\x1b[2J|\u200b\ufeff\U000e0041|\udcff"
SHOWN = _TAGS + "···|··[2J|···|?"
TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "dl", "dt", "dd", "div", "table", "tr",
        "th", "td", "pre", "figure", "figcaption", "ul", "li", "svg", "line", "polyline", "circle", "rect", "text"}
ATTRIBUTES = {"lang", "charset", "name", "content", "http-equiv", "class", "tabindex", "viewbox", "role",
              "aria-label", "aria-hidden", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height",
              "points", "fill", "stroke", "stroke-width", "stroke-dasharray", "text-anchor", "transform"}
VOID = {"meta"}


def hostile(name: str) -> str:
    """Return a text that would break out of a page, starting with a name by which it is found there."""
    return name + HOSTILE


class Page(HTMLParser):
    """A page as a browser reads it: tags with attributes, style, and the text that is seen."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags, self.policy, self.style, self.text, self.holders, self.open = [], "", "", "", [], []
        self.feed(source)
        assert not self.open, "a page whose tags do not pair"

    def handle_starttag(self, tag, attributes):
        """Note a tag, what a table stands in, and the policy."""
        given = dict(attributes)
        self.tags.append((tag, given))
        if tag == "table":
            self.holders.append(self.open[-1])
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        if tag not in VOID:
            self.open.append((tag, given))

    def handle_endtag(self, tag):
        """Leave a tag."""
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        """Note what is seen, and the style."""
        if self.open and self.open[-1][0] == "style":
            self.style += data
        else:
            self.text += data


def is_harmless(path: Path) -> Page:
    """Assert that nothing on a page is active, comes from elsewhere, or hides or reorders text; return the page."""
    source = path.read_text(encoding="utf-8")
    assert not [character for character in source if hides(character)]
    page = Page(source)
    assert {tag for tag, _ in page.tags} <= TAGS
    for _, attributes in page.tags:
        assert set(attributes) <= ATTRIBUTES
    assert page.policy.startswith("default-src 'none'; style-src 'unsafe-inline'")
    return page


def hides(character: str) -> bool:
    """Say whether a character is a control or a format character, line ends apart."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs") and character != "\n"


def tables_scroll(page: Page) -> bool:
    """Say whether every table stands in a box that scrolls sideways, and nothing is cut off."""
    rule = page.style.partition(".scrolling {")[2].partition("}")[0]
    boxed = page.holders and all(given.get("class") == "scrolling" for _, given in page.holders)
    return bool(boxed) and "overflow-x: auto" in rule and "hidden" not in page.style
