"""Tables, plots and the report page of a benchmark, from its results.json alone.

  python -m eagle3.report runs/smollm2/06_bench

Prints acceptance and speed as tables and writes report.html, acceptance.png and throughput.png beside results.json.
"""

import argparse
import sys
from pathlib import Path

from eagle3.benchmark import report
from eagle3.common import log
from eagle3.common.errors import StageError
from eagle3.common.log import logger


def main(arguments: list[str]) -> int:
    """Render a results directory again and print its tables; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m eagle3.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="folder of stage 06 with results.json; report and plots go there")
    directory = parser.parse_args(arguments).directory
    log.set_up(None, "info")
    try:
        made = report.render(directory)
        print(report.text_table(report.load(directory)))
        logger.info("wrote %s", ", ".join(str(path) for path in made))
        return 0
    except StageError as error:
        logger.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
