# SPDX-License-Identifier: Apache-2.0
"""``enable_profiler``: record what a run does, as a Chrome trace."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from torch.profiler import ProfilerActivity, profile

from executor.config import RunConfig
from executor.session import output_path


@contextmanager
def profiled(run: RunConfig) -> Iterator[None]:
    """Profile the body on the CPU and write ``trace.json`` beside the report, if ``run`` asks for it."""
    if not run.model.enable_profiler:
        yield
        return
    path = output_path(run, "trace.json")
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        yield
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as folder:  # nothing is left behind if the disk is full
        recorded.export_chrome_trace(f"{folder}/trace.json")
        os.replace(f"{folder}/trace.json", path)
