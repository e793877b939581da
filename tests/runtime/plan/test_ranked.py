"""Things come lowest first, and groups that nobody asks for are not made."""

from penstock.runtime.plan.candidates import Ranked


def test_all_come_lowest_first_and_equal_ones_as_given() -> None:
    groups = [(1.0, lambda: [(3.0, "c"), (1.0, "a")]), (2.0, lambda: [(2.0, "b"), (3.0, "d")])]
    assert list(Ranked(groups)) == ["a", "b", "c", "d"]


def test_a_group_is_made_only_when_its_bound_is_the_lowest_left() -> None:
    made: list[str] = []

    def group(name: str, *numbers: float) -> list[tuple[float, str]]:
        made.append(name)
        return [(number, name) for number in numbers]

    ranked = Ranked([(5.0, lambda: group("late", 6.0)), (1.0, lambda: group("soon", 4.0, 7.0))])
    assert ranked.at(0) == "soon"
    assert made == ["soon"]
    assert [ranked.at(1), ranked.at(2), ranked.at(3)] == ["late", "soon", None]
    assert made == ["soon", "late"]


def test_without_any_there_is_none() -> None:
    ranked: Ranked[str] = Ranked([(0.0, list)])
    assert not ranked
    assert ranked.at(0) is None
