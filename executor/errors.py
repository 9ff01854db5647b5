# SPDX-License-Identifier: Apache-2.0
"""The one exception that reaches a user: a single line naming the key, value or file, the constraint and the fix."""


class UserError(ValueError):
    """Something the user gave us is wrong. ``str(error)`` is one line; the command line prints it and exits with 2."""
