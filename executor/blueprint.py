# SPDX-License-Identifier: Apache-2.0
"""All that is needed to build a model: shapes, groups, memory order, strategies. It makes the parts models compose."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from executor.batch import PHASES, Phase
from executor.layers.attention import Attention
from executor.layers.decoder import CausalLM, DecoderLayer, FeedForward
from executor.layers.embedding import LMHead, VocabParallelEmbedding
from executor.layers.mlp import MLP
from executor.layers.norm import RMSNorm
from executor.layers.rope import RotaryEmbedding
from executor.model_config import ModelConfig, MoeConfig
from executor.moe.block import MoeBlock
from executor.moe.ep_allgather import AllGatherExperts
from executor.moe.ep_double_routing import DoubleRouting
from executor.moe.ep_local import LocalExperts
from executor.moe.ep_mc2 import CombineInNextNorm, DispatchCombine
from executor.moe.experts import Experts
from executor.moe.gate import BalancedGate, Gate
from executor.moe.strategy import Strategy, StrategyName
from executor.moe.tp import TensorParallel
from executor.ops.forms import Forms, forms
from executor.parallel.groups import Group, Groups
from executor.parallel.layout import Replicated, ReplicatedResidual, Residual, Sharded, ShardedResidual, Tokens
from executor.quant.scheme import LinearScheme
from executor.quant.unquantized import UnquantizedLinear
from executor.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """
    Attributes:
        max_positions: positions that the rotary table has.
        sharded: phases in which every rank holds tokens of its own between the layers; in others an attention group
            is the whole run and each of its ranks holds all of them.
        exchange_heads: sharded phases that exchange heads for tokens before ``o_proj``.
        mc2_sends_weights: the product's dispatch kernel takes the routing weights too.
        combine_in_next_norm: the product has a kernel for the combine of MC2 and the norm after it.
    """

    config: ModelConfig
    groups: Groups
    storage: Storage
    max_positions: int
    scheme: LinearScheme = field(default_factory=UnquantizedLinear)
    forms: Forms = field(default_factory=lambda: forms(("rotary",)))
    sharded: frozenset[Phase] = frozenset()
    exchange_heads: frozenset[Phase] = frozenset()
    moe_strategies: Mapping[Phase, StrategyName] = field(default_factory=lambda: {"prefill": "tp", "decode": "tp"})
    mc2_sends_weights: bool = False
    combine_in_next_norm: bool = False
    balanced_gate: bool = False

    def residual(self) -> dict[Phase, Residual]:
        group = self.groups.attn_tp
        return {p: ShardedResidual(group) if p in self.sharded else ReplicatedResidual(group) for p in PHASES}

    def tokens(self, group: Group) -> dict[Phase, Tokens]:
        return {p: Sharded(group) if p in self.sharded else Replicated(group) for p in PHASES}

    def norm(self) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, self.storage, self.forms)

    def attention(self) -> Attention:
        group = self.groups.attn_tp
        return Attention(
            self.config, group, self.residual(), self.exchange_heads, self.storage, self.scheme, self.forms
        )

    def dense_mlp(self) -> MLP:
        group = self.groups.dense_tp
        return MLP(self.config, group, self.tokens(group), self.storage, self.scheme, self.forms)

    def moe_block(self) -> MoeBlock:
        moe, hidden = self.config.moe, self.config.hidden_size
        if moe is None:
            raise ValueError("this model has no experts")
        ep = self.groups.moe_ep
        # where tokens are replicated all ranks route the same ones
        turn = ep.rank if "decode" in self.sharded else 0
        gate = (
            BalancedGate(moe, hidden, self.storage, self.forms, turn)
            if self.balanced_gate
            else Gate(moe, hidden, self.storage, self.forms)
        )
        experts = Experts(moe, hidden, self.groups.moe_tp, self.groups.moe_ep, self.storage, self.forms)
        tokens = self.tokens(self.groups.moe_tp)
        strategies = {
            phase: self._strategy(name, moe, experts.mine, tokens[phase]) for phase, name in self.moe_strategies.items()
        }
        return MoeBlock(gate, experts, strategies, tokens)

    def _strategy(self, name: StrategyName, moe: MoeConfig, mine: range, slices: Tokens) -> Strategy:
        ep = self.groups.moe_ep
        match name:
            case "tp":
                return TensorParallel(moe.num_experts)
            case "ep_local":
                return LocalExperts(moe.num_experts, mine, ep)
            case "ep_allgather":
                return AllGatherExperts(moe.num_experts, mine, ep)
            case "ep_double_routing":
                return DoubleRouting(moe.num_experts, mine, ep, slices)
            case "ep_mc2":
                mc2 = self.groups.moe_ep_mc2
                kind = CombineInNextNorm if self.combine_in_next_norm else DispatchCombine
                return kind(moe.num_experts, mc2, send_weights=self.mc2_sends_weights)

    def _head_tokens(self) -> Tokens:
        """The head gets rows that all ranks of an attention group have. If its group reaches over several of them,
        each of its ranks has rows to offer."""
        group = self.groups.lmhead_tp
        within = self.groups.attn_tp.size % group.size == 0
        return Replicated(group) if within else Sharded(group)

    def causal_lm(self, mlp: Callable[[int], FeedForward]) -> CausalLM:
        """The whole model; ``mlp(i)`` makes the feed-forward part of layer ``i``."""
        config, storage, groups = self.config, self.storage, self.groups
        vocab, hidden = config.vocab_size, config.hidden_size
        return CausalLM(
            VocabParallelEmbedding(vocab, hidden, groups.embed_tp, self.tokens(groups.embed_tp), storage),
            [DecoderLayer(self.attention(), mlp(i), self.norm(), self.norm()) for i in range(config.num_hidden_layers)],
            self.norm(),
            LMHead(vocab, hidden, groups.lmhead_tp, self._head_tokens(), storage, self.scheme),
            RotaryEmbedding(config.rope, config.head_dim, self.max_positions, storage.dtype, storage.device),
            self.residual(),
            tie_word_embeddings=config.tie_word_embeddings,
        )
