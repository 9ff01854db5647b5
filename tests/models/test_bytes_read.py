# SPDX-License-Identifier: Apache-2.0
"""Each rank reads its slices of what is split, the whole of what is not, and no more."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from executor.model_runner import plan_run
from executor.parallel.groups import planned_groups
from executor.weights import load_weights
from tests.models import checkpoints as ck

REPLICATED = ("norm.weight", "mlp.gate.weight")


@pytest.mark.parametrize(
    ("kind", "split"),
    [("moe", {"moe_tp": 4}), ("moe", {"moe_ep": 4}), ("dense", {"dense_tp": 4})],
)
def test_bytes_read_at_tp4(kind, split, tmp_path):
    folder = ck.save(ck.make(kind, num_key_value_heads=4, tie_word_embeddings=False, **_eight(kind)), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    size = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    replicated = sum(n for name, n in size.items() if name.endswith(REPLICATED))
    sizes = {"attn_tp": 4, "embed_tp": 4, "lmhead_tp": 4, **split}
    parallel = {f"parallel__{name}_size": n for name, n in sizes.items()}
    runner, plan = plan_run(ck.run_config(folder, parallel__world_size=4, **parallel))
    storage = dataclasses.replace(plan.blueprint.storage, device=torch.device("cpu"))
    read = []
    for rank in range(4):
        groups = planned_groups(rank, **sizes)
        model = runner.build_model(dataclasses.replace(plan.blueprint, storage=storage, groups=groups))
        read.append(load_weights(model, folder).bytes_read)
    expected = (sum(size.values()) - replicated) / 4 + replicated
    # every split axis of this model divides by four, KV heads too
    assert all(abs(n - expected) <= 0.02 * expected for n in read), (read, expected)


def _eight(kind: str) -> dict:
    return {"num_experts": 8} if kind == "moe" else {}
