"""10,000 damaged configurations and records of published drafters: findings, or an error with what, where and fix."""


import pytest
from support.damaged_json import damaged, put

from eagle3.common import files, tensor_files
from eagle3.common.errors import StageError
from eagle3.drafter import checkpoint, config_keys, export_checks, flat_config, verifier

COUNT = 10_000
IDS = flat_config.IDS
LAYER = {"vocab_size": 402, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 32,
         "num_key_value_heads": 1, "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
         "hidden_act": "silu", "tie_word_embeddings": False, "sliding_window": None}  # fmt: skip
LAYOUTS = {
    "flat": {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 128,
             "rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32,
             "original_max_position_embeddings": 512}, "torch_dtype": "bfloat16", IDS: [2, 4, 5],
             "norm_before_residual": False, "num_aux_hidden_states": 3,
             "eagle_config": {IDS: [1, 3, 4], "use_aux_hidden_state": True}},
    "speculators": {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": 128,
                    "transformer_layer_config": LAYER | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4,
                    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 512}}, IDS: [2, 4, 5], "norm_before_fc": True},
}  # fmt: skip


def require_whole(error: StageError, path) -> None:
    assert error.what and str(path) in str(error.parts["where"]) and error.parts["fix"], error.render()


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    """A drafter's file with all its tensors, all zeros."""
    import torch
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("zeros") / tensor_files.SINGLE
    shapes = checkpoint.expected_shapes(LAYOUTS["flat"] | {"fc_norm": False})
    types = {"d2t": torch.int64, "t2d": torch.bool}
    save_file({name: torch.zeros(shape, dtype=types.get(name, torch.bfloat16)) for name, shape in shapes.items()
               if name != checkpoint.EMBEDDING}, path)
    return tensor_files.read(path.parent)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_configurations_of_published_drafters(tensors, tiny_model, tmp_path, layout):
    facts, path, sound = verifier.read(tiny_model), tmp_path / "config.json", 0
    for number, data in enumerate(damaged(LAYOUTS[layout], COUNT // 2, seed=4)):
        put(path, data)
        try:
            raw = config_keys.read(tmp_path)
        except StageError as error:
            require_whole(error, path)
            continue
        engine = ("vllm", "sglang", "speculators")[number % 3]
        version = "0.5.12" if engine == "sglang" else None
        export = checkpoint.Export(tmp_path, raw, tensors, facts, engine, version, 2048)
        findings = export_checks.run(export, values=False)
        assert len(findings) == len(export_checks.HEADERS)
        assert all(each.found and (each.fix and each.expected or each.status != "fail") for each in findings)
        if not any(each.status == "fail" for each in findings):
            sound += 1
            export.config()
    assert sound > 10


def test_records_of_training(tmp_path):
    counters = {"step": 3, "epoch": 1, "epoch_end": True, "layers": [2, 4, 5, 7], "best": {"acceptance": {"length": 2}}}
    for data in damaged(counters, COUNT, seed=5):
        put(tmp_path / checkpoint.TRAINING, data)
        try:
            ids, here = checkpoint.training_record(tmp_path)
            assert here and (ids is None or all(type(each) is int and each >= 0 for each in ids))
        except StageError as error:
            require_whole(error, tmp_path / checkpoint.TRAINING)


def test_checksums_of_checkpoints(tmp_path):
    for name in (tensor_files.SINGLE, "config.json", checkpoint.TRAINING):
        (tmp_path / name).write_bytes(b"{}")
    names = (tensor_files.SINGLE, "config.json", checkpoint.TRAINING)
    digests = {name: files.sha256_file(tmp_path / name) for name in names}
    for data in damaged(digests, COUNT // 5, seed=6):
        put(tmp_path / checkpoint.CHECKSUMS, data)
        try:
            checkpoint.prove(tmp_path)
            found = files.read_json(tmp_path / checkpoint.CHECKSUMS)
            assert {name: found[name] for name in names} == digests
        except StageError as error:
            require_whole(error, tmp_path)
