# SPDX-License-Identifier: Apache-2.0
"""A run from config to loaded runner, from prompts to requests, and to a folder of results: what commands need."""

import dataclasses
import hashlib
import itertools
import json
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

from executor.config import RunConfig
from executor.engine import Tally, new_scheduler
from executor.errors import UserError
from executor.generation import Answer, OnText, generate
from executor.model_config import read_config_json
from executor.model_runner import ModelRunner, plan_run, require_runnable
from executor.parallel import world
from executor.plan import Plan
from executor.prompts import Prompt
from executor.sampler import SamplingParams, warn_if_greedy_thinking
from executor.scheduler import Request
from executor.text import IdCodec, TextCodec
from executor.weights import LoadReport

DEFAULT_PROMPT_TOKENS = 128  # of a random prompt, unless data_config.input_truncated_len says otherwise
RESULTS = "EXECUTOR_RESULTS"  # in the environment of a job, so of its ranks: the folder that it has for itself


@dataclass
class Session:
    """A plan, its tokenizer and its sampling defaults; the model is loaded by ``load``."""

    plan: Plan
    runner_kind: type[ModelRunner]
    codec: TextCodec | IdCodec
    sampling: SamplingParams

    @classmethod
    def open(cls, run: RunConfig) -> "Session":
        """Plan, read the tokenizer, resolve sampling. Raises UserError for all that can be known without weights."""
        kind, plan = plan_run(run)
        require_runnable(plan)
        wanted = run.sampling.model_dump(exclude={"ignore_eos", "stop"})
        if run.model.model_path is None:
            if run.model.with_ckpt:
                raise UserError(
                    f"model_config.model_path is not set, so there is no checkpoint of {run.model.model_name}; add "
                    "--set model_config.model_path=DIR, or --explain to only check the recipe, or --set "
                    "model_config.with_ckpt=false to time its shapes with random weights"
                )
            shapes = IdCodec(plan.config.vocab_size, run.data.input_truncated_len or DEFAULT_PROMPT_TOKENS)
            return cls(plan, kind, shapes, SamplingParams.resolve({}, wanted))
        folder = run.model.config_dir
        generation = folder / "generation_config.json"
        # a link whose target is gone is not an absent file: what it recommended would be lost in silence
        present = generation.exists() or generation.is_symlink()
        recommended = read_config_json(generation) if present else {}
        codec = TextCodec.load(folder, list(plan.config.eos_token_ids) or None, recommended)
        return cls(plan, kind, codec, SamplingParams.resolve(recommended, wanted))

    def advice(self) -> list[str]:
        """Warnings that should be read but stop nothing."""
        if not self.plan.run.model.with_ckpt:
            return ["random weights (model_config.with_ckpt=false): the figures mean something, the answers do not"]
        if self.plan.run.model.force_eplb:
            return ["experts in turn (model_config.force_eplb=true): the figures mean something, the answers do not"]
        greedy = warn_if_greedy_thinking(self.sampling, self.plan.run.model.enable_thinking)
        no_end = (
            None if self.codec.eos_ids else "no end-of-sequence id in config.json, generation_config.json or tokenizer"
        )
        return [line for line in (greedy, no_end) if line]

    @property
    def vocab_limit(self) -> int:
        return min(self.codec.vocab_limit, self.plan.config.vocab_size)

    def requests(self, prompts: Iterable[Prompt], first: int = 0) -> list[Request]:
        """Encode ``prompts``, of which the first is number ``first`` of the run: with a seed each draws from a stream
        of its own. Raises UserError if one is empty or can never be served by this plan."""
        run = self.plan.run
        eos = frozenset() if run.sampling.ignore_eos else self.codec.eos_ids
        requests = []
        trial = new_scheduler(self.plan, torch.empty(0))  # only asked whether it would accept
        for number, prompt in enumerate(prompts):
            ids = self._encode(prompt)
            if run.data.input_truncated_len is not None:
                ids = ids[-run.data.input_truncated_len :]
            if ids and max(ids) >= self.plan.config.vocab_size:
                raise UserError(
                    f"prompt {number + 1} has token id {max(ids)}, but config.json says vocab_size="
                    f"{self.plan.config.vocab_size}: tokenizer and model do not belong together"
                )
            seed = None if self.sampling.seed is None else self.sampling.seed + first + number
            request = Request(
                prompt=ids,
                max_new_tokens=prompt.max_new_tokens or run.scheduler.max_new_tokens,
                eos_ids=eos,
                sampling=dataclasses.replace(self.sampling, seed=seed),
            )
            trial.require(request, number)
            requests.append(request)
        return requests

    def _encode(self, prompt: Prompt) -> list[int]:
        data = self.plan.run.data
        messages = list(prompt.messages) if prompt.messages is not None else None
        if messages is None and not data.chat_template:
            return self.codec.encode_raw(prompt.text or "")
        if messages is None:
            messages = [{"role": "user", "content": prompt.text or ""}]
        if data.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": data.system_prompt}, *messages]
        return self.codec.encode_chat(messages, self.plan.run.model.enable_thinking)

    def answer(self, runner: ModelRunner, requests: list[Request], on_text: OnText) -> tuple[list[Answer], Tally]:
        """``generate`` with this session's tokenizer and stop strings."""
        return generate(
            runner,
            requests,
            vocab_limit=self.vocab_limit,
            codec=self.codec,
            stop=self.plan.run.sampling.stop,
            on_text=on_text,
        )

    def load(self, console: Console, requests: Iterable[Request] = ()) -> tuple[ModelRunner, LoadReport]:
        """Build the model and fill it. Rank 0 shows a progress bar on ``console``; a rank with a log of its own prints
        every tenth part.

        Args:
            requests: what is going to be answered, if that is known: all ranks have to be given the same.
        Raises:
            UserError: another rank was given other requests.
            PeerLost: another rank needed ``parallel_config.timeout_seconds`` longer than this one.
        """
        parallel, printed = self.plan.run.parallel, 0

        def on_bytes(done: int, total: int) -> None:
            nonlocal printed
            progress.update(task, completed=done, total=total)
            if world.has_log() and 10 * done // max(total, 1) > printed:
                printed = 10 * done // max(total, 1)
                console.print(f"loading: {10 * printed} % of {total} bytes", soft_wrap=True)

        runner = self.runner_kind(self.plan)
        _require_same_requests(requests)
        columns = (TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
        # where it cannot be drawn, all it would leave is an empty line
        drawn = console.is_interactive and world.has_terminal()
        with Progress(*columns, console=console, transient=True, disable=not drawn) as progress:
            task = progress.add_task("loading", total=None)
            report = runner.load_weights(on_bytes)
        if parallel.world_size > 1:  # a step would wait as well, but not say for whom
            world.arrive("load", parallel.timeout_seconds)
        buckets = (TextColumn("decode graph of {task.fields[rows]} rows"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *buckets, console=console, transient=True, disable=not drawn or runner.graphs is None
        ) as progress:
            task = progress.add_task("graphs", total=len(self.plan.buckets), rows="", completed=-1)
            report.warm_up_seconds = runner.warm_up(lambda rows: progress.update(task, advance=1, rows=rows))
        report.bytes_of_ranks = [int(n) for n in world.collect(str(report.bytes_read), world.everyone())]
        if world.has_terminal() or world.has_log():
            for warning in report.warnings:
                console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
        return runner, report


def _require_same_requests(requests: Iterable[Request]) -> None:
    """Machines could be given different prompts, or different tokenizers: their ranks would work on different steps,
    and end in the middle of a collective."""
    mine = [_digest(request) for request in requests]
    given = [json.loads(text) for text in world.collect(json.dumps(mine), world.everyone())]
    for rank, theirs in enumerate(given):
        for number, pair in enumerate(itertools.zip_longest(given[0], theirs), start=1):
            if pair[0] != pair[1]:
                raise UserError(
                    f"prompt {number} differs between rank 0, which has {len(given[0])}, and rank {rank}, which has "
                    f"{len(theirs)}; give all machines the same prompts, tokenizer and generation_config.json"
                )


def _digest(request: Request) -> str:
    fields = dataclasses.asdict(request) | {"eos_ids": sorted(request.eos_ids)}
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


@contextmanager
def results_folder(run: RunConfig, recipe: Path) -> Iterator[Path]:
    """``<output_config.dir>/<recipe without .yaml>``, for this job alone as long as it runs: while another job of this
    host has it, the first of ``-2``, ``-3`` and so on behind that name. Nothing is created yet.

    The claim is an abstract socket, which the kernel forgets with its process, however that ends. It is made by the
    launcher, whose ranks find the folder in their environment; under torchrun by rank 0, which alone writes results.
    """
    if RESULTS in os.environ:
        yield Path(os.environ[RESULTS])
        return
    with ExitStack() as held:
        folder = _claim(held, run, recipe) if world.has_terminal() else run.output.path / recipe.stem
        os.environ[RESULTS] = str(folder)
        held.callback(os.environ.pop, RESULTS)
        yield folder


def _claim(held: ExitStack, run: RunConfig, recipe: Path) -> Path:
    for number in range(1, 100):
        folder = run.output.path / (recipe.stem if number == 1 else f"{recipe.stem}-{number}")
        key = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()
        claim = held.enter_context(socket.socket(socket.AF_UNIX))
        with suppress(OSError):  # taken
            claim.bind(f"\0qwen3-recipes-results-{key}")
            return folder
    raise UserError(f"output_config.dir={run.output.dir}: 99 jobs are writing there; name another directory")


def output_path(run: RunConfig, name: str) -> Path:
    """``name`` in the folder of results. Raises UserError if it could not be written, so that a run does not end in
    that surprise. That is tried, since permissions do not tell all, but nothing is left behind.

    To be called inside ``results_folder``.
    """
    path = Path(os.environ[RESULTS]) / name
    try:
        nearest = next(parent for parent in path.parents if parent.exists())
        with TemporaryDirectory(dir=nearest):
            writable = not path.is_dir()
    except OSError:  # a file in the way, a name that is too long, a parent that may not be looked into, /proc
        writable = False
    if not writable:
        raise UserError(f"output_config.dir={run.output.dir}: {path} cannot be written; name a writable directory")
    return path
