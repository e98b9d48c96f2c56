"""Stage 01: prompts, the servers that answer them, and the traces that come of it."""
