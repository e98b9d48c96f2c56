"""What a stage looks at before it starts anything expensive: the part of the doctor that concerns it.

A failed check stops the stage with its reason and its fix, exit code 3; a warning goes to the log. --no-preflight
turns failures into warnings. Neither an engine nor torch is imported here, no weights are loaded: seconds, against
the half hour in which a large engine finds out by itself.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.checks.drafter_checks import check_drafter
from eagle3.checks.machine_checks import check_architecture, check_gpus, check_ports, check_shared_memory
from eagle3.checks.model_checks import check_engine, check_model, check_teacher
from eagle3.checks.subject import Check, Subject, look
from eagle3.common.errors import PreconditionError
from eagle3.common.findings import FAIL, WARN, Finding
from eagle3.common.log import logger
from eagle3.common.options import EngineOptions
from eagle3.common.stage import Stage
from eagle3.drafter.checkpoint import Export
from eagle3.drafter.verifier import without_weights
from eagle3.engines import installed

ENGINE: tuple[Check, ...] = (check_engine, check_model, check_gpus, check_architecture, check_shared_memory,
                             check_ports, check_drafter)
TRAINING: tuple[Check, ...] = (check_teacher, check_gpus, check_shared_memory)


def before_engine(
    options: Any, stage: Stage, *, speculates: bool = False, drafter: Path | None = None,
    serve_args: Sequence[str] = (), captures: bool = False,
) -> dict[str, Any]:
    """Look at what an engine needs here, and return what the manifest says of it: `engine` and `patches`.

    Args:
        options: of a stage with sections common, model and engine.
        speculates: the engine is to serve a drafter. drafter: the exported drafter, to be looked at as well.
        captures: the engine is to give hidden states.
    Raises:
        PreconditionError: a check fails.
    """
    subject = Subject(options.engine, options.model, stage.run_dir, serve_args, drafter, speculates,
                      captures=captures)
    require(stage, subject, ENGINE)
    return {} if stage.common.dry_run else installed.facts(options.engine)


def before_drafter(options: Any, stage: Stage, drafter: Path, export: Export) -> None:
    """Look at a drafter alone, as `export` was written into its folder; PreconditionError when a check fails."""
    training = {"trained_ids": export.trained_ids, "trained_here": export.trained_here,
                "trained_norms": export.trained_norms, "keeps_embedding": export.keeps_embedding}
    subject = Subject(options.engine, options.model, stage.run_dir, drafter=drafter, training=training)
    require(stage, subject, (check_drafter,))


def before_training(options: Any, stage: Stage) -> None:
    """Look at the GPUs and at what processes share; PreconditionError when a check fails.

    NCCL wants a GPU for each process; without any GPU the processes train on the CPU.
    """
    engine = EngineOptions(tensor_parallel_size=options.train.gpus)
    require(stage, Subject(engine, options.model, stage.run_dir, trains=True), TRAINING)


def require(stage: Stage, subject: Subject, checks: Sequence[Check]) -> None:
    """Run checks and log what they warn of; PreconditionError with all that fails.

    A dry run where the model folder has no weights is a plan for another machine, whose own doctor is to be asked.
    """
    if stage.common.dry_run and subject.folder is not None and without_weights(subject.folder):
        return
    lines = look(subject, checks)
    failed = [line for line in lines if line.status == FAIL]
    for line in lines:
        warns = line.status == WARN or (line in failed and not stage.common.preflight)
        say = logger.warning if warns else logger.debug
        say("before starting: %s%s", _text(line), f" ({line.fix})" * bool(line.fix))
    if failed and stage.common.preflight:
        raise PreconditionError(
            f"{len(failed)} of {len(lines)} checks fail, and nothing has been loaded",
            where=subject.drafter if all(line.name.startswith("drafter") for line in failed) else subject.folder or "",
            found="\n".join(_text(line) for line in failed),
            fix="\n".join([*(f"{line.name}: {line.fix}" for line in failed if line.fix),
                           "or go on regardless with --no-preflight"]),
        )


def _text(line: Finding) -> str:
    return f"{line.name}: {line.found}"
