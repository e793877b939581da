"""The shape of an asynchronous algorithm without its work: fake nodes with given durations.

    prompts → fake_generate → fake_score → fake_update → policy
      policy ⇢ fake_generate: weights, at most `lag` updates old

It shows what a schedule does, and runs without a model or data.
"""

from penstock.graph import broadcast, program
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate, fake_score, fake_update


@program
def toy(
    policy: FakePolicy,
    prompts: FakePrompts,
    *,
    samples: int = 4,
    lag: int = 1,
    generate_ms: float = 50.0,
    score_ms: float = 5.0,
    update_ms: float = 50.0,
    sync_ms: float = 5.0,
    jitter_ms: float = 0.0,
) -> FakePolicy:
    """Fake nodes with given durations, for schedules and tests.

    Args:
        samples: responses per prompt.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        generate_ms: milliseconds to generate one group.
        score_ms: milliseconds to score one group.
        update_ms: milliseconds of one update.
        sync_ms: milliseconds to publish the weights.
        jitter_ms: at most this many milliseconds more for each firing, keyed by the firing.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = fake_generate(prompts, behaviour, samples=samples, ms=generate_ms, jitter_ms=jitter_ms)
    rewards = fake_score(rollouts, ms=score_ms, jitter_ms=jitter_ms)
    return fake_update(policy, rollouts, rewards, ms=update_ms, jitter_ms=jitter_ms)
