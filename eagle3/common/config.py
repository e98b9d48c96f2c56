"""Options from three places: a flag beats the YAML file, the file beats the default.

The whole file is validated on every run, also the sections of other stages, so a typing error in `train:`
is found before stage 01 has spent a night.
"""

import argparse
import contextlib
import dataclasses
import difflib
import json
import shutil
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml

from eagle3.common.errors import PreconditionError, UsageError
from eagle3.common.options import SECTIONS
from eagle3.common.values import SHOWN, checked, plain_type, shown

Options = TypeVar("Options")



def parse(options_class: type[Options], arguments: list[str], documentation: str) -> Options:
    """Return the resolved options of a stage.

    Raises UsageError (exit 2) for an unknown flag or key, naming the nearest valid one, and for a value of
    the wrong type or out of its limits. `--help` prints and exits 0.
    """
    parser = build_parser(options_class, documentation)
    given, unknown = parser.parse_known_args(_joined(options_class, arguments))
    if unknown:
        raise _unknown_flag(parser, unknown[0])
    sections = read_yaml(Path(given.common__config)) if getattr(given, "common__config", "") else {}
    values = {name: dict(content) for name, content in sections.items()}
    for name, value in vars(given).items():
        section, key = name.split("__", 1)
        values.setdefault(section, {})[key] = value
    built = {}
    for part in dataclasses.fields(options_class):  # type: ignore[arg-type]
        built[part.name] = _build_section(typing.cast(type, part.type), part.name, values.get(part.name, {}))
    return options_class(**built)


def of_file(options_class: type[Options], path: str) -> Options:
    """Return another stage's options as a configuration file (none: "") and the defaults give them."""
    return parse(options_class, ["--config", path] if path else [], "")


def build_parser(options_class: type, documentation: str) -> argparse.ArgumentParser:
    """Return a parser with one flag per option, grouped by section; absent flags leave no value behind."""
    parser = _Parser(
        description=documentation,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for section in dataclasses.fields(options_class):
        section_class = typing.cast(type, section.type)
        group = parser.add_argument_group(section.name, (section_class.__doc__ or "").strip())
        for item in dataclasses.fields(section_class):
            _add_flag(group, section.name, item)
    return parser


def _joined(options_class: type, arguments: list[str]) -> list[str]:
    """Return the arguments with `--engine-args --x` as `--engine-args=--x`: argparse would take --x for a flag."""
    words_flags = {
        flag_of(item)
        for section in dataclasses.fields(options_class)
        for item in dataclasses.fields(typing.cast(type, section.type))
        if item.type == list[str]
    }
    joined: list[str] = []
    for word in arguments:
        if joined and joined[-1] in words_flags:
            joined[-1] += "=" + word
        else:
            joined.append(word)
    return joined


def flag_of(item: dataclasses.Field[Any]) -> str:
    """Return the command-line flag of an option."""
    return item.metadata["flag"] or "--" + item.name.replace("_", "-")


def read_yaml(path: Path) -> dict[str, dict[str, Any]]:
    """Return the validated sections of a configuration file; relative paths stay as written."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise UsageError("the configuration file does not exist", where=path, fix="give it with --config") from None
    except OSError as error:
        raise UsageError("the configuration file cannot be read", where=path, found=error.strerror,
                         fix="name a file with --config") from None
    except Exception as error:  # what YAML's constructors raise for a date or a number that is none
        raise UsageError("the configuration file is not YAML", where=path, found=str(error)[:SHOWN],
                         fix="correct it; configs/ has examples") from None
    if not isinstance(content, dict):
        raise UsageError("the configuration file must hold sections", where=path, found=type(content).__name__,
                         fix="correct it; configs/ has examples")
    for name, section in content.items():
        if name not in SECTIONS:
            raise UsageError("unknown section", where=f"{path}: {_name(name)}", **_nearest(_name(name), SECTIONS))
        if not isinstance(section, dict):
            raise UsageError("a section must hold options", where=f"{path}: {name}", found=shown(section),
                             fix="indent its options below it")
        _build_section(SECTIONS[name], name, section, str(path))
    return content


def to_dict(options: Any) -> dict[str, dict[str, Any]]:
    """Return the options as {section: {name: value}}; secrets in engine.env are replaced by '***'."""
    result: dict[str, dict[str, Any]] = dataclasses.asdict(options)
    if "engine" in result:
        result["engine"]["env"] = _masked(result["engine"]["env"])
    return result


def without_secrets(argv: list[str]) -> list[str]:
    """Return a command line in which the secrets of --engine-env are replaced by '***'."""
    shown = list(argv)
    for i, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag != "--engine-env":
            continue
        at, value = (i, value) if equals else (i + 1, (argv + [""])[i + 1])
        with contextlib.suppress(ValueError, TypeError, IndexError, RecursionError):
            shown[at] = (flag + equals if equals else "") + json.dumps(_masked(dict(json.loads(value))))
    return shown


def _masked(environment: dict[str, Any]) -> dict[str, Any]:
    words = ("KEY", "TOKEN", "SECRET", "PASSWORD")
    return {k: "***" if any(word in str(k).upper() for word in words) else v for k, v in environment.items()}


def to_yaml(options: Any) -> str:
    """Return the resolved configuration as YAML that --config reads back (without the common section)."""
    return yaml.safe_dump({k: v for k, v in to_dict(options).items() if k != "common"}, sort_keys=False)


def result_options(options: Any) -> dict[str, Any]:
    """Return {section.name: value} of the options that change results: the basis of the fingerprint."""
    chosen = {}
    for section in dataclasses.fields(options):
        if section.name == "common":
            continue
        for item in dataclasses.fields(getattr(options, section.name)):
            if item.metadata["results"] and not (section.name == "model" and item.name == "path"):
                value: Any = getattr(getattr(options, section.name), item.name)
                value = _masked(value) if (section.name, item.name) == ("engine", "env") else value
                chosen[f"{section.name}.{item.name}"] = Path(value).name if item.metadata["path"] and value else value
    return chosen


# --- flags ------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(message, where="command line", fix="--help lists every option")


class _Words(argparse.Action):
    """A flag that may be given again: its words are put together."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest, "")
        setattr(namespace, self.dest, f"{before} {values}".strip())


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=min(110, shutil.get_terminal_size().columns))


def _add_flag(group: Any, section: str, item: dataclasses.Field[Any]) -> None:
    kind, _ = plain_type(item.type)
    keywords: dict[str, Any] = {"dest": f"{section}__{item.name}", "help": _help_text(item)}
    if kind is bool:
        keywords["action"] = argparse.BooleanOptionalAction
    elif kind is list and typing.get_args(item.type)[0] is str:
        keywords["metavar"] = "'WORDS'"  # one string: words that start with a dash would be taken for flags here
        keywords["action"] = _Words
    elif kind is list:
        keywords["nargs"] = "+"
        keywords["metavar"] = "N"
    else:
        keywords["metavar"] = "{" + ",".join(item.metadata["choices"]) + "}" if item.metadata["choices"] else (
            (item.metadata["unit"] or kind.__name__).split()[0].upper()
        )
    group.add_argument(flag_of(item), **keywords)


def _help_text(item: dataclasses.Field[Any]) -> str:
    factory = item.default_factory
    default = item.default if factory is dataclasses.MISSING else factory()
    unit = f" [{item.metadata['unit']}]" if item.metadata["unit"] else ""
    shown = "" if default in (None, "", [], {}) else f" (default: {default})"
    return (item.metadata["help"] + unit + shown).replace("%", "%%")


def _unknown_flag(parser: argparse.ArgumentParser, flag: str) -> UsageError:
    known = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    return UsageError("unknown option", where=f"command line: {flag}", **_nearest(flag.split("=")[0], known))


def _nearest(name: str, known: typing.Iterable[str]) -> dict[str, str]:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return {"fix": f"did you mean {close[0]}?" if close else "valid names: " + ", ".join(sorted(names))}


# --- values -----------------------------------------------------------------------------------------------


def _build_section(section_class: type, section: str, values: dict[str, Any], source: str = "") -> Any:
    fields = {item.name: item for item in dataclasses.fields(section_class)}
    built = {}
    for name, value in values.items():
        item = fields.get(_name(name))
        where = f"{source or 'option'}: {section}.{_name(name)}"
        if item is None or (source and item.metadata["command_line_only"]):
            known = [key for key, known_item in fields.items() if not known_item.metadata["command_line_only"]]
            raise UsageError("unknown option", where=where, **_nearest(_name(name), known))
        built[item.name] = checked(item, value, where)
    return section_class(**built)


def _name(key: Any) -> str:
    """Return a key of YAML, which may be of any type, as a name."""
    return key if isinstance(key, str) else shown(key)


def require(value: str, flag: str, what: str) -> str:
    """Return a value that has no default; PreconditionError naming the flag when it is empty."""
    if not value:
        raise PreconditionError(f"{what} is not given", where=flag, fix=f"give it with {flag} or in the YAML file")
    return value
