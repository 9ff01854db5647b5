# SPDX-License-Identifier: Apache-2.0
"""``python -m executor``: the command line. Before torch is imported, which takes seconds: who is quiet, and when.

Ctrl-C on a terminal reaches every process. A rank leaves it to its launcher, which ends all of them and says so once.
"""

import os
import signal
import sys

from executor.parallel.machines import LAUNCHER

if LAUNCHER in os.environ:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
# torch prints C++ backtraces of what it raises as well, and that becomes an error of ours in one line
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

try:
    from executor.cli import main

    code = main()
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    code = 130
signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is to end
sys.exit(code)
