# SPDX-License-Identifier: Apache-2.0
"""Packed weights multiply as plain ones do."""

import pytest
import torch
from torch import nn

from executor.memory import WEIGHTS
from executor.quant.packed import PackedLinear
from executor.quant.unquantized import UnquantizedLinear
from executor.storage import Storage
from tests.models import checkpoints as ck

needs_onednn = pytest.mark.skipif(not PackedLinear.available(), reason="this CPU or torch has no BF16 oneDNN kernels")


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 64])
@pytest.mark.parametrize(("in_features", "out_features"), [(32, 96), (48, 7), (513, 130)])
def test_packed_equals_plain(in_features, out_features, rows, bias):
    torch.manual_seed(0)
    storage = Storage(torch.bfloat16, torch.device("cpu"), out_in_order=True)
    plain, packed = nn.Module(), nn.Module()
    for layer, scheme in ((plain, UnquantizedLinear()), (packed, PackedLinear())):
        scheme.declare(layer, in_features, out_features, storage)
    plain.weight.data.normal_(0, in_features**-0.5)
    packed.weight.data.copy_(plain.weight)
    PackedLinear().finalize(packed)
    assert not list(packed.parameters())  # the plain copy is gone
    x = torch.randn(rows, in_features, dtype=torch.bfloat16)
    b = torch.randn(out_features, dtype=torch.bfloat16) if bias else None
    exact = x.double() @ plain.weight.double() + (b.double() if bias else 0)
    # both sum in float32 and round once to bf16: half an ulp, 2^-9 relative, plus the float32 sum's own error
    for layer, scheme in ((plain, UnquantizedLinear()), (packed, PackedLinear())):
        torch.testing.assert_close(scheme.apply(layer, x, b).double(), exact, rtol=2**-8, atol=1e-3)


@needs_onednn
@pytest.mark.parametrize("tied", [False, True])
def test_memory_is_planned_and_the_tied_head_keeps_the_embedding(tied, tmp_path):
    folder = ck.save(ck.make("dense", tie_word_embeddings=tied).bfloat16(), tmp_path)
    made = ck.runner(folder, model__dtype="bfloat16")
    embedding = made.model.embed_tokens.weight
    packed = [m.packed for m in made.model.modules() if hasattr(m, "packed")]
    assert len(packed) == 4 * 3 + 1  # qkv, o, gate|up, down of each layer, and the head
    held = sum(t.numel() * t.element_size() for t in (*made.model.parameters(), *made.model.buffers()))
    vocab, hidden = embedding.shape
    shapes = 3 * (48 * 128 + 64 * 48 + 48 * 160 + 80 * 48) + vocab * hidden
    assert made.plan.memory.parts[WEIGHTS] == held + 2 * shapes
