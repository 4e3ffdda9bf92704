"""The errors that a user can cause: one sentence that names the key and the remedy, exit status 2, no traceback."""

EXIT_STATUS = 2


class UserError(Exception):
    """Something the user can put right. `train.py` prints the message alone and exits with status 2."""


class ConfigError(UserError):
    """A mistake in the TOML file, on the command line, or between keys.

    Args:
        problems: one sentence each. All that were found are reported at once.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class DataError(UserError):
    """A data set or tokenizer that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint that cannot be saved, found or loaded."""


def nearest(name: str, known: "list[str]") -> str:
    """' (did you mean ...?)' with the closest of `known`, or '' where nothing is close."""
    from difflib import get_close_matches

    # A key is often right but for its section: compare the last part too.
    by_last = {key.rsplit(".", 1)[-1]: key for key in known}
    close = get_close_matches(name, known, n=1) or [
        by_last[last] for last in get_close_matches(name.rsplit(".", 1)[-1], list(by_last), n=1)
    ]
    return f" (did you mean {close[0]}?)" if close else ""
