"""What a plan takes for granted of the work that the program does not say, in words. Pure."""

from penstock.runtime.plan.roles import Roles
from penstock.runtime.plan.workload import Workload


def assumptions(roles: Roles, work: Workload) -> tuple[str, ...]:
    """Of filters, baselines, buffers and slower clocks; none of a program without them."""
    said = []
    if roles.filters:
        many = f"{work.drawn} are drawn for the {work.prompts} of an update"
        said.append(f"{', '.join(roles.filters)} leaves {work.kept:.0%} of the groups (--kept), so that {many}")
    for node, samples in roles.baselines:
        more = f"{samples} more response{'s' if samples > 1 else ''}"
        said.append(f"{node} makes {more} to each prompt, as long as those that are learnt from")
    if roles.buffer is not None:
        said.append(f"{roles.buffer.node} adds {work.replayed} past groups to each update, as long as fresh ones")
    apart = "decodes on machines of its own, which are not of this plan, and nobody waits for it"
    return (*said, *(f"{pool} {apart}" for pool in roles.outside))
