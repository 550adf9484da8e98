"""What a command says when it cannot do what it was asked for."""


class CommandError(RuntimeError):
    """Printed as one line, without a traceback; the exit status is 1."""
