"""The model: sizes, config.json, and a folder that engines load, made from 6-bit weights in this repository.

  python -m tiny_kimi.model --out models/tiny-kimi                     KimiK25ForConditionalGeneration
  python -m tiny_kimi.model --out models/tiny-deepseek --text-only     its text part, DeepseekV3ForCausalLM

Everything is Kimi-K2.5's but the size: MLA with its ranks, a dense first layer, experts chosen by sigmoid scores with a
correction bias and one shared expert, a vision tower in front. The vision tower is random: nothing here sees images.
"""

import argparse
import json
import lzma
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_kimi import tokenizer

if TYPE_CHECKING:
    import torch

WEIGHTS = Path(__file__).with_name("weights.xz")
LAYERS = 8
TEXT: dict[str, Any] = {
    "vocab_size": tokenizer.VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "moe_intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
# What engines read and transformers' class does not know.
ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 14,
    "merge_kernel_size": [2, 2],
}
VISION_FORMS = {  # one value in three spellings: transformers', and the two that engines read
    "pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 4,
    "init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4,
    "vt_hidden_size": 32, "vt_intermediate_size": 64, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 1,
    "mm_hidden_size": 32, "text_hidden_size": TEXT["hidden_size"], "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "video_attn_type": "spatial_temporal",
    "pos_emb_type": "divided_fixed", "merge_type": "sd2_tpool",
}  # fmt: skip
_LEVELS = 31  # symmetric: 6 bits


def text_config() -> Any:
    """Return transformers' configuration of the text model."""
    from transformers import DeepseekV3Config

    special = tokenizer.ids()
    own = {name: value for name, value in TEXT.items() if name not in ("rope_theta", "rope_scaling")}
    rope = {"rope_type": "default", "rope_theta": TEXT["rope_theta"]}
    return DeepseekV3Config(**own, rope_parameters=rope, bos_token_id=special["[BOS]"],
                            eos_token_id=special["<|im_end|>"], pad_token_id=special["[PAD]"])


def config_json(*, text_only: bool) -> dict[str, Any]:
    """Return config.json of the wrapped or the text-only form, in the spelling of published checkpoints."""
    special = tokenizer.ids()
    ends = {"bos_token_id": special["[BOS]"], "eos_token_id": special["<|im_end|>"], "pad_token_id": special["[PAD]"]}
    text = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **TEXT, **ROUTING, **ends,
            "torch_dtype": "bfloat16"}
    if text_only:
        return text
    media = special["<|media_pad|>"]
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text | {"model_type": "kimi_k2"},
        "vision_config": VISION | VISION_FORMS,
        "media_placeholder_token_id": media,
        "image_token_id": media,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **ends,
    }


def write(folder: Path, *, text_only: bool = False, weights: Path = WEIGHTS) -> None:
    """Write a complete model folder: weights in bf16, configuration, tokenizer, template."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in unpack(weights).items()}
    prefix = "" if text_only else "language_model."
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    if not text_only:
        named |= vision_weights()
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    special = tokenizer.ids()
    generation = {"eos_token_id": special["<|im_end|>"], "bos_token_id": special["[BOS]"], "do_sample": False}
    limits = dict.fromkeys(("in_patch_limit", "in_patch_limit_each_frame", "in_patch_limit_video"), 64)
    media = {"media_proc_cfg": {"patch_size": 14, "merge_kernel_size": 2, "patch_limit_on_one_side": 16, **limits,
                                "fixed_output_tokens": None, "temporal_merge_kernel_size": 4, "sample_fps": 2.0,
                                "max_num_frames_each_video": None, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
                                "timestamp_mode": "hh:mm:ss.fff", "config_type": "media_proc.processors.moonvit"}}
    written = {"generation_config.json": generation} | ({} if text_only else {"preprocessor_config.json": media})
    for name, content in ({"config.json": config_json(text_only=text_only)} | written).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.write(folder)


def vision_weights() -> "dict[str, torch.Tensor]":
    """Return a random vision tower and projector under the names of published checkpoints."""
    import torch

    hidden, inner, text = VISION["hidden_size"], VISION["intermediate_size"], TEXT["hidden_size"]
    merged = hidden * math.prod(VISION["merge_kernel_size"])
    block = "vision_tower.encoder.blocks.0."
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.pos_emb.weight": (8, 8, hidden),
        "vision_tower.patch_embed.proj.weight": (hidden, 3, VISION["patch_size"], VISION["patch_size"]),
        "vision_tower.patch_embed.proj.bias": (hidden,),
        block + "norm0.weight": (hidden,), block + "norm0.bias": (hidden,),
        block + "norm1.weight": (hidden,), block + "norm1.bias": (hidden,),
        block + "wqkv.weight": (3 * hidden, hidden), block + "wqkv.bias": (3 * hidden,),
        block + "wo.weight": (hidden, hidden), block + "wo.bias": (hidden,),
        block + "mlp.fc0.weight": (inner, hidden), block + "mlp.fc0.bias": (inner,),
        block + "mlp.fc1.weight": (hidden, inner), block + "mlp.fc1.bias": (hidden,),
        "vision_tower.encoder.final_layernorm.weight": (hidden,),
        "vision_tower.encoder.final_layernorm.bias": (hidden,),
        "mm_projector.pre_norm.weight": (hidden,), "mm_projector.pre_norm.bias": (hidden,),
        "mm_projector.proj.0.weight": (merged, merged), "mm_projector.proj.0.bias": (merged,),
        "mm_projector.proj.2.weight": (text, merged), "mm_projector.proj.2.bias": (text,),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return {name: (0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16) for name, shape in shapes.items()}


# --- weights in the repository ----------------------------------------------------------------------------


def pack(tensors: "dict[str, torch.Tensor]", path: Path) -> None:
    """Write tensors: matrices in 6 bits with a scale a row, vectors in bf16, all of it compressed."""
    import torch
    from safetensors.torch import save

    packed = {}
    for name, tensor in sorted(tensors.items()):
        if tensor.dim() < 2:
            packed[name] = tensor.float().cpu() if "bias" in name else tensor.to(torch.bfloat16).cpu()
            continue
        levels, scale = quantize(tensor.float().cpu())
        packed[name], packed[name + "/scale"] = levels.to(torch.int8), scale.to(torch.bfloat16)
    path.write_bytes(lzma.compress(save(packed), preset=9 | lzma.PRESET_EXTREME))


def unpack(path: Path) -> "dict[str, torch.Tensor]":
    """Return the tensors of a packed file in float32."""
    from safetensors.torch import load

    packed = load(lzma.decompress(path.read_bytes()))
    return {name: tensor.float() * packed[name + "/scale"].float() if name + "/scale" in packed else tensor.float()
            for name, tensor in packed.items() if not name.endswith("/scale")}


def quantize(weight: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return (levels, scale): rows of a matrix [.., R, C] as whole numbers of at most 31 times a scale [.., R, 1]."""
    import torch

    scale = (weight.abs().amax(-1, keepdim=True) / _LEVELS).clamp(min=1e-8).to(torch.bfloat16).float()
    return (weight / scale).round().clamp(-_LEVELS, _LEVELS), scale


def main() -> None:
    """Write the model folder."""
    parser = argparse.ArgumentParser(prog="python -m tiny_kimi.model", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--text-only", action="store_true", help="the text part alone, as DeepseekV3ForCausalLM")
    given = parser.parse_args()
    write(given.out, text_only=given.text_only)


if __name__ == "__main__":
    main()
