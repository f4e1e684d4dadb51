"""message_tags.py: tags that no two messages share by accident, the same on both sides."""

import pytest
import torch.distributed as dist

from minifsdp.comm.consensus import gather_objects
from minifsdp.comm.message_tags import Kind, Message, messages_started, started
from tests.ranks import join_another_group, on_ranks, run
from tests.small import stack, step

UNIT = 0x4D46_0000  # where numbers of units begin


def new(number=UNIT, kind=Kind.PARAMETERS, size=4):
    return Message(dist.group.WORLD, number, kind, size, "'a'")


@on_ranks(2)
def test_messages_that_differ_in_anything_have_other_tags():
    differ = [
        (UNIT + unit, kind, size) for unit in range(40) for kind in Kind for size in (1, 2, 4, 8)
    ]
    tags = {new(*what).tag for what in differ} | {new(*what).tag for what in differ}
    assert len(tags) == 2 * len(differ)
    assert all(1 << 30 <= tag < 1 << 31 for tag in tags)  # positive, and far from users' own


@on_ranks(1)
def test_after_thousands_of_messages_tags_of_other_kinds_are_still_others():
    tags = {}
    for size in (1, 2, 4):
        tags[size] = {new(UNIT + 4000, size=size).tag for _ in range(5000)}
    tags[0] = {new(UNIT + 4000, Kind.GRADIENT, 1).tag}
    assert len(set.union(*tags.values())) == sum(map(len, tags.values()))


@on_ranks(2)
def test_both_sides_count_alike_whatever_else_they_say():
    number = UNIT + 5000
    other = dist.new_group()
    for _ in range(dist.get_rank()):
        new(number + 1)
        new(number, Kind.REDUCTION)
        Message(other, number, Kind.PARAMETERS, 4, "")
    tags = gather_objects([new(number).tag for _ in range(3)], dist.group.WORLD)
    assert tags[0] == tags[1] and len(set(tags[0])) == 3


@on_ranks(1)
def test_what_was_started_is_known():
    before, message = messages_started(), new(UNIT + 6000, Kind.REDUCTION)
    assert started[message.key] == message.count == 1
    assert new(UNIT + 6000, Kind.REDUCTION).count == started[message.key] == 2
    assert messages_started() == before + 2


@pytest.mark.parametrize(
    "kind, words",
    [
        (Kind.PARAMETERS, "the gather of the parameters of unit 'a' (4 bytes per element)"),
        (Kind.REDUCTION, "the reduction of the gradient of unit 'a'"),
        (Kind.OTHER, "'a'"),
    ],
)
@on_ranks(1)
def test_a_message_in_words(kind, words):
    assert str(new(UNIT + 7000, kind)) == words


@on_ranks(2)
def test_what_goes_through_the_store_is_counted_by_label_because_groups_may_differ():
    keys = [Message(dist.new_group(), 0, Kind.STORE, 1, "a") for _ in range(2)]
    assert keys[0].key == keys[1].key and [message.count for message in keys] == [1, 2]
    assert Message(dist.group.WORLD, 0, Kind.STORE, 1, "b").count == 1


def another_process_group(folder):
    """After a failure of one rank, say, as elastic programs do."""
    if dist.get_rank() == 0:
        new(), new(0, Kind.STORE, 1)  # that the other has not come to
    join_another_group(folder)
    step(stack(1))
    assert new(UNIT + 9000).count == new(UNIT + 9000).count - 1 == 1


def test_in_another_process_group_all_ranks_count_anew(tmp_path):
    run(another_process_group, 2, str(tmp_path))
