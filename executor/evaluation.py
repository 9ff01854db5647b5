# SPDX-License-Identifier: Apache-2.0
"""Exact-match scoring."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """``exact`` of ``total`` answers were right; ``wrong`` lists the indices of the others."""

    exact: int
    total: int
    wrong: tuple[int, ...]

    @property
    def share(self) -> float:
        return self.exact / self.total


def final_answer(text: str) -> str:
    """``text`` without the thoughts before it and without white space around it."""
    return text.rpartition("</think>")[2].strip()


def score(expected: Sequence[str], given: Sequence[str]) -> Score:
    """Compare answer by answer; the two have the same, non-zero length."""
    wrong = tuple(i for i, (want, got) in enumerate(zip(expected, given, strict=True)) if want.strip() != got)
    return Score(len(expected) - len(wrong), len(expected), wrong)
