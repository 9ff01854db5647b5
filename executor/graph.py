# SPDX-License-Identifier: Apache-2.0
"""Decode compiled to static graphs: one per bucket, behind one call.

A compiled step is a function of tensors that stay where they are: the step's inputs, copied into fixed buffers, and the
caches, which it updates in place. Everything else is a constant of the graph. Sampling stays outside.
"""

import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from executor.batch import Batch
from executor.errors import UserError
from executor.kv_cache import LayerCache

Mode = Literal["eager", "inductor", "ge_graph", "npugraph_ex"]
LENGTHS_ON_DEVICE = ("inductor", "ge_graph")  # others read the lengths on the host before they launch attention
INPUTS = ("input_ids", "active", "positions", "slot_mapping", "block_table", "logit_rows")

Compiled = Callable[..., torch.Tensor]


@dataclass
class GraphTally:
    """What became of the graphs of a run. ``recompiles`` holds the reason of each compilation after warm-up."""

    mode: Mode = "eager"
    buckets: tuple[int, ...] = ()
    steps: Counter[int] = field(default_factory=Counter)  # bucket -> steps that used it
    traced: int = 0
    recompiles: list[str] = field(default_factory=list)


class DecodeStep(nn.Module):
    """The decode step of one bucket."""

    def __init__(self, model: nn.Module, rows: int, digest: str) -> None:
        """``digest`` is of everything that can change the graph: torchair names its cache by this module's repr, which
        shows neither code nor most settings."""
        super().__init__()
        self.model = model
        self.rows = rows
        self.digest = digest

    def forward(
        self,
        input_ids: torch.Tensor,
        active: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
        logit_rows: torch.Tensor,
        actual_seq_qlen: torch.Tensor | None,
        actual_seq_kvlen: list[int] | torch.Tensor,
        caches: Sequence[LayerCache],
    ) -> torch.Tensor:
        """``actual_seq_qlen``: None where the lengths are integers of the host, as each row has one token."""
        batch = Batch(
            phase="decode",
            input_ids=input_ids,
            active=active,
            positions=positions,
            slot_mapping=slot_mapping,
            block_table=block_table,
            actual_seq_qlen=list(range(1, self.rows + 1)) if actual_seq_qlen is None else actual_seq_qlen,
            actual_seq_kvlen=actual_seq_kvlen,
            logit_rows=logit_rows,
            most_tokens=self.rows,
            causal_mask=None,
        )
        return self.model(batch, caches)

    def extra_repr(self) -> str:
        return f"rows={self.rows}, {self.digest}"


def own_method(step: DecodeStep) -> Callable[..., torch.Tensor]:
    """``step.forward`` with code of its own, named after the bucket. Compilers keep what they compiled by code object,
    and torchair's cache removes its files when one is compiled for a second shape."""
    name = f"decode_{step.rows}"
    code = DecodeStep.forward.__code__.replace(co_name=name, co_qualname=f"DecodeStep.{name}")
    return types.MethodType(types.FunctionType(code, globals(), name), step)


class Graph:
    """A compiled step with the buffers that it reads."""

    def __init__(self, template: Batch, compiled: Compiled, device: torch.device, *, lengths_on_device: bool) -> None:
        """``template``: any step of this bucket, this rank's own, on the host."""
        self.compiled = compiled
        self.inputs = {name: getattr(template, name).to(device, copy=True) for name in INPUTS}
        self.qlen: torch.Tensor | None = None
        self.kvlen: torch.Tensor | None = None
        if lengths_on_device:
            self.qlen = torch.tensor(template.actual_seq_qlen, dtype=torch.int64, device=device)
            self.kvlen = torch.tensor(template.actual_seq_kvlen, dtype=torch.int64, device=device)
        for buffer in self.inputs.values():
            torch._dynamo.mark_static(buffer)

    def __call__(self, batch: Batch, caches: Sequence[LayerCache]) -> torch.Tensor:
        for name, buffer in self.inputs.items():
            buffer.copy_(getattr(batch, name), non_blocking=True)
        lengths = batch.actual_seq_kvlen
        if self.kvlen is not None:
            lengths = self.kvlen.copy_(torch.as_tensor(lengths), non_blocking=True)
        return self.compiled(*self.inputs.values(), self.qlen, lengths, caches)


class DecodeGraphs:
    """What takes decode steps: a graph for each bucket, compiled at its first call."""

    def __init__(
        self,
        model: nn.Module,
        caches: Sequence[LayerCache],
        templates: Sequence[Batch],
        mode: Mode,
        device: torch.device,
        *,
        digest: str = "",
        cache_dir: Path | None = None,
        shipped_converters: bool = False,
    ) -> None:
        """
        Args:
            templates: a step of each bucket.
            cache_dir: where torchair keeps what it compiled; None: nowhere.
            shipped_converters: see ``ge_converters``.
        """
        for cache in (tensor for layer in caches for tensor in layer):
            torch._dynamo.mark_static(cache)
        compile_step = compiler(mode, cache_dir, shipped_converters=shipped_converters)
        self.graphs = {
            batch.num_tokens: Graph(
                batch,
                compile_step(DecodeStep(model, batch.num_tokens, digest)),
                device,
                lengths_on_device=mode in LENGTHS_ON_DEVICE,
            )
            for batch in templates
        }
        self.tally = GraphTally(mode, tuple(self.graphs))
        self.warm = False

    def __call__(self, batch: Batch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """``batch``: this rank's own, on the host.

        Raises:
            UserError: the step could not be compiled.
        """
        graph = self.graphs[batch.num_tokens]
        if not self.warm:
            return self._compiling(graph, batch, caches)
        self.tally.steps[batch.num_tokens] += 1
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                return graph(batch, caches)
        except torch._dynamo.exc.RecompileError as error:  # the guards decide before anything is computed
            self.tally.recompiles.append(f"bucket {batch.num_tokens}: {error}")
        return self._compiling(graph, batch, caches)

    def _compiling(self, graph: Graph, batch: Batch, caches: Sequence[LayerCache]) -> torch.Tensor:
        stats = torch._dynamo.utils.counters["stats"]
        before = stats["unique_graphs"]
        try:
            return graph(batch, caches)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UserError(
                f"model_config.exe_mode={self.tally.mode}: a decode step of {batch.num_tokens} rows cannot be compiled "
                f"({str(error).strip().splitlines()[0]}); exe_mode=eager runs without a compiler"
            ) from error
        finally:
            self.tally.traced += stats["unique_graphs"] - before


def compiler(mode: Mode, cache_dir: Path | None, *, shipped_converters: bool) -> Callable[[DecodeStep], Compiled]:
    """How a step becomes a compiled callable in ``mode``, which is not eager."""
    match mode:
        case "inductor":
            return lambda step: torch.compile(own_method(step), fullgraph=True, dynamic=False)
        case "ge_graph":
            return _ge_graph(cache_dir, shipped_converters)
        case "npugraph_ex":
            return _npugraph_ex(cache_dir, shipped_converters)
        case _:
            raise ValueError(f"{mode} compiles nothing")


def ge_config() -> Any:
    """torchair's settings. Weights are constants of the graph; tiling of static shapes is done while compiling, which
    needs ``dynamic=False``; a stable order of operators, as ranks that disagree on the order of collectives wait for
    each other for ever."""
    import torchair

    config = torchair.CompilerConfig()
    config.mode = "max-autotune"
    config.experimental_config.frozen_parameter = True
    config.experimental_config.tiling_schedule_optimize = True
    config.experimental_config.topology_sorting_strategy = "StableRDFS"
    return config


def _ge_graph(cache_dir: Path | None, shipped_converters: bool) -> Callable[[DecodeStep], Compiled]:
    import torchair

    from executor import ge_converters

    if not shipped_converters:
        ge_converters.register()
    config = ge_config()
    if cache_dir is None:
        backend = torchair.get_npu_backend(compiler_config=config)
        return lambda step: torch.compile(own_method(step), backend=backend, fullgraph=True, dynamic=False)
    return lambda step: torchair.inference.cache_compile(
        own_method(step), config=config, dynamic=False, cache_dir=str(cache_dir), ge_cache=True
    )


def _npugraph_ex(cache_dir: Path | None, shipped_converters: bool) -> Callable[[DecodeStep], Compiled]:
    """Lengths are integers of the host that change from step to step, so they have to be symbols: ``dynamic=True``.
    Tensors are static all the same, as they are marked so."""
    import npugraph_ex

    from executor import ge_converters

    if not shipped_converters:
        ge_converters.register_in_place()
    config = npugraph_ex.CompilerConfig()
    if cache_dir is None:
        backend = npugraph_ex.get_npu_backend(compiler_config=config)
        return lambda step: torch.compile(own_method(step), backend=backend, fullgraph=True, dynamic=True)
    return lambda step: npugraph_ex.inference.cache_compile(
        own_method(step), config=config, dynamic=True, cache_dir=str(cache_dir)
    )
