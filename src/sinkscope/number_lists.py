"""Whole numbers as people write them on a command line."""


def whole_numbers(text: str) -> list[int]:
    """The numbers of a list such as 0,3 or 0-2,7; ValueError where it is none, or a range in it is empty."""
    numbers: list[int] = []
    for item in text.split(","):
        first, dash, last = item.partition("-")
        found = range(int(first), int(last) + 1) if dash and first else [int(item)]
        if not found:
            raise ValueError("an empty range")
        numbers += found
    return numbers
