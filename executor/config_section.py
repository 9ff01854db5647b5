# SPDX-License-Identifier: Apache-2.0
"""What the sections of a recipe are made of."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

LARGEST = 2**31 - 1  # what an int32 of an operator can count
# A YAML list becomes a tuple, so that a frozen config is frozen all the way down.
TextList = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]


def key(default: Any, description: str, **bounds: Any) -> Any:
    """One declared key; ``...`` as default means required."""
    return Field(default, description=description, **bounds)


class Section(BaseModel):
    """A group of keys: immutable, strictly typed, closed to keys it does not declare."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
