"""Tiny random verifiers of many families, built with transformers' own classes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, VOCAB, END = 8, 64, 512, 1
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
    "initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": END, "pad_token_id": END,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "head_dim": 16, "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        **_EXPERTS}  # fmt: skip
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": HIDDEN,
           "deepstack_visual_indexes": [0], "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}


@dataclass(frozen=True)
class Family:
    """A family: names of its configuration and model class in transformers, and what is set beside the sizes.

    Attributes:
        inner: the sizes are of the wrapper's text part, whose further values these are; None: there is no wrapper.
        renames: what transformers 5.19 calls otherwise when it saves, and published names.
    """

    config: str
    model: str
    values: dict[str, Any] = field(default_factory=dict)
    inner: dict[str, Any] | None = None
    renames: tuple[tuple[str, str], ...] = ()

    def build(self, folder: Path, **values: Any) -> Path:
        """Save a random float32 model, its norms not all ones; `values` override what this family sets."""
        import torch
        import transformers

        torch.manual_seed(0)
        sizes = {"tie_word_embeddings": False} | _SIZES
        if self.inner is None:
            settings = sizes | self.values | values
        else:
            settings = {"tie_word_embeddings": False, **self.values, "text_config": sizes | self.inner | values}
        model = getattr(transformers, self.model)(getattr(transformers, self.config)(**settings)).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # whatever starts as 0 or 1: norms, biases, sinks
                    parameter.add_(0.2 * torch.randn(parameter.shape))
        model.save_pretrained(folder)
        if self.renames:
            from safetensors.torch import load_file, save_file

            tensors = {}
            for name, tensor in load_file(folder / "model.safetensors").items():
                for theirs, published in self.renames:
                    name = name.replace(theirs, published)
                tensors[name] = tensor
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3-moe": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_experts": 8, **_EXPERTS}),
    "qwen3-vl": Family("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", {"vision_config": _VISION},
                       {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 2, 2],
                                            "mrope_interleaved": True}}),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", {
        "tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}),
    "gemma2": Family("Gemma2Config", "Gemma2ForCausalLM", {
        "tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 32,
        "final_logit_softcapping": 3.0}),
    "granite": Family("GraniteConfig", "GraniteForCausalLM", {
        "logits_scaling": 8.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.2}),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "gpt-oss": Family("GptOssConfig", "GptOssForCausalLM", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32}),
    "deepseek-v3": Family("DeepseekV3Config", "DeepseekV3ForCausalLM", _MLA),
    "glm4": Family("Glm4Config", "Glm4ForCausalLM", {"attention_bias": True}),
    "glm4-moe": Family("Glm4MoeConfig", "Glm4MoeForCausalLM", {
        "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        **_EXPERTS}),
    "kimi-k2.5": Family("Kimi_K25Config", "Kimi_K25ForConditionalGeneration", {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1,
                          "pos_emb_height": 8, "pos_emb_width": 8},
        "projection_hidden_size": 32, "image_token_id": 508, "video_token_id": 509}, _MLA,
        (("language_model.model.blocks.", "language_model.model.layers."), ("model.mm_projector.", "mm_projector."))),
    "cohere": Family("CohereConfig", "CohereForCausalLM", {
        "tie_word_embeddings": True, "logit_scale": 0.25, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "minicpm3": Family("MiniCPM3Config", "MiniCPM3ForCausalLM", {
        **{key: value for key, value in _MLA.items() if "lora" in key or "head" in key}, "dim_model_base": 16}),
}  # fmt: skip
