# SPDX-License-Identifier: Apache-2.0
"""What torchair of torch_npu 2.13.0 lacks or has wrong for our decode step, registered through its own interfaces.

With ``model_config.shipped_converters`` none of it is in force: two copies per layer come back, and the plan then uses
the plain form of what could not be lowered at all.
"""

import torch


def register() -> None:
    """Converters of the graph engine: gating, and rotary embedding without copies of q and k."""
    import torchair
    import torchair._ge_concrete_graph.ge_converter.custom  # would replace ours, imported after it
    from torchair._ge_concrete_graph import ge_apis
    from torchair.ge import attr

    layouts = {"BSH": 1, "BSND": 1, "SBND": 2, "BNSD": 3, "TND": 4}

    @torchair.register_fx_node_ge_converter(torch.ops.npu.npu_moe_gating_top_k_softmax_v2.default)
    def gating(
        x: object, *, k: int = 1, finished: object = None, renorm: int = 0, output_softmax: bool = False,
        meta_outputs: object = None,
    ) -> object:  # fmt: skip
        """The shipped one passes ``renorm`` to an operator that does not have it, so it always raises TypeError. The
        flag of the third output has one name in torchair and another in the kernel; it stays at its default."""
        if output_softmax:
            raise NotImplementedError("npu_moe_gating_top_k_softmax_v2 with output_softmax=True")
        return torchair.ge.custom_op(
            "MoeGatingTopKSoftmaxV2",
            inputs={"x": x, "finished": finished},
            attrs={"k": attr.Int(k), "renorm": attr.Int(renorm)},
            outputs=["y", "expert_idx", "softmax_result"],
        )

    @torchair.register_fx_node_ge_converter(torch.ops.npu.npu_apply_rotary_pos_emb.default)
    def rotary(
        query: object, key: object, cos: object, sin: object, layout: str = "BSND", rotary_mode: str = "half",
        meta_outputs: object = None,
    ) -> object:  # fmt: skip
        """The shipped one copies q and k first, as the kernel works in place. Ours come straight out of their norms,
        and nothing else reads them."""
        return ge_apis.ApplyRotaryPosEmb(query, key, cos, sin, layout=layouts[layout], rotary_mode=rotary_mode)


def register_in_place() -> None:
    """npugraph_ex does not know that a cache write can be put back in place after functionalization; each layer would
    clone both caches and copy them back."""
    from npugraph_ex._acl_concrete_graph.graph_pass import register_inplaceable_npu_op

    register_inplaceable_npu_op("npu_scatter_pa_kv_cache_functional", "npu_scatter_pa_kv_cache", mutated_arg=[2, 3])
