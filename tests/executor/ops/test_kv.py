# SPDX-License-Identifier: Apache-2.0
"""Cache writes against element-by-element loops in every format, read back under every name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.ops import kv
from executor.ops.reference.kv import paged_block_size, read_paged

OPS = torch.ops.npu
DTYPES = [torch.float8_e4m3fn, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64]


def numbered(*shape, dtype, start=0):
    """Distinct values as far as the dtype can hold them."""
    n = torch.Size(shape).numel()
    return (torch.arange(start, start + n, dtype=torch.float64) % 120).view(shape).to(dtype)


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))  # bytes: some dtypes have no equality on a CPU


def write_loop(x_TND, cache, slots, mode):
    """The vendor's index formulas, element by element."""
    out = cache.double()
    for t, slot in enumerate(slots):
        if slot < 0:
            continue
        for n in range(x_TND.shape[1]):
            for d in range(x_TND.shape[2]):
                element = x_TND[t, n, d].double()
                if mode == "Norm":
                    out[slot // cache.shape[1], slot % cache.shape[1], n, d] = element
                else:
                    size, row = cache.shape[2:]
                    flat = n * x_TND.shape[2] + d
                    out[slot // size, flat // row, slot % size, flat % row] = element
    return out.to(cache.dtype)


def empty_cache(mode, blocks, size, heads, dim, dtype):
    row = 32 // dtype.itemsize
    shape = (blocks, size, heads, dim) if mode == "Norm" else (blocks, heads * dim // row, size, row)
    return torch.full(shape, -1.0).to(dtype)


@settings(deadline=None, max_examples=40)
@given(
    mode=st.sampled_from(["Norm", "PA_NZ"]),
    dtype=st.sampled_from(DTYPES),
    blocks=st.integers(1, 3),
    size=st.integers(1, 4),
    heads=st.integers(1, 3),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    data=st.data(),
)
def test_scatter_pa_equals_the_index_formula(mode, dtype, blocks, size, heads, index_dtype, data):
    free = data.draw(st.permutations(range(blocks * size)))
    slots = [s if data.draw(st.booleans()) else -1 for s in free[: data.draw(st.integers(0, len(free)))]]
    key = numbered(len(slots), heads, 32, dtype=dtype)
    value = numbered(len(slots), heads, 64, dtype=dtype, start=7)  # the head dims may differ
    caches = [empty_cache(mode, blocks, size, heads, d, dtype) for d in (32, 64)]
    expected = [write_loop(x, cache, slots, mode) for x, cache in zip((key, value), caches)]
    mapping = torch.tensor(slots, dtype=index_dtype)
    before = [c.clone() for c in caches]
    copies = OPS.npu_scatter_pa_kv_cache_functional(key, value, *caches, mapping, cache_mode=mode)
    assert all(same(a, b) for a, b in zip(caches, before))
    assert OPS.npu_scatter_pa_kv_cache(key, value, *caches, mapping, cache_mode=mode) is None
    for inplace, functional, loop in zip(caches, copies, expected):
        assert same(inplace, loop)
        assert same(functional, loop)


def test_default_cache_mode_is_nz():
    key = numbered(1, 1, 32, dtype=torch.bfloat16)
    caches = [empty_cache("PA_NZ", 1, 2, 1, 32, torch.bfloat16) for _ in range(2)]
    OPS.npu_scatter_pa_kv_cache(key, key, *caches, torch.tensor([1]))
    assert same(caches[0], write_loop(key, empty_cache("PA_NZ", 1, 2, 1, 32, torch.bfloat16), [1], "PA_NZ"))


@settings(deadline=None, max_examples=30)
@given(axes=st.integers(1, 3), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_scatter_nd_update_is_a_loop_of_assignments(axes, dtype, seed):
    target = numbered(3, 4, 5, dtype=dtype)
    cells = torch.cartesian_prod(*(torch.arange(n) for n in target.shape[:axes])).view(-1, axes)
    picked = cells[torch.randperm(len(cells), generator=torch.Generator().manual_seed(seed))[:2]]
    updates = numbered(2, *target.shape[axes:], dtype=dtype, start=61)
    expected = target.double()
    for index, update in zip(picked.tolist(), updates.double()):
        expected[tuple(index)] = update
    returned = OPS.npu_scatter_nd_update_(target, picked.int(), updates)
    assert returned.data_ptr() == target.data_ptr()
    assert same(target, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_our_two_writes_agree(dtype):
    k, v = numbered(3, 2, 16, dtype=dtype), numbered(3, 2, 16, dtype=dtype, start=50)
    slots = torch.tensor([5, 0, 6], dtype=torch.int32)
    caches = [[empty_cache("Norm", 2, 4, 2, 16, dtype) for _ in range(2)] for _ in range(2)]
    kv.write_kv(k, v, *caches[0], slots)
    kv.write_kv_unfused(k, v, *caches[1], slots)
    for fused, unfused, x in zip(caches[0], caches[1], (k, v)):
        assert same(fused, unfused)
        assert same(fused[1, 1], x[0])
        assert same(fused[0, 0], x[1])
        assert same(fused[1, 2], x[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_format_reads_back_what_was_written(dtype):
    heads, dim, size, row = 3, 32, 4, 32 // dtype.itemsize
    x = torch.randn(7, heads, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    blocks = torch.tensor([4, 1])  # the sequence's seven tokens fill block 4 and three slots of block 1
    slots = torch.tensor([4 * size + i for i in range(4)] + [size + i for i in range(3)])
    norm_cache, nz_cache = (
        torch.full_like(empty_cache(m, 5, size, heads, dim, dtype), torch.nan) for m in ("Norm", "PA_NZ")
    )
    OPS.npu_scatter_pa_kv_cache(x, x, norm_cache, norm_cache.clone(), slots, cache_mode="Norm")
    OPS.npu_scatter_pa_kv_cache(x, x, nz_cache, nz_cache.clone(), slots)
    names = {
        "BnBsH": norm_cache.view(5, size, -1),
        "BnNBsD": norm_cache.transpose(1, 2).contiguous(),
        "NZ": nz_cache.view(5, heads, dim // row, size, row),
    }
    for name, cache in names.items():
        assert paged_block_size("op", "key", cache, heads, dim) == size, name
        assert torch.equal(read_paged(cache, blocks.tolist(), 7, heads), x), name


def test_misread_formats_are_refused():
    with pytest.raises(ValueError, match=r"\[Bn, 3, bs, D\] with D = 32"):
        paged_block_size("op", "key", torch.empty(5, 4, 3, 32), 3, 32)  # the "Norm" write shape
    with pytest.raises(ValueError, match=r"with D = 32"):
        paged_block_size("op", "key", torch.empty(5, 6, 4, 16, dtype=torch.bfloat16), 3, 32)  # "PA_NZ", not 5-D
    with pytest.raises(ValueError, match="65535"):
        paged_block_size("op", "key", torch.empty(1, 1, 65536, dtype=torch.bfloat16), 512, 128)


def test_bad_writes_are_refused():
    x = numbered(2, 1, 32, dtype=torch.bfloat16)
    cache = empty_cache("Norm", 2, 4, 1, 32, torch.bfloat16)

    def write(slots, x=x, cache=cache, mode="Norm", **options):
        OPS.npu_scatter_pa_kv_cache(x, x, cache, cache.clone(), torch.tensor(slots), cache_mode=mode, **options)

    with pytest.raises(ValueError, match="slot 8 is outside"):
        write([0, 8])
    with pytest.raises(ValueError, match="twice"):
        write([3, 3])
    with pytest.raises(ValueError, match="slot_mapping must be"):
        write([3])
    with pytest.raises(ValueError, match="for 'PA_NZ'"):
        write([0, 1], mode="PA_NZ")
    with pytest.raises(ValueError, match="cache_mode 'Nz'"):
        write([0, 1], mode="Nz")
    with pytest.raises(ValueError, match="dtype of its"):
        write([0, 1], x=x.half())
    with pytest.raises(NotImplementedError, match="seq_lens"):
        write([0, 1], seq_lens=torch.tensor([1]))
    with pytest.raises(ValueError, match="outside"):
        OPS.npu_scatter_nd_update_(cache, torch.tensor([[2]]), x[:1].view(1, 1, 1, 32).expand(1, 4, 1, 32))
    with pytest.raises(ValueError, match="outside"):
        kv.write_kv_unfused(x, x, cache, cache, torch.tensor([0, -1]))
    with pytest.raises(ValueError, match="updates must be"):
        OPS.npu_scatter_nd_update_(cache, torch.tensor([[1]]), x)


@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
def test_meta_equals_cpu(mode):
    x = numbered(2, 1, 32, dtype=torch.bfloat16)
    cache = empty_cache(mode, 2, 4, 1, 32, torch.bfloat16)
    args = (x, x, cache, cache.clone(), torch.tensor([1, 2]))
    on_meta = [t.to("meta") for t in args]
    for m, c in zip(
        OPS.npu_scatter_pa_kv_cache_functional(*on_meta, cache_mode=mode),
        OPS.npu_scatter_pa_kv_cache_functional(*args, cache_mode=mode),
    ):
        assert (m.shape, m.dtype, m.device.type) == (c.shape, c.dtype, "meta")
    assert OPS.npu_scatter_pa_kv_cache(*on_meta, cache_mode=mode) is None
    target, indices = cache.to("meta").flatten(0, 1), torch.tensor([[1], [2]], device="meta")
    updates = torch.empty(2, *target.shape[1:], dtype=target.dtype, device="meta")
    assert OPS.npu_scatter_nd_update_(target, indices, updates) is target
