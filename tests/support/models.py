"""Tiny models with random weights."""

from pathlib import Path

# ChatML. The generation prompt ends in an open think tag when asked; a conversation that does not start with
# the user (or a system message) is refused, as many published templates do.
CHAT_TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('the first turn must be the user') }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking %}<think>{% endif %}{% endif %}"
)
_TEXT = (
    "The verifier reads the whole prompt and writes one token after another. A drafter guesses the next tokens, "
    "and the verifier accepts the longest correct part of the guess. List the planets. Why do cats purr? "
    "Write a short story about the sea, the rain, and an old lighthouse keeper who counts the ships at night. "
)


def make_tiny_model(folder: Path) -> Path:
    """Make a random Llama (8 layers, hidden 64, head 32, about 500 tokens, ChatML) in a folder and return that."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)  # of this process: on a model so small, threads only wait for each other
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet, min_frequency=1)
    backend.train_from_iterator([_TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=2048, initializer_range=0.1,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=end, pad_token_id=end,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder
