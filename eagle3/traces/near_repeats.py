"""Which texts say the same in nearly the same words, among many thousands.

Two texts are near-repeats when their word triples agree: a share of all that either has (Jaccard), or, against texts
that are to be kept out, a share of all that such a text has, so that it is found inside a longer one too. Candidates
come from MinHash with bands (A. Broder, 1997; P. Indyk and R. Motwani, 1998); each is then compared exactly.
Letter case, punctuation and white space do not count. Scripts without spaces count by the character.
"""

import re
from collections import Counter
from typing import Any

from eagle3.common.files import hash64

SHARE = 0.7  # of the word triples of both texts from which they repeat each other
HELD_OUT_SHARE = 0.5  # of a held-out text's word triples from which a text repeats it
_NO_SPACES = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # Thai, Lao, kana, Han, Hangul
_WORD = re.compile(rf"[{_NO_SPACES}]|[^\W_{_NO_SPACES}]+")
_TRIPLE = 3
# Two texts of Jaccard 0.7 share one of 16 bands of 3 with 1 - (1 - 0.7³)¹⁶ = 99.9%, of 0.2 with 12%.
_BANDS, _ROWS = 16, 3


def words(text: str) -> list[str]:
    """Return the words of a text in small letters."""
    return _WORD.findall(text.lower())


def triples(text: str) -> list[int]:
    """Return a hash of each three neighbouring words, in turn; of the whole where a text has fewer than three."""
    said = words(text)
    count = max(1, len(said) - _TRIPLE + 1)
    return [hash64(" ".join(said[k:k + _TRIPLE])) for k in range(count)]


class NearRepeats:
    """Texts that have been taken, and texts that are to be kept out; about 2 KB each."""

    def __init__(self, held_out: list[str]) -> None:
        import numpy as np

        self._held_out = [frozenset(triples(text)) for text in held_out]
        self._inside: dict[int, list[int]] = {}
        for number, known in enumerate(self._held_out):
            for triple in known:
                self._inside.setdefault(triple, []).append(number)
        self._bands: list[dict[bytes, list[int]]] = [{} for _ in range(_BANDS)]
        self._taken: list[Any] = []
        generator = np.random.default_rng(0)
        self._factors = generator.integers(0, 2**63, (_BANDS * _ROWS, 1), dtype=np.uint64) * 2 + 1

    def repeats_held_out(self, text: str) -> bool:
        """Say whether a text holds most of what a held-out one says."""
        shared = Counter(number for triple in set(triples(text)) for number in self._inside.get(triple, ()))
        return any(count >= HELD_OUT_SHARE * len(self._held_out[number]) for number, count in shared.items())

    def take(self, text: str) -> bool:
        """Take a text unless it is a near-repeat of one that was taken; say whether it was."""
        import numpy as np

        own = np.unique(np.asarray(triples(text), dtype=np.uint64))
        signs = (own * self._factors).min(axis=1).reshape(_BANDS, _ROWS)
        keys = [row.tobytes() for row in signs]
        near = {number for band, key in zip(self._bands, keys, strict=True) for number in band.get(key, ())}
        for number in near:
            other = self._taken[number]
            shared = len(np.intersect1d(own, other, assume_unique=True))
            if shared >= SHARE * (len(own) + len(other) - shared):
                return False
        for band, key in zip(self._bands, keys, strict=True):
            band.setdefault(key, []).append(len(self._taken))
        self._taken.append(own)
        return True
