# SPDX-License-Identifier: Apache-2.0
"""The section of a recipe that says how a model is split over ranks, and how ranks meet."""

import re
from typing import Literal, Self

from pydantic import model_validator

from executor.config_errors import show
from executor.config_section import LARGEST, Section, TextList, key
from executor.errors import UserError
from executor.moe.strategy import StrategyName

HOST = re.compile(
    r"[\w.-]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(%[\w.-]+)?"
)  # a name, IPv4; IPv6 has two colons


class ParallelSection(Section):
    """How many ranks there are and how many share each part of the model. Each size divides world_size; with experts,
    moe_tp_size * moe_ep_size = world_size. The rest is attention data parallelism:
    attn_dp_size = world_size / attn_tp_size."""

    world_size: int = key(1, "Ranks in total, one per NPU die (A2: per NPU).", ge=1, le=65536)
    attn_tp_size: int = key(1, "Ranks that split the attention heads.", ge=1)
    dense_tp_size: int = key(1, "Ranks that split a dense MLP.", ge=1)
    moe_tp_size: int = key(1, "Ranks that split each expert.", ge=1)
    moe_ep_size: int = key(1, "Groups of ranks the experts are dealt to.", ge=1)
    embed_tp_size: int = key(1, "Ranks that split the embedding table.", ge=1)
    lmhead_tp_size: int = key(1, "Ranks that split the vocabulary of lm_head.", ge=1)
    sequence_parallel_prefill: bool = key(
        False,
        "In prefill each rank holds its own tokens, and o_proj whole: less traffic, more memory.",
    )
    moe_prefill_strategy: StrategyName | None = key(None, "How tokens reach their experts in prefill; null: chosen.")
    moe_decode_strategy: StrategyName | None = key(None, "How tokens reach their experts in decode; null: chosen.")
    timeout_seconds: int = key(600, "A rank that is later than this to meet the others is given up.", ge=1, le=86400)
    hccl_buffer_size: int | None = key(None, "MiB per HCCL communicator; null: HCCL's default (200).", ge=1, le=LARGEST)
    hosts: TextList = key((), "Addresses of the machines, that of rank 0 first; empty: this machine.")

    @property
    def attn_dp_size(self) -> int:
        """world_size / attn_tp_size: groups of ranks that each serve their own sequences."""
        return self.world_size // self.attn_tp_size

    @property
    def sharded_phases(self) -> frozenset[Literal["prefill", "decode"]]:
        """Phases in which every rank holds tokens of its own between the layers."""
        if self.attn_dp_size > 1:
            return frozenset(("prefill", "decode"))
        return frozenset(("prefill",)) if self.sequence_parallel_prefill else frozenset()

    @model_validator(mode="after")
    def _sizes_fit_world(self) -> Self:
        world = f"parallel_config.world_size={self.world_size}"
        for name, size in self:
            if name.endswith(("_tp_size", "_ep_size")) and self.world_size % size:
                legal = ", ".join(str(n) for n in range(1, self.world_size + 1) if self.world_size % n == 0)
                raise UserError(f"parallel_config.{name}={size} does not divide {world}; legal: {legal}")
        if self.sequence_parallel_prefill and self.attn_tp_size == 1:
            raise UserError(
                "parallel_config.sequence_parallel_prefill=true splits tokens over attn_tp_size=1 ranks, which is no "
                "split; raise attn_tp_size or set it to false"
            )
        for host in self.hosts:
            if not HOST.fullmatch(host):
                hint = "; the port is MASTER_PORT in the environment" if re.fullmatch(r"[^:]+:\d+", host) else ""
                raise UserError(
                    f"parallel_config.hosts={show(host)}: expected an address or the name of a machine{hint}"
                )
        twice = [host for host in self.hosts if self.hosts.count(host) > 1]
        if twice:
            raise UserError(f"parallel_config.hosts lists {twice[0]} more than once; list each machine once")
        if self.hosts and self.world_size % len(self.hosts):
            hosts = f"parallel_config.hosts has {len(self.hosts)} entries"
            raise UserError(f"{hosts}, which does not divide {world}; machines run equally many ranks")
        return self
