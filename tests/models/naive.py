# SPDX-License-Identifier: Apache-2.0
"""Qwen3 written down once more, as plainly as possible and in float64: one sequence, no cache, loops over heads,
tokens and experts. It shares nothing with the project's code but the checkpoint and its config.json."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file


def _norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _rope(x_SD, theta):
    """Rotate each (i, i + D/2) pair of position s by ``s / theta^(2i/D)``."""
    length, dim = x_SD.shape
    out = x_SD.clone()
    for s in range(length):
        for i in range(dim // 2):
            angle = s / theta ** (2 * i / dim)
            a, b = x_SD[s, i], x_SD[s, i + dim // 2]
            out[s, i] = a * math.cos(angle) - b * math.sin(angle)
            out[s, i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def _attention(x, t, config):
    heads, kv_heads, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    eps, theta = config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]
    q, k, v = (x @ t[f"{name}_proj.weight"].T for name in "qkv")
    visible = torch.ones(len(x), len(x)).tril().bool()
    outputs = []
    for head in range(heads):
        kv = head // (heads // kv_heads)
        q_h = _rope(_norm(q[:, head * dim : (head + 1) * dim], t["q_norm.weight"], eps), theta)
        k_h = _rope(_norm(k[:, kv * dim : (kv + 1) * dim], t["k_norm.weight"], eps), theta)
        scores = (q_h @ k_h.T / math.sqrt(dim)).masked_fill(~visible, -math.inf)
        outputs.append(scores.softmax(-1) @ v[:, kv * dim : (kv + 1) * dim])
    return torch.cat(outputs, -1) @ t["o_proj.weight"].T


def _gated(x, t, prefix):
    gate, up, down = (t[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _mixture(x, t, config):
    rows = []
    for row in x:
        probabilities = (t["gate.weight"] @ row).softmax(-1)
        chosen = sorted(range(len(probabilities)), key=lambda e: -probabilities[e])[: config["num_experts_per_tok"]]
        total = sum(probabilities[e] for e in chosen) if config["norm_topk_prob"] else 1.0
        rows.append(sum(probabilities[e] / total * _gated(row, t, f"experts.{e}.") for e in chosen))
    return torch.stack(rows)


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """``[len(ids), vocab]`` float64: what follows each prefix of ``ids``."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}

    def part(prefix):
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    x, eps = tensors["model.embed_tokens.weight"][ids], config["rms_norm_eps"]
    for layer in range(config["num_hidden_layers"]):
        t = part(f"model.layers.{layer}.")
        attention = {name.removeprefix("self_attn."): w for name, w in t.items()}
        mlp = {name.removeprefix("mlp."): w for name, w in t.items()}
        x = x + _attention(_norm(x, t["input_layernorm.weight"], eps), attention, config)
        h = _norm(x, t["post_attention_layernorm.weight"], eps)
        x = x + (_mixture(h, mlp, config) if "gate.weight" in mlp else _gated(h, mlp, ""))
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return _norm(x, tensors["model.norm.weight"], eps) @ head.T
