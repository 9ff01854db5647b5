# SPDX-License-Identifier: Apache-2.0
"""Oracles of the attention tests: scalar loops, torch's SDPA, and a paged cache that is NaN where not written."""

import math

import torch

import executor.ops.reference.attention  # noqa: F401  (registers the kernels)
from executor.ops import kv

OPS = torch.ops.npu
FIA = OPS.npu_fused_infer_attention_score_v2
NAN = torch.nan


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def loop(q, k, v, scale, sees):
    """One sequence in Python floats, masked by ``sees(i, j)``: returns out [Sq, Nq, Dv] and lse [Sq, Nq]."""
    (sq, nq, _), (length, nk, dv) = q.shape, v.shape
    q, k, v = q.tolist(), k.tolist(), v.tolist()
    out, lse = (
        torch.full((sq, nq, dv), NAN, dtype=torch.float64),
        torch.full((sq, nq), NAN, dtype=torch.float64),
    )
    for i in range(sq):
        for h in range(nq):
            g = h * nk // nq
            scores = {j: scale * sum(a * b for a, b in zip(q[i][h], k[j][g])) for j in range(length) if sees(i, j)}
            if not scores:
                continue
            total = sum(math.exp(s) for s in scores.values())
            lse[i, h] = math.log(total)
            for d in range(dv):
                out[i, h, d] = sum(math.exp(s) / total * v[j][g][d] for j, s in scores.items())
    return out, lse


def sdpa(q, k, v, scale, causal):
    """One sequence through torch, K and V repeated for GQA; right-down causal by an explicit mask."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    keep = torch.ones(q.shape[0], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[0]) if causal else None
    return torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k, v, attn_mask=keep, scale=scale
    ).transpose(0, 1)


def running(lengths):
    return torch.tensor(lengths).cumsum(0).tolist()


def assert_close(actual, expected, tolerance=1e-12):  # default: fp64 against fp64, a few hundred operations
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


class Cache:
    """Sequences of ``kv_lengths`` tokens written into random blocks; whatever was not written is NaN."""

    def __init__(self, kv_lengths, dtype, heads=2, dim=32, size=4, seed=0):
        self.row = 32 // dtype.itemsize
        self.heads, self.dim, self.size, self.lengths = heads, dim, size, kv_lengths
        needed = [-(-n // size) for n in kv_lengths]
        self.blocks = sum(needed) + 3
        order = torch.randperm(self.blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        # unused entries of the table name a block that stays NaN
        self.table = torch.full((len(kv_lengths), max(needed) + 1), order[-1], dtype=torch.int32)
        self.k = [randn(n, heads, dim, dtype=dtype, seed=10 + b) for b, n in enumerate(kv_lengths)]
        self.v = [randn(n, heads, dim, dtype=dtype, seed=50 + b) for b, n in enumerate(kv_lengths)]
        slots = []
        for b, n in enumerate(needed):
            self.table[b, :n] = torch.tensor(order[:n], dtype=torch.int32)
            slots += [order[j // size] * size + j % size for j in range(kv_lengths[b])]
            order = order[n:]
        tokens = torch.cat(self.k), torch.cat(self.v)
        slots = torch.tensor(slots)
        self.norm = [torch.full((self.blocks, size, heads, dim), NAN, dtype=dtype) for _ in range(2)]
        kv.write_kv(*tokens, *self.norm, slots)
        self.nz = [
            torch.full((self.blocks, heads * dim // self.row, size, self.row), NAN, dtype=dtype) for _ in range(2)
        ]
        OPS.npu_scatter_pa_kv_cache(*tokens, *self.nz, slots)

    def as_format(self, name):
        if name == "BnBsH":
            return [c.flatten(2) for c in self.norm]
        if name == "BnNBsD":
            return [c.transpose(1, 2).contiguous() for c in self.norm]
        return [c.view(self.blocks, self.heads, self.dim // self.row, self.size, self.row) for c in self.nz]
