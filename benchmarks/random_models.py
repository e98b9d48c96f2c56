"""Verifiers of random weights (standard deviation 0.02, bf16) for benchmarks: config.json and weights, no tokenizer.

  python benchmarks/random_models.py moe-mla /data/moe-mla
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tiny_kimi.model import ROUTING, TEXT

# Llama: hidden, layers, heads, key-value heads, MLP, vocabulary
LLAMAS = {"llama-7b": (4096, 32, 32, 8, 14336, 128256), "llama-3b": (4096, 12, 32, 8, 14336, 128256),
          "smollm2": (576, 30, 9, 3, 1536, 49152)}
# Kimi-K2.5's kind of layers: MLA, experts, a dense first layer. What differs from tiny_kimi; the first has 3.9 B
# parameters, the second is for trying this on a CPU.
MOES: dict[str, dict[str, Any]] = {
    "moe-mla": {"hidden_size": 2048, "intermediate_size": 8192, "moe_intermediate_size": 1024, "num_hidden_layers": 12,
                "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 48, "num_experts_per_tok": 6,
                "q_lora_rank": 768, "vocab_size": 65536},
    "moe-mla-tiny": {},
}
SIZES = (*LLAMAS, *MOES)
Tensors = Iterator[tuple[str, tuple[int, ...]]]


def build(folder: Path, size: str) -> Path:
    """Write a model of one of SIZES, made on a GPU where there is one; return its folder."""
    import torch
    from safetensors.torch import save_file

    config, shapes = llama(*LLAMAS[size]) if size in LLAMAS else moe(MOES[size])
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    save_file({name: (torch.ones(shape) if len(shape) == 1 and "norm" in name else
                      torch.randn(shape, device=device) * 0.02).to(torch.bfloat16).cpu() for name, shape in shapes},
              folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def llama(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocabulary: int
          ) -> tuple[dict[str, Any], Tensors]:
    """Return config.json and the tensors' names and shapes."""
    head = hidden // heads

    def layer(own: str) -> Tensors:
        yield own + "self_attn.q_proj.weight", (hidden, hidden)
        yield from ((own + f"self_attn.{name}_proj.weight", (kv_heads * head, hidden)) for name in ("k", "v"))
        yield own + "self_attn.o_proj.weight", (hidden, hidden)
        yield from mlp(own + "mlp.", hidden, inner)

    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
              "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
              "intermediate_size": inner, "vocab_size": vocabulary, "max_position_embeddings": 8192,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
              "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    return config, around([layer(f"model.layers.{k}.") for k in range(layers)], hidden, vocabulary)


def moe(differs: dict[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """Return config.json and the tensors' names and shapes."""
    own = TEXT | differs
    hidden, heads, experts = own["hidden_size"], own["num_attention_heads"], own["n_routed_experts"]
    rope, nope, value = own["qk_rope_head_dim"], own["qk_nope_head_dim"], own["v_head_dim"]
    q_rank, kv_rank = own["q_lora_rank"], own["kv_lora_rank"]

    def layer(k: int) -> Tensors:
        at, width = f"model.layers.{k}.", own["moe_intermediate_size"]
        yield at + "self_attn.q_a_proj.weight", (q_rank, hidden)
        yield at + "self_attn.q_a_layernorm.weight", (q_rank,)
        yield at + "self_attn.q_b_proj.weight", (heads * (nope + rope), q_rank)
        yield at + "self_attn.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)
        yield at + "self_attn.kv_a_layernorm.weight", (kv_rank,)
        yield at + "self_attn.kv_b_proj.weight", (heads * (nope + value), kv_rank)
        yield at + "self_attn.o_proj.weight", (hidden, heads * value)
        if k < own["first_k_dense_replace"]:
            yield from mlp(at + "mlp.", hidden, own["intermediate_size"])
            return
        yield at + "mlp.gate.weight", (experts, hidden)
        yield at + "mlp.gate.e_score_correction_bias", (experts,)
        for expert in range(experts):
            yield from mlp(at + f"mlp.experts.{expert}.", hidden, width)
        yield from mlp(at + "mlp.shared_experts.", hidden, width * own["n_shared_experts"])

    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **own, **ROUTING,
              "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    return config, around([layer(k) for k in range(own["num_hidden_layers"])], hidden, own["vocab_size"])


def mlp(at: str, hidden: int, inner: int) -> Tensors:
    """Yield the tensors of a gated MLP."""
    yield from ((at + f"{name}_proj.weight", (inner, hidden)) for name in ("gate", "up"))
    yield at + "down_proj.weight", (hidden, inner)


def around(layers: list[Tensors], hidden: int, vocabulary: int) -> Tensors:
    """Yield what stands before, in and behind the layers."""
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    yield "lm_head.weight", (vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    for k, layer in enumerate(layers):
        yield from ((f"model.layers.{k}.{norm}_layernorm.weight", (hidden,)) for norm in ("input", "post_attention"))
        yield from layer


def main() -> None:
    """Write the model that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    build(given.folder, given.size)


if __name__ == "__main__":
    main()
