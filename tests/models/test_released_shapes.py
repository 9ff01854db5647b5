# SPDX-License-Identifier: Apache-2.0
"""Every released Qwen3 builds on ``meta``; its slots are the tensors transformers writes, and ranks share them out.

No weights are needed: transformers' own ``save_pretrained`` runs on a ``meta`` model, and the call that would write a
file is intercepted for the names and shapes it is given.
"""

import dataclasses
import itertools
import json
import math
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils

from executor.blueprint import Blueprint
from executor.memory import weight_bytes
from executor.model_runner import runner_class
from executor.parallel.groups import planned_groups
from executor.platform.features import GIB, NPU, cpu
from executor.quant.unquantized import UnquantizedLinear
from executor.storage import Storage
from executor.weights import check_coverage
from tests.models import checkpoints as ck

CONFIGS = Path(__file__).parents[2] / "assets" / "model_configs"
NAMES = sorted(path.parent.name for path in CONFIGS.glob("*/config.json"))
WORLD = 8
LAYOUTS = {
    "TP 8": dict(attn_tp=8, dense_tp=8, moe_tp=8, embed_tp=8, lmhead_tp=8),
    "EP 8": dict(attn_tp=8, dense_tp=8, moe_ep=8, embed_tp=8, lmhead_tp=8),
    "TP 2 x EP 4": dict(attn_tp=2, attn_dp=4, dense_tp=2, moe_tp=2, moe_ep=4, embed_tp=4, lmhead_tp=8),
}


def raw_config(name):
    return json.loads((CONFIGS / name / "config.json").read_text())


def build(config, groups, features):
    """Our model on ``meta``; its rotary tables are short, since they are computed in earnest and hold no weights."""
    storage = Storage(torch.bfloat16, torch.device("meta"), features.out_in_order)
    blueprint = Blueprint(config=config, groups=groups, storage=storage, scheme=UnquantizedLinear(), max_positions=128)
    return runner_class(config.model_type).build_model(blueprint)


def released(name):
    raw = raw_config(name)
    return runner_class(raw["model_type"]).parse_config(raw)


def written(model, folder):
    """Name -> shape of the tensors that ``save_pretrained`` hands to safetensors; no weights reach the disk."""
    shapes = {}

    def record(tensors, filename, metadata=None):
        shapes.update({name: tuple(tensor.shape) for name, tensor in tensors.items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_utils, "safe_save_file", record)
        model.save_pretrained(folder, max_shard_size="100TB")
    assert not list(Path(folder).glob("*.safetensors"))
    return shapes


@pytest.fixture(scope="module")
def checkpoint_shapes(tmp_path_factory):
    """Model name -> what transformers would write for it."""

    @cache
    def shapes(name):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw_config(name)), dtype=torch.bfloat16)
        return written(model, tmp_path_factory.mktemp(name))

    return shapes


def test_all_released_models_are_here():
    assert len(NAMES) == 8


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_interception_sees_what_lands_on_disk(kind, tied, tmp_path):
    model = ck.make(kind, tie_word_embeddings=tied)
    intercepted = written(model, tmp_path / "intercepted")
    ck.save(model, tmp_path / "real")
    with safe_open(tmp_path / "real" / "model.safetensors", "pt") as file:
        on_disk = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert intercepted == on_disk
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    assert written(empty, tmp_path / "meta") == on_disk


@pytest.mark.parametrize("name", NAMES)
def test_slots_are_the_released_tensors(name, checkpoint_shapes):
    started = time.perf_counter()
    for features in (cpu(), NPU["a3"]):
        model = build(released(name), planned_groups(), features)
        slots = list(model.slots())
        assert len({name for name, _ in slots}) == len(slots)
        assert {name: slot.shape for name, slot in slots} == checkpoint_shapes(name)
        assert all(slot.target.shape == slot.shape for _, slot in slots)
        check_coverage(slots, model.parameters())
    print(f"{name}: {len(slots)} tensors, {time.perf_counter() - started:.2f} s")


def box(slot):
    """The part of the tensor on disk that a slot reads, as (start, stop) per axis."""
    return tuple(part.indices(size)[:2] for part, size in zip(slot.index, slot.shape, strict=True))


def volume(part):
    return math.prod(stop - start for start, stop in part)


def copies(name, config, sizes):
    """How many of the ranks hold each element of tensor ``name``: all of them, over those it is split among."""
    attn_tp = sizes["attn_tp"]
    split = {
        ".q_proj.": attn_tp,
        ".o_proj.": attn_tp,
        ".k_proj.": min(attn_tp, config.num_key_value_heads),
        ".v_proj.": min(attn_tp, config.num_key_value_heads),
        ".experts.": sizes.get("moe_tp", 1) * sizes.get("moe_ep", 1),
        "embed_tokens.": sizes["embed_tp"],
        "lm_head.": sizes["lmhead_tp"],
    }
    if config.moe is None:
        split[".mlp."] = sizes["dense_tp"]
    return WORLD // next((size for part, size in split.items() if part in name), 1)


def rank_boxes(config, sizes):
    """Tensor name -> boxes that the ranks read, each tensor once per rank; checks every rank's own coverage."""
    boxes = {}
    for rank in range(WORLD):
        model = build(config, planned_groups(rank, **sizes), NPU["a3"])
        slots = list(model.slots())
        check_coverage(slots, model.parameters())
        mine = {}
        for name, slot in slots:
            found = mine.setdefault(name, [])
            if slot.target is not None:
                found.append(box(slot))
                assert tuple(slot.target.shape) == tuple(stop - start for start, stop in found[-1])
        for name, found in mine.items():
            # a tied head that is split otherwise than the embedding reads the same tensor a second time
            assert len(found) <= 1 + (name == "model.embed_tokens.weight" and config.tie_word_embeddings)
            boxes.setdefault(name, []).extend(found[:1])
    return boxes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_read_every_element(name, layout, checkpoint_shapes):
    """The ranks' parts of each tensor are disjoint boxes that add up to all of it, each read by as many ranks as the
    layout says. Two layers stand for all: the others have the same names and shapes, as the first lines check."""
    started = time.perf_counter()
    config, sizes, expected = released(name), LAYOUTS[layout], checkpoint_shapes(name)
    layer = {key[15:]: shape for key, shape in expected.items() if key.startswith("model.layers.0.")}
    for i in range(config.num_hidden_layers):
        assert all(expected[f"model.layers.{i}.{key}"] == shape for key, shape in layer.items())
    rest = {key: shape for key, shape in expected.items() if not key.startswith("model.layers.")}
    assert len(expected) == len(rest) + config.num_hidden_layers * len(layer)

    config = dataclasses.replace(config, num_hidden_layers=2, moe_layers=config.moe_layers[:2])
    boxes = rank_boxes(config, sizes)
    two = {f"model.layers.{i}.{key}": shape for i in range(2) for key, shape in layer.items()}
    assert set(boxes) == {*rest, *two}
    for key, shape in {**rest, **two}.items():
        distinct = set(boxes[key])
        assert sum(map(volume, distinct)) == math.prod(shape), key
        for a, b in itertools.combinations(distinct, 2):
            assert any(one[1] <= other[0] or other[1] <= one[0] for one, other in zip(a, b)), key
        assert {boxes[key].count(part) for part in distinct} == {copies(key, config, sizes)}, key
    print(f"{name}, {layout}: {time.perf_counter() - started:.2f} s")


def test_bytes_of_the_largest_model(checkpoint_shapes):
    """235B at TP 8 in BF16: 54.9 GiB per rank, counted on the built model and again from the checkpoint's shapes."""
    config, sizes = released("Qwen3-235B-A22B"), LAYOUTS["TP 8"]
    model = build(config, planned_groups(**sizes), NPU["a3"])
    counted = weight_bytes(model) / GIB
    assert counted == pytest.approx(54.9, abs=0.1)  # the rounded figure that the recipe's comment states
    tables = sum(t.numel() * t.element_size() for t in model.buffers()) / GIB
    shapes = checkpoint_shapes("Qwen3-235B-A22B").items()
    shares = sum(2 * math.prod(shape) * copies(name, config, sizes) / WORLD for name, shape in shapes) / GIB
    assert counted - tables == pytest.approx(shares, rel=1e-9)  # integers below 2**53, so only the division rounds
