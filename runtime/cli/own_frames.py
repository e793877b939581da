"""The traceback that a user reads: of their own lines."""

import sys
import traceback

OURS = ("penstock.", "importlib", "__main__")
"""What the names of our modules begin with; the last is the one that a child was started with."""


def own_frames() -> str:
    """The traceback of the exception under way, from the first frame that is the user's; none for a file that cannot be
    parsed, whose place the error says itself."""
    kind, error, whole = sys.exc_info()
    tb = whole
    while tb is not None and tb.tb_frame.f_globals.get("__name__", "").startswith(OURS):
        tb = tb.tb_next
    if tb is None and not isinstance(error, SyntaxError):
        tb = whole
    return "".join(traceback.format_exception(kind, error, tb)).rstrip()
