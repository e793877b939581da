"""A complaint waits for those who may know of a death."""

from penstock.runtime.control.controller import AGENTS_S, DEATH_S, Complaint

SINCE, BEFORE, LATER = 100.0, 99.9, 100.1


def test_a_complaint_waits_a_moment_for_a_better_reason() -> None:
    complaint = Complaint("a transfer broke", SINCE)
    assert not complaint.ripe(SINCE + DEATH_S, lambda peer: LATER)
    assert complaint.ripe(SINCE + DEATH_S + 0.1, lambda peer: BEFORE)


def test_a_complaint_waits_for_all_agents_and_not_for_ever() -> None:
    complaint = Complaint("a transfer broke", SINCE, ("agent:a", "agent:b"))
    heard = {"agent:a": LATER, "agent:b": BEFORE}
    assert not complaint.ripe(SINCE + AGENTS_S, heard.__getitem__)
    assert complaint.ripe(SINCE + AGENTS_S + 0.1, heard.__getitem__)
    heard["agent:b"] = LATER
    assert not complaint.ripe(SINCE + DEATH_S, heard.__getitem__)
    assert complaint.ripe(SINCE + DEATH_S + 0.1, heard.__getitem__)
