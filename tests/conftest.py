"""What holds for all tests: nothing of Hypothesis goes by the clock, for a shared machine is slow at any moment."""

from hypothesis import HealthCheck, settings

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
