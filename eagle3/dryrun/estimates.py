"""What a stage will take: parameters, bytes, memory and, where a rate is known, time.

Sizes follow from config.json, the shard index and the options. Rates are those of one run, of Kimi-K2.5 on 8 RTX
PRO 6000, which existed before this pipeline; they are scaled by tokens and offered for that model alone. What it
wrote down is shown beside, and no formula is bent towards it: its 828 GB do not even fit its own 17.3 M tokens.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.common import files, tensor_files
from eagle3.drafter.checkpoint import EMBEDDING, MAPPING, expected_shapes
from eagle3.drafter.flat_config import layer_shape
from eagle3.drafter.verifier import Verifier
from eagle3.training.memory import Step

AUXILIARY = 3  # captured layers that the drafter reads
_FLOAT32, _BFLOAT16, _ID = 4, 2, 8  # bytes
# Vectors of the hidden size that a prefill holds at once beside its MLP, counted in the decoder layers of vLLM.
_PREFILL_VECTORS = 8

# Prompts that a verifier invents: SmolLM2-135M on vLLM, 18,000 attempts on an H200 (84% usable), and 235 on a CPU (85%,
# 93 tokens each with those that were cut at 384).
USABLE_PROMPTS, INVENTED_TOKENS = 0.84, 93


# Matrix operations a second: training's step on an H200 (20 GFLOP a token at 33,500 tokens/s, docs/speed.md), and
# float32 products on two AVX2 cores (eagle3/engines/defaults.py).
WALK_RATES = {"one H200": 6.7e14, "two CPU cores": 9.5e10}


# --- the run that inspired this project --------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """The figures of Kimi-K2.5 on 8 RTX PRO 6000 (10,000 traces; where marked, a second run with 37,312).

    Attributes:
        tokens: of all samples. trace_s, load_s, train_s: seconds. capture_rate: tokens a second on 8 GPUs.
        train_epochs: passes over all samples in train_s, held-out ones included, on one GPU.
        told: what the run reported, by stage.
    """

    name: str = "the run on 8 RTX PRO 6000"
    samples: int = 10_000
    tokens: int = 17_300_000
    trace_s: float = 5.3 * 3600
    load_s: float = 24.5 * 60
    capture_rate: float = 3165.0
    train_s: float = 155 * 60
    train_epochs: int = 5

    told = {
        "01_traces": "10,000 traces in 5.3 h, none failed; in the larger run 37,312 with 87.8 M tokens",
        "02_states": "17.3 M tokens at 3,165 tok/s in 91 min after a load of 24.5 min, 828 GB; the larger run 4.6 TB",
        "03_vocab": "163,840 → 32,000 tokens, 98.3% of token frequency",
        "04_train": "10,000 samples, 5 epochs, sequences of 2,048: 155 min on one GPU, checkpoint 4.5 GB, acceptance "
        "length about 2.1; in the larger run 10.8 h on 4 GPUs with FSDP, 74.7% at the first step, length about 2.95",
        "05_export": "keys renamed by hand (layers.0 → midlayer) until SGLang read them",
        "06_bench": "vLLM 0.16 with patches: 15% acceptance, 0.66 × the speed (a defect); SGLang with 16 draft tokens",
    }

    @property
    def tokens_per_sample(self) -> int:
        """Average tokens of a sample, prompt and reply."""
        return self.tokens // self.samples

    def trace_seconds(self, tokens: int) -> float:
        """Return the time for generating traces of so many tokens."""
        return self.trace_s * tokens / self.tokens

    def capture_seconds(self, tokens: int) -> float:
        """Return the time for capturing so many tokens, without loading the model."""
        return tokens / self.capture_rate

    def training_seconds(self, tokens: int, epochs: int, gpus: int) -> float:
        """Return the time for training on so many tokens if `gpus` are that many times as fast as one."""
        return self.train_s * (tokens * epochs) / (self.tokens * self.train_epochs) / gpus


def reference(facts: Verifier) -> Reference | None:
    """Return the reference run for the model that it was made with, None for any other (also its small likenesses)."""
    same = facts.architecture.startswith("KimiK25") and (facts.hidden_size, facts.num_layers) == (7168, 61)
    return Reference() if same else None


# --- the verifier on an engine -----------------------------------------------------------------------------


def weight_bytes(folder: Path) -> int:
    """Return the bytes of a model's weights, from its index where it has one, else from its files (0: none there)."""
    if (folder / tensor_files.INDEX).exists():
        total = files.read_json(folder / tensor_files.INDEX).get("metadata", {}).get("total_size")
        if total:
            return int(total)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def kv_bytes_per_token(facts: Verifier, gpus: int) -> int:
    """Return the bytes of KV cache that one token takes on each of `gpus` GPUs (bf16).

    MLA keeps one latent vector for all heads, which tensor parallelism cannot split.
    """
    config = facts.config
    if facts.mla:
        return (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])) * facts.num_layers * _BFLOAT16
    shape = layer_shape(facts)
    heads = math.ceil(shape["num_key_value_heads"] / gpus)
    return 2 * heads * shape["head_dim"] * facts.num_layers * _BFLOAT16


def prefill_bytes(facts: Verifier, tokens: int, gpus: int) -> int:
    """Return roughly what a prefill pass of so many tokens holds besides weights and KV cache on each GPU."""
    config = facts.config
    experts = int(config.get("num_experts_per_tok") or 0)
    inner = experts * int(config.get("moe_intermediate_size") or 0) if experts else int(config["intermediate_size"])
    return tokens * _BFLOAT16 * ((_PREFILL_VECTORS + experts) * facts.hidden_size + 3 * math.ceil(inner / gpus))


# --- the drafter -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafter:
    """Sizes of a drafter.

    Attributes:
        trained: parameters of fc, the decoder layer, norms and lm_head. frozen: those of the verifier's embedding
            and of its head's rows for the draft vocabulary, the teacher. fc, head: parameters of those two.
        step: sizes from which a step's memory follows. vocab, target_vocab: tokens.
    """

    trained: int
    frozen: int
    fc: int
    head: int
    step: Step
    vocab: int
    target_vocab: int

    @property
    def total(self) -> int:
        """All parameters in memory while training."""
        return self.trained + self.frozen

    @property
    def served_bytes(self) -> int:
        """Bytes of what an engine loads: trained parameters in bf16, and the vocabulary mapping."""
        return self.trained * _BFLOAT16 + self.vocab * _ID + self.target_vocab

    def checkpoint_bytes(self, moment: int = _FLOAT32) -> int:
        """Return the bytes of a training checkpoint: bf16 to serve, and for an exact resume weight and AdamW's two
        moments of `moment` bytes."""
        return self.trained * (_BFLOAT16 + _FLOAT32 + 2 * moment) + self.vocab * _ID + self.target_vocab

    def flops_per_token(self, steps: int) -> int:
        """Return the matrix operations of training on one token at which every TTT step carries loss.

        Two a parameter forward and four backward; fc runs once, the teacher's head once and forward only.
        """
        return 6 * (self.fc + steps * (self.trained - self.fc)) + 2 * self.head

    def walk_flops(self, tokens: int, steps: int) -> int:
        """Return the matrix operations of walking so many tokens of replies, if all of that many drafts were right:
        two a parameter; fc runs once, the verifier's head over its own vocabulary once."""
        hidden = self.head // self.vocab
        return 2 * tokens * (self.fc + steps * (self.trained - self.fc) + hidden * self.target_vocab)

    def state_bytes(self, gpus: int, moment: int = _FLOAT32) -> int:
        """Return weights, gradients and moments (`moment` bytes each) of the trained parameters on each GPU, sharded
        over all."""
        return self.trained * (2 * _FLOAT32 + 2 * moment) // gpus

    def whole_bytes(self, gpus: int, bf16: bool) -> int:
        """Return what else lies whole on each GPU: the frozen parameters, and of the trained ones what a step gathers.

        FSDP gathers weights and gradients in the compute precision and reduces gradients in float32; on one GPU
        weights have copies in bf16. Frozen ones are in the compute precision.
        """
        item = _BFLOAT16 if bf16 else _FLOAT32
        if gpus > 1:
            return self.frozen * item + self.trained * (2 * item + _FLOAT32)
        return self.frozen * item + self.trained * (item if bf16 else 0)

    def activation_bytes(self, tokens: int, steps: int, *, bf16: bool, fused: bool = True, recompute: bool = False
                         ) -> int:
        """Return the bytes of a batch's activations at the peak: eagle3/training/memory.py has the terms."""
        if bf16 and fused:
            return (self.step.again if recompute else self.step.whole)(tokens, steps)
        return self.step.plain(tokens, steps, bf16, recompute)


def drafter(facts: Verifier, draft_vocab: int, layer: dict[str, Any] | None = None) -> Drafter:
    """Return the sizes of a drafter of this verifier; `layer` is its configuration, by default a fresh one's."""
    layer = layer or layer_shape(facts)
    shapes = tensors(facts, draft_vocab, layer)
    counts = {name: math.prod(shape) for name, shape in shapes.items() if name not in MAPPING}
    head, hidden = counts["lm_head.weight"], facts.hidden_size
    trained, frozen = sum(counts.values()), facts.vocab_size * hidden + head + hidden
    step = Step(hidden, layer["num_attention_heads"] * layer["head_dim"], layer["num_key_value_heads"]
                * layer["head_dim"], layer["intermediate_size"], draft_vocab, trained, frozen)
    return Drafter(
        trained=trained,
        frozen=frozen,
        fc=counts["fc.weight"],
        head=head,
        step=step,
        vocab=draft_vocab,
        target_vocab=facts.vocab_size,
    )


def tensors(facts: Verifier, draft_vocab: int, layer: dict[str, Any] | None = None) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of what stage 04 saves for an engine."""
    shape = (layer or layer_shape(facts)) | {"draft_vocab_size": draft_vocab, "num_aux_hidden_states": AUXILIARY}
    shapes = expected_shapes(shape)
    return {name: shape for name, shape in shapes.items() if name != EMBEDDING}
