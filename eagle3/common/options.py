"""Every option of every stage: one dataclass a section of the YAML file. One list, and so longer than other modules.

A stage's options are its sections side by side, so `options.train.lr` is `train: {lr: …}` in the file and
`--lr` on the command line. `option()` holds what --help prints and what validation needs. `results=False`
marks an option that cannot change what is computed (worker counts, time-outs): it may change on resume.
"""

from dataclasses import dataclass, field
from typing import Any


def option(
    default: Any = None,
    help: str = "",  # noqa: A002 - the word argparse uses
    *,
    unit: str = "",
    flag: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    length: int | None = None,
    results: bool = True,
    path: bool = False,
    command_line_only: bool = False,
) -> Any:
    """Return a dataclass field with its help text, unit, limits and role in the fingerprint.

    Limits of a list are those of each of its values; `length` is how many it has.
    """
    metadata = {
        "help": help,
        "unit": unit,
        "flag": flag,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "length": length,
        "results": results,
        "path": path,
        "command_line_only": command_line_only,
    }
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _common(default: Any, help: str, **more: Any) -> Any:  # noqa: A002
    return option(default, help, results=False, command_line_only=True, **more)


@dataclass
class CommonOptions:
    """Options that every stage has; they are given on the command line only."""

    config: str = _common("", "YAML file with a section per stage plus model and engine", path=True)
    run_dir: str = _common("", "directory of the run; each stage has a folder in it", path=True)
    out: str | None = _common(None, "write this stage's result here instead of into the run directory", path=True)
    dry_run: bool = _common(False, "print what would be read, written and launched, with estimates; change nothing")
    preflight: bool = _common(
        True, "look at machine, engine, model and drafter before an engine or training starts, and stop where it would "
        "fail; --no-preflight only warns"
    )
    print_config: bool = _common(False, "print the resolved configuration as YAML and stop")
    restart: bool = _common(False, "move an existing result aside (nothing is deleted) and start anew")
    limit: int | None = _common(None, "use only the first N inputs", unit="inputs", minimum=1)
    json: bool = _common(False, "print the manifest as JSON on stdout at the end")
    log_level: str = _common("info", "how much to print", choices=("debug", "info", "warning", "error"))


@dataclass
class ModelOptions:
    """The verifier: the model that is to be sped up."""

    path: str = option("", "folder of the verifier (Hugging Face layout)", flag="--model", path=True)
    layers: list[int] = option(
        [],
        "three auxiliary layers (the residual stream entering each) and the last decoder layer, whose output is "
        "the teacher state; empty: 2, N//2, N-3, N-1 for N layers",
        unit="layer indexes",
    )
    trust_remote_code: bool = option(False, "run Python code that lies in the model folder (Kimi's tokenizer needs it)")


@dataclass
class EngineOptions:
    """The inference engine; it may live in an interpreter of its own."""

    kind: str = option("vllm", "which engine", flag="--engine", choices=("vllm", "sglang"))
    python: str | None = option(
        None, "interpreter that holds the engine; default: this one", flag="--engine-python", path=True, results=False
    )
    tensor_parallel_size: int = option(1, "GPUs that share the model", unit="GPUs", minimum=1, results=False)
    env: dict[str, str] = option({}, "environment variables for the engine, as JSON", flag="--engine-env")
    args: list[str] = option([], "arguments for the engine, passed through verbatim", flag="--engine-args")
    startup_timeout_min: float = option(
        60.0,
        "give up on an engine that has not answered by then",
        unit="minutes",
        flag="--engine-startup-timeout-min",
        minimum=0.1,
        results=False,
    )
    stall_min: float = option(
        5.0,
        "give up on a starting engine that for so long writes no log line, computes nothing, reads nothing and does "
        "not use its GPUs; 0: never",
        unit="minutes",
        flag="--engine-stall-min",
        minimum=0.0,
        results=False,
    )


@dataclass
class GenerateSection:
    """Stage 01: prompts → traces."""

    prompts: str = option(
        "",
        "where prompts come from: a file (JSON lines, JSON array, Parquet), a folder of such files or one saved by "
        "`datasets`, or the name of a dataset on the hub; self:N lets the verifier invent N of its own",
        path=True,
    )
    self_temperature: float = option(1.0, "sampling temperature of self:N", minimum=0.0)
    self_top_p: float = option(1.0, "nucleus sampling of self:N", minimum=0.0, maximum=1.0)
    self_seed: int = option(0, "seed of self:N; each request has its own, made of this one and its number")
    self_tokens: list[int] = option([4, 384], "shortest and longest prompt of self:N", unit="tokens", minimum=1,
                                    length=2)
    self_systems: list[str] = option(
        [], "system prompts before which self:N lets the user speak, in turn, one a request; '' is none"
    )
    self_openings: list[str] = option(
        [], "first words of the user in self:N, in turn, such as 'Write a poem' 'Translate into'; '' is none"
    )
    self_keep_system: bool = option(False, "ask the prompts of self:N with the system prompt that they were invented "
                                    "after; otherwise it only steers what they are about")
    self_held_out: list[str] = option(
        [], "files of prompts that self:N must not come near; prompts/benchmark.jsonl of the project and what the "
        "configuration measures on (benchmark.prompts, benchmark.prompt_sets) are kept out in any case"
    )
    prompt_split: str = option("train", "split of a dataset that has several", results=False)
    turns: str = option(
        "last",
        "last: only the last reply of a conversation; all: each reply anew, in turn, on what was generated before",
        choices=("last", "all"),
    )
    sample: int | None = option(None, "ask only this many conversations, chosen by --sample-seed whatever their order",
                                unit="conversations", minimum=1, results=False)
    sample_seed: int = option(0, "seed of --sample", results=False)
    deduplicate: str = option(
        "rows",
        "what is asked once: rows that are equal throughout, or prompts with equal messages and tools",
        choices=("rows", "prompts"),
        results=False,
    )
    role_map: dict[str, str] = option({}, 'roles of other names, as JSON: {"human": "user"}', results=False)
    endpoint: list[str] = option(
        [],
        "OpenAI-compatible servers of the same model, such as http://127.0.0.1:8000/v1; they share the work, and one "
        "that fails is set aside and tried again",
        results=False,
    )
    serve: bool = option(False, "start the engine on the model for this stage and stop it afterwards", results=False)
    serve_args: list[str] = option([], "more arguments for the server of --serve (parsers and the like)")
    served_model_name: str | None = option(None, "model name to ask for; default: the only one the server lists")
    max_tokens: int = option(2048, "longest reply", unit="tokens", minimum=1)
    max_model_len: int | None = option(
        None, "longest prompt plus reply; longer prompts are skipped, replies clamped", unit="tokens", minimum=2
    )
    temperature: float = option(0.0, "sampling temperature; 0 is greedy", minimum=0.0)
    top_p: float = option(1.0, "nucleus sampling", minimum=0.0, maximum=1.0)
    seed: int = option(0, "sampling seed sent with each request")
    chat_template_kwargs: dict[str, Any] = option({}, "arguments for the chat template, as JSON")
    sampling: str | None = option(
        None,
        "YAML or JSON list of settings to mix, each with a weight and any of temperature, top_p, max_tokens, "
        "chat_template_kwargs; a prompt's setting is a hash of its id and --seed",
        path=True,
    )
    ask_again: list[str] = option(
        [],
        "reasons of skipped.jsonl whose prompts are asked all the same, such as 'prompt too long' (quoted) once the "
        "server takes longer ones",
        results=False,
    )
    check_tokens: int = option(
        0,
        "compare the server's token ids with those of the template on this many replies, and say where they differ",
        unit="replies",
        minimum=0,
        results=False,
    )
    reasoning: str = option(
        "optional", "whether replies must, may or must not reason", choices=("required", "optional", "off")
    )
    concurrency: int = option(64, "requests in flight", unit="requests", minimum=1, results=False)
    request_timeout_s: float = option(600.0, "longest wait for one reply", unit="seconds", minimum=0.1, results=False)
    retries: int = option(4, "tries after the first for errors that may pass", minimum=0, results=False)
    max_failures: int = option(0, "failed prompts that are still a success", minimum=0, results=False)
    max_consecutive_failures: int = option(
        20, "stop after this many failures in a row: the server is gone", minimum=1, results=False
    )


@dataclass
class ExtractSection:
    """Stage 02: traces → hidden states."""

    traces: str | None = option(None, "traces; default: the run's 01_traces", path=True, results=False)
    backend: str = option("auto", "auto: the engine (--engine: vllm or sglang); hf: the transformers reference",
                          choices=("auto", "vllm", "sglang", "hf"))
    dtype: str = option("auto", "precision of the verifier; auto: as the engine serves it",
                        choices=("auto", "bfloat16", "float32"))
    states_dtype: str = option(
        "auto", "how states are stored; auto: in the verifier's precision; fp8: one byte a value and a scale for each "
        "token and layer, about half the disk of bfloat16", choices=("auto", "fp8"))
    capture: str = option(
        "auto", "how states are taken; outputs: those vLLM's model gives EAGLE-3, in compiled graphs; hooks: on "
        "layers, in eager mode, for models without, and on SGLang; auto: outputs where there are such",
        choices=("auto", "outputs", "hooks"))
    max_length: int = option(8192, "longest sequence; longer ones are skipped and counted", unit="tokens", minimum=2)
    batch_tokens: int = option(
        8192, "tokens in one prefill pass; at least max_length", unit="tokens", minimum=2, results=False
    )
    shard: str | None = option(None, "capture part k of n, k from 1, such as 2/8, into a folder of its own (--out)",
                               results=False)
    merge: list[str] = option([], "take what these shards have captured, then capture what is missing", results=False)
    verify: str = option("quick", "what lies there already, by size; full: by checksum, reading every byte; what is "
                         "damaged is captured again", choices=("quick", "full"), results=False)
    min_agreement: float = option(
        0.9,
        "smallest share of checked positions whose stored teacher state gives the engine's own next token",
        minimum=0.0,
        maximum=1.0,
        results=False,
    )
    max_failures: int = option(0, "failed samples that are still a success", minimum=0, results=False)


@dataclass
class VocabSection:
    """Stage 03: traces → draft vocabulary."""

    traces: str | None = option(None, "traces; default: the run's 01_traces", path=True, results=False)
    draft_vocab_size: int = option(32000, "tokens the drafter can propose", unit="tokens", minimum=1)
    pin: list[str] = option([], "tokens that go in however rarely they were generated: ids, or texts of one token each")
    from_checkpoint: str | None = option(
        None, "take the vocabulary of this published drafter instead of choosing one (for 04_train.py --init-from)",
        path=True, results=False,  # its mapping itself is in the fingerprint
    )


@dataclass
class TrainSection:
    """Stage 04: states and mapping → drafter."""

    states: str | None = option(None, "hidden states; default: the run's 02_states", path=True, results=False)
    vocab: str | None = option(None, "vocabulary mapping; default: the run's 03_vocab", path=True, results=False)
    init_from: str | None = option(
        None, "begin with the weights of this published drafter, whose vocabulary stage 03 took with --from-checkpoint",
        path=True,
    )
    epochs: int = option(5, "passes over the training samples", minimum=1)
    max_steps: int | None = option(None, "end after this many optimizer steps, the learning rate with them",
                                   unit="steps", minimum=1)
    optimizer: str | None = option(None, "adamw, or muon: Muon for the matrices but lm_head, AdamW for the rest, one "
                                   "process only; default: adamw", choices=("adamw", "muon"))
    lr: float = option(3e-5, "peak learning rate", minimum=0.0)
    warmup_ratio: float = option(0.01, "share of the steps with rising learning rate", minimum=0.0, maximum=1.0)
    min_lr_ratio: float = option(0.0, "learning rate at the end of the cosine, as a share of lr", minimum=0.0)
    weight_decay: float = option(0.01, "weight decay of matrices (none on norms)", minimum=0.0)
    adam_betas: list[float] = option([0.9, 0.95], "AdamW betas, both below 1", minimum=0.0, maximum=0.999999, length=2)
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm", minimum=0.0)
    spike_factor: float = option(
        10.0, "skip a step whose gradient norm is this many times the median of the last 100; 0: only one that is not "
        "finite", minimum=0.0)
    max_skipped_in_a_row: int = option(5, "stop after this many skipped steps in a row, with the checkpoint before "
                                          "them", unit="steps", minimum=1, results=False)
    batch_tokens: int = option(8192, "tokens packed into one batch of one process", unit="tokens", minimum=8)
    long_samples: str = option(
        "chunk", "texts longer than a batch: trained in chunks at their true positions, cut at the batch's end, or "
        "left out", choices=("chunk", "truncate", "drop"))
    recompute: str = option(
        "auto", "compute each TTT step's layer, head and loss again in the backward pass instead of keeping what they "
        "need: less memory for long texts, a third more time; auto: on a GPU where the step would not fit",
        choices=("auto", "on", "off"))
    moments: str = option(
        "float32", "precision of the optimizer's moments, in memory and in checkpoints; bf16 halves them, rounded "
        "stochastically by seed and step", choices=("float32", "bf16"))
    matmul: str = option(
        "bf16", "products of the layer on a GPU: fp8 computes them in float8 (e4m3 by rows, from Ada and Hopper on); "
        "weights, their gradients, fc and head stay as they are", choices=("bf16", "fp8"))
    accumulation: int = option(1, "batches summed up for one optimizer step", unit="batches", minimum=1)
    ttt_steps: int = option(3, "training-time-test steps: how many tokens ahead the drafter is trained", minimum=1)
    ttt_step_loss_decay: float = option(1.0, "weight of step k's loss is this to the power k", minimum=0.0)
    loss: str = option("kl_div", "training loss (eagle3/training/losses.py has the formulas); on GPUs kl_div takes the "
                       "least memory and time", choices=("kl_div", "ce", "rkl", "jsd", "tv", "nla", "lk_hybrid"))
    intermediate_size: int | None = option(None, "width of the drafter's MLP; default: the verifier's dense one")
    fc_norm: bool | None = option(None, "norm each captured state before fc (EAGLE-3.1); default: as the drafter "
                                  "of --init-from, else no")
    norm_before_fc: bool | None = option(None, "norm the captured states together before fc; default: as for fc_norm")
    norm_output: bool | None = option(None, "go on drafting from the normed output (EAGLE-3.1); default: as for "
                                      "fc_norm")
    validation_fraction: float = option(0.05, "share of samples held out", minimum=0.0, maximum=0.9)
    draft_tokens: int | None = option(
        None, "draft tokens whose predicted acceptance length chooses the best checkpoint; default: the mean over "
        "benchmark.draft_tokens, which stage 06 serves", unit="tokens", minimum=1)
    seed: int = option(0, "seed of initialisation and data order")
    dtype: str = option("auto", "compute precision; auto: bfloat16 on GPUs, float32 on CPUs; weights are float32",
                        choices=("auto", "bfloat16", "float32"))
    gpus: int = option(1, "processes, one a GPU; started and watched by this one", unit="processes", minimum=1)
    save_every_min: float = option(10.0, "checkpoint at least this often, besides each epoch's end", unit="minutes",
                                   minimum=0.0, results=False)
    save_every_steps: int | None = option(
        None, "checkpoint every N steps as well", unit="steps", minimum=1, results=False
    )
    keep_checkpoints: int = option(2, "newest epoch-end checkpoints kept (best and last always)", minimum=1,
                                   results=False)
    keep_every: int | None = option(None, "checkpoint every N steps and keep it for good", unit="steps", minimum=1,
                                    results=False)
    max_failures: int = option(
        0, "samples with damaged states that are named and left out, to be captured again; with more the run stops",
        unit="samples", minimum=0, results=False)
    log_every_steps: int = option(10, "one log line every N steps, and the accuracy of that step", unit="steps",
                                  minimum=1, results=False)
    track: list[str] = option([], "what else gets the figures: tensorboard, wandb, trackio, as far as installed; all "
                              "without network unless their own variables say otherwise", results=False)


@dataclass
class ExportSection:
    """Stage 05: checkpoint → what an engine loads."""

    checkpoint: str | None = option(None, "checkpoint; default: the run's 04_train/checkpoints/best", path=True,
                                    results=False)
    to: str = option("vllm", "who is to load it", choices=("vllm", "sglang", "speculators"))
    engine_version: str | None = option(None, "version of that engine; default: the installed one, else the newest")
    serving_length: int | None = option(
        None, "longest sequence that will be served; default: the verifier's", unit="tokens", minimum=1
    )
    trained_embedding: bool = option(
        False, "the checkpoint's own embedding was trained: ship it (vLLM and speculators only)"
    )
    in_place: bool = option(
        False, "rewrite the checkpoint's own folder, its old files kept as NAME.bak", results=False,
        command_line_only=True,
    )
    check: bool = option(False, "only report; write nothing", results=False, command_line_only=True)
    smoke: bool = option(
        False, "start the engine with the export, ask a few prompts, and fail when the first draft token is "
        "accepted too rarely", results=False,
    )
    smoke_prompts: str | None = option(
        None, "prompts of --smoke; default: the project's prompts/benchmark.jsonl", path=True, results=False
    )
    smoke_count: int = option(8, "prompts asked by --smoke", unit="prompts", minimum=1, results=False)
    smoke_tokens: int = option(64, "longest reply of --smoke", unit="tokens", minimum=2, results=False)
    smoke_draft_tokens: int = option(3, "draft tokens of --smoke", unit="tokens", minimum=1, results=False)
    min_first_acceptance: float = option(
        0.2, "share of rounds whose first draft token has to be accepted in --smoke", minimum=0.0, maximum=1.0,
        results=False,
    )


@dataclass
class BenchmarkSection:
    """Stage 06: drafter → acceptance and speed-up."""

    drafter: str | None = option(None, "exported drafter; default: the run's 05_export/<engine>", path=True,
                                 results=False)
    control: str | None = option(
        None, "a second drafter, known to be good, measured under the same conditions: it tells a fault of the engine "
        "from one of the training", path=True, results=False,  # its measurements carry its identity
    )
    prompts: str = option("", "held-out prompts, JSON lines with id and messages: a prompt set named after the file",
                          path=True)
    prompt_sets: list[str] = option(
        [], "more prompt sets, NAME=FILE each, measured one by one; mt-bench, gsm8k, humaneval, math-500 and speed-"
        "bench are read as they are published, other names as --prompts is",
    )
    draft_tokens: list[int] = option([3], "draft-token counts to measure, a server each", unit="tokens")
    concurrency: list[int] = option([1, 8], "requests in flight to measure", unit="requests")
    temperature: list[float] = option([0.0], "sampling temperatures to measure; acceptance is predicted at each",
                                      minimum=0.0)
    repeats: int = option(1, "measurements of each kind within a server's life; figures are their medians, with spread",
                          minimum=1)
    baseline_again: bool = option(
        True, "measure the verifier alone once more at the end, on a server of its own, to show by how much the "
        "machine drifted",
    )
    max_tokens: int = option(512, "longest reply", unit="tokens", minimum=1)
    warmup_prompts: int = option(2, "requests before measuring starts", unit="requests", minimum=0)
    serve_args: list[str] = option([], "more arguments for the servers")
    baseline_endpoint: str | None = option(None, "running server without drafter, instead of starting one")
    drafter_endpoint: str | None = option(None, "running server with drafter, instead of starting one")
    predict: bool = option(True, "predict the acceptance on these very replies (captures their hidden states)")
    capture_python: str | None = option(
        None, "interpreter with vLLM that captures those states instead of SGLang, when that is the engine",
        path=True, results=False,
    )
    load_processes: int | None = option(
        None, "processes that send the requests; default: one for 128 in flight, on at most half of the cores",
        minimum=1, results=False,
    )
    request_timeout_s: float = option(600.0, "longest wait for one reply", unit="seconds", minimum=0.1, results=False)


@dataclass
class GenerateOptions:
    """Options of 01_generate_synthetic.py."""

    common: CommonOptions = field(default_factory=CommonOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    generate: GenerateSection = field(default_factory=GenerateSection)


@dataclass
class ExtractOptions:
    """Options of 02_extract_hidden_states.py."""

    common: CommonOptions = field(default_factory=CommonOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    extract: ExtractSection = field(default_factory=ExtractSection)


@dataclass
class VocabOptions:
    """Options of 03_build_vocab_mapping.py."""

    common: CommonOptions = field(default_factory=CommonOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    vocab: VocabSection = field(default_factory=VocabSection)


@dataclass
class TrainOptions:
    """Options of 04_train.py."""

    common: CommonOptions = field(default_factory=CommonOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    train: TrainSection = field(default_factory=TrainSection)


@dataclass
class ExportOptions:
    """Options of 05_fix_weight_keys.py."""

    common: CommonOptions = field(default_factory=CommonOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    export: ExportSection = field(default_factory=ExportSection)


@dataclass
class BenchmarkOptions:
    """Options of 06_benchmark.py."""

    common: CommonOptions = field(default_factory=CommonOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    benchmark: BenchmarkSection = field(default_factory=BenchmarkSection)


# Every section that a YAML file may hold.
SECTIONS: dict[str, type] = {
    "model": ModelOptions,
    "engine": EngineOptions,
    "generate": GenerateSection,
    "extract": ExtractSection,
    "vocab": VocabSection,
    "train": TrainSection,
    "export": ExportSection,
    "benchmark": BenchmarkSection,
}
