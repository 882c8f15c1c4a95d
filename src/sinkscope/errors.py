"""The one exception for input that cannot be honoured; the command line turns it into exit code 2."""


class InputError(Exception):
    """Says what was expected, what was found and what to type next, each as a short phrase without a full stop."""

    def __init__(self, *, expected: str, found: str, next_step: str) -> None:
        self.expected = expected
        self.found = found
        self.next_step = next_step
        super().__init__(f"expected {expected}; found {found}. {next_step}.")
