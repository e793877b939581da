"""What holds for all tests: no example of Hypothesis has a deadline, for a shared machine is slow at any moment."""

from hypothesis import settings

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
