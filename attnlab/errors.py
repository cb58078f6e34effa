"""The one exception that stands for a user's mistake."""


class UserError(ValueError):
    """What came and what was expected, in one line; the command line prints it and exits with code 2."""


class RunError(RuntimeError):
    """A run that cannot go on, such as one whose loss is no longer finite; printed in one line, exit code 1."""
