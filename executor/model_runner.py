# SPDX-License-Identifier: Apache-2.0
"""ModelRunner: from a Plan to a model on a device that takes one step at a time."""

import dataclasses
import importlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from executor.batch import Batch, Phase, Span, build_batch, dead_span
from executor.blueprint import Blueprint
from executor.config import RunConfig
from executor.decisions import not_built
from executor.errors import UserError
from executor.graph import DecodeGraphs
from executor.kv_cache import LayerCache, allocate
from executor.layers.decoder import CausalLM
from executor.model_config import ModelConfig, read_config_json, with_overrides
from executor.ops.attention import causal_mask
from executor.ops.reference.product import set_product
from executor.ops.uncombined import Uncombined
from executor.parallel import world
from executor.parallel.groups import Groups, connected_groups
from executor.plan import Plan, make_plan
from executor.platform import npu
from executor.platform.select import device, planned_features
from executor.weights import LoadReport, check_coverage, load_weights, randomize

# HF model_type -> where its runner is. The executor knows models by these names only.
RUNNERS = {
    "qwen3": "models.qwen3_dense.runner:Qwen3DenseRunner",
    "qwen3_moe": "models.qwen3_moe.runner:Qwen3MoeRunner",
}


class NonFiniteLogits(UserError):
    """The model produced NaN or infinity; the message names the first layer where it appears."""


def runner_class(model_type: object) -> "type[ModelRunner]":
    """The runner of a ``model_type``. Raises UserError for one we do not have."""
    if not isinstance(model_type, str) or model_type not in RUNNERS:
        raise UserError(f"config.json: model_type={model_type!r} is not supported; one of {', '.join(RUNNERS)}")
    module, name = RUNNERS[model_type].split(":")
    return getattr(importlib.import_module(module), name)


def plan_run(run: RunConfig) -> "tuple[type[ModelRunner], Plan]":
    """Read the model's config and plan the run; nothing is allocated. Raises UserError for all that cannot work."""
    folder = run.model.config_dir
    if run.model.model_path is not None and not folder.is_dir():
        raise UserError(f"model_config.model_path={run.model.model_path}: no such directory, looked for {folder}")
    raw = read_config_json(folder / "config.json")
    scaling = run.model.rope_scaling.as_dict() if run.model.rope_scaling else None
    kind = runner_class(raw.get("model_type"))
    config = kind.parse_config(with_overrides(raw, scaling, run.model.max_position_embeddings))
    return kind, make_plan(run, config, planned_features(run.model.platform_version), kind.build_model)


def require_runnable(plan: Plan) -> torch.device:
    """The device to run on. Raises UserError if the plan is for another machine, or asks for what is not built yet."""
    found = device(plan.features)
    wishes = not_built(plan.run, plan.features)
    if wishes:
        raise UserError(
            f"{wishes[0]} is not built yet; run with neither enable_weight_nz nor (on an NPU) enable_profiler, or add "
            "--explain to only check the recipe"
        )
    return found


class ModelRunner(ABC):
    """Builds the model of a plan on this machine's device, loads it, and runs steps.

    A subclass says how a config is read and how a model is composed.
    """

    forwards: dict[Phase, Callable[[Batch, Sequence[LayerCache]], torch.Tensor]]
    graphs: DecodeGraphs | None = None

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.device = require_runnable(plan)
        set_product(plan.features.product)
        storage = dataclasses.replace(plan.blueprint.storage, device=self.device)
        self.groups = self._connect()
        memory = plan.memory.within(npu.free_bytes()) if self.device.type == "npu" else plan.memory
        # each rank planned with the memory that it saw; those of one attention group have to schedule alike
        blocks = -world.largest([-memory.num_blocks], world.everyone())[0]
        self.plan = plan = dataclasses.replace(plan, memory=dataclasses.replace(memory, num_blocks=blocks))
        blueprint = dataclasses.replace(plan.blueprint, storage=storage, groups=self.groups)
        self.model = self.build_model(blueprint).eval()
        check_coverage(self.model.slots(), self.model.parameters())
        attention = self.model.layers[0].self_attn
        self.caches = allocate(
            plan.config.num_hidden_layers,
            plan.memory.num_blocks,
            plan.block_size,
            attention.num_kv_heads,  # type: ignore[union-attr, arg-type]
            plan.config.head_dim,
            storage.dtype,
            self.device,
        )
        self.causal_mask = causal_mask(self.device)

    @staticmethod
    @abstractmethod
    def parse_config(raw: dict[str, Any]) -> ModelConfig:
        """``config.json`` to ModelConfig."""

    @staticmethod
    @abstractmethod
    def build_model(blueprint: Blueprint) -> CausalLM:
        """The model, with uninitialised weights."""

    def _connect(self) -> Groups:
        """The plan's groups, with processes behind them if it has more than one rank."""
        parallel = self.plan.run.parallel
        # nothing to start from in the environment of a process that joined otherwise
        started = dist.get_world_size() if dist.is_initialized() else world.started_ranks()
        if started != parallel.world_size and (world.launched() or parallel.world_size > 1):
            raise UserError(
                f"parallel_config.world_size={parallel.world_size}, but {started} ranks were started; "
                "scripts/infer.sh starts as many as the recipe says"
            )
        if parallel.world_size == 1:
            return self.plan.blueprint.groups
        world.join(self.plan.features.device_type, parallel.timeout_seconds)
        self._require_one_recipe()
        return connected_groups(
            self.plan.blueprint.groups.sizes(),
            timeout_seconds=parallel.timeout_seconds,
            buffer_mib=self.plan.buffer_mib,
        )

    def _require_one_recipe(self) -> None:
        """Machines could be given different recipes: the sums of their ranks would mean nothing, and nobody would see.
        Where a machine keeps its checkpoint and its results is its own business."""
        mine = {
            f"{section}.{key}": value
            for section, values in self.plan.run.to_mapping().items()
            for key, value in values.items()
            if section != "output_config" and key != "model_path"
        }
        for rank, text in enumerate(world.collect(json.dumps(mine), world.everyone())):
            other = json.loads(text)
            for key, value in mine.items():
                if other[key] != value:
                    raise UserError(
                        f"{key}={other[key]} on rank {rank}, but {value} on rank {world.rank()}; all machines have to "
                        "be started with the same recipe and the same --set"
                    )

    def load_weights(self, on_bytes: Callable[[int, int], None] = lambda done, total: None) -> LoadReport:
        """Fill the model from ``model_path``, or with random weights if ``with_ckpt`` is false. Once per runner."""
        run = self.plan.run.model
        report = LoadReport()
        if not run.with_ckpt:
            randomize(self.model)
        elif run.model_path is None:
            raise UserError(
                "model_config.model_path is not set: name a checkpoint directory "
                "(--set model_config.model_path=DIR), or set model_config.with_ckpt=false for random weights"
            )
        else:
            report = load_weights(self.model, run.config_dir, on_bytes)
        for module in self.model.modules():
            finalize = getattr(module, "finalize", None)
            if finalize is not None:
                finalize()
        self.graph_compile()
        return report

    def graph_compile(self) -> None:
        """Choose what takes the steps of each phase. Called once the weights are final."""
        mode = self.plan.run.model.exe_mode
        self.forwards = {"prefill": self._eager, "decode": self._eager}
        if mode != "eager":
            templates = [self._share(self._dead_rows(rows)) for rows in self.plan.buckets]
            self.forwards["decode"] = self.graphs = DecodeGraphs(self.model, self.caches, templates, mode, self.device)

    def warm_up(self, on_bucket: Callable[[int], None] = lambda rows: None) -> float:
        """Take a step of each bucket and one of prefill on scratch slots, so that one-off costs, above all those of
        compiling, are not in the first request's times. Returns seconds.

        Args:
            on_bucket: called with the number of rows before each.
        Raises:
            PeerLost: another rank needed ``parallel_config.timeout_seconds`` longer than this one.
        """
        started = time.perf_counter()
        size, blocks = self.plan.block_size, self.plan.max_blocks
        for rows in reversed(self.plan.buckets):  # the largest needs most memory
            on_bucket(rows)
            self.step(self._dead_rows(rows))
            if self.graphs is not None and self.plan.run.parallel.world_size > 1:
                world.arrive(f"decode step of {rows} rows", self.plan.run.parallel.timeout_seconds)
        if self.graphs is not None:
            self.graphs.warm = True
        tokens = min(size, self.plan.max_seq_len, self.plan.run.scheduler.max_prefill_tokens)
        chunk = [Span([0] * tokens, 0, [0])]
        self.step(build_batch("prefill", chunk, block_size=size, max_blocks=blocks, causal_mask=self.causal_mask))
        return time.perf_counter() - started

    def _dead_rows(self, rows: int) -> Batch:
        """A decode step for nobody."""
        spans = [dead_span(row, self.plan.block_size) for row in range(rows)]
        return build_batch(
            "decode", spans, block_size=self.plan.block_size, max_blocks=self.plan.max_blocks, causal_mask=None
        )

    @torch.inference_mode()
    def step(self, batch: Batch) -> torch.Tensor:
        """Logits ``[R, vocab]`` of ``batch.logit_rows``, in the model's dtype. Writes the step's keys and values.
        The result of a compiled step is only good until the next one."""
        return self.forwards[batch.phase](self._share(batch), self.caches)

    def _eager(self, batch: Batch, caches: Sequence[LayerCache]) -> torch.Tensor:
        return self.model(self._on_device(batch), caches)

    def _share(self, batch: Batch) -> Batch:
        """What this rank holds of ``batch``."""
        return self.model.residual[batch.phase].own(batch)

    def _on_device(self, batch: Batch) -> Batch:
        moved = {
            f.name: getattr(batch, f.name).to(self.device)
            for f in dataclasses.fields(batch)
            if isinstance(getattr(batch, f.name), torch.Tensor)
        }
        return dataclasses.replace(batch, **moved)

    @torch.inference_mode()
    def explain_non_finite(self, batch: Batch) -> NonFiniteLogits:
        """Run ``batch`` again (it writes what it wrote before) and find the first module whose output for a request is
        not finite on any rank. All ranks call this together, each with its own last batch."""
        modules: list[tuple[str, nn.Module]] = [("model.embed_tokens", self.model.embed_tokens)]
        modules += [(f"model.layers.{i}", layer) for i, layer in enumerate(self.model.layers)]
        found, own = [len(modules)], self._on_device(self._share(batch))

        def watch(number: int) -> Callable[..., None]:
            def look(module: nn.Module, args: Any, output: Any) -> None:
                outputs = output if isinstance(output, tuple) else (output,)
                tensors = [t.combined() if isinstance(t, Uncombined) else t for t in outputs]
                if not all(bool(t[own.active].isfinite().all()) for t in tensors):
                    found.append(number)

            return look

        hooks = [module.register_forward_hook(watch(number)) for number, (_, module) in enumerate(modules)]
        try:
            self.model(own, self.caches)
        finally:
            for hook in hooks:
                hook.remove()
        first = -world.largest([-min(found)], world.everyone())[0]
        name = modules[first][0] if first < len(modules) else "model.norm or lm_head"
        hint = (
            "; float16 overflows on Qwen3: use bfloat16" if self.plan.blueprint.storage.dtype == torch.float16 else ""
        )
        return NonFiniteLogits(f"logits are not finite; the first layer with NaN or infinity is {name}{hint}")
