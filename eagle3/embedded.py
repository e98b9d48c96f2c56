"""python -m eagle3.embedded: see eagle3/drafter/gguf.py."""

import sys

from eagle3.drafter.gguf import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
