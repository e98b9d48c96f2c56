"""Checks of a drafter beside its verifier, each on one damaged for it."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from support.examined import subject
from support.fake_engine import install
from support.pipeline import change_config, change_tensors, random_embedding, shift_offsets

from eagle3.checks import drafter_checks
from eagle3.checks.subject import Subject
from eagle3.common import files
from eagle3.common.options import ModelOptions


def look(drafter, tiny_model, **more):
    return list(drafter_checks.check_drafter(subject(model__path=str(tiny_model), drafter=drafter, **more)))


def named(lines, level="fail"):
    return {line.name.removeprefix("drafter "): line.found for line in lines if line.status == level}


@pytest.mark.parametrize(("values", "level", "name"), [
    ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "eagle_config": None}, "fail", "ids-match-the-manifest"),
    ({"vocab_size": 7}, "fail", "belongs-to-the-verifier"),
    ({"hidden_size": 128}, "fail", "belongs-to-the-verifier"),
    ({"max_position_embeddings": 16}, "warn", "positions-cover-serving"),
])
def test_a_config_that_costs_acceptance_is_found(drafter, tiny_model, values, level, name):
    change_config(drafter, **values)
    assert name in named(look(drafter, tiny_model), level)


@pytest.mark.parametrize(("change", "name", "words"), [
    (lambda tensors: tensors.pop("lm_head.weight"), "keys-known-and-complete", "lm_head.weight"),
    (shift_offsets, "mapping-consistent", "do not belong together"),
    (random_embedding, "embedding-is-the-verifiers", "not the verifier's"),
])
@pytest.mark.parametrize("small", [True, False])
def test_weights_that_cost_acceptance_are_found(drafter, tiny_model, monkeypatch, change, name, words, small):
    change_tensors(drafter, change)
    monkeypatch.setattr(drafter_checks, "_SMALL", 1 << 30 if small else 0)
    assert words in named(look(drafter, tiny_model))[name]


def test_a_foreign_drafter_is_of_unknown_provenance(drafter, tiny_model):
    (drafter.parent / "manifest.json").unlink()
    line = next(line for line in look(drafter, tiny_model) if line.name == "drafter provenance")
    assert line.status == "warn" and "unknown provenance" in line.found and "[2, 4, 5]" in line.found
    assert "05_fix_weight_keys.py --smoke" in line.fix


def test_trained_ids_come_from_the_exports_manifest_else_from_the_checkpoint_itself(drafter):
    def write(folder, content):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text(json.dumps(content))

    def training():
        found = drafter_checks.training_of(drafter)
        return found["trained_ids"], found["trained_here"], found["keeps_embedding"]

    assert training() == ([2, 4, 5], True, False)
    write(drafter.parent, {"stage": "05_export", "options": {"export": {"trained_embedding": True}},
                           "trained": {"ids": [1, 2, 3], "here": True}})
    assert training() == ([1, 2, 3], True, True)
    write(drafter.parent, {"stage": "another"})
    assert training() == (None, False, False)
    (drafter / "trainer.json").write_text(json.dumps({"step": 1}))  # of an older version
    assert training() == (None, True, False)
    (drafter / "trainer.json").write_text(json.dumps({"step": 1, "layers": [1, 2, 4, 7]}))
    assert training() == ([1, 2, 4], True, False)


def test_an_older_compile_cache_is_a_warning_where_the_engine_does_not_see_ids(drafter, tiny_model, tmp_path):
    cache = tmp_path / "cache" / "torch_compile_cache" / "abc"
    cache.mkdir(parents=True)
    os.utime(cache, (time.time() - 3600,) * 2)

    def lines(version, **env):
        here = tmp_path / "-".join([version, *env])
        here.mkdir()
        given = subject(model__path=str(tiny_model), drafter=drafter, engine__python=install(here, version),
                        engine__env={"VLLM_CACHE_ROOT": str(tmp_path / "cache")} | env)
        return [line.status for line in drafter_checks.check_drafter(given) if line.name == "compile cache"]

    assert lines("0.16.0") == ["warn"]
    assert lines("0.17.1") == lines("0.16.0", VLLM_DISABLE_COMPILE_CACHE="1") == []


def test_a_tokenizer_other_than_the_trainings_is_a_failure_and_a_template_a_warning(drafter, tiny_model, tmp_path):
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    files.write_json(tmp_path / "run/02_states/manifest.json", {"inputs": {"model": files.model_identity(model)}})

    def levels():
        subject = Subject(model=ModelOptions(path=str(model)), run_dir=tmp_path / "run", drafter=drafter)
        return {line.name: line.status for line in drafter_checks.check_drafter(subject)
                if line.name in ("drafter tokenizer", "drafter chat_template")}

    assert levels() == {}
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert levels() == {"drafter chat_template": "warn"}
    path = model / "tokenizer.json"
    path.write_text(path.read_text().replace('"the"', '"thy"') + " ")
    assert levels() == {"drafter chat_template": "warn", "drafter tokenizer": "fail"}
