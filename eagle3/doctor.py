"""Everything that can be wrong before a model is loaded, looked at in seconds: machine, engine, model, drafter.

  python -m eagle3.doctor --config configs/kimi-k2.5.yaml --run-dir runs/kimi
  python -m eagle3.doctor --config configs/kimi-k2.5.yaml --drafter runs/kimi/05_export/vllm --json

Each line is ok, warn or fail, with what was found and what to do. Nothing is changed, no process is touched, no
weights are loaded. Exit code 0, or 3 when a line is fail.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from eagle3.checks.drafter_checks import check_drafter
from eagle3.checks.machine_checks import (
    check_architecture,
    check_gpus,
    check_ports,
    check_resources,
    check_shared_memory,
)
from eagle3.checks.model_checks import check_engine, check_model, check_offline, check_tokenizer
from eagle3.checks.subject import Check, Subject, look
from eagle3.common import config, log
from eagle3.common.errors import PreconditionError, StageError
from eagle3.common.findings import Finding
from eagle3.common.options import CommonOptions, EngineOptions, ModelOptions, option


@dataclass
class DoctorSection:
    """What else to look at."""

    drafter: str | None = option(None, "exported drafter to check against the model", path=True)
    explain: str | None = option(
        None, "say why acceptance is low: a run, or one folder of stage 06 in it; the model and the drafter are those "
        "that it recorded unless named", path=True
    )


@dataclass
class DoctorOptions:
    """Options of the doctor: those of the stages that load a model."""

    common: CommonOptions = field(default_factory=CommonOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    doctor: DoctorSection = field(default_factory=DoctorSection)


CHECKS: tuple[Check, ...] = (check_gpus, check_architecture, check_shared_memory, check_ports, check_resources,
                             check_engine, check_offline, check_model, check_tokenizer, check_drafter)


def examine(options: DoctorOptions) -> list[Finding]:
    """Return the findings of all checks on what the options name."""
    drafter = Path(options.doctor.drafter) if options.doctor.drafter else None
    subject = Subject(options.engine, options.model, Path(options.common.run_dir or "."), drafter=drafter,
                      captures=True)
    return look(subject, CHECKS)


def main(arguments: list[str]) -> int:
    """Examine what the command line names, print, and return the exit code."""
    log.set_up(None, "info")
    try:
        options = config.parse(DoctorOptions, arguments, __doc__ or "")
        if options.doctor.explain:
            from eagle3.checks import explain

            return explain.run(Path(options.doctor.explain), model=options.model.path, drafter=options.doctor.drafter,
                               as_json=options.common.json)
        lines = examine(options)
    except StageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.common.json:
        told = [{"level": line.status, "check": line.name, "found": line.found, "fix": line.fix} for line in lines]
        print(json.dumps({"schema_version": 1, "lines": told}, indent=2))
    else:
        for line in lines:
            fix = f"\n{'':<6}→ {line.fix}" if line.fix and line.status != "ok" else ""
            print(f"{line.status:<5} {line.name}: {line.found}{fix}")
    return PreconditionError.exit_code if any(line.status == "fail" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
