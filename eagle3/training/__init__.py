"""Stage 04: batches, the TTT forward, the trainer, its checkpoints, and the acceptance that it predicts."""
