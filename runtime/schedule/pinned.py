"""Which graphs a run's rules are possible for: pinned versions, groups that are replaced. Pure."""

from penstock.runtime.schedule.tables import Rules, Step, Tables


def check_rules(tables: Tables, rules: Rules) -> None:
    """Raises ValueError for rules that the graph does not allow.

    Pinned versions: a replica keeps one version live and a resumed run makes none older than its cut. So all per-group
    readers of weights need the same version for a group, and per-update readers the current one; and a cut must not
    have to wait for a group that reads something delayed, which waits for an update in its turn.

    Groups that are replaced: nobody may read anything delayed, since the groups after a lost one are for an earlier
    update than the one that they have read it for.
    """
    if rules.on_failure == "replace":
        _check_places(tables)
    if rules.versions == "pinned":
        _check_order(tables)
        _check_lags(tables)
        _check_delays(tables)


def _check_places(tables: Tables) -> None:
    """Does the update that a group is for stay the one it was when the group started?"""
    delays = [(step.name, carried) for step in tables.steps.values() for carried, _ in step.delays]
    if delays:
        given = ", ".join(f"{name}, which reads {carried!r} delayed" for name, carried in delays)
        raise ValueError(
            f'on_failure="replace": given {given}; needed no delay, which is exact, while a replaced group moves those '
            'after it to earlier updates than the ones that they have read it for; use on_failure="stop", with retries'
        )


def _check_order(tables: Tables) -> None:
    """Are the groups of an update, and the versions that there are, known beforehand?"""
    filters = [s.name for s in tables.steps.values() if s.filters]
    slow = [c.node for c in tables.channels.values() if c.every > 1]
    if filters or slow:
        given = ", ".join([f"the filter {name}" for name in filters] + [f"{name} with every=…" for name in slow])
        raise ValueError(
            f'versions="pinned": given {given}; needed none, since which groups an update takes, or which versions '
            'exist, would not be known beforehand; use versions="free"'
        )


def _check_lags(tables: Tables) -> None:
    lags = {(s.name, lag) for readers in tables.weight_readers.values() for s, lag in readers if not s.per_update}
    late = {(s.name, lag) for readers in tables.weight_readers.values() for s, lag in readers if s.per_update and lag}
    if len({lag for _, lag in lags}) > 1 or late:
        given = ", ".join(f"{name} lag={lag}" for name, lag in sorted(lags | late))
        raise ValueError(
            f'versions="pinned": given {given}; needed one lag for all per-group nodes that read weights, and lag=0 '
            'for per-update ones; use versions="free" or make the lags equal'
        )


def _check_delays(tables: Tables) -> None:
    """Is what a reader of weights waits for made by the time its version is?"""
    for step in tables.steps.values():
        for carried, lag in step.delays:
            if lag < tables.max_lag and _reads_weights(tables, step):
                raise ValueError(
                    f'versions="pinned": given {step.name}, which reads {carried!r} with a delay of {lag} before '
                    f"weights are read with lag={tables.max_lag}; needed a delay of at least the lag, or "
                    'versions="free"'
                )


def _reads_weights(tables: Tables, step: Step) -> bool:
    """Does a per-group step, or one that depends on it, read weights that change?"""
    after = [*step.readers, *([step.partner] if step.turns and not step.answers else [])]
    per_group = [tables.steps[name] for name in after if not tables.steps[name].per_update]
    return bool(step.weights) or any(_reads_weights(tables, later) for later in per_group)
