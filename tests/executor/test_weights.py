# SPDX-License-Identifier: Apache-2.0
"""Loading: complete or refused with nothing filled; ranks read their share and together hold the whole model."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.blueprint import Blueprint
from executor.checkpoint import Checkpoint
from executor.errors import UserError
from executor.model_config import read_config_json
from executor.model_runner import runner_class
from executor.parallel.groups import planned_groups
from executor.quant.unquantized import UnquantizedLinear
from executor.storage import Storage
from executor.weights import check_coverage, load_weights
from tests import checkpoint_files as files
from tests.models import checkpoints as ck

FP32 = 1e-4  # float32 sums in another order, as in test_parity.py
PROMPTS = ck.random_prompts([3, 17])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Checkpoints that nobody may write to."""
    base = tmp_path_factory.mktemp("whole")
    for name in ("dense", "dense tied", "dense bias", "moe"):
        tied, bias = name.endswith("tied"), name.endswith("bias")
        ck.save(ck.make(name.split()[0], tie_word_embeddings=tied, attention_bias=bias), base / name)
    return base


@pytest.fixture
def copy(whole, tmp_path):
    """A copy to spoil."""

    def copied(name):
        return shutil.copytree(whole / name, tmp_path / name)

    return copied


def empty_model(folder, rank=0, out_in_order=True, **sizes):
    """The model of one rank in float32, every parameter NaN so that what loading fills can be told."""
    raw = read_config_json(folder / "config.json")
    kind = runner_class(raw["model_type"])
    blueprint = Blueprint(
        config=kind.parse_config(raw),
        groups=planned_groups(rank, **sizes),
        storage=Storage(torch.float32, torch.device("cpu"), out_in_order),
        scheme=UnquantizedLinear(),
        max_positions=64,
    )
    model = kind.build_model(blueprint)
    for param in model.parameters():
        param.data.fill_(math.nan)
    return model


def loaded(folder, rank=0, out_in_order=True, **sizes):
    model = empty_model(folder, rank, out_in_order, **sizes)
    load_weights(model, folder)
    return model


def same(a, b):
    assert not a.isnan().any()
    assert torch.equal(a, b)


@pytest.mark.parametrize("name", files.DAMAGES)
def test_damaged_checkpoints_are_refused_before_anything_is_filled(name, copy):
    folder, damage = copy("moe"), files.DAMAGES[name]
    damage.spoil(folder)
    model = empty_model(folder)
    with pytest.raises(UserError) as caught:
        load_weights(model, folder)
    message = str(caught.value)
    assert message.startswith(str(folder))
    assert "\n" not in message
    assert len(message) < 600
    for words in damage.words:
        assert words in message
    assert all(param.isnan().all() for param in model.parameters())


def test_damage_seen_by_one_rank_is_seen_by_all(copy):
    """Else the others would wait for it in a collective."""
    folder = copy("moe")
    files.DAMAGES["missing expert"].spoil(folder)  # the last expert, which rank 0 of EP 2 does not hold
    for rank in range(2):
        with pytest.raises(UserError, match=r"experts\.5\.up_proj"):
            load_weights(empty_model(folder, rank, moe_ep=2), folder)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "dense bias", "moe"])
def test_one_rank_reads_every_byte_once(kind, shards, copy):
    folder = copy(kind)
    total = sum(t.numel() * t.element_size() for t in load_file(folder / files.WEIGHTS).values())
    if shards == 2:
        files.split(folder)
    model, calls = empty_model(folder), []
    report = load_weights(model, folder, lambda done, whole: calls.append((done, whole)))
    assert report.bytes_read == total
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert not report.warnings
    assert report.seconds > 0
    assert not any(param.isnan().any() for param in model.parameters())


def share(name, sizes, kv_heads):
    """Which part of tensor ``name`` a rank reads."""
    tp = sizes.get("attn_tp", 1)
    split = {
        "q_proj.": tp,
        "k_proj.": min(tp, kv_heads),
        "v_proj.": min(tp, kv_heads),
        "o_proj.weight": tp,
        "mlp.gate_proj.": sizes.get("dense_tp", 1),
        "mlp.up_proj.": sizes.get("dense_tp", 1),
        "mlp.down_proj.": sizes.get("dense_tp", 1),
        "experts.": sizes.get("moe_tp", 1) * sizes.get("moe_ep", 1),
        "embed_tokens.": sizes.get("embed_tp", 1),
        "lm_head.": sizes.get("lmhead_tp", 1),
    }
    return 1 / next((size for part, size in split.items() if part in name), 1)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("dense", dict(attn_tp=4, dense_tp=4, embed_tp=4, lmhead_tp=2)),
        ("dense bias", dict(attn_tp=4)),
        ("moe", dict(attn_tp=4, moe_tp=4, embed_tp=2, lmhead_tp=4)),
        ("moe", dict(attn_tp=2, moe_ep=2)),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_reads_its_share(kind, sizes, fused, copy, monkeypatch):
    """Counted three ways: by the report, by what reading returned, and from the shapes on disk."""
    folder = copy(kind)
    if fused and kind == "moe":
        ck.fuse_experts(folder, {0, 2})
    returned = []
    read = Checkpoint.read

    def spy(self, name, index):
        tensor = read(self, name, index)
        returned.append(tensor.numel() * tensor.element_size())
        return tensor

    monkeypatch.setattr(Checkpoint, "read", spy)
    report = load_weights(empty_model(folder, rank=1, **sizes), folder)  # rank 0 holds the bias of o_proj
    tensors = load_file(folder / files.WEIGHTS)
    expected = sum(
        t.numel() * t.element_size() * share(name, sizes, kv_heads=2)
        for name, t in tensors.items()
        if not name.endswith("o_proj.bias")
    )
    assert report.bytes_read == sum(returned) == expected
    assert expected < sum(t.numel() * t.element_size() for t in tensors.values())


def test_only_indexed_files_are_read(copy):
    """A leftover shard of another download, however broken, does not matter; nor do files beside a lone one."""
    folder = copy("moe")
    before = loaded(folder)
    (folder / "adapter.safetensors").write_bytes(b"not for us")
    lone = loaded(folder)
    files.split(folder)
    files.lfs_pointer(folder / "model-00003-of-00003.safetensors")
    save_file({files.Q_PROJ: torch.zeros(64, 48)}, folder / "model-00001-of-00001.safetensors")
    indexed = loaded(folder)
    for a, b, c in zip(before.parameters(), lone.parameters(), indexed.parameters()):
        same(a, b)
        same(a, c)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_names_without_prefix_but_with_a_head(kind, copy):
    folder = copy(kind)
    before = loaded(folder)
    tensors = load_file(folder / files.WEIGHTS)
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, folder / files.WEIGHTS)
    for a, b in zip(loaded(folder).parameters(), before.parameters()):
        same(a, b)


def test_names_with_and_without_prefix_are_refused(copy):
    folder = copy("moe")
    files.edit(folder, lambda t: t.update({"norm.weight": t.pop("model.norm.weight")}))
    with pytest.raises(UserError, match=r"1 tensor missing: model\.norm\.weight; unexpected: norm\.weight"):
        loaded(folder)


def tied_with_head(folder, change):
    """Write ``change(embedding)`` beside the embedding as ``lm_head.weight``."""
    embedding = load_file(folder / files.WEIGHTS)["model.embed_tokens.weight"]
    files.edit(folder, lambda tensors: tensors.update({"lm_head.weight": change(embedding.clone())}))


def test_tied_with_an_equal_head_stays_tied(copy):
    folder = copy("dense tied")
    before = loaded(folder)
    tied_with_head(folder, lambda embedding: embedding)
    model = empty_model(folder)
    report = load_weights(model, folder)
    assert not report.warnings
    assert model.shares_head
    same(model.lm_head.weight, before.lm_head.weight)


def test_tied_with_a_different_head_uses_the_head_and_warns(copy):
    """As transformers does, which is asked for its logits; a head that differs in one element is different."""
    folder = copy("dense tied")
    tied = ck.prefill_logits(ck.runner(folder), PROMPTS)

    def negate_last_row(embedding):
        embedding[-1] *= -1
        return embedding

    tied_with_head(folder, negate_last_row)
    made = ck.runner(folder)
    logits = ck.prefill_logits(made, PROMPTS)
    oracle = ck.oracle_logits(ck.load(folder, torch.float32), PROMPTS)
    torch.testing.assert_close(logits, oracle, rtol=0, atol=FP32)
    assert torch.equal(logits[:, :-1], tied[:, :-1])
    assert (logits[:, -1] - tied[:, -1]).abs().min() > 10 * FP32
    report = load_weights(empty_model(folder), folder)
    assert len(report.warnings) == 1
    for words in (str(folder), "tie_word_embeddings=true", "lm_head.weight wins", "tie_word_embeddings=false"):
        assert words in report.warnings[0]


@pytest.mark.parametrize("sizes", [dict(), dict(embed_tp=2, lmhead_tp=2), dict(lmhead_tp=2)])
def test_a_different_head_wins_on_every_rank(sizes, copy):
    folder = copy("dense tied")
    tied_with_head(folder, lambda embedding: embedding.neg())
    whole_head = load_file(folder / files.WEIGHTS)["lm_head.weight"]
    ranks = [loaded(folder, rank, **sizes) for rank in range(sizes.get("lmhead_tp", 1))]
    same(torch.cat([model.lm_head.weight.t() for model in ranks]), whole_head)


def test_tied_with_a_head_of_another_shape_is_refused(copy):
    folder = copy("dense tied")
    tied_with_head(folder, lambda embedding: embedding[:-1])
    with pytest.raises(UserError, match=r"lm_head\.weight is \[95, 48\], expected \[96, 48\]"):
        loaded(folder)


def attention_heads(model, head_dim=16):
    """q, k and v of every layer, weight and bias, as ``[heads, head_dim, ...]`` each."""
    found = []
    for layer in model.layers:
        qkv = layer.self_attn.merged_qkv_proj
        for matrix in (qkv.weight.t(), *(() if qkv.bias is None else (qkv.bias,))):
            found += [part.unflatten(0, (-1, head_dim)) for part in matrix.split(qkv.sizes)]
    return found


def halves(matrices, dim):
    """gate and up lie side by side on every rank: concatenate each over the ranks, then put them side by side."""
    gates, ups = zip(*(matrix.chunk(2, dim) for matrix in matrices))
    return torch.cat((*gates, *ups), dim)


@pytest.mark.parametrize("out_in_order", [True, False])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["dense", "moe", "dense tied", "dense bias"])
def test_tensor_parallel_ranks_hold_the_whole_model(name, tp, out_in_order, whole):
    """Concatenated, the ranks' parameters are those of one rank; with 4 ranks for 2 KV heads, two hold each head."""
    sizes = dict(attn_tp=tp, dense_tp=tp, moe_tp=tp, embed_tp=tp, lmhead_tp=tp)
    if name == "dense tied":
        sizes.pop("embed_tp")  # the head is split, the embedding is not, so the head has memory of its own
    one = loaded(whole / name, out_in_order=out_in_order)
    ranks = [loaded(whole / name, rank, out_in_order, **sizes) for rank in range(tp)]

    for i, expected in enumerate(attention_heads(one)):
        parts = [attention_heads(model)[i] for model in ranks]
        copies = tp * parts[0].shape[0] // expected.shape[0]
        assert copies == (2 if tp == 4 and expected.shape[0] == 2 else 1)
        for replica in range(copies):
            same(torch.cat(parts[replica::copies]), expected)
    for i, layer in enumerate(one.layers):
        others = [model.layers[i] for model in ranks]
        same(torch.cat([other.self_attn.o_proj.weight for other in others]), layer.self_attn.o_proj.weight)
        assert (layer.self_attn.o_proj.bias is None) == (name != "dense bias")
        if layer.self_attn.o_proj.bias is not None:  # added by one rank, since the ranks' results are summed
            same(others[0].self_attn.o_proj.bias, layer.self_attn.o_proj.bias)
            assert all(other.self_attn.o_proj.bias is None for other in others[1:])
        if name == "moe":
            same(halves([other.mlp.experts.w13 for other in others], -1), layer.mlp.experts.w13)
            same(torch.cat([other.mlp.experts.w2 for other in others], 1), layer.mlp.experts.w2)
        else:
            same(halves([other.mlp.gate_up_proj.weight for other in others], -1), layer.mlp.gate_up_proj.weight)
            same(torch.cat([other.mlp.down_proj.weight for other in others]), layer.mlp.down_proj.weight)
    embeddings = [model.embed_tokens.weight for model in ranks[: sizes.get("embed_tp", 1)]]
    same(torch.cat(embeddings), one.embed_tokens.weight)
    same(torch.cat([model.lm_head.weight for model in ranks], -1), one.lm_head.weight)
    assert all(model.shares_head == (name == "dense tied" and model is one) for model in (one, *ranks))
    check_replicated(one, ranks)


def check_replicated(one, ranks):
    names = [name for name, _ in one.named_parameters() if "norm" in name or ".gate." in name]
    assert len(names) >= 4 * len(one.layers) + 1
    for name in names:
        for model in ranks:
            same(model.get_parameter(name), one.get_parameter(name))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("moe_tp", [1, 2])
def test_expert_parallel_ranks_hold_the_whole_model(moe_tp, fused, copy):
    """EP 2, alone and times TP 2: ranks with one half of the experts are neighbours."""
    folder = copy("moe")
    one = loaded(folder)
    if fused:
        ck.fuse_experts(folder, {0, 1, 2})
    ranks = [loaded(folder, rank, moe_tp=moe_tp, moe_ep=2) for rank in range(2 * moe_tp)]
    for i, layer in enumerate(one.layers):
        experts = [model.layers[i].mlp.experts for model in ranks]
        pairs = [experts[:moe_tp], experts[moe_tp:]]
        same(torch.cat([halves([e.w13 for e in pair], -1) for pair in pairs]), layer.mlp.experts.w13)
        same(torch.cat([torch.cat([e.w2 for e in pair], 1) for pair in pairs]), layer.mlp.experts.w2)
    check_replicated(one, ranks)


def test_coverage_notices_a_forgotten_slot(whole):
    model = empty_model(whole / "moe")
    slots = list(model.slots())
    check_coverage(slots, model.parameters())
    for forgotten in (0, len(slots) // 2, -1):
        rest = [slot for slot in slots if slot is not slots[forgotten]]
        with pytest.raises(RuntimeError, match="slots' elements"):
            check_coverage(rest, model.parameters())
