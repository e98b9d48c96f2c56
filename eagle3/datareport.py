"""python -m eagle3.datareport: see eagle3/traces/data_report.py."""

import sys

from eagle3.traces.data_report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
