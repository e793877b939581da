"""Of several failures of a run, the one that explains the others is said."""

from itertools import permutations

from penstock.runtime.control.failure import AGENTS_S, HELD, HELD_S, PRIORITY, Failure, FailureCode, Verdict

SINCE, BEFORE, LATER = 100.0, 99.9, 100.1
TRANSFER = Failure(FailureCode.TRANSFER, "a transfer broke", ("agent:a", "agent:b"))
DEATH = Failure(FailureCode.RANK_DIED, "generator/0 rank 0 died")


def verdict(*failures: Failure, now: float = SINCE) -> Verdict:
    made = Verdict()
    for failure in failures:
        made.report(failure, now)
    return made


def test_a_held_failure_waits_a_moment_for_a_better_cause() -> None:
    ended = Failure(FailureCode.RANK_ENDED, "a rank ended")
    assert verdict(ended).final(SINCE + HELD_S, lambda peer: LATER) is None
    assert verdict(ended).final(SINCE + HELD_S + 0.1, lambda peer: BEFORE) == ended


def test_a_held_failure_waits_for_the_next_heartbeat_of_all_agents_and_not_for_ever() -> None:
    held, heard = verdict(TRANSFER), {"agent:a": LATER, "agent:b": BEFORE}
    assert held.final(SINCE + AGENTS_S, heard.__getitem__) is None
    assert held.final(SINCE + AGENTS_S + 0.1, heard.__getitem__) == TRANSFER
    heard["agent:b"] = LATER
    assert held.final(SINCE + HELD_S, heard.__getitem__) is None
    assert held.final(SINCE + HELD_S + 0.1, heard.__getitem__) == TRANSFER


def test_a_death_explains_a_broken_transfer_whichever_is_heard_first() -> None:
    for order in permutations([TRANSFER, DEATH]):
        assert verdict(*order).final(SINCE, lambda peer: BEFORE) == DEATH


def test_of_any_two_failures_the_one_of_the_earlier_code_is_said() -> None:
    for one, two in permutations(FailureCode, 2):
        said = verdict(Failure(one, "one"), Failure(two, "two")).final(SINCE + AGENTS_S + 1, lambda peer: LATER)
        assert said is not None
        assert said.code == min(one, two, key=PRIORITY.__getitem__)


def test_of_two_failures_of_one_code_the_first_is_said() -> None:
    assert verdict(DEATH, Failure(FailureCode.RANK_DIED, "another")).final(SINCE, lambda peer: BEFORE) == DEATH


def test_a_later_report_does_not_make_a_held_failure_wait_longer() -> None:
    held = verdict(TRANSFER)
    held.report(TRANSFER, SINCE + AGENTS_S)
    assert held.final(SINCE + AGENTS_S + 0.1, lambda peer: BEFORE) == TRANSFER


def test_only_consequences_are_held_and_they_come_last_but_for_a_rank_that_has_told_why() -> None:
    assert [code for code in FailureCode if not verdict(Failure(code, "")).certain] == list(HELD)
    assert set(list(FailureCode)[-2:]) < set(HELD)


def test_no_failure_ends_nothing() -> None:
    assert Verdict().final(SINCE, lambda peer: LATER) is None
    assert not Verdict().certain
