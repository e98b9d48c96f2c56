"""Options and configuration files that say nonsense are refused with place and remedy, each from its seed."""

import dataclasses
import json

from support.nonsense import NUMBERS, TEXTS, Nonsense, outcomes

from eagle3.common import config, options
from eagle3.common.errors import UsageError

COUNT = 10_000
STAGES = (options.GenerateOptions, options.ExtractOptions, options.VocabOptions, options.TrainOptions,
          options.ExportOptions, options.BenchmarkOptions)
PARSERS = {stage: config.build_parser(stage, "") for stage in STAGES}
FLAGS = {stage: [flag for action in PARSERS[stage]._actions for flag in action.option_strings if flag not in (
    "-h", "--help", "--config")] for stage in STAGES}


def refusal(error, where=""):
    assert error.exit_code == 2 and error.parts["where"] and error.parts["fix"], error
    assert where in str(error.parts["where"]), error
    assert len(str(error)) < 20_000
    return "refused"


def test_any_command_line_is_understood_or_refused(monkeypatch):
    monkeypatch.setattr(config, "build_parser", lambda stage, _: PARSERS[stage])  # most of the time goes into that

    def read(number):
        chance = Nonsense(number).chance
        stage, words = chance.choice(STAGES), []
        for _ in range(chance.randrange(1, 4)):
            flag = chance.choice(FLAGS[stage]) if chance.random() < 0.95 else chance.choice(TEXTS)
            values = [str(chance.choice((*TEXTS, *NUMBERS, "0.9", "2", "vllm"))) for _ in range(chance.randrange(3))]
            words += [f"{flag}={values[0]}"] if values and chance.random() < 0.2 else [flag, *values]
        try:
            parsed = config.parse(stage, words, "")
        except UsageError as error:
            return refusal(error)
        config.without_secrets(words)
        config.to_yaml(parsed)
        return "understood"

    found = outcomes(COUNT, read)
    assert set(found) == {"refused", "understood"} and min(found.values()) > 500, found


def test_any_file_is_a_configuration_or_refused(tmp_path):
    path = tmp_path / "c.yaml"
    defaults = {name: dataclasses.asdict(section()) for name, section in options.SECTIONS.items()}

    def read(number):
        nonsense = Nonsense(number)
        chosen = {name: {key: values[key] for key in nonsense.chance.sample(sorted(values), min(2, len(values)))}
                  for name, values in defaults.items() if nonsense.chance.random() < 0.25}
        content = nonsense.mutated(chosen, nonsense.chance.randrange(3))
        text = json.dumps(content).replace("Infinity", ".inf").replace("NaN", ".nan")  # YAML reads JSON
        if nonsense.chance.random() < 0.2:  # scalars that YAML itself makes something of
            text = text.replace("null", nonsense.chance.choice((*TEXTS, "!!float x", "!!bool x", "0x" + "f" * 5000)), 1)
        text = nonsense.damaged(text, deepest=500 if number % 100 == 0 else 3)  # YAML takes long over deep ones
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            sections = config.read_yaml(path)
        except UsageError as error:
            return refusal(error, str(path))
        assert set(sections) <= set(options.SECTIONS)
        return "read"

    found = outcomes(COUNT, read)
    assert set(found) == {"refused", "read"} and min(found.values()) > 500, found
