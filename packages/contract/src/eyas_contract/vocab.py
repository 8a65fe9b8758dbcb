"""VocabMap: which target tokens the draft can propose. One sorted list; `d2t` and `t2d` are derived from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VocabMap:
    """The draft vocabulary.

    Attributes:
        target_vocab_size: size of the target's vocabulary.
        target_ids: ascending target ids; draft id i stands for `target_ids[i]`.
    """

    target_vocab_size: int
    target_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        ids = self.target_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= self.target_vocab_size:
            raise ValueError(f"target_ids must be ascending, distinct and within 0..{self.target_vocab_size - 1}")

    @property
    def size(self) -> int:
        """Number of draft tokens."""
        return len(self.target_ids)

    @property
    def is_full(self) -> bool:
        """Whether draft ids are target ids."""
        return self.size == self.target_vocab_size

    def d2t(self) -> list[int]:
        """Offsets, as checkpoints store them: `target_id = draft_id + d2t[draft_id]`. int64 [V_draft]."""
        return [target - draft for draft, target in enumerate(self.target_ids)]

    def t2d(self) -> list[bool]:
        """Mask over target ids that the draft can propose. bool [V_target]."""
        mask = [False] * self.target_vocab_size
        for target in self.target_ids:
            mask[target] = True
        return mask

    @classmethod
    def from_d2t(cls, d2t: list[int], target_vocab_size: int) -> VocabMap:
        """Rebuild from offsets.

        Raises:
            ValueError: the offsets do not give ascending ids in range (absolute ids, for one, do not).
        """
        return cls(target_vocab_size, tuple(draft + offset for draft, offset in enumerate(d2t)))
