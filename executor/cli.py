# SPDX-License-Identifier: Apache-2.0
"""The command line: ``infer`` answers prompts, ``eval`` scores answers. Errors are one line and a non-zero exit."""

import dataclasses
import io
import os
import signal
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from executor.chat import converse
from executor.config import REPOSITORY_ROOT, RunConfig
from executor.errors import UserError
from executor.evaluation import final_answer, score
from executor.generation import Answer
from executor.launch import run_ranks
from executor.model_runner import plan_run
from executor.parallel import world
from executor.parallel.machines import LAUNCHER, this_machine
from executor.profiling import profiled
from executor.prompts import Prompt, read_prompts
from executor.report import print_plan, print_summary, records, summarize, write_json
from executor.session import Session, output_path, results_folder
from executor.text import IdCodec

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
out = Console(highlight=False, markup=False)
err = Console(stderr=True, highlight=False, markup=False)
USAGE = "infer|eval RECIPE [--prompt TEXT] [--file FILE] [--set section.key=value] ..., see --help"
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
NO_READER = 141  # 128 + SIGPIPE: who read the output is gone, as with `| head`

ConfigArgument = Annotated[Path, typer.Argument(help="recipe, one of configs/*.yaml")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value, repeatable", metavar="KEY=VALUE")
]


class OrderedPrinter:
    """Streams the first unfinished answer as it comes; later ones wait for their turn."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts = prompts
        self.pending = ["" for _ in prompts]
        self.done: set[int] = set()
        self.current = 0
        self.line_is_open = False

    def __call__(self, number: int, text: str, done: bool) -> None:
        self.pending[number] += text
        self.done |= {number} if done else set()
        while self.current < len(self.prompts):
            self._write(self.pending[self.current])
            self.pending[self.current] = ""
            if self.current not in self.done:
                return
            self._write("\n")
            self.current += 1
            self.announce()

    def announce(self) -> None:
        """Show the prompt whose answer comes next."""
        if self.current < len(self.prompts):
            prompt = self.prompts[self.current]
            self._write(f"> {prompt.text if prompt.messages is None else prompt.messages[-1]['content']}\n")

    def end_line(self) -> None:
        """What is printed after an answer that broke off begins a line of its own."""
        if self.line_is_open:
            self._write("\n")

    def end_line_if_terminated(self) -> None:
        """The launcher ends ranks by SIGTERM, and then prints why. Raising an error here could hide behind another."""

        def end(number: int, frame: object) -> None:
            if self.line_is_open:
                os.write(sys.stdout.fileno(), b"\n")  # the stream itself may be in the middle of something
            os._exit(128 + number)

        signal.signal(signal.SIGTERM, end)

    def _write(self, text: str) -> None:
        if text:
            self.line_is_open = not text.endswith("\n")
            sys.stdout.write(text)
            sys.stdout.flush()


def _prompts(session: Session, prompt: list[str] | None, file: Path | None) -> list[Prompt]:
    found = [Prompt(text=text) for text in prompt or ()]
    if file is not None:
        found += read_prompts(file)
    if isinstance(session.codec, IdCodec):
        if found:
            raise UserError(
                "without model_config.model_path there is no tokenizer, so prompts are random ids; leave --prompt and "
                "--file out, or name a checkpoint"
            )
        found = [Prompt(text="(random ids)")] * session.plan.run.scheduler.batch_size
    if not found and session.plan.run.data.dataset_path is not None:
        found = read_prompts(session.plan.run.data.dataset_path)
    if not found:
        raise UserError("nothing to answer: give --prompt TEXT, --file FILE, --chat, or set data_config.dataset")
    return found


def _answer(session: Session, prompts: list[Prompt], stream: bool) -> tuple[list[Answer], dict]:
    """Load, answer, and put the figures together. Of several ranks the first one speaks."""
    requests, speaks = session.requests(prompts), world.has_terminal()
    runner, load = session.load(err, requests)
    printer = OrderedPrinter(prompts)
    on_text = printer if stream and speaks else lambda number, text, done: None
    if speaks:
        for line in session.advice():  # once nothing can be refused any more, so that an error is the only line
            err.print(f"note: {line}", style="yellow", soft_wrap=True)
    try:
        if stream and speaks:
            if LAUNCHER in os.environ:
                printer.end_line_if_terminated()
            printer.announce()
        with profiled(session.plan.run) if speaks else nullcontext():
            answers, tally = session.answer(runner, requests, on_text)
    except BaseException:
        printer.end_line()
        raise
    return answers, summarize(session.plan, runner, load, answers, tally)


def _started_ranks(session: Session) -> bool:
    """Run this command as the recipe's ranks, if it has several and this process is not one of them yet."""
    run = session.plan.run
    if run.parallel.world_size == 1 or world.launched():
        return False
    code = run_ranks(
        run.parallel.world_size,
        [sys.executable, "-m", "executor", *sys.argv[1:]],
        output_path(run, "logs/rank1.log").parent,
        machine=this_machine(run.parallel.hosts, run.parallel.world_size),
        device_type=session.plan.features.device_type,
        timeout_seconds=run.parallel.timeout_seconds,
    )
    if code:
        raise typer.Exit(code)
    return True


@app.command()
def infer(
    config: ConfigArgument,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="a prompt, repeatable")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="prompts: .txt, one per line, or .jsonl")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="converse on the terminal")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="print the plan and stop")] = False,
    overrides: SetOption = None,
) -> None:
    """Answer prompts with the model of a recipe."""
    run = RunConfig.load(config, overrides or ())
    if explain:
        print_plan(out, plan_run(run)[1])
        return
    session = Session.open(run)
    if chat:
        if prompt or file:
            raise UserError("--chat reads its prompts from the terminal; leave --prompt and --file out")
        if run.parallel.world_size > 1:
            raise UserError("--chat on several ranks is not built yet; set parallel_config.world_size=1")
        with results_folder(run, config), profiled(run):
            converse(session, err)
        return
    prompts = _prompts(session, prompt, file)
    with results_folder(run, config):
        path = output_path(run, "report.json")
        if _started_ranks(session):
            return
        answers, figures = _answer(session, prompts, stream=True)
        if not world.has_terminal():
            return
        print_summary(out, figures)
        write_json(path, {"figures": figures, "config": run.to_mapping(), "answers": records(prompts, answers)})
        out.print(f"report: {path}", soft_wrap=True)


@app.command(name="eval")
def evaluate(
    config: ConfigArgument,
    file: Annotated[Path, typer.Option("--file", help=".jsonl with prompt and answer")] = REPOSITORY_ROOT
    / "assets/heldout.jsonl",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="only the first n questions")] = None,
    overrides: SetOption = None,
) -> None:
    """Score exact answers on held-out questions."""
    run = RunConfig.load(config, overrides or ())
    session = Session.open(run)
    prompts = read_prompts(file)[:limit]
    if any(p.answer is None for p in prompts):
        raise UserError(f"{file}: eval needs an `answer` in every line")
    with results_folder(run, config):
        path = output_path(run, "eval.json")
        if _started_ranks(session):
            return
        answers, figures = _answer(session, prompts, stream=False)
        if not world.has_terminal():
            return
        result = score([p.answer or "" for p in prompts], [final_answer(a.text) for a in answers])
        for index in result.wrong[:10]:
            said, wanted = prompts[index].text, prompts[index].answer
            out.print(f"wrong: {said!r} -> {answers[index].text!r}, expected {wanted!r}", soft_wrap=True)
        print_summary(out, figures)
        out.print(f"exact: {result.exact} of {result.total} = {result.share:.1%}")
        content = {"score": dataclasses.asdict(result), "figures": figures, "config": run.to_mapping()}
        write_json(path, {**content, "answers": records(prompts, answers)})
        out.print(f"report: {path}", soft_wrap=True)


def main() -> int:
    """Run a command. Exit codes: 0 done, 2 something the user can mend, 75 another rank was lost, 130 interrupted,
    141 nobody reads the output any more."""
    world.die_with_launcher()
    _open_streams()
    try:
        code = app(standalone_mode=False) or 0  # typer returns the code of an Exit, to which it turns Ctrl-C
    except UserError as error:
        return _complain(error)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except SystemExit:  # so typer answers a BrokenPipeError, and nothing else here
        os._exit(NO_READER)  # without flushing: there is nobody to say more to
    except OSError as error:  # a full disk, a directory that vanished
        return _complain(f"{error.filename or 'writing'}: {error.strerror or error}")
    except Exception as error:
        lost = world.lost_peer(error)
        if lost is not None:
            if world.rank() > 0:
                traceback.print_exception(error)  # into its log; the terminal gets one line
            return _complain(lost)
        if type(error).__module__.startswith(("click", "typer")):
            message = str(error.format_message() if hasattr(error, "format_message") else error)
            # no message: no arguments at all, and the help has been shown
            return _complain(f"{message.rstrip('.')}; usage: {USAGE}") if message else 2
        if not world.launched():
            raise
        traceback.print_exception(error)
        return _end(1)
    if code == INTERRUPTED:
        if LAUNCHER not in os.environ:  # else that one says it
            print("interrupted", file=sys.stderr)
        return _end(code)
    world.leave()
    return code


def _open_streams() -> None:
    """Output that was closed goes nowhere, and a character that the terminal cannot show becomes a question mark:
    neither is a reason to lose an answer."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _complain(problem: object) -> int:
    print(f"error: {' '.join(str(problem).split())}", file=sys.stderr)  # one line, whatever a file is called
    return _end(world.PEER_LOST if isinstance(problem, world.PeerLost) else 2)


def _end(code: int) -> int:
    """What a failure returns. One of several ranks ends at once: a communicator to a lost peer may never close."""
    if world.launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
