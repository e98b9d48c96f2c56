"""Engine arguments in every spelling that the engines take; how vLLM's own parser reads them."""

import pytest

from eagle3.common.options import EngineOptions
from eagle3.engines import arguments, defaults, launch
from eagle3.states import extraction

DTYPE = [["--dtype", "float32"], ["--dtype=float32"], ["--seed=1", "--dtype=float16", "--dtype", "float32", "-q", "x"]]


@pytest.mark.parametrize("words", DTYPE)
def test_both_spellings_say_the_same_and_the_last_one_counts(words):
    assert arguments.value(words, "--dtype") == "float32"
    assert extraction.resolve_dtype("auto", EngineOptions(args=words)) == "float32"


@pytest.mark.parametrize(("words", "name", "value"), [
    (["-tp", "8"], "--tensor-parallel-size", "8"),
    (["--tp=8"], "--tensor-parallel-size", "8"),
    (["--tensor_parallel_size", "8"], "--tensor-parallel-size", "8"),
    (["-O3"], "--optimization-level", "3"),
    (["-O", "3"], "--optimization-level", "3"),
    (["-cc.mode", "0"], "--compilation-config", "0"),
    (["--compilation-config.mode=0"], "--compilation-config", "0"),
    (["--enforce-eager", "--port", "1"], "--enforce-eager", ""),
    (["--seed", "-1"], "--seed", "-1"),
    (["--override", "--dtype"], "--override", ""),
    (["--served-model-name", "dtype"], "--dtype", None),
    ([], "--dtype", None),
])  # fmt: skip
def test_short_names_underscores_and_members_of_objects(words, name, value):
    assert arguments.value(words, name) == value
    assert arguments.given(words, name) == (value is not None)


@pytest.mark.parametrize(("given", "dtype"), [("half", "float16"), ("float", "float32"), ("auto", "bfloat16")])
def test_vllms_names_of_a_precision_are_torchs(given, dtype):
    assert extraction.resolve_dtype("auto", EngineOptions(args=["--dtype", given])) == dtype


@pytest.mark.parametrize("words", [["--enforce-eager"], ["-O0"], ["-cc.mode=0"], ["--compilation_config", "{}"]])
def test_what_the_user_says_of_compiling_stays(words, monkeypatch):
    monkeypatch.setattr(defaults, "is_cpu_only", lambda engine: True)
    assert "--enforce-eager" in defaults.cpu_args(EngineOptions())
    assert "--enforce-eager" not in defaults.cpu_args(EngineOptions(args=words))


def test_a_port_is_found_in_either_spelling():
    assert launch.given_port(["--port=8001"]) == launch.given_port(["--port", "8001"]) == 8001
    assert launch.given_port(["--port"]) is None


def test_vllms_own_parser_reads_them_so():
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = ["-tp=4", "--dtype=float32", "--max_model_len", "64", "-cc.mode", "0", "-O1", "--dtype", "bfloat16"]
    theirs = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words)
    assert int(arguments.value(words, "--tensor-parallel-size")) == theirs.tensor_parallel_size == 4
    assert arguments.value(words, "--dtype") == theirs.dtype == "bfloat16"
    assert int(arguments.value(words, "--max-model-len")) == theirs.max_model_len == 64
    assert int(arguments.value(words, "--optimization-level")) == int(theirs.optimization_level) == 1
    assert arguments.given(words, "--compilation-config") and int(theirs.compilation_config.mode) == 0
