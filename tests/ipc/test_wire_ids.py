"""The IDs of requests in messages."""

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.ipc.wire_ids import own_ids, split, wire_id


@given(st.integers(1, 10**6), st.text())
def test_the_reader_and_its_id_can_be_read_from_the_id_on_the_wire(reader, request_id):
    assert split(wire_id(reader, request_id)) == (reader, request_id)


@given(st.text())
def test_ids_of_reader_0_stay_as_they_are(request_id):
    assert wire_id(0, request_id) == request_id
    assert own_ids(0, [request_id]) == {request_id}


@given(st.text(st.characters(exclude_categories=("Nd",))))
def test_an_id_without_a_number_is_of_reader_0(request_id):
    assert split(request_id) == (0, request_id)


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["a", "1:a", ":", ""]))))
def test_a_reader_finds_its_own_ids(requests):
    wires = [wire_id(reader, request_id) for reader, request_id in requests]
    for reader in (1, 2, 3, 13):
        assert own_ids(reader, wires) == {own for of, own in requests if of == reader}
