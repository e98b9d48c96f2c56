"""What the checks of an export find, said as a stage's result."""

import json
import logging

from eagle3.common import findings
from eagle3.common.log import logger
from eagle3.common.stage import Stage
from eagle3.drafter import export_checks
from eagle3.drafter.checkpoint import Export


def require_sound(stage: Stage, export: Export, *, only: bool = False, values: bool = True
                  ) -> list[findings.Finding]:
    """Print what every check finds; PreconditionError when one fails. `only`: the report is the result."""
    results = export_checks.run(export, values=values)
    for each in results:
        if only or stage.common.dry_run or each.status == findings.WARN:
            logger.log({"ok": logging.INFO, "warn": logging.WARNING, "fail": logging.ERROR}[each.status], each.line())
    failed = any(each.status == findings.FAIL for each in results)
    if stage.common.json and (only or failed):
        print(json.dumps({"checkpoint": str(export.folder), "to": export.engine, "version": export.version,
                          "checks": findings.as_json(results)}, indent=2))
    findings.require(results, export.folder)
    if only:
        logger.info("%s is sound: %d checks, %d tensors", export.folder, len(results), len(export.tensors))
    return results
