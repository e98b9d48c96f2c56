"""Arguments of an engine's command line, as its own parser reads them: what is given, and with what value.

Both engines read theirs with argparse. `--dtype=float32` and `--dtype float32` are one thing; the last of several
counts; vLLM takes underscores for dashes, and sets members of an object with a dot (`--compilation-config.mode 0`).
Read in vLLM 0.16-0.32 (vllm/utils/argparse_utils.py, vllm/engine/arg_utils.py) and SGLang 0.5.8-0.5.17
(sglang/srt/server_args.py). Unambiguous beginnings of a name, which argparse takes too, are not recognised.
"""

from collections.abc import Iterator, Sequence

# Other names of the arguments that are looked up here.
_OTHER_NAMES = {
    "-tp": "--tensor-parallel-size", "--tp": "--tensor-parallel-size", "--tp-size": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size", "--pp": "--pipeline-parallel-size", "--pp-size": "--pipeline-parallel-size",
    "-q": "--quantization", "-sc": "--speculative-config", "-cc": "--compilation-config",
    "-O": "--optimization-level", "--model-path": "--model",
}  # fmt: skip


def value(words: Sequence[str], *names: str) -> str | None:
    """Return the value of the argument with one of these names, the last one given; None when there is none.

    A flag without a value has the value "".
    """
    return next((found for name, found in reversed([*_pairs(words)]) if name in names), None)


def given(words: Sequence[str], *names: str) -> bool:
    """Say whether an argument with one of these names is given, with whatever value."""
    return any(name in names for name, _ in _pairs(words))


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (full name, value) of each argument: for `--a.b v` that of `--a` too."""
    for place, word in enumerate(words):
        if not word.startswith("-") or _is_number(word):
            continue
        written, equals, text = word.partition("=")
        if written.startswith("-O") and written != "-O":  # -O3
            written, equals, text = "-O", "=", written[2:]
        following = words[place + 1] if place + 1 < len(words) else ""
        if not equals and (not following.startswith("-") or _is_number(following)):
            text = following
        name = written.replace("_", "-") if written.startswith("--") else written
        yield _OTHER_NAMES.get(name, name), text
        if "." in name:
            outer = name.partition(".")[0]
            yield _OTHER_NAMES.get(outer, outer), text


def _is_number(word: str) -> bool:
    return word.lstrip("-").replace(".", "", 1).isdigit()
