"""What is said of an exception that a node or a maker raised."""

import traceback

from penstock.runtime.control.messages import shortened

OWN = ("penstock.", "__main__")
BETWEEN = ("torch.", "concurrent.futures.")


def told(error: BaseException) -> str:
    """Its traceback; of a refusal the message alone.

    A refusal is a ValueError or TypeError that this package raises with no code of the user's on the way. It says what
    was given and what is needed, and the lines that found out are of no use to whoever wrote the program.
    """
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    refused = isinstance(error, ValueError | TypeError) and bool(modules) and modules[-1].startswith(OWN)
    shown = refused and all(module.startswith(OWN + BETWEEN) for module in modules)
    text = "".join(traceback.format_exception_only(error) if shown else traceback.format_exception(error))
    text = shortened(text)
    return text.encode(errors="backslashreplace").decode()  # half a character, which no message could carry
