"""The ticket book: bounds, order, and that every ticket leaves it exactly once."""

import pytest
from prefetch_fakes import NBYTES, make_ticket

from nano_oasis.memory.tickets import NOW, State, TicketBook


def make_book(max_tickets=100, max_bytes=100 * NBYTES):
    return TicketBook(max_tickets, max_bytes)


def slots(tickets):
    return [t.slot for t in tickets]


def served(book, max_bytes=NBYTES):
    """The order in which the link would get the waiting tickets, as batches of slots."""
    batches = []
    while batch := book.take(max_bytes):
        batches.append(slots(batch))
    return batches


# --- the life of a ticket ---------------------------------------------------------------------------
def test_the_two_marks_are_two_facts():
    book, ticket = make_book(), make_ticket()
    seen = [(ticket.enqueued, ticket.completed, ticket.finished)]
    book.submit([ticket])
    seen.append((ticket.enqueued, ticket.completed, ticket.finished))
    book.take(1)
    seen.append((ticket.enqueued, ticket.completed, ticket.finished))
    book.finish([ticket])
    seen.append((ticket.enqueued, ticket.completed, ticket.finished))
    no, yes = False, True
    assert seen == [(no, no, no), (no, no, no), (yes, no, no), (yes, yes, yes)]


def test_a_failed_ticket_was_enqueued_but_a_cancelled_one_never_was():
    book, failed, cancelled = make_book(), make_ticket(0), make_ticket(1, request_id=2)
    book.submit([failed, cancelled])
    assert book.take(NBYTES) == [failed]
    assert book.cancel(1, "aborted") == []  # too late for this one: it ends by itself
    assert book.cancel(2, "aborted") == [cancelled]
    book.finish([failed], "OSError: gone")
    assert (failed.state, failed.error, failed.enqueued) == (State.FAILED, "OSError: gone", True)
    assert (cancelled.state, cancelled.error, cancelled.enqueued) == (State.CANCELLED, "aborted", False)
    assert not failed.completed and not cancelled.completed and failed.finished and cancelled.finished
    assert book.collect() == [cancelled, failed] and book.collect() == []


def test_a_ticket_counts_until_it_is_collected():
    book = make_book()
    book.submit([make_ticket(0), make_ticket(1), make_ticket(2, request_id=9)])
    book.finish(book.take(2 * NBYTES))
    assert (len(book), book.num_bytes) == (3, 3 * NBYTES)
    assert (book.in_flight(), book.in_flight(1), book.in_flight(9), book.in_flight(5)) == (3, 2, 1, 0)
    book.collect()
    assert (len(book), book.num_bytes, book.in_flight(1), book.in_flight(9)) == (1, NBYTES, 0, 1)


def test_only_an_enqueued_ticket_can_finish():
    book, ticket = make_book(), make_ticket()
    book.submit([ticket])
    with pytest.raises(AssertionError, match="is waiting"):
        book.finish([ticket])


# --- order ------------------------------------------------------------------------------------------
def test_earliest_deadline_first_then_priority():
    book = make_book()
    book.submit(
        [
            make_ticket(0, step=2, layer=0, priority=0.9),
            make_ticket(1, step=1, layer=5, priority=0.1),
            make_ticket(2, step=1, layer=5, priority=0.7),
            make_ticket(3, step=1, layer=2, priority=0.2),
        ]
    )
    book.submit([make_ticket(4, step=NOW, layer=3)])  # a repair
    book.submit([make_ticket(5, step=1, layer=5, priority=0.3)])
    assert served(book) == [[4], [3], [2], [5], [1], [0]]


def test_a_batch_is_one_layers_and_bounded_in_bytes():
    book = make_book()
    book.submit([make_ticket(i, layer=i // 4, priority=-i) for i in range(8)])
    assert served(book, 3 * NBYTES) == [[0, 1, 2], [3], [4, 5, 6], [7]]


def test_a_block_larger_than_a_batch_travels_alone():
    book = make_book()
    book.submit([make_ticket(i, priority=-i) for i in range(2)])
    assert served(book, NBYTES // 2) == [[0], [1]]


def test_who_is_waited_for_goes_first_layer_by_layer():
    book = make_book()
    tickets = [make_ticket(i, step=1 + i // 4, layer=i % 4) for i in range(8)]
    book.submit(tickets)
    book.promote([tickets[7], tickets[2], tickets[6]])  # 2 and 6 are of one layer
    book.promote([tickets[7]])  # asked for twice, served once
    assert served(book, 10 * NBYTES) == [[2, 6], [7], [0], [1], [3], [4], [5]]


def test_promoted_tickets_can_still_be_cancelled():
    book = make_book()
    tickets = [make_ticket(i) for i in range(3)]
    book.submit(tickets)
    book.promote(tickets[:2])
    assert set(book.cancel(None, "stop")) == set(tickets)
    assert served(book) == [] and len(book.collect()) == 3


# --- bounds and refusals ----------------------------------------------------------------------------
@pytest.mark.parametrize("bounds", [{"max_tickets": 4}, {"max_bytes": 4 * NBYTES + 1}])
def test_what_exceeds_a_bound_is_refused_least_urgent_first(bounds):
    book = make_book(**bounds)
    tickets = [make_ticket(i, step=1 + i % 2, priority=i) for i in range(6)]
    refused = book.submit(tickets)
    assert slots(refused) == [5, 3, 1] and all(t.state is State.NEW for t in refused)
    assert book.submit(refused) == refused  # still full
    book.finish(book.take(NBYTES))
    assert book.submit(refused) == refused  # finished, but its slot is not settled yet
    book.collect()
    assert slots(book.submit(refused)) == [3, 1]


@pytest.mark.parametrize("bounds", [{"max_tickets": 8}, {"max_bytes": 8 * NBYTES}])
def test_prefetches_never_keep_a_repair_out(bounds):
    book = make_book(**bounds)
    assert slots(book.submit([make_ticket(i) for i in range(7)])) == [6]
    assert slots(book.submit([make_ticket(10 + i, step=NOW) for i in range(3)])) == [12]
    assert slots(book.submit([make_ticket(20)])) == [20]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([make_ticket(1, nbytes=101 * NBYTES)], "can never be taken"),
        ([make_ticket(1, nbytes=0)], "can never be taken"),
        ([make_ticket(1, position=0)], "already on their way"),
        ([make_ticket(0, position=1)], "destination of another"),
        ([make_ticket(1), make_ticket(2, position=1)], "already on their way"),
        ([make_ticket(1), make_ticket(1, position=2)], "destination of another"),
        ([make_ticket(1, state=State.COMPLETED)], "submitted before"),
    ],
)
def test_wrong_tickets_are_refused_by_name_and_change_nothing(wrong, message):
    book = make_book()
    book.submit([make_ticket(0)])
    with pytest.raises(ValueError, match=message):
        book.submit([make_ticket(7), *wrong])
    assert (len(book), book.num_bytes, served(book)) == (1, NBYTES, [[0]])


def test_the_same_block_of_a_later_generation_is_another_ticket():
    book = make_book()
    book.submit([make_ticket(0)])
    assert book.submit([make_ticket(1, position=0, generation=1)]) == []


@pytest.mark.parametrize("bounds", [{"max_tickets": 0}, {"max_bytes": 0}])
def test_a_book_that_can_hold_nothing_is_refused(bounds):
    with pytest.raises(ValueError, match="at least 1"):
        make_book(**bounds)


def test_nothing_is_remembered_of_tickets_that_left():
    book = make_book()
    for i in range(300):
        book.submit([make_ticket(s, request_id=i, step=i) for s in range(4)])
        book.finish(book.take(NBYTES), "failed" if i % 3 else None)
        book.cancel(i, "aborted")
        assert len(book.collect()) == 4
    held = [book._by_slot, book._keys, book._per_request, book._waiting, book._finished]
    assert [len(x) for x in held] == [0] * 5 and book.num_bytes == 0
