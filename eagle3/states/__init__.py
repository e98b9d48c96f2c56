"""Stage 02: hidden states out of the verifier, and the store that holds them."""
