# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints as transformers writes them, and our runner on them, for comparison."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from executor.batch import Span, build_batch
from executor.config import RunConfig
from executor.model_runner import ModelRunner, plan_run

SMALL: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    eos_token_id=1,
)
EXPERTS: dict[str, Any] = dict(moe_intermediate_size=24, num_experts=6, num_experts_per_tok=3, mlp_only_layers=[])


def make(kind: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A random ``dense`` or ``moe`` model in float32, its weights large enough for logits of about unit scale."""
    torch.manual_seed(seed)
    absent = [key for key, value in options.items() if value is ...]
    fields = {**SMALL, **(EXPERTS if kind == "moe" else {}), **options}
    fields = {key: value for key, value in fields.items() if key not in absent}
    config = Qwen3Config(**fields) if kind == "dense" else Qwen3MoeConfig(**fields)
    model = Qwen3ForCausalLM(config) if kind == "dense" else Qwen3MoeForCausalLM(config)
    for name, param in model.named_parameters():
        if "norm" in name:
            param.data.uniform_(0.5, 1.5)
        else:
            fan_in = param.shape[-1] if param.dim() > 1 else 48
            param.data.normal_(0.0, fan_in**-0.5)
    return model.eval()


def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' model of ``folder``. Not ``model.to(dtype)``: that would round the rope frequencies too."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    if dtype == torch.float64 and hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return model


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def edit_config(folder: Path, edit: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def fuse_experts(folder: Path, layers: set[int], parts: tuple[str, ...] = ("gate_up_proj", "down_proj")) -> None:
    """Rewrite the experts of ``layers`` from one tensor per expert to the fused tensors of transformers 5."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp.experts"
        count = 1 + max(int(name.split(".")[5]) for name in tensors if name.startswith(prefix + "."))

        def stack(name: str, prefix: str = prefix, count: int = count) -> torch.Tensor:
            return torch.stack([tensors.pop(f"{prefix}.{e}.{name}.weight") for e in range(count)])

        if "gate_up_proj" in parts:
            tensors[f"{prefix}.gate_up_proj"] = torch.cat((stack("gate_proj"), stack("up_proj")), 1).contiguous()
        if "down_proj" in parts:
            tensors[f"{prefix}.down_proj"] = stack("down_proj").contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def run_config(folder: Path, **overrides: Any) -> RunConfig:
    """A config for ``folder``; keys are ``section__key``."""
    sections: dict[str, dict[str, Any]] = {
        "model_config": {
            "model_name": "test",
            "model_path": str(folder),
            "dtype": "float32",
            "platform_version": "cpu",
        },
        "scheduler_config": {"block_size": 16, "batch_size": 4, "max_new_tokens": 8, "max_seq_len": 640},
    }
    for key, value in overrides.items():
        section, name = key.split("__")
        sections.setdefault(f"{section}_config", {})[name] = value
    return RunConfig.from_mapping(sections)


def runner(folder: Path, **overrides: Any) -> ModelRunner:
    kind, plan = plan_run(run_config(folder, **overrides))
    made = kind(plan)
    made.load_weights()
    return made


def prefill_logits(made: ModelRunner, prompts: list[list[int]]) -> torch.Tensor:
    """Logits after each prompt, from one prefill step that holds them all. Blocks are handed out backwards, so that
    logical and physical order differ."""
    size, blocks = made.plan.block_size, list(range(made.plan.memory.num_blocks - 1, 0, -1))
    spans = []
    for prompt in prompts:
        need = -(-len(prompt) // size)
        spans.append(Span(prompt, 0, [blocks.pop(0) for _ in range(need)]))
    batch = build_batch(
        "prefill", spans, block_size=size, max_blocks=made.plan.max_blocks, causal_mask=made.causal_mask
    )
    return made.step(batch)


def step_by_step(made: ModelRunner, prompts: list[list[int]], decode_steps: int = 5, chunks: int = 2):
    """Feed all but the last ``decode_steps`` tokens of ``prompts`` in one or two chunks, then single tokens; yields for
    each step the positions (one per prompt) that its logits belong to, and the logits. Attention groups take the
    prompts in turn and get the logits of their own."""
    size, group = made.plan.block_size, made.groups.attn_dp
    blocks = list(range(made.plan.memory.num_blocks - 1, 0, -1))
    mine = range(group.rank, len(prompts), group.size)
    owned = {i: [blocks.pop(0) for _ in range(-(-len(prompts[i]) // size))] for i in mine}
    lengths = [len(prompt) - decode_steps for prompt in prompts]
    plan = [("prefill", [n // 2 for n in lengths])] if chunks == 2 else []
    plan += [("prefill", lengths)] + [("decode", [n + i for n in lengths]) for i in range(1, decode_steps + 1)]
    done = [0] * len(prompts)
    for phase, ends in plan:
        counts = [end - start for start, end in zip(done, ends)]
        spans = [Span(prompts[i][done[i] : ends[i]], done[i], owned[i]) for i in mine]
        batch = build_batch(
            phase,
            spans,
            block_size=size,
            max_blocks=made.plan.max_blocks,
            causal_mask=made.causal_mask if phase == "prefill" else None,
            most_tokens=max(sum(counts[r :: group.size]) for r in range(group.size)),
            num_rows=-(-len(prompts) // group.size),
        )
        done = ends
        yield [done[i] - 1 for i in mine], made.step(batch)[: len(mine)]


def random_prompts(lengths: list[int], vocab: int = 96, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def oracle_logits(model: PreTrainedModel, prompts: list[list[int]]) -> torch.Tensor:
    """transformers' logits after each prompt, one prompt at a time."""
    return torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
