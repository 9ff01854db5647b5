# SPDX-License-Identifier: Apache-2.0
"""All that is needed to build a model: shapes, groups, memory order, strategies. It makes the parts models compose."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from executor.batch import Batch, Phase
from executor.layers.attention import Attention
from executor.layers.decoder import CausalLM, DecoderLayer, FeedForward
from executor.layers.embedding import LMHead, VocabParallelEmbedding
from executor.layers.mlp import MLP
from executor.layers.norm import RMSNorm
from executor.layers.rope import RotaryEmbedding
from executor.model_config import ModelConfig, MoeConfig
from executor.moe.block import MoeBlock
from executor.moe.ep_local import LocalExperts
from executor.moe.experts import Experts
from executor.moe.gate import BalancedGate, Gate
from executor.moe.strategy import Dispatched, Strategy, StrategyName
from executor.moe.tp import TensorParallel
from executor.parallel.groups import Groups
from executor.quant.scheme import LinearScheme
from executor.quant.unquantized import UnquantizedLinear
from executor.storage import Storage


class PlannedStrategy:
    """Stands for a strategy that has no implementation yet, so that its weights can be planned; it cannot run."""

    capturable = True

    def __init__(self, name: StrategyName) -> None:
        self.name = name

    def dispatch(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, batch: Batch) -> Dispatched:
        raise NotImplementedError(f"MoE strategy {self.name} is planned, not built")

    def combine(self, y_RH: torch.Tensor, state: Any) -> torch.Tensor:
        raise NotImplementedError(f"MoE strategy {self.name} is planned, not built")

    def reduce(self, y_TH: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(f"MoE strategy {self.name} is planned, not built")


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    config: ModelConfig
    groups: Groups
    storage: Storage
    max_positions: int
    scheme: LinearScheme = field(default_factory=UnquantizedLinear)
    moe_strategies: Mapping[Phase, StrategyName] = field(default_factory=lambda: {"prefill": "tp", "decode": "tp"})
    balanced_gate: bool = False

    def norm(self) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, self.storage)

    def attention(self) -> Attention:
        return Attention(self.config, self.groups.attn_tp, self.storage, self.scheme)

    def dense_mlp(self) -> MLP:
        return MLP(self.config, self.groups.dense_tp, self.storage, self.scheme)

    def moe_block(self) -> MoeBlock:
        moe, hidden = self.config.moe, self.config.hidden_size
        if moe is None:
            raise ValueError("this model has no experts")
        gate = (BalancedGate if self.balanced_gate else Gate)(moe, hidden, self.storage)
        experts = Experts(moe, hidden, self.groups.moe_tp, self.groups.moe_ep, self.storage)
        strategies = {phase: self._strategy(name, moe, experts) for phase, name in self.moe_strategies.items()}
        return MoeBlock(gate, experts, strategies)

    def _strategy(self, name: StrategyName, moe: MoeConfig, experts: Experts) -> Strategy:
        if name == "tp":
            return TensorParallel(moe.num_experts, self.groups.moe_tp)
        if name == "ep_local":
            return LocalExperts(moe.num_experts, experts.mine, self.groups.moe_tp, self.groups.moe_ep)
        return PlannedStrategy(name)

    def causal_lm(self, mlp: Callable[[int], FeedForward]) -> CausalLM:
        """The whole model; ``mlp(i)`` makes the feed-forward part of layer ``i``."""
        config, storage = self.config, self.storage
        vocab, hidden = config.vocab_size, config.hidden_size
        return CausalLM(
            VocabParallelEmbedding(vocab, hidden, self.groups.embed_tp, storage),
            [DecoderLayer(self.attention(), mlp(i), self.norm(), self.norm()) for i in range(config.num_hidden_layers)],
            self.norm(),
            LMHead(vocab, hidden, self.groups.lmhead_tp, storage, self.scheme),
            RotaryEmbedding(config.rope, config.head_dim, self.max_positions, storage.dtype, storage.device),
            tie_word_embeddings=config.tie_word_embeddings,
        )
