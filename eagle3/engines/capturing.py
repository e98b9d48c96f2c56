"""Whether an engine can give hidden states here: its version, and the arguments that would keep them from a hook."""

from eagle3.common.options import EngineOptions
from eagle3.common.versions import numbers
from eagle3.engines import arguments, installed

# SGLang's --forward-hooks (sglang/srt/model_executor/hook_manager.py). From 0.5.21 on layers give their output without
# the residual, which is kept in the batch in more than one form (sglang/srt/layers/layer_boundary). Read in its wheels.
SGLANG_SINCE, SGLANG_BELOW = (0, 5, 8), (0, 5, 21)
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
    if numbers(version) >= SGLANG_BELOW:
        last = ".".join(map(str, (*SGLANG_BELOW[:2], SGLANG_BELOW[2] - 1)))
        return (f"SGLang {version} keeps the residual stream out of its layers' outputs: the last to capture from is "
                f"{last}")
    for name in _FLAGS:
        if arguments.given(engine.args, name):
            return f"hooks do not see every layer's whole output with {name}"
    for name in _AT_MOST_ONE:
        if (arguments.value(engine.args, name) or "1") != "1":
            return f"states are captured with tensor parallelism on one machine alone, not with {name}"
    return ""
