"""The smoke test of an export: does the engine accept what the drafter proposes? A few prompts, one server."""

from pathlib import Path
from typing import Any

from eagle3.benchmark import load
from eagle3.common import files
from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger
from eagle3.common.options import BenchmarkSection, ExportOptions
from eagle3.common.stage import Stage
from eagle3.engines import defaults, launch
from eagle3.traces import prompts


def measure(options: ExportOptions, stage: Stage, drafter: Path, prompts_file: Path) -> dict[str, Any]:
    """Ask a few prompts at temperature 0 and return the acceptance; PreconditionError when it is too low."""
    section, model = options.export, Path(options.model.path)
    asked = prompts.read_prompts(prompts_file, section.smoke_count)
    load_section = BenchmarkSection(max_tokens=section.smoke_tokens, temperature=[0.0])
    arguments = defaults.no_prefix_caching(options.engine)
    arguments = [*arguments, "--trust-remote-code"] if options.model.trust_remote_code else arguments
    speculative = {"model": str(drafter), "num_speculative_tokens": section.smoke_draft_tokens}
    with launch.serve(options.engine, model, stage=stage, label=f"{stage.directory.name}-smoke",
                      extra_args=arguments, speculative=speculative) as server:
        figures, _ = load.measure(server, asked, load_section, len(asked), stage, "smoke")
    acceptance = figures["acceptance"]
    files.write_json(stage.directory / "smoke.json", {"drafter": str(drafter), "acceptance": acceptance})
    first = acceptance["by_position"][0] if acceptance and acceptance["by_position"] else None
    if first is None or first < section.min_first_acceptance:
        measured = "the engine does not count" if first is None else f"{first:.1%} of {acceptance['drafts']:.0f} rounds"
        raise PreconditionError(
            "the engine serves the drafter but accepts too little of it",
            where=drafter,
            expected=f"the first draft token accepted in {section.min_first_acceptance:.0%} of the rounds or more",
            found=measured,
            fix="compare with what stage 04 predicted; `--check` names what is known to cost acceptance",
        )
    logger.info("smoke: first draft token accepted in %.1f%% of %d rounds, acceptance length %.3f", 100 * first,
                acceptance["drafts"], acceptance["length"])
    return acceptance
