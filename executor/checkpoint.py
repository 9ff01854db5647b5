# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory on disk: which safetensors files belong to it, and what they hold."""

import json
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from executor.errors import UserError

INDEX = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"


class Checkpoint:
    """The safetensors files of a directory, opened once; ``names`` are normalised to carry the ``model.`` prefix."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.names: dict[str, tuple[Any, str]] = {}  # normalised name -> (open file, name in it)
        where: dict[str, str] = {}
        for file_name, expected in self._files().items():
            handle = stack.enter_context(_open(folder / file_name))
            keys = list(handle.offset_keys())  # in file order, so that reading is sequential
            absent = sorted(expected - set(keys))
            if absent:
                raise UserError(
                    f"{folder / INDEX}: {file_name} does not hold {some(absent)}, which the index says it does; "
                    "index and shards must be of one download"
                )
            for key in keys:
                if key in where:
                    raise UserError(
                        f"{folder}: tensor {key} is in both {where[key]} and {file_name}; which of the two is right "
                        "is unknown: download the checkpoint again"
                    )
                where[key] = file_name
                self.names[key] = (handle, key)
        if not any(name.startswith("model.") for name in self.names):
            self.names = {k if k.startswith("lm_head.") else f"model.{k}": v for k, v in self.names.items()}

    def _files(self) -> dict[str, set[str]]:
        """File name -> tensors that the index promises in it. Only indexed files are read where there is an index."""
        index = self.folder / INDEX
        if index.is_file() or index.is_symlink():
            try:
                content = json.loads(index.read_text(encoding="utf-8"))
                weight_map = {str(k): str(v) for k, v in content["weight_map"].items()}
            except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
                raise UserError(
                    f"{index}: not a safetensors index, a JSON object with weight_map ({type(error).__name__}: "
                    f"{error}); download it again"
                ) from None
            files: dict[str, set[str]] = defaultdict(set)
            for name, file_name in weight_map.items():
                if Path(file_name).name != file_name:
                    raise UserError(
                        f"{index}: {name} points outside of its directory: {file_name}; name files beside the index"
                    )
                files[file_name].add(name)
            missing = [f for f in sorted(files) if not (self.folder / f).is_file()]
            if missing:
                raise UserError(f"{self.folder}: missing shard {some(missing)}, named by {INDEX}; download it")
            if not files:
                raise UserError(f"{index}: weight_map is empty; download it again")
            return dict(sorted(files.items()))
        found = sorted(p.name for p in self.folder.glob("*.safetensors"))
        if not found:
            raise UserError(f"{self.folder}: no safetensors file, and no other format is read; download the weights")
        if len(found) > 1 and "model.safetensors" not in found:
            raise UserError(
                f"{self.folder}: {len(found)} safetensors files but no {INDEX}, so which to read is unknown; "
                "download the index"
            )
        return {"model.safetensors" if len(found) > 1 else found[0]: set()}

    def shape(self, name: str) -> tuple[int, ...]:
        handle, key = self.names[name]
        return tuple(handle.get_slice(key).get_shape())

    def dtype(self, name: str) -> str:
        handle, key = self.names[name]
        return str(handle.get_slice(key).get_dtype())

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        handle, key = self.names[name]
        if all(s == slice(None) for s in index):
            return handle.get_tensor(key)
        return handle.get_slice(key)[index]


def _open(path: Path) -> Any:
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: cannot be read (not a regular file); it must be a readable file")
    try:
        with path.open("rb") as f:
            if f.read(len(LFS_POINTER)) == LFS_POINTER:
                raise UserError(
                    f"{path}: is a git-lfs pointer, not weights; run `git lfs pull` in the checkpoint's repository"
                )
        return safe_open(path, framework="pt", device="cpu")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); it must be a readable file") from None
    except SafetensorError as error:
        raise UserError(f"{path}: truncated or damaged safetensors file ({error}); download it again") from None


def some(names: Iterable[str], most: int = 4) -> str:
    """The first ``most`` of ``names``, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
