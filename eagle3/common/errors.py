"""Errors that a user reads: what happened, where, expected, found, and what to do."""


class StageError(Exception):
    """A failure with an exit code of its own; anything else that escapes a stage is a bug (exit 1).

    `what` is one sentence. `where` names a file, option or address; `expected` and `found` are the two
    values that disagree; `fix` is what the user can do, with a command to copy where there is one.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, where: object = "", expected: object = "", found: object = "", fix: str = ""
    ) -> None:
        self.what = what
        self.parts = {"where": where, "expected": expected, "found": found, "fix": fix}
        super().__init__(self.render())

    def render(self) -> str:
        """Return the message as it is printed, one part a line, empty parts left out."""
        lines = [self.what]
        for name, value in self.parts.items():
            if value != "":
                text = str(value).replace("\n", "\n" + " " * 12)
                lines.append(f"  {name + ':':<9} {text}")
        return "\n".join(lines)


class UsageError(StageError):
    """The command or the configuration file is wrong."""

    exit_code = 2


class PreconditionError(StageError):
    """An input is missing or broken, the machine does not fit, or another process is in the way."""

    exit_code = 3


class StaleError(PreconditionError):
    """What lies in the output directory was made with other options or inputs."""


class FailureLimitError(StageError):
    """The stage ran to its end (or gave up) with more failures than allowed."""

    exit_code = 4


class Interrupted(StageError):
    """A signal asked the stage to stop; everything finished so far is saved."""

    def __init__(self, signal_number: int) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(f"interrupted by signal {signal_number}; the same command resumes")
