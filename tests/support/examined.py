"""What is examined, and what is found."""

from eagle3.checks.subject import Subject
from eagle3.common.findings import Finding
from eagle3.doctor import DoctorOptions


def options(**changes) -> DoctorOptions:
    """Return the doctor's options with some of them changed: model__path is `path` of the section `model`."""
    result = DoctorOptions()
    for name, value in changes.items():
        section, key = name.split("__")
        setattr(getattr(result, section), key, value)
    return result


def subject(**changes) -> Subject:
    """Return what is examined: engine__args and the like go into its sections."""
    own = {name: value for name, value in changes.items() if "__" not in name}
    given = options(**{name: value for name, value in changes.items() if "__" in name})
    return Subject(given.engine, given.model, **own)


def findings(check, given) -> dict[str, Finding]:
    """Return what a check says of a subject, by name."""
    return {line.name: line for line in check(given)}
