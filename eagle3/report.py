"""python -m eagle3.report: see eagle3/benchmark/report.py."""

import sys

from eagle3.benchmark.report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
