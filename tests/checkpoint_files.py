# SPDX-License-Identifier: Apache-2.0
"""Checkpoint directories for tests, and every way to spoil one: each with what the error has to say."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from tests.models import checkpoints as ck

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The character tokenizer of the tiny checkpoints, 108 ids with its chat template."""
    path = Path(__file__).parents[1] / "scripts" / "train_tiny.py"
    spec = importlib.util.spec_from_file_location("train_tiny", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build_tokenizer()


def make_checkpoint(folder: Path, kind: str = "moe", **options) -> Path:
    """A small random model (vocabulary 128) in one file, with a tokenizer beside it."""
    ck.save(ck.make(kind, **{"vocab_size": 128, "eos_token_id": 2, **options}), folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Let ``change`` work on the tensors of the folder's one file."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def split(folder: Path, doubled: int = 0) -> None:
    """Replace the one file by two shards and their index, every second tensor in the second one; ``doubled`` of the
    second one's are in the first as well."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    place = {name: (FIRST, SECOND)[i % 2] for i, name in enumerate(names)}
    save_file({name: tensors[name] for name in (*names[::2], *names[1::2][:doubled])}, folder / FIRST)
    save_file({name: tensors[name] for name in names[1::2]}, folder / SECOND)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": place}))
    (folder / WEIGHTS).unlink()


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def truncate(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def lfs_pointer(path: Path) -> None:
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234\n")


@dataclass(frozen=True)
class Damage:
    """How a whole one-file MoE checkpoint is spoilt, and the words (file or tensor, constraint, fix) that the error
    has to hold."""

    spoil: Callable[[Path], object]
    words: tuple[str, ...]


def _sharded(then: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        split(folder)
        then(folder)

    return spoil


def _both_layouts(folder: Path) -> None:
    alone = load_file(folder / WEIGHTS)
    ck.fuse_experts(folder, {1})
    edit(folder, lambda tensors: tensors.update({**alone, **tensors}))


def _wrong_fused_shape(folder: Path) -> None:
    ck.fuse_experts(folder, {1})
    name = "model.layers.1.mlp.experts.down_proj"
    edit(folder, lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()}))


def _change(name: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda tensors: tensors.update({name: new(tensors[name]).contiguous()}))


def _flip_key(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes().replace(b"data_offsets", b"data_0ffsets", 1))


def _two_files_without_index(folder: Path) -> None:
    split(folder)
    (folder / INDEX).unlink()


DOWNLOAD = "download it again"
ONE_MODEL = "config.json and weights must be of one model"
EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"
DAMAGES = {
    "missing tensor": Damage(lambda f: edit(f, lambda t: t.pop(Q_PROJ)), ("1 tensor missing", Q_PROJ, ONE_MODEL)),
    "missing expert": Damage(lambda f: edit(f, lambda t: t.pop(EXPERT)), ("1 tensor missing", EXPERT, ONE_MODEL)),
    "unexpected tensor": Damage(
        lambda f: edit(f, lambda t: t.update({"model.visual.weight": torch.ones(3)})),
        ("1 tensor not in this model", "model.visual.weight", ONE_MODEL),
    ),
    "one layer too many": Damage(
        lambda f: ck.edit_config(f, lambda raw: raw.update(num_hidden_layers=2)),
        ("tensors not in this model", "model.layers.2.", ONE_MODEL),
    ),
    "renamed tensor": Damage(
        lambda f: edit(f, lambda t: t.update({"model.q": t.pop(Q_PROJ)})),
        ("1 tensor missing", Q_PROJ, "unexpected: model.q", ONE_MODEL),
    ),
    "duplicate tensor": Damage(lambda f: split(f, doubled=1), ("tensor", "is in both", FIRST, SECOND, "download")),
    "wrong shape": Damage(
        _change(Q_PROJ, lambda t: t[:-1]), ("1 tensor of another kind", f"{Q_PROJ} is [63, 48], expected [64, 48]")
    ),
    "transposed": Damage(_change(Q_PROJ, torch.t), (f"{Q_PROJ} is [48, 64], expected [64, 48]", ONE_MODEL)),
    "wrong fused shape": Damage(
        _wrong_fused_shape, ("1 tensor of another kind", "experts.down_proj is [6, 47, 24], expected [6, 48, 24]")
    ),
    "wrong dtype": Damage(
        _change(Q_PROJ, lambda t: t.to(torch.int8)), (f"{Q_PROJ} has dtype I8", "expected one of BF16", ONE_MODEL)
    ),
    "experts in both layouts": Damage(_both_layouts, ("one by one and fused", "layers.1.mlp.experts", "remove one")),
    "untied without head": Damage(
        lambda f: edit(f, lambda t: t.pop("lm_head.weight")),
        ("1 tensor missing: lm_head.weight", "tie_word_embeddings=false", "set that to true"),
    ),
    "no weights": Damage(lambda f: (f / WEIGHTS).unlink(), ("no safetensors file", "download the weights")),
    "missing shard": Damage(_sharded(lambda f: (f / SECOND).unlink()), (f"missing shard {SECOND}", INDEX, "download")),
    "two files, no index": Damage(_two_files_without_index, ("2 safetensors files but no", INDEX, "download")),
    "truncated shard": Damage(_sharded(lambda f: truncate(f / SECOND, 0.7)), (SECOND, "truncated", DOWNLOAD)),
    "empty shard": Damage(_sharded(lambda f: truncate(f / FIRST, 0)), (FIRST, "truncated", DOWNLOAD)),
    "damaged header": Damage(_flip_key, (WEIGHTS, "damaged", DOWNLOAD)),
    "git-lfs pointer": Damage(_sharded(lambda f: lfs_pointer(f / SECOND)), (SECOND, "git-lfs pointer", "git lfs pull")),
    "shard is a directory": Damage(
        lambda f: ((f / WEIGHTS).unlink(), (f / WEIGHTS).mkdir()), (WEIGHTS, "cannot be read", "a readable file")
    ),
    "index not JSON": Damage(
        _sharded(lambda f: truncate(f / INDEX, 0.5)), (INDEX, "not a safetensors index", DOWNLOAD)
    ),
    "index not UTF-8": Damage(
        _sharded(lambda f: (f / INDEX).write_bytes(b"\xff" * 999)), (INDEX, "not a safetensors index", DOWNLOAD)
    ),
    "index without weight_map": Damage(
        _sharded(lambda f: (f / INDEX).write_text("{}")), (INDEX, "weight_map", DOWNLOAD)
    ),
    "index is a list": Damage(_sharded(lambda f: (f / INDEX).write_text("[]")), (INDEX, "weight_map", DOWNLOAD)),
    "index with empty weight_map": Damage(
        _sharded(lambda f: edit_index(f, dict.clear)), (INDEX, "weight_map is empty", DOWNLOAD)
    ),
    "index leads out of the directory": Damage(
        _sharded(lambda f: edit_index(f, lambda m: m.update({Q_PROJ: "../model.safetensors"}))),
        (INDEX, Q_PROJ, "outside of its directory: ../model.safetensors", "beside the index"),
    ),
    "index of another download": Damage(
        _sharded(lambda f: edit_index(f, lambda m: m.update({"model.visual.weight": FIRST}))),
        (INDEX, FIRST, "does not hold model.visual.weight", "one download"),
    ),
}
