"""A byte-level BPE of 1,024 tokens with Kimi's special tokens by name (other ids: nothing may depend on them).

  python -m tiny_kimi.tokenizer      makes tokenizer.json anew; the weights belong to the one that is here
"""

import itertools
import json
from pathlib import Path
from typing import Any

from tiny_kimi.tasks import tasks

VOCAB_SIZE = 1024
FILE = Path(__file__).with_name("tokenizer.json")
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
# Control tokens vanish from decoded text; those that servers parse replies by (thinking, tool calls) stay in it.
CONTROL = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "[EOT]", "<|im_system|>", "<|im_middle|>",
           "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "[UNK]", "[PAD]")
PARSED = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
          "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<think>", "</think>")
_TEXTS = 20_000


def train() -> Any:
    """Return a tokenizer trained on the tasks; digits stay single, special tokens come last, as Kimi's do."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r" ?\d| ?\p{L}+| ?[^\s\d\p{L}]+|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    backend.decoder = decoders.ByteLevel()
    size = VOCAB_SIZE - len(CONTROL) - len(PARSED)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = (text for task in itertools.islice(tasks(0), _TEXTS)
             for text in (task.question, task.reasoning, task.answer))
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet,
                                                          show_progress=False))
    if backend.get_vocab_size() != size:
        raise ValueError(f"the tasks give {backend.get_vocab_size()} tokens, {size} are wanted")
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in PARSED])
    return backend


def load() -> Any:
    """Return the tokenizer of this folder as a `tokenizers.Tokenizer`."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(FILE))


def ids() -> dict[str, int]:
    """Return the id of each special token."""
    backend = load()
    return {token: backend.token_to_id(token) for token in (*CONTROL, *PARSED)}


def write(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into a model folder."""
    special = {"bos_token": "[BOS]", "eos_token": "<|im_end|>", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [token for token in CONTROL if token not in special.values()],
        **special,
    }
    (folder / "tokenizer.json").write_bytes(FILE.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_bytes(TEMPLATE.read_bytes())


def prompt_text(question: str) -> str:
    """Return what the template makes of one question, up to the open think block."""
    return f"<|im_user|>user<|im_middle|>{question}<|im_end|><|im_assistant|>assistant<|im_middle|><think>"


def reply_text(reasoning: str, answer: str) -> str:
    """Return what the model is to write after `prompt_text`."""
    return f"{reasoning}</think>{answer}<|im_end|>"


if __name__ == "__main__":
    train().save(str(FILE))
