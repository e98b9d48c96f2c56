"""A Kimi-K2.5 in everything but size: tasks it reasons about, tokenizer and template, training, model folder."""
