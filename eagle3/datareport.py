"""The data report of stage 01: what the traces look like, before GPU hours are spent on them.

  python -m eagle3.datareport runs/kimi/01_traces --closing-id 163607
  python -m eagle3.datareport runs/kimi/01_traces --render      (the page again, from data_report.json alone)

Reads traces.jsonl, skipped.jsonl and failures.jsonl as streams and writes data_report.json and data_report.html
beside them. About 60 bytes a trace are held in memory, never a text.
"""

import argparse
import sys
from pathlib import Path

from eagle3.common import log
from eagle3.common.errors import StageError
from eagle3.common.log import logger
from eagle3.traces import data_report


def main(arguments: list[str]) -> int:
    """Write or render the report of a folder and print its counts; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m eagle3.datareport", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="01_traces folder of a run")
    parser.add_argument("--closing-id", type=int, help="id of the token that closes the reasoning (Kimi: 163607)")
    parser.add_argument("--render", action="store_true", help="only the page, from data_report.json")
    given = parser.parse_args(arguments)
    log.set_up(None, "info")
    try:
        if given.render:
            data_report.render(given.directory)
        else:
            data_report.write(given.directory, given.closing_id)
        print(data_report.counts_text(data_report.load(given.directory)))
        logger.info("wrote %s", ", ".join(str(path) for path in data_report.outputs(given.directory).values()))
        return 0
    except StageError as error:
        logger.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
