"""What a training step takes of a GPU's memory, term by term, and whether its layer has to be computed again for it.

Needs no torch: dry runs ask too. Elements are of bf16 (fused.py, products.py: each term names what is kept there); A is
heads times their size, K the same of keys, F the MLP's width, D the draft vocabulary, R the rows of a batch.
"""

from dataclasses import dataclass

CHUNK = 4096  # rows whose logits are there at once where head and loss are computed again
_HALF, _FULL = 2, 4  # bytes
# Of a GPU's memory what training may take: the rest is CUDA's own, fragments, and what estimates miss.
_USABLE = 0.85
_AHEAD = 3  # batches that prefetch.py has on the GPU at most, beside the one that is trained on


@dataclass(frozen=True)
class Step:
    """Sizes of a drafter in training.

    Attributes:
        hidden, attention, keys, width, vocab: H, A, K, F and D. trained, frozen: parameters.
    """

    hidden: int
    attention: int
    keys: int
    width: int
    vocab: int
    trained: int
    frozen: int

    def fixed(self, moments: int = 2 * _FULL, processes: int = 1, half: bool = True, fp8: bool = False) -> int:
        """Return bytes of weights, moments, copies in bf16 and frozen weights; gradients come as products end. Copies
        in float8 are two, by rows and by columns."""
        copies = _HALF * half + 2 * fp8
        return self.trained * (_FULL + moments) // processes + self.trained * copies + self.frozen * (
            _HALF if half else _FULL)

    def once(self, rows: int) -> int:
        """Return bytes that a batch takes once: its states (4H), fc's input (3H), output and its gradient (2H),
        embeddings (H) and their shares of q, k and v, the teacher's logits."""
        return rows * _HALF * (10 * self.hidden + self.attention + 2 * self.keys + self.vocab)

    def ahead(self, rows: int) -> int:
        """Return bytes of the batches that are loaded ahead."""
        return _AHEAD * rows * _HALF * 4 * self.hidden

    def kept(self, rows: int) -> int:
        """Return bytes that one TTT step keeps for the backward pass.

        Inputs of products: qkv, gate and up, head (3H), o (A), down (F). Gradients of their outputs in one place until
        the last step: o and down (2H), q, k and v, gate and up (2F, their outputs before). Streams after attention and
        MLP (2H), q, k and v themselves, logits (D).
        """
        return rows * _HALF * (7 * self.hidden + self.attention + 2 * (self.attention + 2 * self.keys)
                               + 3 * self.width + self.vocab)

    def passing(self, rows: int) -> int:
        """Return bytes that pass through a step's backward at its peak, in vectors of H: gradients between two products
        (q, k, v, attention, stream, norms) and float32 sums of flash attention."""
        return rows * _HALF * 12 * self.hidden

    def whole(self, rows: int, steps: int) -> int:
        """Return bytes of activations at the peak where everything is kept."""
        return self.once(rows) + steps * self.kept(rows) + self.passing(rows)

    def again(self, rows: int, steps: int) -> int:
        """Return the same where each step's layer is computed again: of each step the stream that enters, q, k and v,
        and the head's input are kept; one step at a time is there whole, a chunk of logits with its gradient."""
        each = rows * _HALF * (2 * self.hidden + self.attention + 2 * self.keys)
        one = self.kept(rows) - rows * _HALF * (self.hidden + self.vocab)
        chunk = min(rows, CHUNK) * self.vocab * 2 * _HALF
        return self.once(rows) + steps * each + one + chunk + self.passing(rows)

    def plain(self, rows: int, steps: int, half: bool, again: bool = False) -> int:
        """Return bytes of activations in the plain form, roughly: vectors of H kept for a backward pass, attention,
        the MLP's three, and bf16 logits with float32 log-softmax of both sides; float32 takes twice as much."""
        layer = _HALF * (8 * self.hidden + 2 * self.attention + 2 * self.keys + 3 * self.width)
        logits = (2 * _HALF + 2 * _FULL) * self.vocab
        one = rows * (layer + logits)
        if again:
            each = rows * _HALF * (2 * self.hidden + 2 * self.keys)
            one = steps * each + rows * (layer + _HALF * self.vocab) + min(rows, CHUNK) * logits
        else:
            one *= steps
        return one * (1 if half else 2)

    def peak(self, rows: int, steps: int, *, moments: int = 2 * _FULL, processes: int = 1, recompute: bool = False,
             fp8: bool = False) -> int:
        """Return the most bytes that a fused step in bf16 takes: while all activations are there no gradient is but the
        first (counted as lm_head's size), at its end all gradients are and no activations."""
        fixed, gradients = self.fixed(moments, processes, fp8=fp8), _FULL * self.trained // processes
        if processes > 1:  # FSDP gathers gradients in bf16 and reduces them in float32
            gradients += self.trained * (_HALF + _FULL)
        least = gradients + rows * _HALF * 4 * self.hidden
        if recompute:  # the last step's backward makes all gradients, and frees what was kept of that step
            return fixed + max(least, self.again(rows, steps), gradients + self.again(rows, max(1, steps - 1)))
        return fixed + max(least, self.whole(rows, steps) + _FULL * self.vocab * self.hidden)


def too_large(needed: int, memory: int) -> bool:
    """Say whether a step that needs so many bytes is too large for a GPU of so much memory."""
    return needed > _USABLE * memory
