"""The JSON files of Kimi-K2.5's model folder, as a laptop has them: no weights, no tokenizer model.

Values are those of the published configuration as far as the pipeline depends on them. The shards are named as
published checkpoints name them; which tensor lies in which is made up.
"""

import json
from pathlib import Path

LAYERS, HIDDEN, EXPERTS, SHARDS = 61, 7168, 384, 64
TOTAL_SIZE = 547_000_000_000  # bytes
SPECIAL_TOKENS = {
    163584: "[BOS]", 163585: "[EOS]", 163586: "<|im_end|>", 163587: "<|im_user|>", 163588: "<|im_assistant|>",
    163593: "[EOT]", 163594: "<|im_system|>", 163595: "<|tool_calls_section_begin|>",
    163596: "<|tool_calls_section_end|>", 163597: "<|tool_call_begin|>", 163598: "<|tool_call_argument_begin|>",
    163599: "<|tool_call_end|>", 163601: "<|im_middle|>", 163605: "<|media_pad|>", 163606: "<think>",
    163607: "</think>", 163839: "[PAD]",
}  # fmt: skip


def text_config() -> dict:
    """Return the text part of config.json."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "intermediate_size": 18432,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
                         "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized",
                                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}},
    }


def weight_map() -> dict[str, str]:
    """Return {tensor: shard}: the tensors outside the layers, and of each layer those that tell its kind."""
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for layer in range(LAYERS):
        own = ["input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.kv_a_proj_with_mqa.weight",
               "self_attn.o_proj.weight"]
        experts = [f"mlp.experts.{expert}.down_proj.weight_packed" for expert in range(EXPERTS)]
        own += experts if layer else ["mlp.down_proj.weight"]
        names += [f"model.layers.{layer}.{name}" for name in own]
    per_shard = -(-len(names) // SHARDS)
    return {f"language_model.{name}": f"model-{k // per_shard + 1:05}-of-{SHARDS:06}.safetensors"
            for k, name in enumerate(names)}


def write(folder: Path) -> Path:
    """Write the JSON files into a new folder and return it."""
    folder.mkdir(parents=True)
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
              "text_config": text_config(), "media_placeholder_token_id": 163605, "pad_token_id": 163839,
              "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}}
    tokenizer = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "model_max_length": 1_000_000,
        "added_tokens_decoder": {str(number): {"content": token, "special": "think" not in token}
                                 for number, token in SPECIAL_TOKENS.items()},
    }  # fmt: skip
    contents = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": 163586, "max_length": 262144},
        "tokenizer_config.json": tokenizer,
        "model.safetensors.index.json": {"metadata": {"total_size": TOTAL_SIZE}, "weight_map": weight_map()},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return folder
