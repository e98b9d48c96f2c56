"""A dry run: what is read, written and started, what it takes, and what of it cannot be seen from this machine.

A model folder with an index and none of its shards is a plan made elsewhere, on a laptop: what only the target
machine can have (weights, GPUs, the engine, its disk) is then listed as "not here" instead of failing. With the
weights in place a dry run fails where the run would. Nothing here imports torch or an engine.
"""

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3.common import config, files, machine, tensor_files
from eagle3.common.errors import PreconditionError, StaleError
from eagle3.common.log import duration, logger, size
from eagle3.common.machine import require_free_disk
from eagle3.common.options import EngineOptions
from eagle3.common.stage import Stage
from eagle3.drafter import verifier
from eagle3.drafter.checkpoint import canonical_key
from eagle3.drafter.flat_config import flat_config
from eagle3.dryrun import estimates
from eagle3.engines import arguments, installed, launch


class DryRun:
    """The printed plan of one stage.

    Attributes:
        elsewhere: whether the model folder has no weights, so that this is no machine to run on.
        facts: the verifier, or None when none is named or config.json does not tell its sizes (stages that need them
            say so themselves). known: the reference run of this very model, or None.
    """

    def __init__(self, stage: Stage, model: str | Path | None) -> None:
        self.stage, self._missing = stage, list[str]()
        self.folder, self.facts = Path(model or ""), None
        self.elsewhere = bool(model) and verifier.without_weights(self.folder)
        with contextlib.suppress(PreconditionError):
            self.facts = verifier.read(self.folder)
        self.known = estimates.reference(self.facts) if self.facts else None
        if self.elsewhere:
            count = len(set(verifier.weight_map(self.folder).values()))
            self.not_here(f"weights: {count} shards, {size(estimates.weight_bytes(self.folder))}")

    # --- what may be missing ---

    @contextlib.contextmanager
    def only_there(self, what: str) -> Iterator[None]:
        """Turn a failed precondition of the target machine into a line, on a machine without the weights."""
        try:
            yield
        except PreconditionError as error:
            if not self.elsewhere or isinstance(error, StaleError):
                raise
            parts = [error.what, *(f"{name} {error.parts[name]}" for name in ("expected", "found", "where")
                                   if error.parts[name])]
            self.not_here(f"{what}: " + ", ".join(" ".join(part.split()) for part in parts))

    def not_here(self, line: str) -> None:
        """Keep a line for the end."""
        self._missing.append(line)

    def engine(self, engine: EngineOptions, model: Path | None = None) -> str:
        """Return the engine with its version; one that is installed has to be the right one, wherever this is.

        Raises PreconditionError as `installed.check` does.
        """
        if self.elsewhere:
            self.gpus(engine.tensor_parallel_size)
            version = None
            with contextlib.suppress(PreconditionError):  # the interpreter itself may be the target's
                version = installed.engine_version(engine)
            if version is None:
                self.not_here(f"engine: no {engine.kind} in {installed.interpreter(engine)}")
                return engine.kind
        return f"{engine.kind} {installed.check(engine, model)}"

    def dtype(self, requested: str, engine: EngineOptions) -> str:
        """Return the precision of captured states: on a CPU the engine is asked what suits it there."""
        if requested != "auto" or self.elsewhere or machine.gpus():
            return requested
        from eagle3.states.extraction import resolve_dtype

        return resolve_dtype(requested, engine)

    def trains_in_bf16(self, requested: str) -> bool:
        """Say whether training computes in bfloat16: by default it does on GPUs."""
        return requested == "bfloat16" or (requested == "auto" and (self.elsewhere or bool(machine.gpus())))

    def published(self, folder: str) -> dict[str, Any] | None:
        """Return the flat configuration of a published drafter, None where its weights are not here."""
        if self.elsewhere and not any(Path(folder).glob("*.safetensors")):
            self.not_here(f"drafter: no weights in {folder}")
            return None
        tensors = {canonical_key(name): entry for name, entry in tensor_files.read(Path(folder)).items()}
        flat = flat_config(files.read_json(Path(folder) / "config.json", fix="name a drafter's folder"), tensors)
        self.say("drafter", f"{folder}: {len(tensors)} tensors, draft vocabulary {flat['draft_vocab_size']:,}")
        return flat

    def named(self, flag: str) -> bool:
        """Say whether an option was given on the command line, so that what it names has to be there."""
        return any(word.partition("=")[0] == flag for word in self.stage.argv)

    def gpus(self, wanted: int) -> None:
        """Note GPUs that are not on this machine, if it is not the one to run on."""
        if self.elsewhere and len(visible := machine.gpus()) < wanted:
            self.not_here(f"GPUs: {wanted} wanted, {len(visible)} visible")

    def disk(self, directory: Path, needed: int, what: str) -> None:
        """Refuse a disk that is too small, where it is the disk that would be written."""
        with self.only_there("disk"):
            require_free_disk(directory, needed, what)

    # --- what is printed ---

    def say(self, label: str, text: str) -> None:
        """Print one line of the plan."""
        logger.info("%-7s %s", label, text)

    def server(self, engine: EngineOptions, arguments: Sequence[str], speculative: dict[str, Any] | None = None) -> str:
        """Return the command line that starts a server; its port is chosen at the start."""
        on_cpu = not self.elsewhere and not machine.gpus()
        line = launch.command(engine, self.folder, 0, arguments, speculative, for_cpu=on_cpu)
        line[line.index("--port") + 1] = "PORT"
        shown = config.to_dict(self.stage.options)["engine"]["env"]
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in shown.items()), shlex.join(line)])

    def memory(self, engine: EngineOptions, *, prefill: int, cached: int, why: str, more: int = 0) -> None:
        """Print the engine's memory on each GPU.

        Args:
            prefill: tokens of one prefill pass. cached: tokens in the KV cache, and `why` so many. more: bytes.
        """
        if self.facts is None:
            return
        gpus = engine.tensor_parallel_size
        weights, each = estimates.weight_bytes(self.folder), estimates.kv_bytes_per_token(self.facts, gpus)
        passing = estimates.prefill_bytes(self.facts, prefill, gpus) + more
        whole = ", MLA's latent is on every GPU" if self.facts.mla and gpus > 1 else ""
        shared = f" on each of {gpus} GPUs ({size(weights)} / {gpus})" if gpus > 1 else ""
        self.say("memory", f"{size(weights / gpus)} of weights{shared}, {size(passing)} for a "
                 f"prefill of {prefill:,} tokens, {size(each * cached)} of KV cache for {cached:,} tokens ({why}; "
                 f"{each:,} bytes each{whole}) (estimate)")
        visible = machine.gpus()[:gpus]
        if visible and not self.elsewhere:
            share = _share(engine)
            left = min(gpu.total_mib for gpu in visible) * machine.MIB * share - weights / gpus - passing
            self.say("", f"at {share:g} of {size(min(g.total_mib for g in visible) * machine.MIB)} that leaves "
                     f"{size(max(0, left))}: {max(0, int(left / each)):,} tokens of KV cache (estimate)")

    def time(self, seconds: float, how: str) -> None:
        """Print a time with the rate that it comes from."""
        self.say("time", f"{duration(seconds)}: {how} (estimate)")

    def end(self) -> None:
        """Print what the reference run reported, and what is not here."""
        if self.known and self.stage.name in self.known.told:
            self.say("theirs", f"{self.known.told[self.stage.name]} (reported, not computed: {self.known.name})")
        for line in self._missing:
            logger.warning("not here: %s", line)
        if self._missing:
            logger.warning("the verifier's weights are not on this machine, so this is only a plan: the machine that "
                           "runs it needs all that is not here, and there the same command fails without it")


def _share(engine: EngineOptions) -> float:
    flag, default = ("--gpu-memory-utilization", 0.92) if engine.kind == "vllm" else ("--mem-fraction-static", 0.88)
    with contextlib.suppress(ValueError, TypeError):
        return float(arguments.value(engine.args, flag))  # type: ignore[arg-type]
    return default
