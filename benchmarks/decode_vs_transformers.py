# SPDX-License-Identifier: Apache-2.0
"""CPU decode speed beside transformers' ``generate``: same random BF16 weights, same prompt, same threads, in turn.

    python -m benchmarks.decode_vs_transformers dense     # the shape of Qwen3-0.6B
    python -m benchmarks.decode_vs_transformers moe       # about 2B parameters: 64 experts, top 8, 24 layers

Prints milliseconds per token of each run, the medians, and their ratio (above 1: we are faster).
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from executor.config import RunConfig
from executor.generation import generate
from executor.model_runner import plan_run
from executor.scheduler import Request

ROOT = Path(__file__).resolve().parents[1]
MOE = dict(
    model_type="qwen3_moe",
    hidden_size=1024,
    intermediate_size=3072,
    moe_intermediate_size=384,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    num_experts=64,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    vocab_size=151936,
    tie_word_embeddings=True,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    eos_token_id=151645,
    torch_dtype="bfloat16",
)


def write_checkpoint(kind: str, folder: Path) -> None:
    raw = MOE if kind == "moe" else json.loads((ROOT / "assets/model_configs/Qwen3-0.6B/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    print(f"{kind}: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters, bfloat16")
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("dense", "moe"))
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(args.kind, folder)
        run = RunConfig.from_mapping(
            {
                "model_config": {"model_name": args.kind, "model_path": name, "platform_version": "cpu"},
                "scheduler_config": {
                    "max_seq_len": args.prompt_tokens + args.new_tokens + 1,
                    "max_new_tokens": args.new_tokens,
                },
            }
        )
        kind, plan = plan_run(run)
        ours = kind(plan)
        load = ours.load_weights()
        print(f"loaded {load.bytes_read / 1e9:.2f} GB in {load.seconds:.1f} s")
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        prompt = torch.randint(0, 150000, (args.prompt_tokens,), generator=torch.Generator().manual_seed(1)).tolist()

        def our_run() -> float:
            _, tally = generate(ours, [Request(prompt=prompt, max_new_tokens=args.new_tokens)], vocab_limit=151936)
            return 1e3 * tally.decode_seconds / tally.decode_steps

        @torch.no_grad()
        def their_run() -> float:
            ids, seconds = torch.tensor([prompt]), []
            for count in (1, args.new_tokens):  # the difference is decode alone
                before = time.perf_counter()
                theirs.generate(
                    ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
                )
                seconds.append(time.perf_counter() - before)
            return 1e3 * (seconds[1] - seconds[0]) / (args.new_tokens - 1)

        our_run(), their_run()  # warm up
        rows = [(our_run(), their_run()) for _ in range(args.rounds)]
    for a, b in rows:
        print(f"ours {a:7.1f} ms/token   transformers {b:7.1f} ms/token   ratio {b / a:.2f}")
    a, b = (statistics.median(column) for column in zip(*rows))
    print(f"median, {args.threads} threads: ours {a:.1f}, transformers {b:.1f} ms/token; ratio {b / a:.2f}")


if __name__ == "__main__":
    main()
