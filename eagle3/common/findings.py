"""What a check says: one line for a terminal, all of it for a machine or an error."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle3.common.errors import PreconditionError

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """What a check found. `status` is ok, warn or fail; the other texts may be empty."""

    status: str
    found: str = ""
    expected: str = ""
    fix: str = ""
    name: str = ""
    reason: str = ""

    def line(self) -> str:
        """Return the finding as one line."""
        parts = [f"{self.status:<4} {self.name}: {self.found or self.reason}"]
        if self.status != OK:
            parts += [f"expected {self.expected}" * bool(self.expected), self.reason * bool(self.found), self.fix]
        return "; ".join(part for part in parts if part)


def said(status: str, name: str, found: str, fix: str = "") -> Finding:
    """Return one of several findings of a check; `name` may be empty, for the check's own."""
    return Finding(status, found, fix=fix, name=name)


def require(findings: list[Finding], where: Path) -> None:
    """Raise PreconditionError naming every failed check: reason, values and fix."""
    failed = [each for each in findings if each.status == FAIL]
    if failed:
        raise PreconditionError(
            f"the drafter fails {len(failed)} of {len(findings)} checks",
            where=where,
            expected="\n".join(f"{each.name}: {each.expected or 'see below'}" for each in failed),
            found="\n".join(f"{each.name}: {each.found}\n  {each.reason}" for each in failed),
            fix="\n".join(f"{each.name}: {each.fix}" for each in failed if each.fix),
        )


def as_json(findings: list[Finding]) -> list[dict[str, str]]:
    """Return the findings as JSON values."""
    return json.loads(json.dumps([asdict(each) for each in findings]))
