# SPDX-License-Identifier: Apache-2.0
"""``python -m executor``: the command line, where Ctrl-C is quiet even while torch is being imported."""

import sys

try:
    from executor.cli import main

    code = main()
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    code = 130
sys.exit(code)
