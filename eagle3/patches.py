"""python -m eagle3.patches: see eagle3/engines/patching.py."""

import sys

from eagle3.engines.patching import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
