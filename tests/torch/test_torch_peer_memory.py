"""Places of messages in an outbox: the same at both ends, and never where one still lies."""

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from rawattn.torch.context_parallel.peer_memory import Ring

SIZE = 8


@given(st.lists(st.integers(1, SIZE), max_size=40), st.integers(0, 39))
def test_a_message_lies_where_nothing_is_left_to_take(lengths: list[int], grown: int) -> None:
    ends, size, lying = (Ring(), Ring()), SIZE, dict[int, range]()
    for end in ends:
        end.grow(size)
    for at, length in enumerate(lengths):
        if at == grown:  # what lay in the memory before has been taken
            size, lying = 2 * SIZE, {}
            for end in ends:
                end.grow(size)
        placed = [end.place(length) for end in ends]
        number, begin, last = placed[0]
        assert placed[0] == placed[1] and number == at + 1
        assert 0 <= begin and begin + length <= size
        lying = {n: place for n, place in lying.items() if n > last}
        own = range(begin, begin + length)
        assert not any({*own} & {*place} for place in lying.values())
        lying[number] = own


def test_messages_follow_one_another_while_there_is_room() -> None:
    ring = Ring()
    ring.grow(SIZE)
    assert [ring.place(3) for _ in range(4)] == [(1, 0, 0), (2, 3, 0), (3, 0, 1), (4, 3, 2)]
