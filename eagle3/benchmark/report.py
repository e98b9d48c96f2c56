"""The report of a benchmark, a page and tables, from its results.json alone."""

import textwrap
from pathlib import Path
from typing import Any

from eagle3.benchmark import headline, prediction_tables, report_page, report_tables
from eagle3.common import files, pages
from eagle3.common.errors import PreconditionError

_SCHEMA_VERSIONS = (1, 2)
WIDTH = 120  # columns of a terminal


def render(directory: Path) -> Path:
    """Write report.html of a results directory and return its path.

    Raises PreconditionError when results.json is missing or of another schema version.
    """
    page = directory / "report.html"
    files.write_bytes(page, report_page.page(load(directory)).encode())
    return page


def load(directory: Path) -> dict[str, Any]:
    """Return the results of a benchmark after checking their schema version; older ones as today's are."""
    path = directory / "results.json"
    results = files.read_json(path, fix="name the directory of a finished benchmark")
    version = results.get("schema_version") if isinstance(results, dict) else None
    if version not in _SCHEMA_VERSIONS:
        raise PreconditionError(
            "results of another schema version", where=path, expected=_SCHEMA_VERSIONS[-1], found=version
        )
    return (_as_today(results) if version == 1 else results) | {"directory": str(directory)}


def _as_today(results: dict[str, Any]) -> dict[str, Any]:
    """Return results of version 1, of one temperature and one prompt set, without the figures that it had not."""
    settings = results["settings"]
    known = {"temperature": settings["temperature"], "prompts": "prompts", "measurements": [""], "spread": {}}
    runs = [known | {"server": "drafter" if run["draft_tokens"] else "baseline"} | run for run in results["runs"]]
    sets = [{"name": "prompts", "about": "prompts of yours", "path": "–", "prompts": settings["prompts"]}]
    return results | {"runs": runs, "sets": sets, "drift": [], "control": None}


def text_table(results: dict[str, Any]) -> str:
    """Return what the benchmark comes to and its tables as text of at most 120 columns, and what to do.

    A command stays on one line however long it is: it is there to be copied.
    """
    results = _as_today(results) if results["schema_version"] == 1 else results
    first = [filled(line) for line in headline.lines(results)]
    shown = [f"{title}\n{pages.text_table(*table, width=WIDTH)}"
             for title, table in report_tables.tables(results).items()]
    verdict = [filled(f"Control: {results['control']['text']}")] if results["control"] else []
    lines = [*prediction_tables.remarks(results), *prediction_tables.serving_words(results)]
    told = [pages.visible(line) if line.startswith("  ") else filled(line) for line in lines]
    return "\n\n".join([*first, *shown, *verdict, *told])


def filled(line: str) -> str:
    """Return a line of a text of unknown origin, wrapped at the width of a terminal."""
    return textwrap.fill(pages.visible(line), WIDTH)
