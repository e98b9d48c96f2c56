"""Report of a benchmark, from its results.json alone; or two of them side by side.

  python -m eagle3.report runs/smollm2/06_bench
  python -m eagle3.report --compare runs/smollm2/06_bench runs/smollm2/06_bench_other

Prints acceptance and speed as tables and writes report.html beside results.json. --compare writes comparison.html
into the second folder, and refuses (exit code 3) two that differ in more than the drafter and how it is served.
"""

import argparse
import sys
from pathlib import Path

from eagle3.benchmark import report, side_by_side
from eagle3.common import files, log, pages
from eagle3.common.errors import StageError
from eagle3.common.log import logger


def main(arguments: list[str]) -> int:
    """Render one results directory, or compare two, and print the tables; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m eagle3.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("directory", type=Path, nargs="?", help="folder of stage 06; the page goes there")
    what.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="two such folders, side by side")
    given = parser.parse_args(arguments)
    log.set_up(None, "info")
    try:
        made = compare(*given.compare) if given.compare else show(given.directory)
    except StageError as error:
        logger.error("%s", error)
        return error.exit_code
    logger.info("wrote %s", made)
    return 0


def show(directory: Path) -> Path:
    """Render a results directory again and print its tables; return the page."""
    made = report.render(directory)
    print(report.text_table(report.load(directory)))
    return made


def compare(first: Path, second: Path) -> Path:
    """Print and write two benchmarks side by side; return the page. PreconditionError names unequal conditions."""
    one, other = report.load(first), report.load(second)
    unrecorded = side_by_side.require_equal(one, other)
    lines = [side_by_side.lead(one, other), *side_by_side.words(one, other, unrecorded)]
    print("\n".join(report.filled(line) for line in lines), end="\n\n")
    print(pages.text_table(*side_by_side.table(one, other), width=report.WIDTH))
    page = second / "comparison.html"
    files.write_bytes(page, side_by_side.page(one, other, unrecorded).encode())
    return page


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
