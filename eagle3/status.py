"""python -m eagle3.status: see eagle3/common/runs.py."""

import sys

from eagle3.common.runs import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
