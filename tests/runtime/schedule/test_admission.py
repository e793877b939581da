"""The rule of admission: which version a group needs, and how many groups a version admits."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.schedule.admission import admitted_groups, needed_version

SMALL = st.integers(0, 30)


@given(ordinal=SMALL, lag=st.integers(0, 5), batch=st.integers(1, 5), version=SMALL)
def test_a_version_admits_the_groups_that_need_none_newer(ordinal: int, lag: int, batch: int, version: int) -> None:
    assert (needed_version(ordinal, lag, batch) <= version) == (ordinal < admitted_groups(version, lag, batch))


@given(update=SMALL, lag=st.integers(0, 5), batch=st.integers(1, 5), place=st.integers(0, 4))
def test_a_group_needs_the_version_of_its_update_less_the_lag(update: int, lag: int, batch: int, place: int) -> None:
    """However many groups before it are dropped: it is for an earlier update then, never for a later one."""
    for dropped in range(update * batch):
        ordinal = update * batch + place % batch
        consumed_by = (ordinal - dropped) // batch
        assert needed_version(ordinal, lag, batch) >= consumed_by - lag
    assert needed_version(update * batch + place % batch, lag, batch) == (update - lag if update > lag else 0)
