"""Whether an engine can give hidden states here: its version, and the arguments that would keep them from a hook."""

from eagle3.common.options import EngineOptions
from eagle3.common.versions import numbers
from eagle3.engines import arguments, installed

# SGLang's --forward-hooks; read in its wheels 0.5.8 to 0.5.23 (sglang/srt/model_executor/hook_manager.py).
SGLANG_SINCE = (0, 5, 8)
_FLAGS = ("--enable-dp-attention", "--enable-two-batch-overlap", "--speculative-algorithm", "--enable-pdmux")
_AT_MOST_ONE = ("--pipeline-parallel-size", "--data-parallel-size", "--dp-size", "--dp", "--nnodes")


def refusal(engine: EngineOptions) -> str:
    """Return why states cannot be captured with an engine, "" when nothing is known against it.

    Raises PreconditionError when its interpreter does not run.
    """
    if engine.kind != "sglang":
        return ""
    version = installed.engine_version(engine)
    if version is None:
        return f"there is no SGLang in {installed.interpreter(engine)}"
    if numbers(version) < SGLANG_SINCE:
        since = ".".join(map(str, SGLANG_SINCE))
        return f"SGLang {version} has no --forward-hooks: states are captured from {since} on"
    for name in _FLAGS:
        if arguments.given(engine.args, name):
            return f"hooks do not see every layer's whole output with {name}"
    for name in _AT_MOST_ONE:
        if (arguments.value(engine.args, name) or "1") != "1":
            return f"states are captured with tensor parallelism on one machine alone, not with {name}"
    return ""
